"""The script in docs/training-job.md runs as it stands, on two processes, as ``torchrun`` starts
them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import as_torchrun

pytestmark = pytest.mark.alone

DOCS = Path(__file__).resolve().parents[2] / "docs" / "training-job.md"


def test_the_example_trains_with_fewer_launches(tmp_path):
    (code,) = re.findall(r"```python\n(# train.py\n.*?)```", DOCS.read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(code)
    with as_torchrun(world_size=2) as job:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script)],
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
    for output in outputs:
        losses = [float(number) for number in re.findall(r"loss ([0-9.]+)", output)]
        assert len(losses) == 3
        assert losses == sorted(losses, reverse=True)
        counts = re.findall(r"(forward|backward): (\d+) collectives in (\d+) launches", output)
        assert [name for name, _, _ in counts] == ["forward", "backward"]
        assert all(int(launches) < int(captured) for _, captured, launches in counts)
