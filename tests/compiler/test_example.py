"""The scripts in docs/training-job.md and docs/own-model.md run as they stand, on two processes, as
``torchrun`` starts them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apsched.cli.main import main
from tests.helpers.processes import as_torchrun
from tests.helpers.snippets import commands_of

pytestmark = pytest.mark.ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The directory where the example ran with ``TORCH_TRACE=trace``, and the output of each
    process.
    """
    directory = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as traced:
        traced.setenv("TORCH_TRACE", str(directory / "trace"))
        return directory, _outputs(directory, "training-job.md", "train.py")


def test_the_example_trains_with_fewer_launches(recorded: tuple[Path, list[str]]) -> None:
    for output in recorded[1]:
        losses = [float(number) for number in re.findall(r"loss ([0-9.]+)", output)]
        assert len(losses) == 3
        assert losses == sorted(losses, reverse=True)
        counts = re.findall(r"(forward|backward): (\d+) collectives in (\d+) launches", output)
        assert [name for name, _, _ in counts] == ["forward", "backward"]
        assert all(int(launches) < int(captured) for _, captured, launches in counts)


def test_a_schedule_of_the_command_line_is_replayed_in_the_job(
    recorded: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of "Solve once, replay in the job": record, solve, replay."""
    page = DOCS / "training-job.md"
    begin, replayed = re.findall(r"^(.*)torchrun (.*train\.py.*)$", page.read_text(), re.MULTILINE)[
        1:
    ]
    assert begin == ("TORCH_TRACE=trace ", "--nproc-per-node 2 train.py")
    assert replayed == ("", "--nproc-per-node 2 train.py schedules")
    (command,) = (words for words in commands_of(page) if words[:2] == ["solve", "trace"])
    directory, before = recorded
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace").symlink_to(directory / "trace")
    assert main([*command]) == 0
    after = _outputs(tmp_path, "training-job.md", "train.py", arguments=("schedules",))
    solved = json.loads((tmp_path / "schedules" / "result.json").read_text())["graphs"]
    for one, other in zip(before, after, strict=True):
        assert re.findall("loss .*", one) == re.findall("loss .*", other)
        assert re.findall(
            r"(\w+): \d+ collectives in (\d+) launches, from schedule file", other
        ) == [(graph["name"], str(graph["num_launches"])) for graph in solved]
        assert "schedule file" not in one


def test_your_own_model_trains_with_a_schedule(tmp_path: Path) -> None:
    for output in _outputs(tmp_path, "own-model.md", "my_model.py", "train_my_model.py"):
        losses = [float(number) for number in re.findall(r"loss ([0-9.]+)", output)]
        assert len(losses) == 3
        assert losses[2] < losses[0]
        assert re.search(r"FSDP2 tuned: 5 units, step time .* predicted, .* untuned", output)


def _outputs(directory: Path, page: str, *files: str, arguments: tuple[str, ...] = ()) -> list[str]:
    """Write the blocks ``files`` of ``page``, run the last of them with ``arguments`` on two
    processes, and return the output of each.
    """
    for file in files:
        (code,) = re.findall(
            rf"```python\n(# {re.escape(file)}\n.*?)```", (DOCS / page).read_text(), re.DOTALL
        )
        (directory / file).write_text(code)
    with as_torchrun(world_size=2) as job:
        processes = [
            subprocess.Popen(
                [sys.executable, str(directory / files[-1]), *arguments],
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
