"""The scripts in docs/training-job.md and docs/own-model.md run as they stand, on two processes, as
``torchrun`` starts them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import as_torchrun

pytestmark = pytest.mark.ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_example_trains_with_fewer_launches(tmp_path: Path) -> None:
    for output in _outputs(tmp_path, "training-job.md", "train.py"):
        losses = [float(number) for number in re.findall(r"loss ([0-9.]+)", output)]
        assert len(losses) == 3
        assert losses == sorted(losses, reverse=True)
        counts = re.findall(r"(forward|backward): (\d+) collectives in (\d+) launches", output)
        assert [name for name, _, _ in counts] == ["forward", "backward"]
        assert all(int(launches) < int(captured) for _, captured, launches in counts)


def test_your_own_model_trains_with_a_schedule(tmp_path: Path) -> None:
    for output in _outputs(tmp_path, "own-model.md", "my_model.py", "train_my_model.py"):
        losses = [float(number) for number in re.findall(r"loss ([0-9.]+)", output)]
        assert len(losses) == 3
        assert losses[2] < losses[0]
        assert re.search(r"FSDP2 tuned: 5 units, step time .* predicted, .* untuned", output)


def _outputs(directory: Path, page: str, *files: str) -> list[str]:
    """Write the blocks ``files`` of ``page``, run the last of them on two processes, and return
    what each printed.
    """
    for file in files:
        (code,) = re.findall(
            rf"```python\n(# {re.escape(file)}\n.*?)```", (DOCS / page).read_text(), re.DOTALL
        )
        (directory / file).write_text(code)
    with as_torchrun(world_size=2) as job:
        processes = [
            subprocess.Popen(
                [sys.executable, str(directory / files[-1])],
                env=os.environ
                | job
                | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=600)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return outputs
