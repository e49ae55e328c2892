"""Inductor's cache on disk from one job to the next: code is used where all process ranks have it,
and never any other.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh

from apsched.capture.fake_world import world
from apsched.compiler.code_cache import with_agreed_code
from apsched.compiler.inductor_pass import inductor_pass
from apsched.compiler.schedule_graph import schedule_graph
from apsched.compiler.settings import Settings
from tests.helpers.graphs.small_models import WIDTH, shard
from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks

WORKER = WORKERS / "training/kept_code_worker.py"
Found = list[dict]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> tuple[Found, Found]:
    """What two processes found, and after them two others with the same directories, and with other
    hash seeds.
    """
    folder = tmp_path_factory.mktemp("kept")
    first = run_processes(WORKER, folder, 2, "first", timeout_s=400)
    return first, run_processes(WORKER, folder, 2, "second", timeout_s=400, new_interpreters=True)


def found(reports: Found, step: str, what: str = "hits, misses") -> list:
    return [report[step][what] for report in reports]


def test_the_second_job_finds_what_the_first_made(jobs):
    first, second = jobs
    assert found(first, "cold") == [[0, 2]] * 2
    assert found(second, "warm") == [[2, 0]] * 2
    assert found(second, "warm", "launches") == [[]] * 2, "nothing was scheduled"
    for what in ("calls", "numbers"):
        assert found(second, "warm", what) == found(first, "cold", what)


@pytest.mark.parametrize(
    "step", ["another cap", "another plan", "another cost file", "another version"]
)
def test_what_changes_the_schedule_is_not_found(jobs, step):
    first, second = jobs
    assert found(second, step) == [[0, 2]] * 2
    assert found(second, step, "numbers") == found(first, "cold", "numbers")


def test_where_one_finds_nothing_nobody_uses_what_was_found(jobs):
    """Process rank 0 finds both graphs, throws both away, and schedules with process rank 1."""
    first, second = jobs
    assert found(second, "cold on one") == [[2, 2], [0, 2]]
    assert found(second, "cold on one", "launches") == [[2, 2]] * 2
    assert found(second, "then warm") == [[2, 0]] * 2
    for step in ("cold on one", "then warm"):
        assert found(second, step, "calls") == found(first, "cold", "calls")


def test_another_order_in_one_cache_is_found_out_and_replaced(jobs):
    first, second = jobs
    assert found(second, "another order on one") == [[2, 2]] * 2, "what both found is not the same"
    assert found(second, "then warm again") == [[2, 0]] * 2
    for step in ("another order on one", "then warm again"):
        calls = found(second, step, "calls")
        assert calls[0] == calls[1]
        assert found(second, step, "numbers") == found(first, "cold", "numbers")


def test_the_pass_alone_has_no_key_where_process_ranks_compare(jobs):
    """It is not called where code is found, and whoever waits for it would wait to the deadline."""
    assert [report["key of the pass alone"] for report in jobs[1]] == [None] * 2


def test_nothing_is_left_in_the_counters(jobs):
    steps = [step for job in jobs for report in job for step in report.values() if step is not None]
    assert [step["left"] for step in steps] == [[]] * len(steps)


def test_the_cache_is_used_where_there_is_nobody_to_talk_to():
    own = inductor_pass()
    without_collectives = torch.fx.symbolic_trace(torch.nn.ReLU())
    assert own.uuid() is not None
    compiled_as = with_agreed_code(lambda gm, inputs: own.uuid(), own.settings)(
        without_collectives, []
    )
    assert compiled_as == own.uuid()


def test_a_graph_scheduled_before_inductor_is_not_looked_for():
    """As in TorchTitan's and AutoParallel's pipelines: what holds the order is nothing that
    Inductor keeps code of.
    """

    def compiler(gm, inputs):
        return compile_fx_inner(
            schedule_graph(gm, Settings(budget=0.0, memory_cap="none", bucket_cap=0), held=True),
            inputs,
        )

    torch._dynamo.reset()
    counters.clear()
    with world(2), fresh_cache(), torch.no_grad():
        module = shard(nn.Linear(WIDTH, WIDTH, bias=False), init_device_mesh("cpu", (2,)))
        backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table)
        torch.compile(module, backend=backend)(torch.ones(4, WIDTH))
    found = counters["inductor"]
    assert (found["fxgraph_cache_bypass"], found["fxgraph_cache_miss"]) == (1, 0)
    torch._dynamo.reset()
