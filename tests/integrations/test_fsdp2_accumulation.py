"""A solved step of several micro-batches as settings of eager FSDP2: real processes gather and
reduce as it says, with the losses and gradients of the same switches set by hand.
"""

import json
from pathlib import Path

import pytest
import torch

import apsched
from apsched.capture.fake_world import world
from apsched.cli.main import main
from apsched.errors import InputError
from apsched.integrations.fsdp2 import apply_fsdp2, fsdp2_plan, read_solved
from apsched.integrations.fsdp2_accumulation import apply_fsdp2_micro_batches
from tests.helpers.processes import WORKERS, Job, run_jobs
from tests.workers.training.fsdp2_micro_batches_worker import CASES, HSDP, NUM_MICRO_BATCHES
from tests.workers.training.fsdp2_worker import eager_model, in_schedule

UNITS = "layers.[0-9]+\nnorm+output\ntok_embeddings\n"
PARAMETERS = {"norm+output": ("norm.weight", "output.weight"), "(root)": ("tok_embeddings.weight",)}


def entries(units: tuple[str, ...], mark: str) -> list[str]:
    """Return the entries of a file for ``--keep``."""
    names = [name for unit in units for name in PARAMETERS.get(unit, (rf"{unit}\..*",))]
    return [f"{name} {mark}".strip() for name in names]


def solved(folder: Path, mesh: str, cases: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Write the answer of each case, as a user does."""
    folder.mkdir(parents=True)
    (folder / "units.txt").write_text(UNITS)
    for name, case in cases.items():
        lines = [
            *entries(case["kept"], ""),
            *entries(case["held"], "@next"),
            *entries(case["summed"], "@sum"),
            *entries(case.get("shards", ()), "@sum-shards"),
        ]
        (folder / f"{name}.txt").write_text("\n".join(lines))
        source = f"solve llama3-debug --mesh {mesh} --seq 32 --layers 3"
        options = f"--accumulate {NUM_MICRO_BATCHES} --max-compute-move 0 --budget 0"
        files = ["--keep", f"{folder}/{name}.txt", "--buckets", f"{folder}/units.txt"]
        assert main([*source.split(), *options.split(), *files, "-o", f"{folder}/{name}"]) == 0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[int, tuple[Path, list[dict]]]:
    root = tmp_path_factory.mktemp("micro_batches")
    folders = {mesh: root / mesh for mesh in ("fsdp=2", "fsdp=4", "hsdp=2x2")}
    for mesh, folder in folders.items():
        solved(folder, mesh, CASES if mesh.startswith("fsdp") else HSDP)
    found = run_jobs(
        WORKERS / "training/fsdp2_micro_batches_worker.py",
        [
            Job(folder=folders["fsdp=2"], world_size=2),
            Job(folder=folders["fsdp=4"], world_size=4),
            Job(folder=folders["hsdp=2x2"], world_size=4, more=("2",)),
        ],
        timeout_s=400,
    )
    return dict(zip(folders, zip(folders.values(), found, strict=True), strict=True))


@pytest.fixture(params=["fsdp=2", "fsdp=4"])
def job(jobs, request) -> tuple[Path, list[dict]]:
    return jobs[request.param]


def units_of(events: list[str], what: str) -> list[str]:
    return [event.split()[1] for event in events if event.split()[0] == what]


@pytest.mark.ranks
def test_losses_and_gradients_are_those_of_the_same_switches_set_by_hand(job) -> None:
    for report in job[1]:
        for name in CASES:
            found, by_hand = report[name]["solved"], report[name]["by hand"]
            assert found["losses"] == by_hand["losses"] == report["untouched"]["losses"]
            assert found["bits"] == by_hand["bits"], name
            assert found["gradients"] == pytest.approx(report["untouched"]["gradients"], rel=1e-3)
            assert any(found["gradients"])
            fewer = report[name]["solved, fewer"]
            assert fewer["bits"] == report[name]["by hand, fewer"]["bits"] != found["bits"]
            assert fewer["losses"] == found["losses"][:-1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ranks
def test_units_are_gathered_and_reduced_as_the_step_says(job, case) -> None:
    chosen = {kind: set(units) for kind, units in CASES[case].items()}
    for report in job[1]:
        for k, (forward, backward) in enumerate(report[case]["solved"]["seen"]):
            everything, last = {"layers.0", "layers.1", "layers.2", "norm+output", "(root)"}, k == 2
            assert set(units_of(forward, "gather")) == everything - (chosen["held"] if k else set())
            assert set(units_of(backward, "gather")) == everything - chosen["kept"] - {"(root)"}
            reduced = set(units_of(backward, "reduce"))
            assert reduced == everything - (set() if last else chosen["summed"])


@pytest.mark.ranks
def test_shards_of_gradients_are_all_reduced_once_under_hsdp(jobs) -> None:
    folder, reports = jobs["hsdp=2x2"]
    case = {kind: set(units) for kind, units in HSDP["shards"].items()}
    for report in reports:
        found, by_hand = report["shards"]["solved"], report["shards"]["by hand"]
        assert found["losses"] == by_hand["losses"] == report["untouched"]["losses"]
        assert found["bits"] == by_hand["bits"]
        assert found["gradients"] == pytest.approx(report["untouched"]["gradients"], rel=1e-3)
        for k, (_, backward) in enumerate(found["seen"]):
            everything, last = {"layers.0", "layers.1", "layers.2", "norm+output", "(root)"}, k == 2
            once = set() if last else case["summed"]
            assert set(units_of(backward, "reduce")) == everything - once
            ends = everything - once - (set() if last else case["shards"])
            assert set(units_of(backward, "all-reduce")) == ends
    written = json.loads((folder / "shards/result.json").read_text())["accumulate"]
    assert written["num_shards_summed"] > written["num_summed"] > 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ranks
def test_gathers_run_in_the_order_of_the_schedules(job, case) -> None:
    folder, reports = job
    pairs = json.loads((folder / case / "result.json").read_text())["accumulate"]["micro_batches"]
    names = [pair["graphs"] for pair in pairs for _ in range(pair["count"])]
    assert len(names) == NUM_MICRO_BATCHES
    for report in reports:
        for pair, seen in zip(names, report[case]["solved"]["seen"], strict=True):
            for name, events in zip(pair, seen, strict=True):
                expected = in_schedule(*read_solved(folder / case, name), "all_gather")
                assert units_of(events, "gather") == [unit for unit, _ in expected]


def test_a_directory_of_one_micro_batch_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="--accumulate N -o"):
        apply_fsdp2_micro_batches(torch.nn.Linear(2, 2), tmp_path)


def answer(folder: Path, lines: list[str], units: str = UNITS) -> Path:
    (folder / "units.txt").write_text(units)
    (folder / "chosen.txt").write_text("\n".join(lines))
    words = "solve llama3-debug --mesh fsdp=2 --seq 32 --layers 3 --accumulate 2 --budget 0"
    files = ["--keep", f"{folder}/chosen.txt", "--buckets", f"{folder}/units.txt"]
    assert main([*words.split(), "--max-compute-move", "0", *files, "-o", f"{folder}/out"]) == 0
    return folder / "out"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "layers.1.attention.wq.weight @next",
            r"forward-2: FSDP2 gathers a unit as one, and of layers.1 the schedule gathers \S+ and"
            r" not layers.1.attention.wq.weight; solve with plan=fsdp2_plan\(model, \*graphs\)",
        ),
        (
            "layers.1.attention.wq.weight @sum",
            r"backward: FSDP2 reduces a unit as one, and of layers.1 the schedule reduces \S+ and"
            r" not layers.1.attention.wq.weight",
        ),
    ],
)
def test_a_part_of_a_unit_is_refused(tmp_path: Path, entry: str, message: str) -> None:
    folder = answer(tmp_path, [entry])
    with world(2):
        model = eager_model(2)
        with pytest.raises(InputError, match=message):
            apply_fsdp2_micro_batches(model, folder)


def test_settings_of_each_micro_batch(tmp_path: Path) -> None:
    folder = answer(tmp_path, [r"layers\.1\..* @next", r"layers\.2\..* @sum"])
    with world(2):
        step = apply_fsdp2_micro_batches(eager_model(2), folder)
        switches = [
            {
                one.name: (one.reshard_after_backward, one.reduce_gradients)
                for one in settings.units
                if not (one.reshard_after_backward and one.reduce_gradients)
            }
            for settings in step.settings
        ]
        assert switches == [{"layers.1": (False, True), "layers.2": (True, False)}, {}]
        name = type(step.model).__name__
        assert repr(step) == f"Fsdp2MicroBatches({name}: {len(step.units)} units, 2 micro-batches)"
        with pytest.raises(InputError, match="a micro-batch from 0 to 1, found 2"):
            step.begin(2)


def test_a_step_ends_with_its_last_micro_batch(tmp_path: Path) -> None:
    folder = answer(tmp_path, [r"layers\.1\..* @next", r"layers\.2\..* @sum"])
    with world(2):
        step = apply_fsdp2_micro_batches(eager_model(2), folder)
        step.begin(0)
        step.begin(1)
        step.begin(0, last=True)
        step.begin(0)
        with pytest.raises(InputError, match=r"a last micro-batch .* begin\(k, last=True\)"):
            step.begin(0)
        step.begin(1)
        step.begin(0)


def test_a_saved_run_has_the_settings_of_its_result(tmp_path: Path) -> None:
    with world(2):
        model = eager_model(2)
        inputs = (torch.zeros(2, 32, dtype=torch.int64), torch.zeros(2, 32, dtype=torch.int64))
        graphs = apsched.capture(model, inputs)
        solved = apsched.solve_step(
            model,
            inputs,
            accumulate=3,
            plan=fsdp2_plan(model, *graphs),
            caps=apsched.Caps(max_compute_move=0),
            budget=0,
        )
        solved.save_run(tmp_path / "run")
        of_result = apply_fsdp2_micro_batches(model, solved)
        of_files = apply_fsdp2_micro_batches(model, tmp_path / "run")
    assert len(of_result.settings) == 3
    assert of_files.settings == of_result.settings
    assert any(not one.reduce_gradients for one in of_files.settings[0].units)


def test_a_root_with_embedding_and_output_may_stay_gathered(tmp_path: Path) -> None:
    """Backward gathers norm and output again, and not the embedding."""
    names = ["norm.weight", "output.weight", "tok_embeddings.weight"]
    entries = [f"{name} @next" for name in names]
    units = "layers.[0-9]+\nnorm+output+tok_embeddings\n"
    folder = answer(tmp_path, entries, units)
    with world(2):
        step = apply_fsdp2_micro_batches(eager_model(2, root_has_all=True), folder)
    first, last = ({one.name: one for one in s.units}["(root)"] for s in step.settings)
    assert first.reshard_after_forward is last.reshard_after_forward is True
    assert (first.reshard_after_backward, last.reshard_after_backward) == (False, True)


def test_settings_of_one_micro_batch_are_refused(tmp_path: Path) -> None:
    folder = answer(tmp_path, [r"layers\.1\..* @next"])
    with world(2), pytest.raises(InputError, match="call apply_fsdp2_micro_batches"):
        apply_fsdp2(eager_model(2), folder)
