"""Eager FSDP2 tuned with a choice of the units that are kept: whole units, one choice on all
process ranks, under the memory of the device, and the same losses.
"""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import apsched
from apsched.capture.fake_world import world
from apsched.compiler.memory_in_use import MemoryInUse
from apsched.integrations.eager import kept as kept_units
from apsched.integrations.fsdp2 import apply_fsdp2, fsdp2_plan
from apsched.integrations.fsdp2_accumulation import apply_fsdp2_micro_batches
from apsched.integrations.tune_fsdp2 import Fsdp2Tuning
from tests.helpers.graphs.small_models import Residual
from tests.helpers.processes import WORKERS, run_processes

TOKENS = torch.zeros(4, 64, dtype=torch.long)


def sharded(**last: object) -> nn.Module:
    torch.manual_seed(0)
    model = Residual(64)
    for layer in model.layers[:-1]:
        fully_shard(layer)
    fully_shard(model.layers[-1], **last)
    return fully_shard(model)


def tuned(keep: object, memory_cap: str | None = "none") -> Fsdp2Tuning:
    with world(8):
        found = apsched.tune_fsdp2(sharded(), TOKENS, keep=keep, memory_cap=memory_cap, budget=0.0)
    for result in found.results:
        cap = result.caps.memory_cap_bytes
        assert cap is None or result.best.peak_memory_bytes <= cap
    return found


def kept_of(found: Fsdp2Tuning) -> set[str]:
    return {one.name for one in found.settings.units if not one.reshard_after_forward}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("tuned_kept")
    return run_processes(WORKERS / "training/tune_keep_worker.py", folder, 2, timeout_s=240)


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["auto", "tight", "none", "part"])
def test_a_model_tuned_with_kept_units_computes_what_it_did(reports, case):
    assert reports[0][case]["resharded"] == reports[1][case]["resharded"]
    for report in reports:
        assert report[case]["losses"] == report["as it was"]
        assert sorted(report[case]["set"]) == sorted(report[case]["resharded"].values())
    resharded = reports[0][case]["resharded"]
    if case == "none":
        assert all(resharded.values())
    if case == "part":
        assert "keep has a part of layers.1, and FSDP2 keeps whole" in reports[0][case]["text"]
    assert case != "auto" or not all(resharded.values())


@pytest.mark.ranks
def test_process_ranks_that_state_other_choices_are_refused(reports):
    for report in reports:
        kind, text = report["differs"]
        assert kind == "AgreementError"
        assert "process rank 1 has other settings than process rank 0: keep none here" in text


@pytest.mark.parametrize("cap", ["none", "floor", "floor+64KiB"])
def test_the_choice_is_no_slower_than_one_that_fits(cap):
    found = tuned("auto", cap)
    fitting = [us for us in found.choices.values() if us is not None]
    assert {"none", kept_units.AS_IT_WAS} <= found.choices.keys()
    assert found.step_time_us <= min(fitting) * (1 + 1e-9)
    assert found.gain == pytest.approx(1 - found.step_time_us / found.untuned_us)


def test_names_none_and_all_are_the_units_kept():
    assert kept_of(tuned("none")) == set()
    assert kept_of(tuned("all")) == {"(root)", *(f"layers.{k}" for k in range(4))}
    assert kept_of(tuned([r"layers\.[12]\..*"])) == {"layers.1", "layers.2"}
    assert tuned("none").untuned_us == tuned("all").untuned_us == tuned(None).untuned_us


@pytest.mark.parametrize("cap", ["none", "floor"])
def test_a_part_of_a_unit_is_solved_with_whole_units_and_has_its_cost(cap):
    found = tuned([r"layers\.1\.up\.weight", r"layers\.2\..*"], cap)
    assert found.in_part.units == ("layers.1",)
    assert "layers.2" in kept_of(found)
    assert found.in_part.whole_us == pytest.approx(found.step_time_us)
    assert found.in_part.stated_us > 0
    with_it, without = tuned([r"layers\.[12]\..*"]), tuned([r"layers\.2\..*"])
    if cap == "none":
        assert found.step_time_us == min(with_it.step_time_us, without.step_time_us)


def test_memory_in_use_leaves_less_to_kept_units(monkeypatch):
    free = tuned("auto", None)
    taken = 10 * 2**30
    use = MemoryInUse(total_bytes=80 * 2**30, outside_bytes=taken, allocated_bytes=0)
    monkeypatch.setattr(kept_units, "agreed_memory", lambda *_: use)
    full = tuned("auto", None)
    for before, after in zip(free.results, full.results, strict=True):
        less = before.caps.memory_cap_bytes - after.caps.memory_cap_bytes
        assert taken / 2 < less <= taken


@pytest.mark.parametrize("accumulate", [1, 2])
def test_on_several_nodes_nothing_is_resharded_in_a_node(accumulate):
    """FSDP2 has no setter for that."""
    with world(16):
        found = apsched.tune_fsdp2(
            sharded(),
            TOKENS,
            keep="auto",
            accumulate=accumulate,
            cluster="h100-tcpx",
            memory_cap="floor+96KiB",
            budget=0.0,
        )
    assert {"none", "last_block"} <= found.choices.keys()
    assert "in_node" not in found.choices
    numbers = [one.reshard_after_forward for one in found.settings.units]
    assert all(isinstance(number, bool) for number in numbers)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_progress_shows_the_capture_and_the_search_of_each_choice(capsys, accumulate):
    for progress in (False, True):
        with world(2):
            settings = {"cluster": "h100", "budget": 0.0, "progress": progress}
            apsched.tune_fsdp2(sharded(), TOKENS, keep="auto", accumulate=accumulate, **settings)
        lines = capsys.readouterr().err.splitlines()
        if not progress:
            assert lines == []
    begun = [line for line in lines if line.endswith(" ...")]
    assert begun[0] == "capture ..."
    assert any("solve with" in line for line in begun)
    done = [line for line in lines if line.startswith("solve with") and line not in begun]
    assert all("incumbent" in line and "; backward, " in line for line in done)


def test_a_schedule_that_reshards_in_a_node_is_refused_with_both_remedies():
    with world(16):
        model = sharded()
        solved = apsched.solve_step(
            model,
            TOKENS,
            keep=[r"layers\.1\..* @node"],
            plan=fsdp2_plan(model, *apsched.capture(model, TOKENS)),
            caps=apsched.Caps(max_compute_move=0),
            budget=0.0,
        )
        remedies = r"layers\.1: .*call fully_shard\(..., reshard_after_forward=8\) on it, or use"
        with pytest.raises(apsched.InputError, match=rf"{remedies} apsched\.tune_fsdp2"):
            apply_fsdp2(model, solved.results)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_solved_with_nothing_resharded_in_a_node_is_applied(accumulate):
    with world(16):
        model = sharded()

        def solved(**options) -> apsched.StepResult:
            return apsched.solve_step(
                model,
                TOKENS,
                accumulate=accumulate,
                cluster="h100-tcpx",
                memory_cap="floor+96KiB",
                plan=fsdp2_plan(model, *apsched.capture(model, TOKENS)),
                caps=apsched.Caps(max_compute_move=0),
                budget=0.0,
                **options,
            )

        assert any("@node" in entry for entry in solved().kept)
        found = solved(in_node=False)
        assert found.kept
        assert not any("@node" in entry for entry in found.kept)
        if accumulate == 1:
            apply_fsdp2(model, found.results)
        else:
            apply_fsdp2_micro_batches(model, found)
        with pytest.raises(apsched.InputError, match=r"there are none\).*@node"):
            solved(keep=[r"layers\.1\..* @node"], in_node=False)


@pytest.mark.parametrize("keep", [None, "none"])
def test_an_error_about_memory_names_no_plan_that_the_user_could_leave_out(keep):
    with pytest.raises(apsched.InfeasibleError) as error:
        tuned(keep, "1KiB")
    (least,) = re.findall(r"try memory_cap=(\d+)", str(error.value))
    with pytest.raises(apsched.InfeasibleError) as error:
        tuned(keep, str(int(least) - 1))
    assert "; without the units and the order of FSDP2 " in str(error.value)
    assert "the plan" not in str(error.value)


def test_an_error_about_a_device_that_is_too_small_names_the_remedies(monkeypatch):
    use = MemoryInUse(total_bytes=80 * 2**30, outside_bytes=76 * 2**30, allocated_bytes=0)
    monkeypatch.setattr(kept_units, "agreed_memory", lambda *_: use)
    with pytest.raises(apsched.InfeasibleError) as error:
        tuned("none", None)
    assert "try memory_cap" not in str(error.value)
    assert "is left for the graph: " in str(error.value)
    assert "activation checkpointing or smaller inputs" in str(error.value)


@pytest.mark.parametrize("stated", [{"keep": "auto"}, {"accumulate": 2}])
def test_a_model_without_a_gradient_has_no_choice(stated):
    with world(8):
        model = sharded().requires_grad_(False)
        with pytest.raises(apsched.InputError, match=r"without a gradient; leave keep and acc"):
            apsched.tune_fsdp2(model, TOKENS, budget=0.0, memory_cap="none", **stated)
        assert apsched.tune_fsdp2(model, TOKENS, budget=0.0, memory_cap="none").settings


def test_a_choice_without_a_setter_is_refused():
    with world(8):
        with pytest.raises(apsched.InputError, match=r"'.* @node'; FSDP2 has no setter for"):
            apsched.tune_fsdp2(sharded(), TOKENS, keep=["layers.1.up.weight @node"])
        with pytest.raises(apsched.InputError, match=r"found 2 in layers.3, for which FSDP2 has"):
            apsched.tune_fsdp2(sharded(reshard_after_forward=2), TOKENS, keep="auto")
        with pytest.raises(apsched.InputError, match=r"found none that 'layers\.9' fits"):
            apsched.tune_fsdp2(sharded(), TOKENS, keep=["layers.9"], memory_cap="none")
        with pytest.raises(apsched.InputError, match="keep: expected auto, none, all, a file or"):
            apsched.tune_fsdp2(sharded(), TOKENS, keep=5)
