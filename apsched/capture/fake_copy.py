"""A copy of a user's module that takes no memory: fake tensors in place of parameters, buffers and
other tensors, so that a job can be captured in the job itself.
"""

import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from apsched.errors import ApschedError, InputError
from apsched.torch_compat.compilers import UncompiledModule, functions_uncompiled, uncompiled_class
from apsched.torch_compat.graphs import compiling_context, quiet_fake_tensors
from apsched.torch_compat.random_draws import RandomBranchError

T = TypeVar("T")
_BRANCHES = (GuardOnDataDependentSymNode, DataDependentOutputException, RandomBranchError)
"""Errors of branches on the values of tensors."""
Inputs = tuple[Any, ...] | Mapping[str, Any]
"""Inputs of forward, in order or by name."""
Make = Callable[[nn.Module, str, nn.Parameter], torch.Tensor]
"""Module, name and parameter -> the fake tensor that stands for it."""

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OF_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def fake_copy(
    module: nn.Module,
    mode: FakeTensorMode,
    *,
    make: Make | None = None,
    class_of: Callable[[nn.Module], type[nn.Module]] = type,
    without_hooks_of: str = "",
    copies: dict[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """Return ``module`` and all modules in it with fake tensors of ``mode``; names and sharing
    stay.

    ``make`` makes parameters in another way, ``class_of`` gives the class that a module had
    before a later change, ``without_hooks_of`` names the package whose hooks are left out, and
    ``copies`` fills with the copy of each module.
    """
    copies = {} if copies is None else copies
    parameters: dict[int, nn.Parameter] = {}

    def fake(value: Any) -> Any:
        return mode.from_tensor(value, static_shapes=True) if _is_real(value) else value

    def parameter(owner: nn.Module, name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        if value is not None and id(value) not in parameters:
            made = fake(value.detach()) if make is None else make(owner, name, value)
            parameters[id(value)] = nn.Parameter(made, requires_grad=value.requires_grad)
        return None if value is None else parameters[id(value)]

    def kept(hook: Any) -> bool:
        return not (without_hooks_of and str(hook.__module__).startswith(without_hooks_of))

    def copy(one: nn.Module) -> nn.Module:
        if one in copies:
            return copies[one]
        of = uncompiled_class(class_of(one))
        new: nn.Module = of.__new__(of)
        copies[one] = new
        state = {key: fake(value) for key, value in vars(one).items()}
        if of is UncompiledModule:
            del state["forward"]  # the compiled code of the original
        state["_parameters"] = {k: parameter(one, k, v) for k, v in one._parameters.items()}
        state["_buffers"] = {k: fake(v) for k, v in one._buffers.items()}
        state["_modules"] = {k: None if v is None else copy(v) for k, v in one._modules.items()}
        left = set()
        for hooks in (name for name in _HOOKS if name in state):
            state[hooks] = type(state[hooks])(
                (k, hook) for k, hook in state[hooks].items() if kept(hook)
            )
            left |= set(state[hooks])
        for hooks in (name for name in _OF_HOOKS if name in state):
            state[hooks] = type(state[hooks])(
                (k, value) for k, value in state[hooks].items() if k in left
            )
        state["_compiled_call_impl"] = None
        vars(new).update(state)
        return new

    found = copy(module)
    rebind = _Rebinding(copies)
    for new in copies.values():
        vars(new).update({key: rebind(value) for key, value in vars(new).items()})
    return found


class _Rebinding:
    """Replaces modules by their ``copies`` in the values of attributes: in lists and dicts, in
    hooks, and in functions that replace ``forward`` and refer to the module that they are of.
    """

    def __init__(self, copies: Mapping[nn.Module, nn.Module]) -> None:
        self._copies = copies
        self._known: dict[int, tuple[Any, Any]] = {}
        """Identity of a value -> the value, so that no other takes it, and the value with the
        copies; itself while that is made.
        """

    def __call__(self, value: Any) -> Any:
        """Return ``value`` with the copies; the same object where it has none of the modules."""
        if isinstance(value, nn.Module):
            return self._copies.get(value, value)
        if type(value) not in _REBOUND:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, value
            self._known[id(value)] = value, _REBOUND[type(value)](self, value)
        return self._known[id(value)][1]

    def sequence(self, value: Any) -> Any:
        """Return a list or a tuple with the copies."""
        found = [self(one) for one in value]
        return type(value)(found) if _differ(found, value) else value

    def mapping(self, value: Any) -> Any:
        """Return a dict with the copies."""
        found = [self(one) for one in value.values()]
        changed = _differ(found, value.values())
        return type(value)(zip(value, found, strict=True)) if changed else value

    def method(self, value: MethodType) -> MethodType:
        """Return a bound method of the copy."""
        parts = value.__func__, value.__self__
        found = [self(one) for one in parts]
        return MethodType(*found) if _differ(found, parts) else value

    def partial(self, value: "partial[Any]") -> "partial[Any]":
        """Return a partial with the copies."""
        parts = value.func, value.args, value.keywords
        function, args, keywords = found = [self(one) for one in parts]
        return partial(function, *args, **keywords) if _differ(found, parts) else value

    def function(self, value: FunctionType) -> FunctionType:
        """Return a function whose closure has the copies."""
        cells = [self._cell(cell) for cell in value.__closure__ or ()]
        if not _differ(cells, value.__closure__ or ()):
            return value
        of = value.__code__, value.__globals__, value.__name__, value.__defaults__
        made = FunctionType(*of, tuple(cells))
        made.__kwdefaults__ = value.__kwdefaults__
        vars(made).update(vars(value))
        return made

    def _cell(self, cell: CellType) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            return cell
        found = self(value)
        return cell if found is value else CellType(found)


_REBOUND: Mapping[type, Callable[[_Rebinding, Any], Any]] = {
    list: _Rebinding.sequence,
    tuple: _Rebinding.sequence,
    dict: _Rebinding.mapping,
    OrderedDict: _Rebinding.mapping,
    MethodType: _Rebinding.method,
    partial: _Rebinding.partial,
    FunctionType: _Rebinding.function,
}


def _differ(found: Iterable[Any], values: Iterable[Any]) -> bool:
    return any(one is not other for one, other in zip(found, values, strict=True))


def fake_inputs(inputs: tuple[Any, ...], mode: FakeTensorMode) -> tuple[Any, ...]:
    """Return ``inputs`` with fake tensors of ``mode``, in tuples, lists and dicts, too."""
    return tuple(
        torch.utils._pytree.tree_map(
            lambda value: mode.from_tensor(value, static_shapes=True) if _is_real(value) else value,
            inputs,
        )
    )


def inputs_of(inputs: Any) -> Inputs:
    """Return the inputs of forward as a user states them: a tuple, a mapping, or one tensor."""
    return inputs if isinstance(inputs, tuple | Mapping) else (inputs,)


def fake_call(copy: nn.Module, inputs: Inputs, mode: FakeTensorMode) -> tuple[Any, ...]:
    """Return the inputs with which ``copy`` is called from here on: fake tensors of ``mode``, no
    numbers, which stay as they are. It returns tensors alone, no cache of keys and values.
    """
    copy.forward, given = _call_in_order(copy.forward, inputs)
    return fake_inputs(given, mode)


@contextmanager
def called_in_order(module: nn.Module, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    """Yield the inputs with which ``module`` is called until the end: those by name in order. It
    returns tensors alone, as :func:`fake_call`.
    """
    before = vars(module).get("forward")
    module.forward, given = _call_in_order(module.forward, inputs)
    try:
        yield given
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _call_in_order(
    forward: Callable[..., Any], inputs: Inputs
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return ``forward`` as a function of its inputs that have tensors, in order, which returns
    tensors alone; and these inputs. A tracer gives other values no node: they stay as they are,
    also inside of an input that has tensors, of which the tensors alone are an input then.
    """
    places, named = ((), dict(inputs)) if isinstance(inputs, Mapping) else (inputs, {})
    stated = [*places, *named.values()]
    with_tensors = [
        k
        for k, value in enumerate(stated)
        if any(map(_is_real, torch.utils._pytree.tree_leaves(value)))
    ]

    def call(*given: Any) -> Any:
        values = list(stated)
        for k, value in zip(with_tensors, given, strict=True):
            values[k] = _with_tensors(stated[k], value)
        rest = len(places)
        return _as_tensors(forward(*values[:rest], **dict(zip(named, values[rest:], strict=True))))

    return call, tuple(_tensors_of(stated[k]) for k in with_tensors)


def _tensors_of(value: Any) -> Any:
    """Return ``value`` if all its leaves are tensors, else a list of those that are."""
    leaves = torch.utils._pytree.tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return value if len(tensors) == len(leaves) else tensors


def _with_tensors(value: Any, given: Any) -> Any:
    """Return ``value`` with the tensors of ``given``, which :func:`_tensors_of` made of a value
    like it.
    """
    leaves, form = torch.utils._pytree.tree_flatten(value)
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return given
    tensors = iter(given)
    merged = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return torch.utils._pytree.tree_unflatten(merged, form)


def _as_tensors(found: Any) -> Any:
    """Return the result of a model as it is, where a tracer takes it, else the tensors in it."""
    leaves = torch.utils._pytree.tree_leaves(found)
    if all(leaf is None or isinstance(leaf, torch.Tensor | int | float) for leaf in leaves):
        return found
    tensors = tuple(leaf for leaf in _leaves(found) if isinstance(leaf, torch.Tensor))
    if not tensors:
        raise InputError(
            "expected tensors in the result of forward, also in tuples, lists, dicts and"
            f" dataclasses, found {type(found).__name__} without any; return one of these, or"
            " register the class with torch.utils._pytree.register_pytree_node"
        )
    return tensors


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a tree, also inside of dataclasses, which torch takes as leaves."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf


def also_as_compiled(trace: Callable[[], T]) -> T:
    """Return the result of ``trace``; where that fails, as on a branch on the values of tensors, as
    a compiler traces the model (models test ``torch.compiler.is_compiling``).
    """
    try:
        return trace()
    except ApschedError:
        raise
    except Exception as error:
        try:
            with compiling_context():
                return trace()
        except Exception as second:
            if isinstance(second, ApschedError) or isinstance(error, _BRANCHES):
                raise
            raise error from None


def traced(trace: Callable[[], T]) -> T:
    """Return the result of ``trace``, which traces a user's model (:func:`also_as_compiled`).

    Raises
    ------
    InputError
        where the model cannot be traced.
    """
    try:
        with quiet_fake_tensors(), functions_uncompiled():
            return also_as_compiled(trace)
    except ApschedError:
        raise
    except Exception as error:
        refuse_branch(error)
        refuse_reentrant(error)
        text = (str(error).strip().splitlines() or [""])[0][:300]
        raise InputError(
            "expected a model that runs, and that AOTAutograd can trace, with these inputs, found"
            f" {type(error).__name__}: {text}{_place(error)}; hand in inputs as the model gets"
            " them (a mapping for inputs by name)"
        ) from error


def refuse_branch(error: Exception, label: str = "") -> None:
    """Raise ``InputError``, which begins with ``label``, where ``error`` is that of a branch on the
    value of a tensor.
    """
    if isinstance(error, RandomBranchError):
        raise InputError(
            f"{label}expected the same operators in each run of the step, found a branch on a"
            f" random draw, {error}{_place(error)}; set layerdrop to 0 in the configuration"
            " (layerdrop, encoder_layerdrop, decoder_layerdrop), or call model.eval() for the"
            " capture"
        ) from error
    if isinstance(error, _BRANCHES):
        raise InputError(
            f"{label}expected a step with the same operators for all values of its inputs, found a"
            f" branch on the value of a tensor{_place(error)}; leave out the input that it tests,"
            " or have the model skip the branch where torch.compiler.is_compiling() is true"
        ) from error


def refuse_reentrant(error: Exception) -> None:
    """Raise ``InputError`` where ``error`` is that of reentrant checkpointing, whose backward runs
    an autograd of its own, which no tracer follows (torch/utils/checkpoint.py, CheckpointFunction).
    """
    if "use_reentrant=True" in str(error):
        raise InputError(
            "expected torch.utils.checkpoint with use_reentrant=False, found use_reentrant=True,"
            " which cannot be captured; pass use_reentrant=False where the model calls it (of"
            " checkpoint_wrapper: checkpoint_impl=CheckpointImpl.NO_REENTRANT)"
        ) from error


def refuse_failed_model(error: Exception, label: str) -> None:
    """Raise ``InputError``, which begins with ``label``, where a model of Transformers raised
    ``error`` while it ran.
    """
    library = getattr(sys.modules.get("transformers"), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ApschedError) or library is None:
        return
    if not any(Path(frame.filename).is_relative_to(Path(library).parent) for frame in frames):
        return
    message = " ".join(str(error).split())[:300]
    raise InputError(
        f"{label}expected a model that runs with its parameters in bfloat16 and on these inputs,"
        f" found {type(error).__name__}: {message}{_place(error)}; correct the configuration,"
        " --seq or --batch, or capture it as package.module:function, which may return it in"
        " another dtype"
    ) from error


def _place(error: BaseException) -> str:
    """Return the line of the user's model that raised ``error``, for a message."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
