"""Eager FSDP2 and DDP tuned in the job: the same losses and weights, the buckets that were
predicted, and one warning where nobody tuned anything.
"""

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_module, init_device_mesh

import apsched
from apsched.capture.fake_world import world
from apsched.capture.fsdp2 import capture_fsdp2
from apsched.compiler import eager_parallel
from apsched.integrations import tune_fsdp2
from apsched.integrations.eager.settings import (
    Fsdp2Settings,
    UnitSettings,
    lacks_buffers,
    set_up,
)
from apsched.integrations.fsdp2_units import units_of
from apsched.integrations.tune_fsdp2 import Fsdp2Tuning
from tests.helpers.graphs.small_models import WIDTH, Blocks, Residual
from tests.helpers.processes import WORKERS, Job, run_jobs


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[dict]:
    asked = Job(folder=tmp_path_factory.mktemp("tuned") / "two", world_size=2)
    (found,) = run_jobs(WORKERS / "training/tune_worker.py", [asked], timeout_s=600)
    return found


@pytest.fixture(scope="module")
def replicas(tmp_path_factory) -> list[dict]:
    asked = Job(folder=tmp_path_factory.mktemp("tuned") / "four", world_size=4)
    (found,) = run_jobs(WORKERS / "training/tune_worker.py", [asked], timeout_s=600)
    return found


def test_a_torch_with_one_reduce_scatter_in_flight_is_named(monkeypatch, caplog) -> None:
    """As torch 2.11 and 2.12: their prediction has more than run."""
    unit = UnitSettings(
        name="(root)",
        forward_prefetch=(),
        backward_prefetch=(),
        reshard_after_forward=False,
        unshard_in_backward=True,
    )
    settings = Fsdp2Settings(units=(unit,), reduce_scatter_buffers=3)
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_max_input_buffers", raising=False)
    with world(2):
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        set_up(model, units_of(model), settings)
        assert lacks_buffers(model, settings)
        assert not lacks_buffers(model, replace(settings, reduce_scatter_buffers=1))
    assert "keeps one reduce-scatter in flight; the schedule has 3" in caplog.text
    tuning = Fsdp2Tuning(settings=settings, results=(), lacks_buffers=True)
    assert "predicted with 3 reduce-scatters in flight, this torch keeps one" in str(tuning)
    assert "in flight" not in str(replace(tuning, lacks_buffers=False))


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["float32", "mixed"])
def test_replicas_are_tuned_too(replicas, case):
    """HSDP: two replicas of two shards, and an all-reduce for each unit behind its
    reduce-scatter.
    """
    test_a_tuned_model_computes_what_it_did(replicas, case)
    launched = [report[case]["launched"] for report in replicas]
    assert all(one == launched[0] for one in launched)
    reduced, summed = (
        [modules for kind, *modules in launched[0] if kind == wanted]
        for wanted in ("reduce_scatter", "all_reduce")
    )
    assert len(summed) == 5, "the sixth unit has one parameter, which is no bucket"
    assert summed == reduced, "as FSDP2 launches them"


@pytest.mark.ranks
def test_units_resharded_to_fewer_process_ranks_are_gathered_there(replicas):
    """Four process ranks, ``reshard_after_forward=2``; 33 rows, so that shards have padding."""
    for report in replicas:
        case = report["in nodes"]
        assert case["tuned"] == case["as it was"] == case["gathered again"]
        assert len({*case["tuned"]}) == 4
        assert case["resharded"] == [False, True, 2, 2, 2]
        sizes = dict(case["gathers"])
        assert [sizes[f"layers.{k}"] for k in range(4)] == [4, 2, 2, 2]


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["float32", "mixed"])
def test_a_tuned_model_computes_what_it_did(job, case):
    settings = [report[case]["settings"] for report in job]
    assert settings[0] == settings[1]
    assert any(len(unit["forward_prefetch"]) > 1 for unit in settings[0]["units"])
    assert any(unit["backward_prefetch"] for unit in settings[0]["units"])
    for report in job:
        assert report[case]["untouched"]
        assert report[case]["tuned"] == report[case]["as it was"]
        assert len({*report[case]["tuned"]}) == 4, "each step changes the loss"


@pytest.mark.ranks
def test_a_root_with_the_head_alone_is_gathered_first_and_reduced_last(job):
    """As FSDP2 runs its hooks, though the head is needed last and has the first gradient."""
    for report in job:
        case = report["head"]
        assert case["tuned"] == case["as it was"]
        assert len({*case["tuned"]}) == 4
        forward, backward = case["launched"]
        assert [modules[0].split(".")[0] for _, *modules in forward] == ["head", *4 * ["layers"]]
        reduced = [modules[0] for kind, *modules in backward if kind == "reduce_scatter"]
        assert [name.split(".")[0] for name in reduced] == [*4 * ["layers"], "head"]
        assert case["settings"]["units"][0]["name"] == "(root)"
        predicted, untuned = case["times"]
        assert predicted <= untuned


@pytest.mark.ranks
def test_it_is_captured_as_the_units_were_told(job):
    assert job[0]["float32"]["dtypes"] == ["float32"]
    assert job[0]["mixed"]["dtypes"] == ["bfloat16", "float32"]
    gathered = [name for name in job[0]["mixed"]["kept"] if name.startswith("output")]
    assert sorted(gathered) == ["output.bias", "output.weight"], "reduced, not gathered again"
    step_us, untuned_us, gain = job[0]["mixed"]["gain"]
    assert 0 < step_us <= untuned_us
    assert gain == pytest.approx(1 - step_us / untuned_us)
    assert "FSDP2 tuned: 6 units, step time" in job[0]["mixed"]["text"]


@pytest.mark.ranks
def test_where_one_process_cannot_be_tuned_none_is(job):
    for report in job:
        assert report["fallback"] == {"settings": None, "text": "FSDP2 stays unchanged"}


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["small", "large"])
def test_ddp_makes_the_buckets_that_were_predicted(job, case):
    predicted = [{k: v for k, v in r["ddp"][case].items() if k != "made"} for r in job]
    assert predicted[0] == predicted[1]
    found, made = predicted[0], job[0]["ddp"][case]["made"]
    assert made["has_rebuilt_buckets"]
    sizes = [int(size) for size in made["rebuilt_bucket_sizes"].split(", ")]
    assert sizes == found["bucket_bytes"]
    indices = made["rebuilt_per_bucket_param_indices"].split(", ")
    by_name = [[found["names"][int(k)] for k in bucket.split()] for bucket in indices]
    assert by_name == found["buckets"]
    assert found["first_bucket_bytes"] == sizes[0]
    assert found["step_time_us"] <= found["default_us"] * 1.001
    assert (len(sizes) == 1) == (case == "small"), "one launch where bytes cost nothing"


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.parallel.DistributedDataParallel,
        lambda model: torch.compile(nn.parallel.DistributedDataParallel(model)),
        lambda model: nn.parallel.DistributedDataParallel(torch.compile(model)),
    ],
    ids=["compiled", "ddp", "compiled ddp", "ddp of compiled"],
)
def test_buckets_of_a_wrapped_model_are_those_of_the_model(wrap):
    """As the warning under torch.compile advises."""
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with world(2):
        assert apsched.ddp_buckets(wrap(Residual()), tokens) == apsched.ddp_buckets(
            Residual(), tokens
        )


def test_a_step_that_takes_longer_to_fit_the_cap_is_said_to():
    def tuned(cap: str) -> Fsdp2Tuning:
        with world(2):
            torch.manual_seed(0)
            model = Residual()
            for layer in model.layers:
                fully_shard(layer)
            tokens = torch.zeros(1, 2, dtype=torch.long)
            return apsched.tune_fsdp2(fully_shard(model), tokens, budget=0.0, memory_cap=cap)

    free, tight = tuned("none"), tuned("floor")
    assert str(free).endswith(f"({100 * free.gain:.1f} % less)")
    assert tight.gain < 0
    assert str(tight).endswith(f"({-100 * tight.gain:.1f} % more, to fit the memory cap)")


@pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="new in torch 2.12")
def test_a_mesh_of_all_dimensions_is_refused():
    with world(2):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = distribute_module(Residual(), mesh)
        fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
        with pytest.raises(apsched.InputError, match=r"one mesh of all dimensions .* leave fully"):
            apsched.tune_fsdp2(model, torch.zeros(1, 2, dtype=torch.long))


def test_parameters_on_the_host_are_refused():
    """Those of ``CPUOffloadPolicy``, unless the host computes."""
    with world(2):
        model, tokens = Residual(), torch.zeros(1, 2, dtype=torch.long)
        fully_shard(model, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
        assert apsched.tune_fsdp2(model, tokens, budget=0.0, memory_cap="none").settings
        model._get_fsdp_state()._device = torch.device("meta")
        with pytest.raises(apsched.InputError, match=r"\.weight: .* on the host .* call"):
            apsched.tune_fsdp2(model, tokens, budget=0.0, memory_cap="none")


def test_a_part_of_a_model_is_refused():
    """As the model that an adapter wraps: the unit around it gathers a part of its parameters."""
    with world(2):
        model = nn.Sequential(Blocks())
        for layer in model[0].layers:
            fully_shard(layer)
        fully_shard(model)
        with pytest.raises(apsched.InputError, match=r"2 modules in the model alone .*, too, as"):
            apsched.tune_fsdp2(model[0], torch.zeros(1, WIDTH))


def test_what_cannot_be_tuned_is_refused():
    with world(2):
        with pytest.raises(apsched.InputError, match="on which fully_shard was called"):
            apsched.tune_fsdp2(Residual(), torch.zeros(1, 2, dtype=torch.long))
        with pytest.raises(apsched.InputError, match="plan: expected no such setting"):
            apsched.tune_fsdp2(Residual(), (), plan="plan.toml")
        with pytest.raises(apsched.InputError, match="on which fully_shard was called"):
            apsched.tune_fsdp2(Residual(), (), keep="auto")
        with pytest.raises(apsched.InputError, match="'zzzz'; settings are cluster, ") as error:
            apsched.tune_fsdp2(Residual(), (), zzzz=1)
        assert not {*tune_fsdp2._REFUSED} & {*str(error.value).split("; ")[1].split(", ")}
        with pytest.raises(apsched.InputError, match="expected a model that runs"):
            apsched.ddp_buckets(Residual(), (torch.zeros(1, 2), torch.zeros(1, 2)))
        with pytest.raises(apsched.InputError, match="found 'memory_cap'"):
            apsched.ddp_buckets(Residual(), torch.zeros(1, 2), memory_cap=1)
    with pytest.raises(apsched.InputError, match="expected a process group"):
        apsched.ddp_buckets(Residual(), torch.zeros(1, 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_tunes_the_training_step(mode):
    """As inside of the block that initialises weights; forward alone was tuned there."""

    def tuned(mode) -> Fsdp2Tuning:
        with world(2):
            model, tokens = Residual(), torch.zeros(1, 2, dtype=torch.long)
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
            with mode():
                return apsched.tune_fsdp2(model, tokens, budget=0.0, memory_cap="none")

    found = tuned(mode)
    assert found.settings == tuned(nullcontext).settings
    assert [result.problem.name for result in found.results] == ["forward", "backward"]


def test_parameters_on_meta_are_refused():
    """There torch takes other operators for attention than on the device, with other memory."""
    with world(2):
        with torch.device("meta"):
            model = Residual()
        fully_shard(model)
        with pytest.raises(apsched.InputError, match=r"found it on meta; call tune_fsdp2 after"):
            apsched.tune_fsdp2(model, torch.zeros(1, 2, dtype=torch.long, device="meta"))
        model.to_empty(device="cpu")
        assert apsched.tune_fsdp2(model, torch.zeros(1, 2, dtype=torch.long), budget=0.0).settings


def test_each_process_rank_captures_the_same_graph_whatever_its_shards():
    codes = []
    for rank in (0, 6):
        with world(7, rank):
            model = Residual()
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
            capture = capture_fsdp2(model, (torch.zeros(1, 2, dtype=torch.long),))
            assert not model._get_fsdp_state()._fsdp_param_groups[0].is_unsharded
            codes.append([graph.module.code for graph in capture.graphs])
    assert codes[0] == codes[1]
    assert "all_gather" in codes[0][0]
    assert "reduce_scatter" in codes[0][1]


def compiled(model: nn.Module) -> None:
    torch._dynamo.reset()
    run = torch.compile(model, backend=apsched.backend(memory_cap="none"))
    for _ in range(2):
        run(torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
def test_fully_shard_under_torch_compile_is_one_warning_on_process_rank_0(
    caplog, monkeypatch, rank, count
):
    monkeypatch.setattr(eager_parallel, "_WARNED", set())
    with world(2, rank), caplog.at_level(logging.WARNING, logger=eager_parallel.__name__):
        model = Residual()
        for layer in model.layers:
            fully_shard(layer)
        compiled(fully_shard(model))
    found = [record.message for record in caplog.records if record.name == eager_parallel.__name__]
    assert len(found) == count
    assert all("fully_shard" in text and "apsched.tune_fsdp2" in text for text in found)


def test_backward_outside_of_the_compiled_function_leaves_all_reduces_to_ddp(caplog, monkeypatch):
    """docs/integrations.md: the mode of DDP that leaves its all-reduces to the graph."""
    monkeypatch.setattr(eager_parallel, "_WARNED", set())
    in_graph = torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True)
    buckets = torch._inductor.config.patch(  # DDP turns them on, for the process
        _fuse_ddp_communication=False, _fuse_ddp_bucket_size=25
    )
    warnings = caplog.at_level(logging.WARNING, logger=eager_parallel.__name__)
    with world(2), in_graph, buckets, warnings:
        torch._dynamo.reset()
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        run = torch.compile(model, backend=apsched.backend(memory_cap="none", budget=0.0))
        run(torch.ones(2, 4)).sum().backward()
    found = [record.message for record in caplog.records if record.name == eager_parallel.__name__]
    assert len(found) == 1
    assert "call loss.backward() in the compiled function" in found[0]


def test_ddp_under_torch_compile_is_a_warning_and_one_process_is_none(caplog, monkeypatch):
    monkeypatch.setattr(eager_parallel, "_WARNED", set())
    with world(2), caplog.at_level(logging.WARNING, logger=eager_parallel.__name__):
        compiled(Residual())
        assert not [r for r in caplog.records if r.name == eager_parallel.__name__]
        compiled(nn.parallel.DistributedDataParallel(Residual()))
    found = [record.message for record in caplog.records if record.name == eager_parallel.__name__]
    assert len(found) == 1
    assert "apsched.ddp_buckets" in found[0]
