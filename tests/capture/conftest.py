"""Common fixtures of capture tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

WRITE = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WRITE:
    """Write a small repro file: its forward, its inputs, and what else a test needs."""

    def make(
        body: str,
        signature: str = "primals_1",
        args: str | None = None,
        init: str = "",
        head: str = "import torch\n",
        tail: str = "mod = Repro()\n",
    ) -> Path:
        args = (
            args
            if args is not None
            else (
                "buf0 = reader.storage(None, 512)\nreader.tensor(buf0, (8, 16), is_leaf=True)  #"
                " primals_1"
            )
        )
        lines = [
            head,
            "class Repro(torch.nn.Module):",
            "    def __init__(self) -> None:",
            "        super().__init__()",
        ]
        lines += [f"        {line}" for line in init.splitlines()]
        lines += [
            "",
            f"    def forward(self, {signature}):",
            *(f"        {line}" for line in body.splitlines()),
            "",
        ]
        lines += [
            "def load_args(reader):",
            *(f"    {line}" for line in args.splitlines()),
            "load_args._version = 0",
            tail,
        ]
        path = tmp_path / "repro.py"
        path.write_text("\n".join(lines))
        return path

    return make
