"""``package.module:function`` is imported, called and captured; each way to get it wrong is told in
one line.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from apsched.capture.function import call_function, capture_function
from apsched.errors import InputError

JOB = """
import torch
from torch import nn
import torch.distributed._functional_collectives as functional


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        return functional.all_gather_tensor(shard, 0, torch.distributed.group.WORLD)
    @staticmethod
    def backward(ctx, gradient):
        world = torch.distributed.group.WORLD
        return functional.reduce_scatter_tensor(gradient, "sum", 0, world)


class Sharded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))

    def forward(self, x):
        return (x @ Gather.apply(self.weight)).sum()


def sharded():
    return Sharded(), (torch.randn(2, 32),)


def single():
    return nn.Linear(4, 2), torch.randn(3, 4)


def raising():
    weight = torch.randn(3)
    return weight @ torch.randn(4)


def leaving():
    raise SystemExit("no GPU here")


def untraceable():
    class Bad(nn.Module):
        def forward(self, x):
            return x @ torch.randn(7, 7)

    return Bad(), (torch.randn(3, 4),)


class builders:
    @staticmethod
    def small():
        return single()


def none(): return None
def one(): return (nn.Linear(4, 2),)
def swapped(): return (torch.randn(3),), nn.Linear(4, 2)
def strange(): return nn.Linear(4, 2), {"x"}
def needs(x): return x
number = 3
_hidden = 1
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """A package ``apsched_test_job`` in the current directory."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "apsched_test_job"
    package.mkdir()
    (package / "__init__.py").touch()

    def add(name: str, text: str) -> None:
        (package / f"{name}.py").write_text(text)

    add("model", JOB)
    yield add
    for name in [name for name in sys.modules if name.startswith("apsched_test_job")]:
        del sys.modules[name]


pytestmark = pytest.mark.usefixtures("job")


def test_function_of_the_current_directory_is_captured() -> None:
    before = list(sys.path)
    capture = capture_function("apsched_test_job.model:sharded", num_ranks=8)
    assert sys.path == before
    assert [graph.name for graph in capture.graphs] == ["forward", "backward"]
    targets = [str(node.target) for node in capture.graphs[0].module.graph.nodes]
    assert "_c10d_functional.all_gather_into_tensor.default" in targets
    assert [len(ranks) for ranks in capture.group_ranks.values()] == [8]
    assert capture.source == "apsched_test_job.model:sharded"
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", ["single", "builders.small"])
def test_one_input_may_stand_alone(name: str) -> None:
    module, inputs = call_function(f"apsched_test_job.model:{name}")
    assert isinstance(module, torch.nn.Linear)
    assert [item.shape for item in inputs] == [(3, 4)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "apsched_test_job.model",
            "expected package.module:function, such as my_job.model:build, found no colon",
        ),
        ("apsched_test_job/model.py:sharded", "found a name that Python cannot import"),
        ("apsched_test_job.model:", "found a name that Python cannot import"),
        (
            "apsched_test_jobs.model:sharded",
            "found no module apsched_test_jobs; run in its directory",
        ),
        ("apsched_test_job.py:sharded", "state the module, apsched_test_job, not its file"),
        ("apsched_test_job.modle:sharded", r"found no module apsched_test_job\.modle"),
        ("apsched_test_job.model:shardde", "found no such name; did you mean sharded?"),
        ("apsched_test_job.model:builders.large", "found no such name; it has small"),
        ("apsched_test_job.model:number", "expected a function without arguments, found int"),
        (
            "apsched_test_job.model:raising",
            (
                r"the function raised RuntimeError: .*\(.*apsched_test_job/model\.py:36\); call it"
                r" by hand"
            ),
        ),
        (
            "apsched_test_job.model:leaving",
            r"the function raised SystemExit: no GPU here \(.*model\.py:40\)",
        ),
        (
            "apsched_test_job.model:needs",
            "the function raised TypeError: .*missing 1 required positional argument",
        ),
        ("apsched_test_job.model:none", r"expected a tuple \(module, inputs\), found NoneType"),
        ("apsched_test_job.model:one", r"expected a tuple \(module, inputs\), found tuple of 1"),
        (
            "apsched_test_job.model:swapped",
            r"expected a torch\.nn\.Module first in \(module, inputs\), found tuple of 1",
        ),
        (
            "apsched_test_job.model:strange",
            r"expected a tuple of inputs, or a mapping .* in \(module, inputs\), found set",
        ),
        (
            "apsched_test_job.model:untraceable",
            r"AOTAutograd can trace with these inputs, found .*model\.py:46\)",
        ),
    ],
)
def test_wrong_source_is_told_in_one_line(
    source: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        capture_function(source)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{source}: ")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import no_such_library\n",
            (
                r"importing apsched_test_job\.broken raised ModuleNotFoundError:"
                r" .*no_such_library.*broken\.py:1\)"
            ),
        ),
        ("x = 1\ny = x / 0\n", r"raised ZeroDivisionError: division by zero \(.*broken\.py:2\)"),
        ("def f(:\n", r"raised SyntaxError: .*broken\.py:1\)"),
    ],
)
def test_module_that_cannot_be_imported_is_told_with_its_line(
    job: Callable[[str, str], None], text: str, message: str
) -> None:
    job("broken", text)
    with pytest.raises(InputError, match=message) as caught:
        call_function("apsched_test_job.broken:f")
    assert "\n" not in str(caught.value)
