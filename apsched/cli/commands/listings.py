"""``apsched models``: the presets."""

import argparse
import json
from dataclasses import asdict
from typing import TextIO

from rich.table import Table

from apsched.models.presets import PRESETS
from apsched.report import console


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """List the presets with their sizes."""
    if args.json:
        print(json.dumps({"schema": 1, "models": {name: asdict(config) for name, config in PRESETS.items()}}), file=stdout)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model")
    for heading in ("layers", "dim", "heads", "vocabulary", "experts"):
        table.add_column(heading, justify="right")
    for name, config in PRESETS.items():
        experts = getattr(config, "num_experts", 0)
        sizes = (config.num_layers, config.dim, config.num_heads, config.vocab_size, experts or "-")
        table.add_row(name, *(str(size) for size in sizes))
    console(stdout).print(table)
