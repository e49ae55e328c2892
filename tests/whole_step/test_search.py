"""The choice found and the bound over all choices, against every choice of small steps."""

from collections.abc import Sequence
from itertools import chain, combinations

import pytest

from apsched.capture.captured import Capture
from apsched.config import Caps, SolveOptions
from apsched.pipeline.solve_graph import SolveRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.solver.bounds.whole_step import seam_bytes
from apsched.whole_step.choices import Choice, Parameter, named_choices, units
from apsched.whole_step.pair import Step
from apsched.whole_step.search import StepAnswer, solve_step
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers

WIDTHS = (32, 64, 128, 32)
SLOW, FAST = FlatPrices(bytes_per_us=150.0), FlatPrices(bytes_per_us=4000.0)


@pytest.fixture(scope="module")
def layers() -> Capture:
    return captured_layers(WIDTHS)


def step_of(
    capture: Capture, prices: FlatPrices, cap_bytes: int | None, *, second_group: bool = False
) -> Step:
    request = SolveRequest(
        caps=Caps(max_compute_move=3),
        memory_cap=MemoryCap(size_bytes=cap_bytes),
        options=SolveOptions(time_slack=0.0),
        second_group=second_group,
    )
    return Step.of(loaded_layers(capture, prices), request, Progress(quiet=True))


def every_choice(names: Sequence[str]) -> list[Choice]:
    sizes = range(len(names) + 1)
    return [Choice(c) for c in chain.from_iterable(combinations(names, n) for n in sizes)]


def caps_around(step: Step) -> list[int]:
    """Return memory caps from where nothing can be kept to where all can."""
    seam = seam_bytes(*(graph.problem for graph in step.graphs))
    least = step.solve(Choice()).results
    floor = max(seam, *(r.answer.floor_memory_bytes for r in least))
    most = floor + 2 * sum(p.size_bytes for p in step.parameters)
    return [floor + (most - floor) * k // 4 for k in range(5)]


@pytest.mark.parametrize("prices", [SLOW, FAST], ids=["network binds", "compute binds"])
@pytest.mark.parametrize("place", range(5))
def test_no_choice_is_faster_than_the_bound_or_the_answer(layers, prices, place) -> None:
    cap = caps_around(step_of(layers, prices, None))[place]
    step = step_of(layers, prices, cap)
    answer = solve_step(step)
    tried = [step_of(layers, prices, cap).solve(c) for c in every_choice(names_of(step))]
    fitting = [solved for solved in tried if solved.fits]
    least = min(solved.step_ticks for solved in fitting)
    assert answer.bound.ticks <= least
    assert answer.best.fits
    assert answer.best.step_ticks == least
    assert answer.best.peak_bytes <= cap
    assert not any(b.fits and b.step_ticks < least for b in answer.baselines.values())


def names_of(step: Step) -> list[str]:
    return [p.name for p in step.parameters]


def test_less_memory_keeps_less_and_is_never_faster(layers) -> None:
    free = step_of(layers, SLOW, None)
    answers = [solve_step(step_of(layers, SLOW, cap)) for cap in caps_around(free)]
    times = [answer.best.step_ticks for answer in answers]
    assert times == sorted(times, reverse=True)
    bounds = [answer.bound.ticks for answer in answers]
    assert bounds == sorted(bounds, reverse=True)
    assert len(answers[0].best.kept) < len(answers[-1].best.kept) == 3
    assert answers[0].bound.ticks > answers[-1].bound.ticks


def test_the_bound_is_met_where_all_can_be_kept(layers) -> None:
    answer: StepAnswer = solve_step(step_of(layers, SLOW, None))
    assert answer.gap < 0.05


def test_peak_counts_shards_that_backward_does_not_take(layers) -> None:
    step = step_of(layers, SLOW, None)
    solved = step.solve(Choice(names_of(step)))
    backward = solved.results[1]
    assert backward.best is not None
    shards = sum(4 * a * b // 4 for a, b in ((32, 64), (64, 128), (128, 32)))
    assert solved.beside_bytes == shards
    assert solved.peak_bytes >= backward.best.peak_memory_bytes + shards
    tight = step_of(layers, SLOW, solved.peak_bytes)
    assert tight.solve(solved.kept).peak_bytes <= solved.peak_bytes


def test_second_groups_have_a_bound_of_their_own(layers) -> None:
    answer = solve_step(step_of(layers, SLOW, None, second_group=True))
    assert answer.bound.ticks <= answer.best.step_ticks


def parameter(name: str, elements: int, need: int) -> Parameter:
    return Parameter(
        name=name, size_bytes=2 * elements, num_elements=elements, beside_bytes=0, gathers=(need,)
    )


BACKWARD = [
    parameter("output.w", 10**6, 0),
    parameter("norm.w", 100, 1),
    parameter("layers.1.w", 10**6, 2),
    parameter("layers.1.b", 10, 3),
    parameter("layers.0.w", 10**6, 4),
    parameter("layers.0.b", 10, 5),
]


def test_choices_that_people_make() -> None:
    assert {name: sorted(kept) for name, kept in named_choices(BACKWARD).items()} == {
        "none": [],
        "all": sorted(p.name for p in BACKWARD),
        "last_block": ["layers.1.b", "layers.1.w", "norm.w", "output.w"],
        "fsdp2": ["norm.w", "output.w"],
        "threshold": ["layers.0.b", "layers.1.b", "norm.w"],
    }


def test_small_parameters_are_kept_first_and_then_those_that_backward_needs_first() -> None:
    assert units(BACKWARD) == [
        ("norm.w", "layers.1.b", "layers.0.b"),
        ("output.w",),
        ("layers.1.w",),
        ("layers.0.w",),
    ]
