"""The gain from one more GiB, or less, for a step with kept parameters."""

import io
import json

import pytest

from apsched.capture.captured import Capture
from apsched.cli.main import main
from apsched.config import Caps, SolveOptions
from apsched.pipeline.solve_graph import SolveRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.report.answer.more_memory import more_memory_json, more_memory_lines
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.choices import Choice
from apsched.whole_step.one_more import MoreMemory, with_more_memory
from apsched.whole_step.pair import Step
from apsched.whole_step.search import solve_step
from apsched.whole_step.solve import best_choice
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers


@pytest.fixture(scope="module")
def layers() -> Capture:
    return captured_layers((32, 64, 128))


def found_of(capture: Capture, cap_bytes: int | None, more_bytes: int) -> MoreMemory:
    request = SolveRequest(
        caps=Caps(),
        memory_cap=MemoryCap(size_bytes=cap_bytes),
        options=SolveOptions(time_slack=0.0, budget=0.0),
    )
    graphs = loaded_layers(capture, FlatPrices(bytes_per_us=150.0))
    step = Step.of(graphs, request, Progress(quiet=True))
    return with_more_memory(step, solve_step(step), more_bytes)


def floor_of(capture: Capture) -> int:
    step = found_of(capture, None, 0).now.tried
    again = next(choice for choice in step if not choice.kept)
    return max(result.answer.floor_memory_bytes for result in again.results)


def test_more_memory_keeps_more_and_is_faster(layers: Capture) -> None:
    """What is gained is the difference to a solve under the looser cap, and lies between what is
    proven and what is possible.
    """
    floor = floor_of(layers)
    found = found_of(layers, floor, 2**20)
    looser = found_of(layers, floor + 2**20, 0).now
    assert not found.now.best.kept
    assert found.more.cap_bytes == floor + 2**20
    assert found.more.best.step_ticks == looser.best.step_ticks
    assert found.gain_ticks == found.now.best.step_ticks - looser.best.step_ticks > 0
    assert found.also_kept == looser.best.kept == {"weights.0", "weights.1"}
    assert found.no_longer_kept == Choice()
    assert found.proven_ticks <= found.gain_ticks <= found.possible_ticks
    line, change = more_memory_lines(found)
    assert line.startswith("one more 1.00 MiB (memory cap ")
    assert change.strip().startswith("2 more kept (weights.0-1): ")
    says = more_memory_json(found)
    assert says["also_kept"] == ["weights.0", "weights.1"]
    assert says["gain_us"] == (found.now.best.step_ticks - looser.best.step_ticks) / 1000


def test_memory_that_does_not_bind_gains_nothing(layers: Capture) -> None:
    found = found_of(layers, floor_of(layers) + 2**22, 2**20)
    assert found.gain_ticks == 0
    assert not found.also_kept | found.no_longer_kept
    (line,) = more_memory_lines(found)
    assert "no gain found" in line or "gains nothing" in line


def test_more_memory_for_several_micro_batches(layers: Capture) -> None:
    """The gain is that of a solve under the looser cap; the words are by kind of choice."""
    request = SolveRequest(caps=Caps(), options=SolveOptions(time_slack=0.0, budget=0.0))
    graphs = loaded_layers(layers, FlatPrices(bytes_per_us=150.0))
    several = Accumulation.of(Step.of(graphs, request, Progress(quiet=True)), 2)
    least = several.with_cap(MemoryCap()).solve(Choice()).least_bytes
    tight, looser = (
        several.with_cap(MemoryCap(size_bytes=size)) for size in (least, least + 2**20)
    )
    found = with_more_memory(tight, best_choice(tight), 2**20)
    more = best_choice(looser).best
    assert found.now.best.kept == {"weights.0 @next", "weights.1 @next"}
    assert found.more.cap_bytes == least + 2**20
    assert found.gain_ticks == found.now.best.step_ticks - more.step_ticks > 0
    assert found.also_kept == more.kept - found.now.best.kept
    line, *changes = more_memory_lines(found)
    assert line.startswith("one more 1.00 MiB (memory cap ")
    assert [change.strip() for change in changes] == [
        "also kept from forward to backward: weights.0-1",
        "also gradients reduced once: weights.0-1",
    ]
    says = more_memory_json(found)
    assert (says["num_kept"], says["num_held"], says["num_summed"]) == (2, 2, 2)
    assert says["also_kept"] == sorted(found.also_kept)


def test_explain_of_several_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "llama3-debug", "--mesh", "fsdp=8", "--seq", "64", "--layers", "2"]
    words += ["--budget", "0", "--max-compute-move", "0", "--keep", "auto", "--accumulate", "2"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("step of 2 micro-batches: ")
    assert text.index("one more 1.00 GiB (memory cap ") < text.index("\nforward: step time")
    assert "\nbackward-2: step time" in text
    assert main([*words, "--json"]) == 0
    says = json.loads(capsys.readouterr().out)
    assert "keep" not in says
    step = says["accumulate"]
    assert step["one_more"]["gain_us"] >= 0
    times = {graph["name"]: graph["step_time_us"] for graph in says["graphs"]}
    total = sum(
        one["count"] * times[name] for one in step["micro_batches"] for name in one["graphs"]
    )
    assert total == pytest.approx(step["step_time_us"])


@pytest.mark.parametrize("keep", ["auto", "all"])
def test_explain_of_a_step(keep: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The step first, then each graph with what is kept; with ``auto`` also one more GiB."""
    words = ["explain", "llama3-debug", "--mesh", "fsdp=8", "--seq", "64", "--layers", "2"]
    words += ["--budget", "0", "--keep", keep]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("step: ")
    assert ("one more 1.00 GiB (memory cap " in text) == (keep == "auto")
    assert text.index("kept from forward to backward") < text.index("\nforward: step time")
    assert main([*words, "--json"]) == 0
    says = json.load(io.StringIO(capsys.readouterr().out))
    assert says["keep"]["num_kept"] == len(says["keep"]["kept"]) > 0
    assert ("one_more" in says["keep"]) == (keep == "auto")
    step_us = sum(graph["step_time_us"] for graph in says["graphs"])
    assert step_us == pytest.approx(says["keep"]["step_time_us"])
