"""Captures the result of a user's function: ``package.module:function`` -> (module, inputs) ->
graphs.
"""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from apsched.capture.captured import Capture
from apsched.capture.fake_copy import (
    Inputs,
    also_as_compiled,
    called_in_order,
    inputs_of,
    refuse_branch,
    refuse_reentrant,
)
from apsched.capture.fake_world import world
from apsched.capture.fsdp2 import fake_step, has_units, resharded
from apsched.capture.micro_batches import MicroBatchChoice
from apsched.errors import ApschedError, InputError
from apsched.fx.collectives import is_collective
from apsched.fx.passes.checkpointing import Checkpointing, blocks_of
from apsched.fx.passes.run_passes import PassList
from apsched.fx.passes.saved_as_eager import save_as_eager
from apsched.models.mesh import MeshSpec, build_meshes
from apsched.models.own_modules import check_own_mesh, is_distributed, shard_module
from apsched.torch_compat.graphs import quiet_fake_tensors

_EXAMPLE = "expected package.module:function, such as my_job.model:build"


def capture_function(
    source: str,
    *,
    num_ranks: int | None = None,
    mesh: MeshSpec | None = None,
    reshard_after_forward: bool = True,
    activation_checkpoint: str = "none",
    micro_batches: MicroBatchChoice | None = None,
) -> Capture:
    """Import ``package.module``, call ``function()`` and capture the (module, inputs) that it
    returns.

    ``source`` is looked up as Python does, with the current directory first. The user's code runs
    here, with this process's rights: as process rank 0 of a fake process group of ``num_ranks``, or
    where that is None in the process group that it starts itself. With ``mesh`` a module that is
    distributed in no way of its own is sharded over its axes
    (:func:`apsched.models.own_modules.shard_module`); of one that is, ``mesh`` says the number of
    process ranks alone, which is a warning of the capture. Units of ``fully_shard`` gather and
    reduce as they say (:mod:`apsched.capture.fsdp2`). ``reshard_after_forward`` is that
    of :func:`apsched.capture.joint.capture_module`; ``activation_checkpoint`` (``none``, ``full``,
    ``every-N``, ``selective``) is about the blocks of the module
    (:func:`apsched.fx.passes.checkpointing.blocks_of`). The inputs are those of one micro-batch,
    of which the step has as many as ``micro_batches`` say.

    Raises
    ------
    InputError
        If there is no such module or function, if it raises (the message names the exception and
        the line of the user's file), if it returns something else, or if the module cannot be
        traced.
    """
    if mesh is not None:
        num_ranks = mesh.world_size
    with world(num_ranks) if num_ranks is not None else nullcontext():
        module, inputs = call_function(source)
        return capture_own(
            module,
            inputs,
            source=source,
            num_ranks=num_ranks,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            activation_checkpoint=activation_checkpoint,
            micro_batches=micro_batches,
        )


def capture_own(
    module: torch.nn.Module,
    inputs: Any,
    *,
    source: str,
    num_ranks: int | None,
    mesh: MeshSpec | None,
    reshard_after_forward: bool = True,
    activation_checkpoint: str = "none",
    micro_batches: MicroBatchChoice | None = None,
) -> Capture:
    """Return the graphs of a module of the user's own, which ``mesh`` shards in place; a process
    group of ``num_ranks`` runs. See :func:`capture_function`; ``inputs`` are in order, a mapping of
    those by name, or one tensor; ``source`` names the module in messages.
    """
    inputs = tuple(inputs) if isinstance(inputs, list) else inputs_of(inputs)
    in_order = nullcontext(()) if has_units(module) else called_in_order(module, inputs)
    try:
        with quiet_fake_tensors(), in_order as given:
            warnings = () if mesh is None else _sharded_over(module, given, source, mesh)
            passes = _checkpointed(module, activation_checkpoint, source)
            if has_units(module):
                passes = (*passes, save_as_eager())

            def trace() -> Capture:
                step = fake_step(module, inputs) if has_units(module) else (module, given, ())
                return (micro_batches or MicroBatchChoice()).capture(
                    *step[:2],
                    source=source,
                    reshard_after_forward=reshard_after_forward,
                    kept_parameters=step[2],
                    passes=passes,
                )

            capture = resharded(also_as_compiled(trace), module)
    except ApschedError:
        raise
    except Exception as error:
        refuse_branch(error, f"{source}: ")
        refuse_reentrant(error)
        raise InputError(
            f"{source}: expected a module that AOTAutograd can trace with these inputs, found"
            f" {_error_text(error)}"
        ) from error
    if num_ranks is not None and num_ranks > 1 and not _has_collectives(capture):
        warnings = (
            *warnings,
            f"{source}: no collective on {num_ranks} process ranks: there is nothing to schedule;"
            f" {_why_unsharded(module)}",
        )
    return replace(capture, warnings=warnings)


def _checkpointed(module: torch.nn.Module, stated: str, source: str) -> PassList:
    """Return the passes that checkpoint the blocks of ``module`` as ``stated``."""
    checkpointing, blocks = Checkpointing.parse(stated), blocks_of(module)
    if checkpointing.every and not blocks:
        raise InputError(
            f"{source}: activation checkpointing needs layers in a ModuleList or ModuleDict,"
            f" and {type(module).__name__} has none; leave it out, or call"
            " torch.utils.checkpoint with use_reentrant=False in the module, which is captured"
        )
    return checkpointing.passes(blocks)


def _sharded_over(
    module: torch.nn.Module, inputs: tuple[Any, ...], source: str, mesh: MeshSpec
) -> tuple[str, ...]:
    """Shard ``module`` over ``mesh``, or return the reason for leaving it as it is."""
    if found := is_distributed(module, inputs):
        return (
            f"{source}: the module has {found} of its own, which say how it is sharded: of --mesh"
            f" {mesh} only the number of process ranks ({mesh.world_size}) counts",
        )
    check_own_mesh(source, mesh)
    shard_module(module, build_meshes(mesh, "cpu"))
    return ()


def _why_unsharded(module: torch.nn.Module) -> str:
    """Return the likely reason why no parameter of ``module`` is gathered or reduced."""
    if any(parameter.is_complex() for parameter in module.parameters()):
        return "parameters of complex numbers are not sharded"
    return "does the module have parameters that need a gradient?"


def _has_collectives(capture: Capture) -> bool:
    return any(is_collective(n) for graph in capture.graphs for n in graph.module.graph.nodes)


def call_function(source: str) -> tuple[torch.nn.Module, Inputs]:
    """Return the (module, inputs) that the function named by ``source`` returns; inputs by name
    are a mapping, and a single input may stand alone.
    """
    function = _find_function(source)
    try:
        result = function()
    except ApschedError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{source}: expected (module, inputs), but the function raised {_error_text(error)};"
            " call it by hand to see more"
        ) from None
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(
            f"{source}: expected a tuple (module, inputs), found {_described(result)}; return"
            " model, (tokens,)"
        )
    module, inputs = result
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"{source}: expected a torch.nn.Module first in (module, inputs), found"
            f" {_described(module)}"
        )
    if not isinstance(inputs, torch.Tensor | tuple | list | Mapping):
        raise InputError(
            f"{source}: expected a tuple of inputs, or a mapping of inputs by name, second in"
            f" (module, inputs), found {_described(inputs)}"
        )
    return module, tuple(inputs) if isinstance(inputs, list) else inputs_of(inputs)


def _find_function(source: str) -> Callable[[], object]:
    """Return the callable that ``source`` names."""
    module_name, colon, path = source.partition(":")
    if (
        not colon
        or not module_name
        or not path
        or not all(part.isidentifier() for part in (*module_name.split("."), *path.split(".")))
    ):
        raise InputError(
            f"{source}: {_EXAMPLE}, found"
            f" {'no colon' if not colon else 'a name that Python cannot import'}"
        )
    found: Any = import_module(module_name, imported_for=source)
    for part in path.split("."):
        owner = found
        found = getattr(owner, part, None)
        if found is None:
            public = (
                [name for name in vars(owner) if not name.startswith("_")]
                if hasattr(owner, "__dict__")
                else []
            )
            near = difflib.get_close_matches(part, public, n=1)
            known = (
                f"did you mean {near[0]}?"
                if near
                else f"it has {', '.join(sorted(_callables(owner, public))[:8]) or 'no functions'}"
            )
            raise InputError(
                f"{source}: expected {part} in {module_name}, found no such name; {known}"
            )
    if not callable(found):
        raise InputError(
            f"{source}: expected a function without arguments, found {_described(found)}"
        )
    return found  # type: ignore[no-any-return]


def _callables(owner: object, names: list[str]) -> list[str]:
    return [name for name in names if callable(getattr(owner, name, None))]


def import_module(module_name: str, *, imported_for: str) -> object:
    """Import a module of the user's, with the current directory on the path as ``python -m`` has
    it. Its code runs here, with this process's rights.

    Raises InputError, which begins with ``imported_for``, where it cannot be imported.
    """
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (
            module_name == error.name or module_name.startswith(f"{error.name}.")
        ):
            raise InputError(
                f"{imported_for}: expected to import {module_name}, found no module {error.name};"
                + (
                    f" state the module, {module_name.removesuffix('.py')}, not its file"
                    if module_name.endswith(".py")
                    else " run in its directory, or install its package beside apsched"
                )
            ) from None
        raise InputError(
            f"{imported_for}: importing {module_name} raised {_error_text(error)}; install its"
            " requirements"
        ) from None
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{imported_for}: importing {module_name} raised {_error_text(error)}"
        ) from None
    finally:
        if added:
            sys.path.remove(folder)


def _error_text(error: BaseException) -> str:
    """Return the exception, its first line, and the innermost line of the user's own code that led
    to it.
    """
    message = (str(error).strip().splitlines() or [""])[0][:300]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} ({error.filename}:{error.lineno})"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def _is_users(filename: str) -> bool:
    """Return whether ``filename`` is neither apsched, torch, Python nor an installed package."""
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    libraries = (
        Path(__file__).resolve().parents[1],
        Path(torch.__file__).resolve().parent,
        Path(os.__file__).resolve().parent,
    )
    return not any(path.is_relative_to(folder) for folder in libraries)


def _described(value: object) -> str:
    return (
        f"{type(value).__name__} of {len(value)}"
        if isinstance(value, tuple | list)
        else type(value).__name__
    )
