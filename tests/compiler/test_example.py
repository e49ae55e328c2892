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


_TIED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import apsched
from train import shard

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.middle.bias.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens)))

def steps(model, run):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        run(torch.arange(8)).square().mean().backward()
        yield model
        optimizer.step()
        optimizer.zero_grad()

dist.init_process_group("gloo")
torch.manual_seed(0)
model, whole = Tied(), Tied()
whole.load_state_dict(model.state_dict())
shard(model, init_device_mesh("cpu", (2,)))
backend = apsched.backend(cluster="h100", memory_cap="60GiB", budget=1.0)
for found in zip(
    steps(model, torch.compile(model, backend=backend)), steps(whole, whole), strict=True
):
    for parameter in whole.parameters():
        if parameter.grad is not None:
            parameter.grad *= 2  # two process ranks with the same tokens
    for one, other in zip(*(found_in.parameters() for found_in in found), strict=True):
        assert (one.grad is None) == (other.grad is None) == (not one.requires_grad)
        if one.grad is not None:
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
assert torch.equal(model.head.weight, model.embedding.weight)
dist.destroy_process_group()
"""


def test_tied_parameters_stay_tied_and_frozen_ones_frozen(tmp_path: Path) -> None:
    """Gradients are those of the model without shards, with ``shard`` of the page."""
    (tmp_path / "tied.py").write_text(_TIED)
    _outputs(tmp_path, "training-job.md", "train.py", start="tied.py")


def _outputs(
    directory: Path, page: str, *files: str, arguments: tuple[str, ...] = (), start: str = ""
) -> list[str]:
    """Write the blocks ``files`` of ``page``, run the last of them (or ``start``) with
    ``arguments`` on two processes, and return the output of each.
    """
    for file in files:
        (code,) = re.findall(
            rf"```python\n(# {re.escape(file)}\n.*?)```", (DOCS / page).read_text(), re.DOTALL
        )
        (directory / file).write_text(code)
    with as_torchrun(world_size=2) as job:
        processes = [
            subprocess.Popen(
                [sys.executable, str(directory / (start or files[-1])), *arguments],
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
