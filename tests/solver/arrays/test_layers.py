"""Layers that repeat are found from the structure, whatever they are called and however long they
take.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from apsched.problem.problem import Problem
from apsched.solver.arrays.layers import Period, find_periods
from apsched.solver.arrays.problem_arrays import problem_arrays
from tests.helpers.problems.by_hand import ByHand
from tests.helpers.problems.layered import Layer, layered

PLAIN, WIDE = Layer(), Layer(ticks=(40, 60, 20), shard_bytes=(2048, 4096, 0))
SLOW = Layer(ticks=(400, 600))


def the_period(problem: Problem) -> Period:
    """The stretch that holds most collectives."""
    return max(
        find_periods(problem_arrays(problem)), key=lambda found: sum(map(len, found.collectives))
    )


def check(problem: Problem, period: Period) -> None:
    """Slots are full, and what they hold looks alike: equal keys and sizes, needs and readiness one
    layer apart.
    """
    small = problem_arrays(problem)
    assert period.first_compute >= 0
    assert period.first_compute + period.count * period.length <= len(small.compute_ticks)
    for row in period.collectives:
        assert [period.layer_of_collective[c] for c in row] == list(range(period.count))
        assert (
            len(
                {
                    (int(small.key[c]), int(small.size_bytes[c]), int(small.output_bytes[c]))
                    for c in row
                }
            )
            == 1
        )
        for slots in (small.need_slot, small.ready_slot):
            steps = {int(slots[d] - slots[c]) for c, d in pairwise(row)}
            assert steps in ({period.length}, {0})
    assert sum(map(len, period.collectives)) == sum(
        layer >= 0 for layer in period.layer_of_collective
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layer", [PLAIN, WIDE, replace(PLAIN, on_path=True)])
def test_equal_layers_are_found(layer: Layer, backward: bool) -> None:
    problem = layered([layer] * 6, backward=backward)
    period = the_period(problem)
    check(problem, period)
    assert period.length * period.count <= len(problem.compute_order)
    assert period.count >= 5
    params = sum(size > 0 for size in layer.shard_bytes)
    assert len(period.collectives) == params * (1 + backward) + layer.on_path


@pytest.mark.parametrize("count", [2, 3, 4])
def test_three_layers_are_a_period_from_the_first_compute_node_on(count: int) -> None:
    """Nothing before them or behind them, and two are not enough."""
    b = ByHand()
    for i in range(count):
        shard = b.input(f"w{i}", 1024, kept=True)
        b.compute(f"f{i}", 10, b.wait(f"wait{i}", b.start("all_gather", f"ag{i}", shard, 512, 512)))
    periods = find_periods(problem_arrays(b.output()))
    found = [(p.first_compute, p.length, p.count, p.collectives) for p in periods]
    assert found == ([(0, 1, count, (tuple(range(count)),))] if count >= 3 else [])


def test_a_reduction_and_the_one_that_follows_it_are_in_one_layer() -> None:
    """Nothing on the compute order makes the all-reduce over replicas ready: it counts where its
    reduce-scatter does.
    """
    problem = layered([replace(PLAIN, chained=True)] * 6, backward=True)
    period = the_period(problem)
    check(problem, period)
    for c, collective in enumerate(problem.collectives):
        if problem.keys[collective.key].group == "replicate" and period.layer_of_collective[c] >= 0:
            before = next(
                d
                for d, other in enumerate(problem.collectives)
                if other.wait in problem.predecessors[collective.start]
            )
            assert period.layer_of_collective[before] == period.layer_of_collective[c]


def test_durations_may_differ_between_layers() -> None:
    """Measured layers never take equally long."""
    rng = random.Random(3)
    layers = [
        replace(PLAIN, ticks=tuple(int(t * rng.uniform(0.9, 1.1)) for t in (4000, 6000)))
        for _ in range(8)
    ]
    assert (the_period(layered(layers)).length, the_period(layered(layers)).count) == (4, 8)


def test_layers_in_turn_make_one_repeat() -> None:
    """Equal structure, but every second layer takes ten times as long: two layers are the loop
    body.
    """
    problem = layered([PLAIN, SLOW] * 4)
    period = the_period(problem)
    check(problem, period)
    assert (period.length, period.count) == (8, 4)
    structure = the_period(layered([PLAIN, WIDE] * 4))
    assert (structure.length, structure.count) == (10, 4)


def test_two_kinds_of_layers_are_two_stretches() -> None:
    """First layers without experts, then layers with them; a joint graph has forward, then
    backward.
    """
    problem = layered([PLAIN] * 5 + [WIDE] * 6)
    found = find_periods(problem_arrays(problem))
    assert [(p.length, len(p.collectives)) for p in found] == [(4, 2), (6, 2)]
    assert found[0].first_compute + found[0].count * found[0].length <= found[1].first_compute
    for period in found:
        check(problem, period)
    assert the_period(problem) == found[1]


@pytest.mark.parametrize(
    "layers", [[PLAIN], [PLAIN] * 2, [PLAIN, WIDE, Layer(ticks=(1,), shard_bytes=(64,))]]
)
def test_nothing_repeats(layers: list[Layer]) -> None:
    assert find_periods(problem_arrays(layered(layers))) == ()


def test_no_collectives_no_period() -> None:
    assert find_periods(problem_arrays(layered([Layer(shard_bytes=(0, 0))] * 5))) == ()


@pytest.mark.parametrize("label", ["moe", "llama"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_layers_of_real_graphs(
    layered_presets: dict[str, Problem], label: str, direction: str
) -> None:
    """All but about one layer, the embedding and the head lie in the repeats."""
    problem = layered_presets[f"{label} {direction}"]
    period = the_period(problem)
    check(problem, period)
    every_second = label == "llama" and direction == "backward"
    modules = [
        [problem.collectives[c].module.split(".") for c in layer]
        for layer in zip(*period.collectives, strict=True)
    ]
    for layer in modules:
        parts = {".".join(names[2:]) for names in layer}
        assert parts >= {"attention_norm.weight", "attention.wo.weight"}
        # a repeat need not begin where a module does
        assert len({names[1] for names in layer if names[0] == "layers"}) in (
            (2, 3) if every_second else (1, 2)
        )
    num_layers = len({names[1] for layer in modules for names in layer if names[0] == "layers"})
    assert num_layers >= {"moe": 3, "llama": 6}[label]
