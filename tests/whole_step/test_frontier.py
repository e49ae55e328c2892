"""Memory against step time along caps, with what is kept at each."""

import io
from dataclasses import replace
from typing import Any

import pytest

from apsched.capture.one_graph import with_joint_graph
from apsched.cli.main import main
from apsched.config import Caps, SolveOptions
from apsched.pipeline.load import with_apart
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.report.answer.along_caps import along_caps_json, print_along_caps
from apsched.report.answer.kept_words import kept_in_words, told_apart
from apsched.report.page.kept import kept_section
from apsched.whole_step import along_caps
from apsched.whole_step.accumulation.search import AccumulationAnswer
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.along_caps import frontier
from apsched.whole_step.choices import Choice
from apsched.whole_step.joint_graph import step as joint_graph
from apsched.whole_step.joint_graph.step import JointStep
from apsched.whole_step.pair import Step
from apsched.whole_step.search import StepAnswer
from apsched.whole_step.solve import best_choice
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers

NAMES = [*(f"layers.{k}.{w}" for k in range(12) for w in "ab"), "norm.w", "output.w"]


def test_more_memory_is_never_slower_and_every_cap_is_kept() -> None:
    graphs = loaded_layers(captured_layers((32, 64, 128)), FlatPrices(bytes_per_us=150.0))
    request = SolveRequest(caps=Caps(), options=SolveOptions(time_slack=0.0, budget=0.0))
    found = frontier(Step.of(graphs, request, Progress(quiet=True)), 3)
    assert [answer.best.fits for answer in found] == [True] * 3
    caps = [answer.cap_bytes or 0 for answer in found]
    assert caps == sorted(set(caps))
    assert all(a.best.peak_bytes <= cap for a, cap in zip(found, caps, strict=True))
    times = [answer.best.step_ticks for answer in found]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert not found[0].best.kept
    assert found[-1].best.kept == set(found[-1].names)
    says = along_caps_json(found)
    assert [one["memory_cap_bytes"] for one in says] == caps
    assert all(one["bound_us"] <= one["step_time_us"] for one in says)
    assert says[-1]["kept"] == ["weights.0", "weights.1"]
    out = io.StringIO()
    print_along_caps(found, out)
    head, *rows = out.getvalue().rstrip().splitlines()
    assert head.split()[-2:] == ["kept", "parameters"]
    assert [row.split()[-1] for row in rows] == ["nothing", rows[1].split()[-1], "weights.0-1"]


def test_several_micro_batches_share_more_with_more_memory() -> None:
    """Under the least memory parameters only stay gathered from backward to forward, where it is
    free; at the other end gathers and reductions run once, as without a cap.
    """
    graphs = loaded_layers(captured_layers((32, 64, 128)), FlatPrices(bytes_per_us=150.0))
    request = SolveRequest(caps=Caps(), options=SolveOptions(time_slack=0.0, budget=0.0))
    accumulation = Accumulation.of(Step.of(graphs, request, Progress(quiet=True)), 3)
    found = frontier(accumulation, 3)
    free = best_choice(accumulation.with_cap(MemoryCap()))
    assert all(isinstance(answer, AccumulationAnswer) and answer.best.fits for answer in found)
    caps = [answer.cap_bytes or 0 for answer in found]
    assert len(caps) == len(set(caps)) == 3
    assert caps[0] == accumulation.solve(Choice()).least_bytes
    assert caps[-1] == free.best.peak_bytes
    assert all(a.best.peak_bytes <= cap for a, cap in zip(found, caps, strict=True))
    times = [answer.best.step_ticks for answer in found]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[1] > times[-1] == free.best.step_ticks
    for answer, cap in zip(found, caps, strict=True):
        alone = best_choice(accumulation.with_cap(MemoryCap(size_bytes=cap)))
        assert answer.best.step_ticks <= alone.best.step_ticks
        assert answer.bound.ticks <= answer.best.step_ticks
    says = along_caps_json(found)
    assert says[0]["choice"] == ["weights.0 @next", "weights.1 @next"]
    assert (says[-1]["num_kept"], says[-1]["num_held"], says[-1]["num_summed"]) == (2, 2, 2)
    out = io.StringIO()
    print_along_caps(found, out)
    head, *rows = out.getvalue().rstrip().splitlines()
    assert head.split()[-5:] == ["kept", "stay", "gathered", "reduced", "once"]
    assert rows[0].split()[-3:] == ["0", "2", "0"]
    assert rows[-1].split()[-3:] == ["2", "2", "2"]


def test_one_graph_is_never_slower_under_a_looser_cap() -> None:
    """From the least memory with none kept to the peak of the fastest step; under each cap the
    schedule under the cap before is known.
    """
    step = joint_step(FlatPrices(bytes_per_us=150.0))
    low, high = along_caps.range_ends_bytes(step)
    caps = [low, *range(low + 1, high, max((high - low) // 5, 1)), high]
    found = [
        *along_caps.answers_along_caps(step, [MemoryCap(size_bytes=cap) for cap in caps]),
    ]
    times = [answer.best.step_ticks for answer in found]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert low == step.solve(Choice()).least_bytes
    assert [answer.cap_bytes for answer in found] == caps
    assert all(a.best.peak_bytes <= cap for a, cap in zip(found, caps, strict=True))
    assert not found[0].best.kept
    assert found[-1].best.kept == set(found[-1].names)
    says = along_caps_json(found)
    assert [one["memory_cap_bytes"] for one in says] == caps
    assert all(one["bound_us"] <= one["step_time_us"] for one in says)
    out = io.StringIO()
    print_along_caps(found, out)
    head, *rows = out.getvalue().rstrip().splitlines()
    assert head.split()[-2:] == ["kept", "parameters"]
    assert rows[0].split()[-1] == "nothing"
    assert rows[-1].split()[-1] == "weights.0-1"


def test_a_schedule_under_a_tighter_cap_is_known_under_a_looser_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the search finds a slower one there, and not where it does not fit."""
    step = joint_step(FlatPrices(bytes_per_us=150.0))
    known = step.solve(Choice())
    real, searches = joint_graph.solve_graph, []

    def slower(*args: Any, **more: Any) -> Result:
        searches.append(more.get("search"))
        if searches[-1] is None:
            more["caps"] = replace(more["caps"], max_prefetch=0)
        return real(*args, **more)

    monkeypatch.setattr(joint_graph, "solve_graph", slower)
    alone = replace(step, solved={}).solve(Choice())
    assert alone.step_ticks > known.step_ticks
    for cap, ticks in ((known.peak_bytes, known.step_ticks), (known.peak_bytes - 1, None)):
        found = step.with_cap(MemoryCap(size_bytes=cap)).solve(Choice())
        assert found.fits
        assert (searches[-1] is not None) == (ticks is not None)
        assert found.step_ticks == ticks if ticks else found.step_ticks > known.step_ticks


def joint_step(prices: FlatPrices) -> JointStep:
    *apart, joint = loaded_layers(with_joint_graph(captured_layers((32, 64, 128))), prices)
    request = SolveRequest(
        caps=Caps(),
        memory_cap=MemoryCap(),
        options=SolveOptions(time_slack=0.0, budget=0.0),
    )
    return JointStep.of(with_apart(joint, apart), request, Progress(quiet=True))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_choice_under_a_cap_is_known_under_the_next(
    num_micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = loaded_layers(captured_layers((32, 64)), FlatPrices(bytes_per_us=150.0))
    request = SolveRequest(caps=Caps(), options=SolveOptions(time_slack=0.0, budget=0.0))
    step = Step.of(graphs, request, Progress(quiet=True))
    whole = step if num_micro_batches == 1 else Accumulation.of(step, num_micro_batches)
    low, high = along_caps.range_ends_bytes(whole)
    known: list[set[Choice]] = []

    def recorded(at_cap: Step | Accumulation) -> StepAnswer | AccumulationAnswer:
        known.append(set(at_cap.solved))
        return best_choice(at_cap)

    monkeypatch.setattr(along_caps, "best_choice", recorded)
    caps = [MemoryCap(size_bytes=size) for size in (low, high, high + 512)]
    found = [answer.best.kept for answer in along_caps.answers_along_caps(whole, caps)]
    assert known == [set(), {found[0]}, {found[1]}]


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ([], "nothing"),
        (NAMES, "layers.0-11, norm, output"),
        (["layers.2.a", "layers.9.a", "layers.10.a"], "parts of layers.2, layers.9-10"),
        (
            ["layers.11.a", "layers.11.b", "norm.w", "layers.0.b"],
            "layers.11, norm; parts of",
        ),
    ],
)
def test_what_is_kept_in_words(kept: list[str], words: str) -> None:
    assert kept_in_words(kept, NAMES).startswith(words)


def test_a_frontier_needs_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, message in (
        (["--keep", "none", "--frontier", "4"], "--frontier: it needs --keep auto; for each graph"),
        (["--frontier", "1"], "--frontier: expected a whole number from 2"),
    ):
        assert main(["solve", "llama3-debug", *asked]) == 2
        assert message in capsys.readouterr().err


A, B, C = "layers.0.a", "layers.0.b", "layers.1.a"
PARTS = "parts of layers.0"


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([[A], [], [A]], [PARTS, "nothing", PARTS]),
        ([[A], [A, B]], [f"{PARTS} (1)", f"{PARTS} (2)"]),
        ([[B, A], [A], [B]], [f"{PARTS} ({A}, {B})", f"{PARTS} ({A})", f"{PARTS} ({B})"]),
        ([[A], [B], [C]], [f"{PARTS} ({A})", f"{PARTS} ({B})", "parts of layers.1"]),
        (
            [[f"{A} @node"], [f"{B} @node"]],
            [f"in the node: {PARTS} ({name} @node)" for name in (A, B)],
        ),
    ],
)
def test_different_choices_have_different_words(choices: list[list[str]], words: list[str]) -> None:
    names = [*NAMES, "layers.0.c"]
    assert told_apart(choices, names) == words


def test_the_table_of_a_report_tells_choices_apart() -> None:
    def choice(*kept: str) -> dict[str, Any]:
        times = dict.fromkeys(("forward_us", "backward_us", "step_time_us", "bound_us"), 1.0)
        sizes = dict.fromkeys(("kept_bytes", "peak_memory_bytes", "memory_cap_bytes"), 2**20)
        counts = {"num_kept": len(kept), "num_in_node": 0, "kept": kept, "fits": True}
        return {**times, **sizes, **counts}

    step = choice(A) | {"parameters": [*NAMES, "layers.0.c"], "gap": 0.0, "baselines": {}}
    for key in ("frontier", "along_caps"):
        page = kept_section(step | {key: [choice(A), choice(B)]})
        assert f"{PARTS} ({A})" in page
        assert f"{PARTS} ({B})" in page
