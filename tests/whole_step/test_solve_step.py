"""``apsched.solve_step``: the step of a module of the user's own, in Python."""

import json
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import apsched
from apsched.artifacts.kept_choice import kept_beside
from apsched.artifacts.solved_run import load_run
from apsched.config import Caps
from apsched.errors import InputError
from apsched.report.page.apply import how_to_apply
from apsched.solver.requested import solve_requested

WIDTH, LAYERS = 64, 3


class Blocks(nn.Module):
    """Linear layers in a list, as blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def solved(**options: object) -> apsched.StepResult:
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(16, WIDTH)
    return apsched.solve_step(model, (x,), "fsdp=8", budget=0, **options)


def test_the_step_is_both_graphs_with_what_is_kept(tmp_path: Path) -> None:
    step = solved()
    forward, backward = step.results
    assert step.step_time_us is not None
    assert step.step_time_us == pytest.approx(
        (forward.step_time_us or 0) + (backward.step_time_us or 0)
    )
    assert step.bound_us <= step.step_time_us
    assert 0 <= step.gap < 1
    assert step.kept
    assert set(step.kept) <= {f"layers.{k}.weight" for k in range(LAYERS)}
    again = solved(keep="none")
    assert again.kept == ()
    assert step.step_time_us <= (again.step_time_us or 0)
    gathers = [len(s.results[1].problem.collectives) for s in (step, again)]
    assert gathers[0] < gathers[1]
    assert step.as_dict()["kept"] == list(step.kept)
    assert len(step.as_dict()["tensors"]["backward"]) == len(step.kept)
    step.save(tmp_path / "kept.txt")
    same = solved(keep=tmp_path / "kept.txt")
    assert same.kept == step.kept
    assert same.step_time_us == step.step_time_us
    assert solved(keep=step.kept).kept == step.kept
    lines = repr(step).splitlines()
    assert lines[0] == "apsched.StepResult"
    count = step.as_dict()["num_parameters"]
    assert f"kept from forward to backward: {len(step.kept)} of {count} parameters" in lines[2]


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_saved_run_is_the_answer(tmp_path: Path, num_micro_batches: int) -> None:
    step = solved(accumulate=num_micro_batches)
    (tmp_path / "backward-3.graph").touch()  # of an earlier answer
    (tmp_path / "result.json").touch()
    step.save_run(tmp_path)
    run = load_run(tmp_path)
    assert [g.result.step_time_us for g in run.graphs] == [r.step_time_us for r in step.results]
    assert [g.result.schedule for g in run.graphs] == [r.schedule for r in step.results]
    figures = run.keep if num_micro_batches == 1 else run.accumulate
    assert figures == json.loads(json.dumps(step.as_dict()))
    assert kept_beside([tmp_path], "keep").entries == step.kept
    assert (tmp_path / "kept.txt").read_text().split("\n")[:-1] == list(step.kept)
    assert (tmp_path / "backward-3.graph").exists() == (num_micro_batches == 3)
    page = how_to_apply(run)
    assert "apsched solve model" not in page
    assert ("apply_fsdp2_micro_batches" in page) == (num_micro_batches == 3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_cap_that_nothing_fits_has_no_step_time(tmp_path: Path, accumulate: int) -> None:
    step = solved(memory_cap=1024, accumulate=accumulate)
    with pytest.raises(InputError, match="save_run: expected a step that fits"):
        step.save_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert step.step_time_us is None
    assert step.peak_memory_bytes is None
    (least,) = re.findall(r"no choice fits the memory cap of 1.00 KiB; .*\((\d+) bytes", repr(step))
    fitting = solved(memory_cap=int(least), accumulate=accumulate)
    assert fitting.peak_memory_bytes == int(least)
    assert solved(memory_cap=int(least) - 1, accumulate=accumulate).step_time_us is None


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_step_that_does_not_fit_has_reasons_also_where_cp_sat_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, num_micro_batches: int
) -> None:
    monkeypatch.setattr(sys.modules["apsched.solver.solve"], "is_small", lambda *_: False)
    searched = Mock(wraps=solve_requested)
    monkeypatch.setattr("apsched.whole_step.pair.solve_requested", searched)
    step = solved(memory_cap=1024, accumulate=num_micro_batches)
    assert searched.call_count == len(step.results)  # the reasons are added without a search
    reasons = [result.answer.infeasibility for result in step.results]
    assert all(why is not None and why.caps == ("memory_cap_bytes",) for why in reasons)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ["layers.9.weight"]}, r"keep: expected parameters .* 'layers\.9\.weight' fits"),
        ({"keep": 3}, "keep: expected auto, none, all, a file or names of parameters; found 3"),
        ({"reserve": 2.0}, "reserve: expected a share between 0 and 1, such as 0.05; found 2.0"),
        (
            {"memory_cap": "1GiB", "caps": Caps(memory_cap_bytes=2**30)},
            "memory_cap: expected it once, found it in caps, too",
        ),
        ({"cluster": "h1000"}, "h1000"),
        ({"optimizer": "adamax"}, "adamax"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(apsched.InputError, match=message):
        solved(**options)


def test_several_micro_batches_in_a_row(tmp_path: Path) -> None:
    step = solved(accumulate=3, keep="all")
    assert [count for count, _ in step.micro_batches] == [1, 1, 1]
    times = [r.step_time_us or 0.0 for _, pair in step.micro_batches for r in pair]
    assert step.step_time_us == pytest.approx(sum(times))
    assert step.bound_us <= step.step_time_us
    assert step.peak_memory_bytes is not None
    assert set(step.kept) == {
        f"layers.{k}.weight{mark}" for k in range(LAYERS) for mark in ("", " @next", " @sum")
    } - {"layers.0.weight"}, "backward does not gather the first layer"
    names = [result.problem.name for result in step.results]
    assert names == ["forward", "backward", "forward-2", "backward-2", "backward-3"]
    assert step.as_dict()["num_micro_batches"] == 3
    step.save(tmp_path / "kept.txt")
    same = solved(accumulate=3, keep=tmp_path / "kept.txt")
    assert (same.kept, same.step_time_us) == (step.kept, step.step_time_us)
    assert solved(keep="all").micro_batches[0][0] == 1
    with pytest.raises(InputError, match="whole number from 1 to 2147483647; found 0"):
        solved(accumulate=0)
    assert repr(step).startswith("apsched.StepResult")
    assert "gathered until the next micro-batch: layers.0-2" in repr(step)


def test_an_optimizer_of_the_model_is_counted_in_its_shards() -> None:
    """Made before the mesh shards the model; another optimizer holds none of its parameters."""
    found = {}
    for label in ("adamw", "torch", "half"):
        with torch.device("meta"):
            model, x = Blocks(), torch.empty(16, WIDTH)
        held = list(model.parameters())[: 2 if label == "half" else None]
        optimizer = label if label == "adamw" else torch.optim.AdamW(held)
        step = apsched.solve_step(model, (x,), "fsdp=8", budget=0, optimizer=optimizer)
        lines = {line.what: line.size_bytes for line in step.results[0].account.lines}
        (found[label],) = (size for what, size in lines.items() if what.startswith("optimizer"))
    assert found["torch"] == found["adamw"] == 2 * 4 * LAYERS * WIDTH * WIDTH // 8
    assert found["half"] == found["torch"] * 2 // 3
    with pytest.raises(InputError, match="found none of them; make the optimizer after"):
        apsched.solve_step(Blocks(), (x,), optimizer=torch.optim.AdamW(Blocks().parameters()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_progress_names_the_choice_and_the_graph_that_are_solved(
    capsys: pytest.CaptureFixture[str], accumulate: int
) -> None:
    solved(keep="none", accumulate=accumulate, memory_cap="floor")
    assert capsys.readouterr().err == ""
    solved(keep="none", accumulate=accumulate, memory_cap="floor", progress=True)
    lines = capsys.readouterr().err.splitlines()
    begun = [line.removesuffix(" ...") for line in lines if line.endswith("...")]
    assert begun[:2] == ["capture", "export forward"]
    assert {"least memory backward", "solve with 0 parameters kept"} <= {*begun}
    done = [line for line in lines if line.startswith("solve with")][-1]
    assert "incumbent" in done
    assert "; backward, " in done


def test_the_bound_over_choices_of_micro_batches_has_a_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    solved(accumulate=2, progress=True)
    lines = capsys.readouterr().err.splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("solve with"))
    assert "bound over all choices ..." in lines[:first]
