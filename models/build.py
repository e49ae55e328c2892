"""Build a preset on its mesh: sharded parameters and example inputs, which are allocated only on
request.
"""

import math
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from apsched.errors import InputError
from apsched.models.deepseek import Deepseek
from apsched.models.layers import Table
from apsched.models.llama import Llama
from apsched.models.mesh import Meshes, MeshSpec, build_meshes, group_of
from apsched.models.options import ModelOptions
from apsched.models.presets import PRESETS, DeepseekConfig, LlamaConfig
from apsched.models.sharding import Values, shard_parameters

Config = LlamaConfig | DeepseekConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A preset, sharded, and inputs for one step of one process rank."""

    name: str
    module: nn.Module
    """``module(*inputs)`` is this process rank's share of the loss; parameters are DTensor shards
    in float32.
    """
    inputs: tuple[torch.Tensor, ...]
    """Tokens and targets, ``[batch, seq_len]`` each; or images and their classes."""
    mesh: MeshSpec
    options: ModelOptions
    num_layers: int
    num_parameters: int
    """Of the whole model."""

    @property
    def takes_images(self) -> bool:
        """Whether a sample is an image, not a sequence of tokens."""
        return self.inputs[0].is_floating_point()


def build(
    name: str,
    *,
    mesh: MeshSpec,
    seq_len: int = 8192,
    batch: int = 1,
    num_layers: int | None = None,
    options: ModelOptions | None = None,
    device: str = "cpu",
    materialize: bool = False,
    seed: int = 0,
) -> BuiltModel:
    """Return preset ``name`` as this process rank holds it; raises :class:`InputError` if the
    preset, mesh, sequence and batch do not fit together.

    A process group of ``mesh.world_size`` must run: real, or a fake one by
    :func:`apsched.capture.fake_world.world`. Parameters and inputs are fake tensors of one fake
    mode, unless ``materialize``: then they are real on ``device``, with values that depend on
    nothing but ``seed`` and their names, so that every mesh starts from the same model. ``batch``
    is sequences per data-parallel process rank.
    """
    options = options or ModelOptions()
    config = _config(name, num_layers)
    _check(name, config, mesh, seq_len, batch)
    meshes = build_meshes(mesh, torch.device(device).type)
    with torch.device("meta"):
        module = _module(config, batch, seq_len, options, meshes)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    with nullcontext() if materialize else FakeTensorMode():
        target = torch.device(device)
        shard_parameters(
            module,
            meshes,
            options,
            device=target,
            values=initial_values(seed) if materialize else None,
        )
        for table in (child for child in module.modules() if isinstance(child, Table)):
            table.fill(target)
        shape = (batch, seq_len + 1)
        tokens = (
            real_tokens(config.vocab_size, shape, mesh, seed)
            if materialize
            else torch.empty(shape, dtype=torch.int64)
        )
        inputs = tuple(part.clone().to(target) for part in (tokens[:, :-1], tokens[:, 1:]))
    return BuiltModel(
        name=name,
        module=module,
        inputs=inputs,
        mesh=mesh,
        options=options,
        num_layers=config.num_layers,
        num_parameters=num_parameters,
    )


def _config(name: str, num_layers: int | None) -> Config:
    if name not in PRESETS:
        raise InputError(f"a preset is one of {', '.join(PRESETS)}; found {name!r}")
    config = PRESETS[name]
    if num_layers is None:
        return config
    if num_layers < 1:
        raise InputError(f"num_layers must be at least 1; found {num_layers}")
    return replace(config, num_layers=num_layers)


def _check(name: str, config: Config, mesh: MeshSpec, seq_len: int, batch: int) -> None:
    for what, value in (("seq_len", seq_len), ("batch", batch)):
        if value < 1:
            raise InputError(f"{what} must be at least 1; found {value}")
    if batch * seq_len % mesh.tp:
        raise InputError(
            f"batch x seq_len must be a multiple of tp, which splits the tokens; found {batch} x"
            f" {seq_len} and tp={mesh.tp}"
        )
    if isinstance(config, LlamaConfig):
        if mesh.ep > 1:
            raise InputError(
                f"{name} has no experts, so mesh axis 'ep' can't be used; drop ep={mesh.ep} or take"
                " a deepseek-v3 preset"
            )
        heads = math.gcd(config.num_heads, config.num_kv_heads)
        if heads % mesh.tp:
            raise InputError(
                f"tp must divide the {heads} key-value heads of {name}; found tp={mesh.tp}"
            )
    else:
        _check_experts(name, config, mesh, seq_len, batch)


def _check_experts(
    name: str, config: DeepseekConfig, mesh: MeshSpec, seq_len: int, batch: int
) -> None:
    if mesh.tp > 1:
        raise InputError(f"{name} has no tensor-parallel form; found tp={mesh.tp}: use fsdp and ep")
    if config.num_experts % mesh.ep:
        raise InputError(
            f"ep must divide the {config.num_experts} experts of {name}; found ep={mesh.ep}"
        )
    routed = batch * seq_len * config.num_experts_per_token
    if routed % config.num_experts:
        raise InputError(
            f"balanced routing needs batch x seq_len x {config.num_experts_per_token} to be a"
            f" multiple of the {config.num_experts} experts of {name}; found {routed}: change"
            " seq_len or batch"
        )


def initial_values(seed: int) -> Values:
    """Return values that depend on nothing but ``seed`` and the names of parameters."""

    def values(name: str, shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
        return torch.empty(shape).normal_(std=0.02, generator=generator)

    return values


def real_tokens(vocab_size: int, shape: tuple[int, int], mesh: MeshSpec, seed: int) -> torch.Tensor:
    """Return tokens that depend on nothing but ``seed`` and the data-parallel rank."""
    data_rank = dist.get_rank() // mesh.tp  # tp process ranks share their tokens
    generator = torch.Generator().manual_seed(seed * 2**32 + 2**31 + data_rank)
    return torch.randint(vocab_size, shape, generator=generator)


def _module(
    config: Config, batch: int, seq_len: int, options: ModelOptions, meshes: Meshes
) -> nn.Module:
    dtype, global_tokens = options.param_dtype, batch * seq_len * meshes.spec.data_parallel_size
    if isinstance(config, LlamaConfig):
        return Llama(
            config,
            seq_len=seq_len,
            dtype=dtype,
            tp=group_of(meshes.dense, "tp"),
            global_tokens=global_tokens,
        )
    ep = group_of(meshes.expert, "ep")
    return Deepseek(
        config,
        num_tokens=batch * seq_len,
        seq_len=seq_len,
        dtype=dtype,
        ep=ep,
        global_tokens=global_tokens,
    )
