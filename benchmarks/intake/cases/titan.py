"""TorchTitan's debug models as its graph trainer traces them, under each parallelism that it traces
on a CPU: the joint graph at the place in its pipeline that apsched's pass takes.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from apsched.capture.captured import CapturedGraph
from apsched.capture.graph_module import kept_by_name
from apsched.fx.graph_copies import copied
from apsched.integrations.torchtitan import REPLACED, pass_name, state_names
from apsched.torch_compat.graphs import quiet_fake_tensors
from benchmarks.intake.case import Case, NotTracedError
from benchmarks.intake.cases.worlds import running_world

_TRAINER = "torchtitan.experiments.graph_trainer"
_SEQ_LEN, _NUM_LAYERS = 32, 2

_DENSE: Mapping[str, dict[str, int]] = {
    "fsdp=2": {"data_parallel_shard_degree": 2},
    "replicate=2": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
    "replicate=2,fsdp=2": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    "tp=2": {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2},
    "fsdp=2,tp=2": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "cp=2": {"data_parallel_shard_degree": 1, "context_parallel_degree": 2},
}
_EXPERT: Mapping[str, dict[str, int]] = {
    "fsdp=2,ep=2": {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
    "fsdp=4,ep=2": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
    "fsdp=2,tp=2,ep=2": {
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "expert_parallel_degree": 2,
    },
}
_MODELS = (
    ("llama3", "debugmodel", _DENSE),
    ("qwen3", "debugmodel", _DENSE),
    ("qwen3", "debugmodel_moe", {**_DENSE, **_EXPERT}),
    ("deepseek_v3", "debugmodel", {**_DENSE, **_EXPERT}),
    ("muse_glimmer", "debugmodel", _DENSE),
)


def cases() -> Iterator[Case]:
    """Yield a case for each model and parallelism."""
    for model, flavor, meshes in _MODELS:
        for mesh, degrees in meshes.items():
            yield Case(
                name=f"{model} {flavor} {mesh}",
                group="TorchTitan",
                build=partial(_graphs, model, flavor, degrees),
            )


def _graphs(name: str, flavor: str, degrees: Mapping[str, int]) -> tuple[CapturedGraph, ...]:
    if find_spec("torchtitan") is None:
        raise NotTracedError("torchtitan is not installed")
    config, world_size = _config(name, flavor, degrees)
    running_world(world_size)
    with quiet_fake_tensors():
        model, dims = _parallelized(name, config, world_size)
        traced = _traced(model, dims)
        module = _as_apsched_gets_it(traced, config, dims)
    placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
    graph = CapturedGraph(
        name="joint",
        module=copied(module),
        kept_inputs=frozenset(kept_by_name(placeholders)),
        parameter_names=state_names(module, traced),
    )
    return (graph,)


def _config(name: str, flavor: str, degrees: Mapping[str, int]) -> tuple[Any, int]:
    """Return what a trainer's configuration says, as far as tracing asks for it."""
    settings: Any = import_module("torchtitan.config")
    registry: Any = import_module(f"{_TRAINER}.{name}")
    configs: Any = import_module(f"{_TRAINER}.configs")
    spec = registry.model_registry(flavor, attn_backend="sdpa")
    spec.model.layers = spec.model.layers[:_NUM_LAYERS]
    parallelism = settings.ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
    config = SimpleNamespace(
        parallelism=parallelism,
        model_spec=spec,
        training=settings.TrainingConfig(
            seq_len=_SEQ_LEN, mixed_precision_param="bfloat16", mixed_precision_reduce="float32"
        ),
        compile=configs.GraphTrainerCompileConfig(
            enable=True, mode="aot_fx_trace", disable_passes=["cudagraph_pass"]
        ),
        debug=SimpleNamespace(moe_force_load_balance=False),
        activation_checkpoint=None,
    )
    spec.model.update_from_config(config=config)
    world_size = parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
    world_size *= parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    return config, world_size


def _parallelized(name: str, config: Any, world_size: int) -> tuple[Any, Any]:
    distributed: Any = import_module("torchtitan.distributed.parallel_dims")
    distributed.device_type = "cpu"
    dims = distributed.ParallelDims.from_config(config.parallelism, world_size)
    dims.build_mesh()
    utils: Any = import_module("torchtitan.distributed.utils")
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model, dims


def _traced(model: Any, dims: Any) -> Any:
    utils: Any = import_module("torchtitan.distributed.utils")
    trainer: Any = import_module(f"{_TRAINER}.trainer")
    tracer: Any = import_module(f"{_TRAINER}.make_fx_tracer")
    loss: Any = import_module("torchtitan.components.loss")
    step = trainer.make_fwd_bwd_step(model, loss.CrossEntropyLoss.Config().build())
    tokens = torch.randint(0, 256, (1, _SEQ_LEN))
    positions = torch.arange(_SEQ_LEN, dtype=torch.int32).expand(1, -1)
    valid = torch.tensor(float(_SEQ_LEN))
    first: Exception | None = None
    for extra in ({}, {"positions": positions}):
        try:
            with utils.get_spmd_context(parallel_dims=dims)():
                return tracer.minimal_fx_tracer(step, module=model)(tokens, tokens, valid, extra)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _as_apsched_gets_it(traced: Any, config: Any, dims: Any) -> torch.fx.GraphModule:
    """Return the graph behind the passes of the default pipeline that come before apsched's; where
    a memory policy knows CUDA's attention alone, as it was traced.
    """
    passes: Any = import_module(f"{_TRAINER}.passes")
    found = passes.construct_default_graph_passes(traced, config, parallel_dims=dims)
    before = found[: [pass_name(one) for one in found].index(REPLACED)]
    module: torch.fx.GraphModule = traced.gm
    for one in before:
        with suppress(Exception):
            module = passes.apply_graph_passes(module, traced.example_inputs, [one])
    return module
