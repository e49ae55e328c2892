"""Any causal, encoder, encoder-decoder or vision model of Transformers, from a configuration alone.

This module builds all families as :mod:`apsched.models.transformers.config` builds those it knows,
but with the model's own forward pass and loss. Data parallelism is that of
:mod:`apsched.models.own_modules`; tensor parallelism follows the model's own plan
(``base_model_tp_plan``) by Transformers' own layers, expert parallelism
:mod:`apsched.models.transformers.experts`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apsched.errors import InputError
from apsched.models.build import BuiltModel, initial_values, real_tokens
from apsched.models.collectives import sum_gradient, sum_of_parts
from apsched.models.mesh import Group, Meshes, MeshSpec, build_meshes, group_of
from apsched.models.options import ModelOptions
from apsched.models.own_modules import shard_module
from apsched.models.transformers.experts import spread_experts
from apsched.torch_compat.graphs import compiling_context

_SUMMED_STYLE = "replicated_with_grad_allreduce"
"""Transformers sums these gradients in a hook, which a graph does not show."""

_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_SEQ_TO_SEQ = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
_HEADS = (
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    _CAUSAL,
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""Tables of Transformers, in order: model type -> class, with a loss where there is one. An encoder
with a causal form is an encoder, unless it says ``is_decoder``.
"""


_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")
"""Names of text, images and sound among the arguments of ``forward``."""


def build_auto(
    path: Path,
    fields: Mapping[str, Any],
    *,
    mesh: MeshSpec,
    seq_len: int,
    batch: int,
    num_layers: int | None,
    options: ModelOptions,
    materialize: bool,
    seed: int,
) -> BuiltModel:
    """Return the model of a configuration, as ``config.build_from_config`` does.

    Raises
    ------
    InputError
        for a configuration that Transformers refuses, and for a model that the mesh or the inputs
        do not fit.
    """
    config = _config(path, fields, num_layers)
    kind = _model_class(path, config, fields)
    meshes = build_meshes(mesh, "cpu")
    device = torch.device("cpu" if materialize else "meta")
    with device, _default_type(options.param_dtype):
        module: Any = accepted(path, lambda: kind(config))
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    if materialize:
        _set_values(module, seed)
    env = ShapeEnv()  # of the numbers of tokens that experts get
    mode = None if materialize else FakeTensorMode(shape_env=env, static_shapes=True)
    with mode or nullcontext():
        if mode is not None:
            _made_fake(module, mode)
        inputs = _inputs(
            path, module, batch, seq_len, mesh, options.param_dtype, seed if materialize else None
        )
        summed = _split_by_plan(path, module, meshes) if mesh.tp > 1 else {}
        if mesh.ep > 1:
            spread_experts(path, module, meshes)
        shard_module(module, meshes, options, summed=summed)
    _return_loss(module, mesh.data_parallel_size, split=mesh.tp > 1)
    _say_type(module, options.param_dtype)
    return BuiltModel(
        name=f"hf:{path.name}",
        module=module,
        inputs=inputs,
        mesh=mesh,
        options=options,
        num_layers=int(getattr(config, "num_hidden_layers", 0) or 0),
        num_parameters=num_parameters,
    )


def _config(path: Path, fields: Mapping[str, Any], num_layers: int | None) -> Any:
    known = import_module("transformers").CONFIG_MAPPING
    if fields["model_type"] not in known:
        raise InputError(
            f"hf:{path}: expected a model_type of the installed Transformers, found"
            f" {fields['model_type']!r}; update it, or capture as package.module:function"
        )
    config = accepted(path, lambda: known[fields["model_type"]].from_dict(dict(fields)))
    if num_layers is not None:
        if num_layers < 1:
            raise InputError(f"num_hidden_layers must be at least 1; found {num_layers}")
        if not isinstance(getattr(config, "num_hidden_layers", None), int):
            raise InputError(
                f"hf:{path}: {config.model_type} has no num_hidden_layers to choose; leave --layers"
                " out, and change the configuration"
            )
        config.num_hidden_layers = num_layers
        for field in ("layer_types", "mlp_layer_types"):
            if getattr(config, field, None):
                setattr(config, field, getattr(config, field)[:num_layers])
        if getattr(config, "decoder_layers", None):
            config.decoder_layers = num_layers
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _model_class(path: Path, config: Any, fields: Mapping[str, Any]) -> Any:
    transformers: Any = import_module("transformers")
    tables: Any = import_module("transformers.models.auto.modeling_auto")
    names = [name for name in fields.get("architectures") or () if hasattr(transformers, name)]
    if getattr(config, "is_encoder_decoder", False):  # its causal class is the decoder alone
        order = (_SEQ_TO_SEQ, *(table for table in _HEADS if table != _CAUSAL))
    else:
        order = (*((_CAUSAL,) if getattr(config, "is_decoder", False) else ()), *_HEADS)
    names = names or [
        name
        for table in order
        if isinstance(name := getattr(tables, table).get(config.model_type), str)
    ]
    for name in names:
        kind = getattr(transformers, name, None)
        if kind is not None and kind.main_input_name in ("input_ids", "pixel_values"):
            _refuse_more_inputs(path, kind)
            return kind
    raise InputError(
        f"hf:{path}: expected a model of tokens or pixels, found {config.model_type!r}"
        f" ({', '.join(names) or 'no model'}); capture it as package.module:function"
    )


def _refuse_more_inputs(path: Path, kind: Any) -> None:
    """Raise ``InputError`` for a model of text and images, or of text and sound: a step of one of
    them leaves out a part of the model.
    """
    arguments = inspect.signature(kind.forward).parameters
    taken = [name for name in _INPUTS if any(one.endswith(name) for one in arguments)]
    if len(taken) > 1:
        raise InputError(
            f"hf:{path}: expected a model of tokens or pixels, found {kind.__name__} with several"
            f" inputs ({', '.join(taken)}); capture it as package.module:function, with all that a"
            " step takes"
        )


def accepted(path: Path, make: Callable[[], Any]) -> Any:
    """Return the configuration that Transformers makes; InputError if it refuses it."""
    try:
        return make()
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"hf:{path}: expected a configuration that Transformers accepts, found"
            f" {type(error).__name__}: {reason}"
        ) from error


def _set_values(module: nn.Module, seed: int) -> None:
    values = initial_values(seed)
    for name, parameter in module.named_parameters():
        parameter.data = values(name, parameter.shape)


def _made_fake(module: Any, mode: FakeTensorMode) -> None:
    """Give ``module``, which is on ``meta``, fake tensors of ``mode``; ties are kept."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = (
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                if tensor.is_meta
                else mode.from_tensor(tensor)
            )
        return made[id(tensor)]

    parameters: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                if id(parameter) not in parameters:
                    whole = fake(parameter)
                    whole = whole.float() if whole.is_floating_point() else whole
                    parameters[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
                child._parameters[name] = parameters[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = fake(buffer)
        for name, value in vars(child).items():  # tables that are no buffers
            if isinstance(value, torch.Tensor):
                setattr(child, name, fake(value))


def _say_type(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the compute dtype of the model and its parts to ``dtype``, for shards of any dtype."""
    base: Any = import_module("transformers").PreTrainedModel
    for child in model.modules():
        if isinstance(child, base):
            members = {"dtype": property(lambda self: dtype)}
            child.__class__ = type(type(child).__name__, (type(child),), members)


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _inputs(
    path: Path,
    module: Any,
    batch: int,
    seq_len: int,
    mesh: MeshSpec,
    dtype: torch.dtype,
    seed: int | None,
) -> tuple[torch.Tensor, ...]:
    """Return inputs and labels of one process rank."""
    config, classes = module.config, max(int(getattr(module.config, "num_labels", 2) or 2), 1)
    if module.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        image = (batch, int(getattr(config, "num_channels", 3)), height, width)
        generator = torch.Generator().manual_seed(seed or 0)
        pixels = torch.empty(image) if seed is None else torch.randn(image, generator=generator)
        return pixels.to(dtype), torch.zeros(batch, dtype=torch.int64) % classes
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < seq_len:
        raise InputError(
            f"hf:{path}: expected a sequence of at most {limit} tokens (max_position_embeddings),"
            f" found {seq_len}; take --seq {limit} or less"
        )
    shape = (batch, seq_len)
    if seed is None:
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    tokens = real_tokens(config.vocab_size, shape, mesh, seed)
    return tokens, tokens.clone()


def _split_by_plan(path: Path, module: Any, meshes: Meshes) -> dict[nn.Module, Group]:
    """Split the model by its own plan; returns the modules whose gradients are parts."""
    distributed: Any = import_module("transformers.distributed")
    layers: Any = import_module("transformers.distributed.tensor_parallel")
    size = meshes.spec.tp

    def plan() -> Any:
        return module._resolve_parallel_plans(distributed.DistributedConfig(tp_size=size))[0]

    tied = _untied(module)
    try:
        found = plan()
        split = {name: style for name, style in found.items() if style != _SUMMED_STYLE}
        layers.apply_tensor_parallelism(module, meshes.dense["tp"], split)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"hf:{path}: expected a model that Transformers splits over tp={size} by its own plan"
            f" (base_model_tp_plan), found {type(error).__name__}: {reason}; drop tp, or use fsdp"
        ) from error
    for owner, name, first, first_name in tied:
        owner._parameters[name] = first._parameters[first_name]
    tp = group_of(meshes.dense, "tp")
    children = dict(module.named_modules())
    owners = (
        name if name in children else name.rpartition(".")[0]  # a plan names modules or parameters
        for name, style in found.items()
        if style == _SUMMED_STYLE
    )
    return {children[name]: tp for name in owners}


def _untied(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """Give every place of a tied parameter one of its own, as plans expect them; returns the places
    (module and name), each with the first that had the parameter.
    """
    first: dict[int, tuple[nn.Module, str]] = {}
    tied = []
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in first:
                tied.append((child, name, *first[id(parameter)]))
            else:
                first[id(parameter)] = (child, name)
    for child, name, owner, own_name in tied:
        whole = owner._parameters[own_name]
        assert whole is not None
        child._parameters[name] = nn.Parameter(whole.detach().clone(), whole.requires_grad)
    return tied


@contextmanager
def _sums_in_the_graph() -> Iterator[None]:
    """Have Transformers' layers sum over ``tp`` by functional collectives, which a graph shows;
    their own write in place, through a process group.
    """
    layers: Any = import_module("transformers.distributed.tensor_parallel")

    def group(process_group: Any) -> Group:
        return Group(
            size=process_group.size(), name=process_group.group_name, rank=process_group.rank()
        )

    class OfGradient:
        @staticmethod
        def apply(x: torch.Tensor, process_group: Any) -> torch.Tensor:
            return sum_gradient(x, group(process_group), x.dtype)

    class OfParts:
        @staticmethod
        def apply(x: torch.Tensor, process_group: Any) -> torch.Tensor:
            return sum_of_parts(x, group(process_group))

    before = layers._AllReduceBackward, layers._AllReduceForward
    layers._AllReduceBackward, layers._AllReduceForward = OfGradient, OfParts
    try:
        yield
    finally:
        layers._AllReduceBackward, layers._AllReduceForward = before


def _return_loss(module: Any, num_parts: int, *, split: bool) -> None:
    """Give the model a forward that returns this process rank's share of the loss: the model's own
    where it has one, else the mean of the squares of its output.
    """
    inner = type(module).forward
    names = inspect.signature(inner).parameters
    has_loss = "labels" in names
    main = module.main_input_name

    def forward(self: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen: dict[str, Any] = {main: inputs}
        if has_loss:
            chosen["labels"] = labels
        if getattr(self.config, "is_encoder_decoder", False):
            chosen["decoder_input_ids"] = inputs
        if "use_cache" in names:
            chosen["use_cache"] = False
        sums = _sums_in_the_graph() if split else nullcontext()
        with sums, compiling_context():  # no look at the values of masks and positions
            found = inner(self, **chosen)
        loss: torch.Tensor | None = getattr(found, "loss", None)
        if loss is None:
            loss = found[0].float().square().mean()
        return loss / num_parts

    replace_forward(module, forward)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give ``module`` another forward pass; names of its parameters stay."""
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})
