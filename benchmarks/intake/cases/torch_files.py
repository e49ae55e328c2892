"""Files that torch writes of a compiled graph (``fx_graph_runnable``), read as a SOURCE."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.fx import GraphModule

from apsched.capture.captured import CapturedGraph
from apsched.errors import ApschedError, InputError
from apsched.fx.graph_copies import copied
from benchmarks.intake.case import Case, NotTracedError, UnreadError
from benchmarks.intake.cases import feature_table
from benchmarks.intake.cases.compiled import compiled_graphs
from benchmarks.intake.cases.parts import WORLD
from benchmarks.intake.cases.worlds import running_world

_OF = (
    "plain",
    "checkpointing",
    "selective checkpointing",
    "dropout",
    "dynamic shapes",
    "autocast",
    "tied embeddings",
    "custom operator",
    "attention of torch",
    "mixture of experts",
    "Ulysses",
    "compiled optimizer, AdamW",
    "sharded by DTensor",
    "branch",
)
"""The features whose files are read; the forward graph of each."""


def cases() -> Iterator[Case]:
    """Yield a case for each file."""
    for name in _OF:
        yield Case(
            name=f"file: {name}",
            group="files",
            build=partial(_read, feature_table.made(name)),
            smoke=name == "plain",
        )


def _read(make: Callable[[], feature_table.Made]) -> tuple[CapturedGraph, ...]:
    from apsched.capture.repro.reader import read_repro

    running_world(WORLD)
    torch.manual_seed(0)
    function, inputs, options = make()
    texts: list[str] = []

    def write(module: GraphModule, inputs: list[object]) -> None:
        if not texts:
            texts.append(_text(copied(module), inputs))

    graphs = compiled_graphs(function, inputs, **{**options, "seen": write})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "fx_graph_runnable.py"
        path.write_text(texts[0])
        try:
            compile(texts[0], "fx_graph_runnable.py", "exec")
        except SyntaxError as error:
            line = (error.text or "").strip()
            raise NotTracedError(f"the file that torch wrote is no Python: {line}") from None
        try:
            return read_repro(path).graphs
        except ApschedError as error:
            told = str(error).replace(f"{folder}/", "")
            raise UnreadError(graphs[0], InputError(told)) from error


def _text(module: GraphModule, inputs: list[object]) -> str:
    from torch._dynamo.repro.after_aot import save_graph_repro

    text = io.StringIO()
    save_graph_repro(text, module, inputs, "inductor", save_dir=None)
    return text.getvalue()
