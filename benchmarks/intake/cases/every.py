"""All cases, and their common preparation."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import suppress

from benchmarks.intake.case import Case
from benchmarks.intake.cases import (
    auto_parallel,
    feature_table,
    features,
    features_that_communicate,
    hugging_face,
    titan,
    torch_files,
)

_REGISTERING = (features, features_that_communicate)
"""The modules that fill the table of features."""

_HEAVY = (
    "transformers",
    "transformers.models.auto.modeling_auto",
    "torch._dynamo",
    "torch._inductor.fx_passes.overlap_scheduling",
    "torch.distributed.tensor",
    "ortools.sat.python.cp_model",
)


def every_case() -> Iterator[Case]:
    """Yield the cases, group by group."""
    yield from feature_table.cases()
    yield from torch_files.cases()
    yield from hugging_face.cases()
    yield from titan.cases()
    yield from auto_parallel.cases()


def prepare() -> None:
    """Import once the modules that take long, so that forks have them."""
    logging.disable(logging.CRITICAL)
    for name in _HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
