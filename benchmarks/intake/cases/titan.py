"""TorchTitan's models as its graph trainer traces them, under each parallelism: the joint graph at
the place in its pipeline that apsched's pass takes.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from apsched.capture.captured import CapturedGraph
from apsched.capture.graph_module import kept_by_name
from apsched.fx.graph_copies import copied
from apsched.integrations.torchtitan import REPLACED, pass_name, state_names
from apsched.torch_compat.graphs import quiet_fake_tensors
from benchmarks.intake.case import Case, NotTracedError
from benchmarks.intake.cases.parts import train_flex_attention_on_cpu
from benchmarks.intake.cases.worlds import running_world

_TRAINER = "torchtitan.experiments.graph_trainer"
_SEQ_LEN, _NUM_LAYERS = 32, 2
_BLOCK = 128
"""Queries in a block of a mask; context parallelism splits no block."""

_DEGREES = {
    "replicate": "data_parallel_replicate_degree",
    "fsdp": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
}
_DENSE = (
    "fsdp=2",
    "replicate=2",
    "replicate=2,fsdp=2",
    "tp=2",
    "fsdp=2,tp=2",
    "replicate=2,fsdp=2,tp=2",
    "cp=2",
    "fsdp=2,cp=2",
    "tp=2,cp=2",
)
_EXPERT = (
    *_DENSE,
    "fsdp=2,ep=2",
    "fsdp=4,ep=2",
    "replicate=2,fsdp=2,ep=2",
    "tp=2,ep=2",
    "fsdp=2,tp=2,ep=2",
    "fsdp=2,cp=2,ep=2",
)
_SDPA = {"attn_backend": "sdpa"}
_VARLEN = {"attn_backend": "varlen"}
_FLEX = {"attn_backend": "flex"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Configuration:
    """A request to TorchTitan's registry."""

    model: str
    flavor: str
    mesh: str
    options: Mapping[str, Any] = field(default_factory=lambda: _SDPA)
    """Keyword arguments of ``model_registry``."""
    compile: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``GraphTrainerCompileConfig``."""
    registered: str = ""
    """The function of its ``config_registry`` that has the model, where no option makes it."""
    real: bool = False
    """Whether the sizes are those of a real model, of which nothing is run."""

    @property
    def name(self) -> str:
        parts = [self.model, self.flavor, self.mesh]
        chosen = {**self.options, **self.compile}
        parts += [f"{key}={value}" for key, value in chosen.items() if value != "sdpa"]
        return " ".join(parts)


def _configurations() -> Iterator[_Configuration]:
    """Yield each debug model under each parallelism; then attention, experts and products of other
    backends; then every flavor with the sizes of a real model, cut to a few layers.
    """
    for model, flavor, meshes in (
        ("llama3", "debugmodel", _DENSE),
        ("qwen3", "debugmodel", _DENSE),
        ("qwen3", "debugmodel_moe", _EXPERT),
        ("deepseek_v3", "debugmodel", _EXPERT),
    ):
        for mesh in meshes:  # CPU's sdpa has no context parallelism
            options = _FLEX if "cp" in mesh else _SDPA
            yield _Configuration(model=model, flavor=flavor, mesh=mesh, options=options)
        for mesh in ("fsdp=2", "fsdp=2,tp=2"):
            yield _Configuration(model=model, flavor=flavor, mesh=mesh, options=_FLEX)
        yield _Configuration(model=model, flavor=flavor, mesh="fsdp=2", options=_VARLEN)
    for mesh in _DENSE:
        yield _Configuration(model="muse_glimmer", flavor="debugmodel", mesh=mesh, options=_FLEX)
    yield from _other_backends()
    for model, flavors in {
        "llama3": ("1B", "3B", "8B", "70B", "405B"),
        "qwen3": ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B"),
        "deepseek_v3": ("16B", "236B", "671B"),
    }.items():
        for flavor in flavors:
            mesh = "fsdp=8,ep=8" if model == "deepseek_v3" or "-A" in flavor else "fsdp=8"
            yield _Configuration(model=model, flavor=flavor, mesh=mesh, real=True)
    yield _Configuration(
        model="muse_glimmer", flavor="30B", mesh="fsdp=8", options=_FLEX, real=True
    )


def _other_backends() -> Iterator[_Configuration]:
    llama, deepseek = "llama3", "deepseek_v3"
    gemm = {**_SDPA, "tp_gemm_backend": "dist_gemm"}
    for mesh in ("tp=2", "fsdp=2,tp=2"):
        yield _Configuration(model=llama, flavor="debugmodel", mesh=mesh, options=gemm)
    yield _Configuration(model="qwen3", flavor="debugmodel_non_fused_qkv", mesh="fsdp=2")
    for backend in ("hybridep", "minimal_async_ep", "deepep"):
        options = {**_SDPA, "moe_comm_backend": backend}
        policy = {"memory_policy": "full"} if backend == "minimal_async_ep" else {}
        yield _Configuration(
            model=deepseek, flavor="debugmodel", mesh="fsdp=2,ep=2", options=options, compile=policy
        )
    for name, model in (("debugmodel_mxfp8", deepseek), ("8b_mxfp8", llama)):
        registered = f"graph_trainer_{model}_{name}"
        yield _Configuration(model=model, flavor=name, mesh="fsdp=2", registered=registered)


def cases() -> Iterator[Case]:
    """Yield a case for each configuration."""
    for configuration in _configurations():
        yield Case(
            name=configuration.name,
            group="TorchTitan",
            build=partial(_graphs, configuration),
            runs=not configuration.real,
        )


def _graphs(configuration: _Configuration) -> tuple[CapturedGraph, ...]:
    if find_spec("torchtitan") is None:
        raise NotTracedError("torchtitan is not installed")
    config, world_size = _config(configuration)
    running_world(world_size)
    with quiet_fake_tensors():
        model, dims = _parallelized(config, world_size, has_values=not configuration.real)
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


def _config(configuration: _Configuration) -> tuple[Any, int]:
    """Return the part of a trainer's configuration that tracing asks for, and the number of its
    process ranks.
    """
    settings: Any = import_module("torchtitan.config")
    configs: Any = import_module(f"{_TRAINER}.configs")
    sizes = dict(part.split("=") for part in configuration.mesh.split(","))
    degrees = {name: int(sizes.get(axis, 1)) for axis, name in _DEGREES.items()}
    spec = _spec(configuration)
    spec.model.layers = spec.model.layers[:_NUM_LAYERS]
    parallelism = settings.ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
    config = SimpleNamespace(
        parallelism=parallelism,
        model_spec=spec,
        training=settings.TrainingConfig(
            seq_len=_SEQ_LEN, mixed_precision_param="bfloat16", mixed_precision_reduce="float32"
        ),
        compile=configs.GraphTrainerCompileConfig(
            enable=True,
            mode="aot_fx_trace",
            disable_passes=["cudagraph_pass"],
            **configuration.compile,
        ),
        debug=SimpleNamespace(moe_force_load_balance=False),
        activation_checkpoint=None,
    )
    spec.model.update_from_config(config=config)
    return config, prod(degrees[_DEGREES[axis]] for axis in _DEGREES if axis != "ep")


def _spec(configuration: _Configuration) -> Any:
    registry = f"{_TRAINER}.{configuration.model}"
    if not configuration.registered:
        named: Any = import_module(registry)
        return named.model_registry(configuration.flavor, **configuration.options)
    attention: Any = import_module("torchtitan.models.common.attention")
    make = getattr(import_module(f"{registry}.config_registry"), configuration.registered)
    spec = make().model_spec
    for layer in spec.model.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    return spec


def _parallelized(config: Any, world_size: int, *, has_values: bool) -> tuple[Any, Any]:
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
    if has_values:
        with torch.no_grad():
            model.init_weights(buffer_device=None)
    return model, dims


def _traced(model: Any, dims: Any) -> Any:
    utils: Any = import_module("torchtitan.distributed.utils")
    trainer: Any = import_module(f"{_TRAINER}.trainer")
    tracer: Any = import_module(f"{_TRAINER}.make_fx_tracer")
    loss: Any = import_module("torchtitan.components.loss")
    common: Any = import_module(f"{_TRAINER}.common_utils")
    train_flex_attention_on_cpu()
    step = trainer.make_fwd_bwd_step(model, loss.CrossEntropyLoss.Config().build())
    inputs = _inputs(model, dims)
    common.maybe_register_blockmask_pytree_node()
    with utils.get_spmd_context(parallel_dims=dims)():
        return tracer.minimal_fx_tracer(step, module=model)(*inputs)


def _inputs(model: Any, dims: Any) -> tuple[Any, ...]:
    """Return the inputs of a trainer's step: tokens, labels, their number, and the positions with
    the masks that go with them; under context parallelism, this process rank's part of the
    sequence.
    """
    attention: Any = import_module("torchtitan.models.common.attention")
    seq_len = _SEQ_LEN if not dims.cp_enabled else 2 * dims.cp * _BLOCK
    tokens = torch.randint(0, 256, (1, seq_len))
    labels, valid = tokens, torch.tensor(float(seq_len))
    extra: dict[str, Any] = {"positions": torch.arange(seq_len, dtype=torch.int32).expand(1, -1)}
    masked = (attention.FlexAttention.Config, attention.VarlenAttention.Config)
    if isinstance(model.config.first_attention.inner_attention, masked):
        extra["attention_masks"] = model.get_attention_masks(positions=extra["positions"])
    if dims.cp_enabled:
        parallel: Any = import_module("torchtitan.distributed.context_parallel")
        tokens, labels, extra = parallel.prepare_context_parallel_input(
            tokens, labels, extra, dims.get_mesh("cp"), torch.device("cpu"), None
        )
    return tokens, labels, valid, extra


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
