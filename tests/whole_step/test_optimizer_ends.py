"""A step whose optimizer runs beside collectives, of a model that is captured and solved."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import apsched
from apsched.report.answer.first import first_lines
from apsched.whole_step.optimizer_ends import optimizer_ends


@pytest.fixture(scope="module")
def results() -> tuple[apsched.Result, ...]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        x = torch.empty(64, 512)
    step = apsched.solve_step(model, (x,), "fsdp=8", budget=0.1, keep="none", memory_cap="none")
    return tuple(step.results)


def with_optimizer(result: apsched.Result, memory_bytes_per_us: float) -> apsched.Result:
    """Return ``result`` on a device of such a memory bandwidth."""
    beside = replace(result.account.beside, memory_bytes_per_us=memory_bytes_per_us)
    return replace(result, account=replace(result.account, beside=beside))


def test_updates_hide_behind_the_last_reductions(results):
    bound_us = sum(result.bound_us for result in results)
    step_us = sum(result.step_time_us for result in results)
    slow = [with_optimizer(result, 100_000) for result in results]
    optimizer_us = slow[1].account.optimizer_us
    # 4 x 512 x 512 values on 8 process ranks, 28 bytes each: parameter, gradient, two states
    assert optimizer_us == pytest.approx(4 * 512 * 512 / 8 * 28 / 100_000)
    ends = optimizer_ends(slow, bound_us)
    assert ends.behind_us == pytest.approx(step_us + optimizer_us, abs=0.01)
    assert max(step_us, ends.bound_us) <= ends.beside_us < ends.behind_us
    assert ends.bound_us >= bound_us
    assert any(
        line.startswith("updated as soon as gradients are reduced:")
        for line in first_lines(slow, None)
    )


def test_a_small_gain_is_no_line(results):
    fast = [with_optimizer(result, 10**9) for result in results]
    assert optimizer_ends(fast, 0.0).saved < 0.005
    assert not any(line.startswith("updated as soon") for line in first_lines(fast, None))


def test_a_step_without_known_updates_has_none(results):
    forward, backward = results
    assert optimizer_ends([backward], 0.0) is None
    assert optimizer_ends([forward, forward], 0.0) is None
    without = replace(backward, account=replace(backward.account, optimizer="none"))
    assert optimizer_ends([forward, without], 0.0) is None
    assert optimizer_ends([forward, replace(backward, account=None)], 0.0) is None
    unnamed = tuple(replace(c, module="") for c in backward.problem.collectives)
    problem = replace(backward.problem, collectives=unnamed)
    assert optimizer_ends([forward, replace(backward, problem=problem)], 0.0) is None
    keys = tuple(replace(key, dtype="float4") for key in backward.problem.keys)
    unknown = replace(backward, problem=replace(backward.problem, keys=keys))
    assert optimizer_ends([forward, unknown], 0.0) is None
    assert optimizer_ends([forward, backward], 0.0) is not None
