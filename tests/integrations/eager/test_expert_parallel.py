"""``tune_fsdp2`` under expert parallelism: experts are gathered on another mesh than the rest."""

import pytest
import torch

import apsched
from apsched.capture.fake_world import world
from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.integrations.fsdp2 import apply_fsdp2, fsdp2_plan
from apsched.integrations.fsdp2_units import launches_of, units_of
from apsched.integrations.unit_order import moved_as_units_run
from apsched.kinds import CollectiveKind
from apsched.schedule.verify import verify
from tests.helpers.graphs.expert_parallel import AS_UNITS, SEVERAL_MESHES, built, ways
from tests.helpers.processes import WORKERS, Job, run_jobs

TOKENS = torch.zeros(4, 8, dtype=torch.long)
QUICK = {"budget": 0.0, "memory_cap": "none"}
needs_several_meshes = pytest.mark.skipif(
    SEVERAL_MESHES not in ways(), reason="this torch has one mesh for each unit"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[dict]:
    asked = Job(folder=tmp_path_factory.mktemp("expert-parallel") / "four", world_size=4)
    script = WORKERS / "training/tune_expert_parallel_worker.py"
    (found,) = run_jobs(script, [asked], timeout_s=600)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("way", ways())
def test_a_tuned_model_computes_what_it_did(job, way):
    """Also with the units kept that pay."""
    for report in job:
        case = report[way]
        assert case["tuned"]["trained"] == case["kept"]["trained"] == case["as it was"]
        assert len({*case["as it was"]}) == 4, "each step changes the loss"
        assert case["tuned"]["settings"] == job[0][way]["tuned"]["settings"]
        predicted, untuned = case["tuned"]["times"]
        assert 0 < case["kept"]["times"][0] <= predicted < untuned


@pytest.mark.ranks
@pytest.mark.parametrize("way", ways())
def test_tokens_are_exchanged_as_often_as_captured(job, way):
    for report in job:
        found = report[way]["exchanges"]
        assert found["captured"] == found["ran"] == [6, 4]
        assert found["gathers"] == [5, 4]
        assert found["reductions"] == [0, 5]


@pytest.fixture(scope="module")
def solved():
    """Units, and the results of both graphs of the model with two meshes in one unit, solved
    without the order of FSDP2.
    """
    with world(4):
        model = built(SEVERAL_MESHES)
        tuned = apsched.tune_fsdp2(model, TOKENS, **QUICK)
        problems = [one.problem for one in tuned.results]
        plans = [fsdp2_plan(model, problem) for problem in problems]
        options = SolveOptions(budget=0.0)
        results = [
            apsched.solve(problem, plan=plan, max_compute_move=0, options=options)
            for problem, plan in zip(problems, plans, strict=True)
        ]
        return model, units_of(model), results, tuned


def launched(units, problem, schedule, kind) -> list[str]:
    by_parameter = {name: unit for unit in units for name in unit.parameters}
    return [one.unit for one in launches_of(problem, schedule, kind, by_parameter)]


@needs_several_meshes
def test_a_unit_is_gathered_and_reduced_at_one_place(solved):
    _, units, results, _ = solved
    order = [[unit.name for unit in units], ["blocks.1", "blocks.0", "(root)"]]
    parameters = [unit.parameters for unit in units]
    for result in results:
        problem, kinds = result.problem, [CollectiveKind.ALL_GATHER]
        if problem.name == "backward":
            kinds.append(CollectiveKind.REDUCE_SCATTER)
        before = [launched(units, problem, result.schedule, kind) for kind in kinds]
        assert any(len(names) > len({*names}) for names in before), "places differ as solved"
        moved = moved_as_units_run(problem, Caps(max_compute_move=0), result.best, parameters)
        assert not verify(problem, moved.schedule, Caps(max_compute_move=0))
        for kind in kinds:
            names = launched(units, problem, moved.schedule, kind)
            assert len(names) == len({*names})
        if problem.name == "backward":
            assert names == order[1]


@needs_several_meshes
def test_another_order_is_refused_with_advice(solved):
    model, _, results, tuned = solved
    assert apply_fsdp2(model, tuned.results) == tuned.settings
    with pytest.raises(InputError, match=r"on all of its meshes at one place.*call tune_fsdp2"):
        apply_fsdp2(model, results)


@pytest.mark.parametrize("keep", [None, "auto"])
def test_hints_state_sizes_that_depend_on_data(keep):
    with world(4):
        model = built(AS_UNITS)
        balanced = apsched.tune_fsdp2(model, TOKENS, **QUICK, keep=keep)
        hints = {size.symbol: 512 for size in balanced.results[0].assumptions.sizes}
        stated = apsched.tune_fsdp2(model, TOKENS, **QUICK, keep=keep, hints=hints)
        assert "(8 sizes) = 16 (balanced)" in str(balanced)
        assert "(8 sizes) = 512 (as stated)" in str(stated)
        for one, other in zip(balanced.results, stated.results, strict=True):
            assert one.peak_memory_bytes < other.peak_memory_bytes
        with pytest.raises(InputError, match=r"hints: .* found 'u99'; the step has u8"):
            apsched.tune_fsdp2(model, TOKENS, **QUICK, keep=keep, hints={"u99": 1})
