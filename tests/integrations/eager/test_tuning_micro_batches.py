"""Eager FSDP2 tuned for several micro-batches in one call: the units that they share are switched
in each of them as the same switches by hand, on real processes, and the figures are those of the
graphs.
"""

import re

import pytest

import apsched
from apsched.capture.fake_world import world
from apsched.integrations.eager.tuning import Fsdp2Tuning
from tests.helpers.processes import WORKERS, Job, run_jobs
from tests.integrations.test_tuning_keep import TOKENS, sharded
from tests.workers.training.tune_micro_batches_worker import CASES, NUM_MICRO_BATCHES

EVERY = {"layers.0", "layers.1", "layers.2", "norm+output", "(root)"}
MESHES = ("fsdp=2", "hsdp=2x2")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, list[dict]]:
    folders = {mesh: tmp_path_factory.mktemp("tuned_micro_batches") for mesh in MESHES}
    found = run_jobs(
        WORKERS / "training/tune_micro_batches_worker.py",
        [
            Job(folder=folders["fsdp=2"], world_size=2),
            Job(folder=folders["hsdp=2x2"], world_size=4, more=("2",)),
        ],
        timeout_s=400,
    )
    return dict(zip(MESHES, found, strict=True))


@pytest.fixture(params=MESHES)
def reports(jobs, request) -> list[dict]:
    return jobs[request.param]


def units_in(events: list[str], what: str) -> list[str]:
    return [event.split()[1] for event in events if event.split()[0] == what]


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_the_same_switches_set_by_hand(reports, case) -> None:
    for report in reports:
        found = report[case]
        assert found["tuned"]["losses"] == found["by hand"]["losses"]
        assert found["tuned"]["weights"] == found["by hand"]["weights"]
        assert found["switches"] == reports[0][case]["switches"]
        assert found["text"] == reports[0][case]["text"]
        assert f"5 units, {NUM_MICRO_BATCHES} micro-batches, step time" in found["text"]
        untouched = report["untouched"]
        assert found["tuned"]["losses"] == pytest.approx(untouched["losses"], rel=1e-5)
        if case == "none":
            assert found["tuned"]["losses"] == untouched["losses"]
            assert found["tuned"]["weights"] == untouched["weights"]


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_units_are_gathered_and_reduced_as_the_settings_say(reports, case) -> None:
    for report in reports:
        switches, held = report[case]["switches"], set()
        for of_units, events in zip(switches, report[case]["tuned"]["seen"], strict=True):
            kept = {n for n, one in of_units.items() if not one["reshard_after_forward"]}
            in_backward = EVERY - kept - {"(root)"}  # backward does not read the embedding
            gathers = units_in(events, "gather")
            assert sorted(gathers) == sorted([*(EVERY - held), *in_backward])
            reduced = {n for n, one in of_units.items() if one["reduce_gradients"]}
            assert set(units_in(events, "reduce")) == reduced
            if any(event.startswith("all-reduce") for event in events):
                whole = {n for n in reduced if of_units[n]["all_reduce_gradients"]}
                assert set(units_in(events, "all-reduce")) == whole
            held = {n for n, one in of_units.items() if not one["reshard_after_backward"]}
        assert not held


@pytest.mark.ranks
def test_cases_share_as_much_as_they_may(reports) -> None:
    first = {name: reports[0][name]["switches"][0] for name in CASES}
    shared = ("reshard_after_backward", "reduce_gradients")
    assert not any(one[switch] for one in first["all"].values() for switch in shared)
    tight = {one["reshard_after_backward"] for one in first["auto"].values()}
    assert tight == {False, True}
    assert all(all(one.values()) for one in first["none"].values())
    assert {n for n, one in first["stated"].items() if not all(one.values())} == {
        "layers.0",
        "layers.1",
        "layers.2",
        "norm+output",
    }
    auto = reports[0]["auto"]
    assert auto["step_time_us"] <= min(us for us in auto["choices"].values() if us is not None)


@pytest.mark.ranks
def test_process_ranks_that_state_other_numbers_are_refused(reports) -> None:
    for report in reports:
        kind, text = report["differs"]
        assert kind == "AgreementError"
        assert "has other settings than process rank 0: accumulate" in text


def tuned(keep: object = None, memory_cap: str = "none", accumulate: int = 3) -> Fsdp2Tuning:
    with world(8):
        return apsched.tune_fsdp2(
            sharded(), TOKENS, keep=keep, memory_cap=memory_cap, budget=0.0, accumulate=accumulate
        )


@pytest.fixture(scope="module", params=["none", "floor+300KiB"])
def auto(request) -> Fsdp2Tuning:
    return tuned(memory_cap=request.param)


def test_the_figures_are_those_of_all_micro_batches(auto) -> None:
    names = [result.problem.name for result in auto.results]
    assert names == ["forward", "backward", "forward-2", "backward-2", "backward-3"]
    assert auto.counts == (1, 1, 2, 1, 1)
    runs = zip(auto.counts, auto.results, strict=True)
    assert auto.step_time_us == pytest.approx(sum(n * one.step_time_us for n, one in runs))
    alone, one = tuned("none"), tuned("none", accumulate=1)
    assert alone.counts == (3, 3)
    assert alone.step_time_us == pytest.approx(3 * one.step_time_us)
    assert auto.untuned_us == alone.untuned_us == pytest.approx(3 * one.untuned_us)


def test_the_choice_is_no_slower_than_one_that_fits(auto) -> None:
    fitting = [us for us in auto.choices.values() if us is not None]
    assert {"none", "as fully_shard says"} <= auto.choices.keys()
    assert auto.step_time_us <= min(fitting) * (1 + 1e-9)
    for result in auto.results:
        limit = result.caps.memory_cap_bytes
        assert limit is None or result.best.peak_memory_bytes <= limit


def test_begin_without_several_micro_batches() -> None:
    found = tuned("none", accumulate=1)
    found.begin(0)
    with pytest.raises(apsched.InputError, match=r"found 1; .* tune_fsdp2\(\.\.\., accumulate=N\)"):
        found.begin(1)
    unchanged = Fsdp2Tuning(settings=None, results=())
    unchanged.begin(3)


@pytest.mark.parametrize(
    ("keep", "accumulate", "message"),
    [
        (None, 0, "accumulate: expected a whole number from 1 to 2147483647; found 0"),
        ([r"layers\.1\.up\.weight"], 2, r"found 'layers.1.up.weight' of layers.1 and not"),
        ([r"layers\.1\.up\.weight @sum"], 2, r"all parameters of a unit or none, found"),
        ([r"layers\.1\..* @next"], 1, "an entry of a step of several micro-batches"),
        (["layers.1.up.weight @node"], 2, "FSDP2 has no setter for a number of process ranks"),
    ],
)
def test_requests_that_fsdp2_cannot_follow_are_refused(keep, accumulate, message) -> None:
    with pytest.raises(apsched.InputError, match=message):
        tuned(keep, accumulate=accumulate)


@pytest.mark.parametrize(("keep", "accumulate"), [("none", 3), ("all", 3), ("all", 1)])
def test_an_error_states_the_memory_cap_that_fits_the_whole_step(keep, accumulate) -> None:
    with pytest.raises(apsched.InfeasibleError) as error:
        tuned(keep, "1MiB", accumulate)
    (least,) = re.findall(r"try memory_cap=(\d+)", str(error.value))
    assert tuned(keep, least, accumulate).settings is not None
    with pytest.raises(apsched.InfeasibleError):
        tuned(keep, str(int(least) - 1), accumulate)
