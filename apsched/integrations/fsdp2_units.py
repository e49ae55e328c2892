"""The units that ``fully_shard`` made of a model, and the launches of a schedule for each."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import groupby

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from apsched.capture.fsdp2 import gathered_by_fsdp2
from apsched.errors import InputError
from apsched.fx.collectives import BYTES
from apsched.integrations.prefetch_order import Hook, Launch
from apsched.kinds import CollectiveKind
from apsched.problem.problem import Collective, Problem
from apsched.schedule.schedule import Schedule, StepKind
from apsched.torch_compat.compilers import CHECKPOINTED, plain_parameter_name
from apsched.torch_compat.fsdp import fsdp_unit_of

ROOT = "(root)"
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The result of one call of ``fully_shard``: modules that are gathered, and reduced, as one;
    parameters on several meshes at one place, once on each.
    """

    name: str
    modules: tuple[str, ...]
    handle: FSDPModule
    """The first of the modules."""
    parameters: tuple[str, ...]
    meshes: tuple[tuple[str, ...], ...] = ()
    """Its parameters on each mesh."""
    trained: bool = True
    """Whether one of them has a gradient."""
    kept: bool = False
    """Whether ``fully_shard`` keeps it gathered from forward to backward."""
    only_embeddings: bool = False
    """Whether all belong to ``nn.Embedding``, whose backward does not read them, and none is under
    a checkpoint wrapper, which runs forward again in backward.
    """

    def holds(self, other: "Unit") -> bool:
        """Return whether ``other`` lies inside."""
        return other is not self and all(
            any(not outer or inner.startswith(f"{outer}.") for outer in self.modules)
            for inner in other.modules
        )


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of ``model`` in order of registration; ``InputError`` where ``fully_shard``
    has not been called on it.
    """
    modules: dict[int, list[tuple[str, FSDPModule]]] = {}
    owner: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            unit = fsdp_unit_of(module)
            modules.setdefault(unit, []).append((plain_parameter_name(name), module))
            owner[name] = unit
    if owner and "" not in owner:
        raise InputError(
            "expected a model on which fully_shard was called, found it called on"
            f" {len(owner)} modules in the model alone ({some(list(owner))}); call it on the"
            " model, too, as the last, or hand in the model on which it was called so"
        )
    if not owner:
        raise InputError(
            "expected a model on which fully_shard was called, found none; call it on the blocks,"
            " then on the model"
        )
    parameters: dict[int, list[str]] = {unit: [] for unit in modules}
    trained: set[int] = set()
    others: set[int] = set()
    kept = {of.unit for of in gathered_by_fsdp2(model).values() if of.kept}
    meshes: dict[int, dict[str, list[str]]] = {unit: {} for unit in modules}
    for name, parameter, group in _parameters_of(model):
        unit = owner[next(path for path in _paths(name) if path in owner)]
        parameters[unit].append(plain_parameter_name(name))
        meshes[unit].setdefault(group, []).append(plain_parameter_name(name))
        trained |= {unit} if parameter.requires_grad else set()
        module = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(module, nn.Embedding) or CHECKPOINTED in name:
            others.add(unit)
    return tuple(
        Unit(
            name="+".join(name or ROOT for name, _ in members),
            modules=tuple(name for name, _ in members),
            handle=members[0][1],
            parameters=tuple(parameters[unit]),
            meshes=tuple(map(tuple, meshes[unit].values())),
            trained=unit in trained,
            kept=unit in kept,
            only_embeddings=unit not in others and bool(parameters[unit]),
        )
        for unit, members in modules.items()
    )


def _parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Yield each parameter once, as FSDP2 gathers it, with the name of the process group that has
    its shards, empty for an ignored one: under two names where modules were tied after
    ``fully_shard``, or by names that tensor parallelism had parted before it.
    """
    gathered = gathered_by_fsdp2(model)
    seen = set[int]()
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            full = f"{path}.{name}" if path else name
            of = gathered.get(plain_parameter_name(full))
            key = id(parameter if of is None else of)
            if parameter is not None and key not in seen:
                seen.add(key)
                yield full, parameter, "" if of is None else of.shard_group.group_name


def running_units(units: Sequence[Unit], forward: Problem) -> tuple[Unit, ...]:
    """Return the units whose hooks run in the graph ``forward``, of the same model; one with others
    in it that run, but no parameter that is used, counts as one without parameters.
    """
    gathered = {c.module for c in movable(forward, CollectiveKind.ALL_GATHER)}
    used = {unit.name for unit in units if gathered.intersection(unit.parameters)}
    return tuple(
        unit if unit.name in used else replace(unit, parameters=())
        for unit in units
        if unit.name in used
        or not unit.parameters
        or any(unit.holds(other) and other.name in used for other in units)
    )


def unread_parameters(units: Sequence[Unit], forward: Problem) -> tuple[str, ...]:
    """Return the parameters of ``units``, which run in ``forward``, that it does not read, and so
    does not gather; FSDP2 gathers them with their unit.
    """
    gathered = {c.module for c in movable(forward, CollectiveKind.ALL_GATHER)}
    return tuple(name for unit in units for name in unit.parameters if name not in gathered)


def launches_of(
    problem: Problem, schedule: Schedule, kind: CollectiveKind, units: Mapping[str, Unit]
) -> tuple[Launch, ...]:
    """Return the launches of a kind, each of which must serve one unit; ``units`` are by parameter.
    Those of a unit with parameters on several meshes are one launch where they are in a row.

    Raises
    ------
    InputError
        for a bucket other than the parameters of one unit on one mesh; the message names the
        nearest bucket that is one.
    """
    serving = tuple(movable(problem, kind))
    every = frozenset(serving)
    launches = (
        Launch(unit=_unit_of(problem, members, serving, units).name, gap=gap)
        for members, gap in _launched(problem, schedule)
        if every.intersection(members)
    )
    return tuple(launch for launch, _ in groupby(launches))


def refuse_apart(problem: Problem, launches: Sequence[Launch]) -> None:
    """Raise ``InputError`` where gathers of one unit, on several meshes, are not in a row."""
    twice = [name for name, n in Counter(one.unit for one in launches).items() if n > 1]
    if twice:
        raise InputError(
            f"{problem.name}: FSDP2 gathers {twice[0]} on all of its meshes at one place, and the"
            " schedule at several; call tune_fsdp2, which solves in that order"
        )


def movable(problem: Problem, kind: CollectiveKind) -> Iterator[Collective]:
    """Yield the collectives of a kind that serve parameters: gathers of shards, and not of
    activations, such as logits under tensor parallelism.
    """
    compute_order = frozenset(problem.compute_order)
    gathers = kind == CollectiveKind.ALL_GATHER
    for c in problem.collectives:
        of_kind = not c.on_path and problem.keys[c.key].kind == kind
        if of_kind and not (gathers and _is_computed(problem, c.start, compute_order)):
            yield c


def _is_computed(problem: Problem, node: int, compute_order: frozenset[int]) -> bool:
    """Return whether ``node`` depends on one of ``compute_order``, which a cast of a shard before
    its gather is not.
    """
    seen, stack = {node}, [node]
    while stack:
        for before in problem.predecessors[stack.pop()]:
            if before in compute_order:
                return True
            if before not in seen:
                seen.add(before)
                stack.append(before)
    return False


def forward_hooks(units: Sequence[Unit], needs: Mapping[str, int]) -> list[Hook]:
    """Return the hooks in the order in which they run: by first need, the units around a unit
    before it.
    """
    first = {unit.name: _first_need(unit, units, needs) for unit in units}
    missing = [unit.name for unit in units if unit.parameters and unit.name not in needs]
    if missing:
        raise InputError(
            f"forward: expected gathers of the parameters of {missing[0]}, found none; the schedule"
            " is of another model or mesh, or of a forward that does not run this unit (tune_fsdp2"
            " leaves such a unit as it is)"
        )
    order = sorted(
        units, key=lambda unit: (first[unit.name], -sum(unit.holds(other) for other in units))
    )
    return [Hook(unit=unit.name, need=first[unit.name]) for unit in order]


def _first_need(unit: Unit, units: Sequence[Unit], needs: Mapping[str, int]) -> int:
    """Return the first need of a unit or of one inside of it: its hook runs before theirs; that of
    a root without parameters before all.
    """
    if unit.name == ROOT and not unit.parameters:
        return -1
    return min(
        (needs[u.name] for u in units if (u is unit or unit.holds(u)) and u.name in needs),
        default=-1,
    )


def backward_order(
    units: Sequence[Unit], forward: Sequence[str], ends: Mapping[str, int]
) -> list[str]:
    """Return the units in the order of their hooks in backward: by the last need of forward, in
    reverse, the units around a unit before it.
    """
    named = {unit.name: unit for unit in units}

    def place(name: str) -> tuple[int, int, int]:
        inside = [u for u in units if u is named[name] or named[name].holds(u)]
        end = max((ends[u.name] for u in inside if u.name in ends), default=-1)
        return end, len(inside), forward.index(name)

    return sorted(forward, key=place, reverse=True)


def needs_of(
    problem: Problem,
    by_parameter: Mapping[str, Unit],
    run: Problem | None = None,
    *,
    last: bool = False,
) -> dict[str, int]:
    """Return for each unit that is gathered how many compute nodes lie before the first that needs
    it, or the last; in ``run``, the same graph without some of the gathers, if that is stated.
    """
    place = {node: k for k, node in enumerate(problem.compute_order)}
    if run is not None:
        by_name = {run.node_names[node]: k for k, node in enumerate(run.compute_order)}
        known = [by_name.get(problem.node_names[node]) for node in place]
        behind = len(by_name)
        for node, k in reversed(list(zip(place, known, strict=True))):
            behind = place[node] = behind if k is None else k
    found: dict[str, int] = {}
    gathers = set(movable(problem, CollectiveKind.ALL_GATHER))
    for c, needed in zip(problem.collectives, problem.needs, strict=True):
        if c in gathers and needed and c.module in by_parameter:
            name = by_parameter[c.module].name
            at = place[needed[-1 if last else 0]]
            found[name] = (max if last else min)(found.get(name, at), at)
    return found


def _launched(problem: Problem, schedule: Schedule) -> Iterator[tuple[tuple[Collective, ...], int]]:
    """Yield the collectives of each launch of the schedule, without collectives on the path, and
    the number of compute nodes before the launch.
    """
    compute_order, starts = (
        frozenset(problem.compute_order),
        {c.start: c for c in problem.collectives},
    )
    gap = 0
    for step in schedule.steps:
        if step.kind is StepKind.NODE and step.index in compute_order:
            gap += 1
        elif step.kind is StepKind.START:
            yield tuple(problem.collectives[c] for c in schedule.buckets[step.index].members), gap
        elif step.kind is StepKind.NODE and step.index in starts and not starts[step.index].on_path:
            yield (starts[step.index],), gap


def _unit_of(
    problem: Problem,
    members: tuple[Collective, ...],
    serving: Sequence[Collective],
    units: Mapping[str, Unit],
) -> Unit:
    """Return the unit that ``members`` are, of the collectives of their kind ``serving``
    parameters.
    """
    kind = problem.keys[members[0].key].kind
    found: dict[str, Unit] = {}
    for c in members:
        if c.module not in units:
            raise InputError(f"{problem.name}: {_unknown(problem, c, units)}")
        unit = units[c.module]
        found[unit.name] = unit
    names = [c.module for c in members]
    if len(found) > 1:
        raise _inexpressible(
            problem, kind, names, f"its parameters lie in {len(found)} units ({some(list(found))})"
        )
    (unit,) = found.values()
    on_mesh = next((part for part in unit.meshes if names[0] in part), unit.parameters)
    together = [c for c in serving if c.module in on_mesh]
    left = [c.module for c in together if c.module not in names]
    if left:
        dtypes = sorted({problem.keys[c.key].dtype for c in together})
        if kind == CollectiveKind.ALL_GATHER and len(dtypes) > 1:
            raise InputError(
                f"{problem.name}: FSDP2 gathers the unit {unit.name} as bytes, since its parameters"
                f" have several dtypes ({', '.join(dtypes)}), and buckets of this graph have one;"
                " call tune_fsdp2, which takes such units"
            )
        raise _inexpressible(problem, kind, names, f"the unit {unit.name} has {some(left)}, too")
    return unit


def _inexpressible(problem: Problem, kind: str, names: list[str], why: str) -> InputError:
    verb = "gather" if kind == CollectiveKind.ALL_GATHER else "reduce"
    return InputError(
        f"{problem.name}: FSDP2 cannot {verb} {some(names)} as one: {why}; nearest is one bucket"
        " for each unit: solve with plan=fsdp2_plan(model, *graphs), where graphs ="
        " apsched.capture(model, inputs), on the command line with --buckets FILE; or call"
        " fully_shard on other modules"
    )


def _unknown(problem: Problem, c: Collective, units: Mapping[str, Unit]) -> str:
    if not c.module:
        return (
            f"expected the name of the parameter that {problem.node_names[c.start]} serves, found"
            " none; capture the module itself"
        )
    near = get_close_matches(c.module, list(units), n=1)
    hint = f"the nearest name is {near[0]}" if near else "the schedule is of another model"
    return f"expected {c.module} among the parameters of the model, found none of that name; {hint}"


def some(names: Sequence[str]) -> str:
    """Return the first of ``names``, and the number of the others."""
    return ", ".join(names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )


def _paths(name: str) -> list[str]:
    """Return the modules around ``name``, innermost first, down to the root."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(len(parts) - 1, -1, -1)]


def check_names(units: Sequence[Unit], problem: Problem) -> None:
    """Raise ``InputError`` where ``problem`` gathers or reduces a parameter that no unit has: a
    plan by units would leave it out.
    """
    known = {name: unit for unit in units for name in unit.parameters}
    for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        for one in movable(problem, kind):
            if one.module and one.module not in known:
                raise InputError(f"{problem.name}: {_unknown(problem, one, known)}")


def check_same_model(model: nn.Module, forward: Problem) -> None:
    """Raise ``InputError`` where ``forward`` gathers a parameter of ``model`` on another number of
    process ranks, or one of another size: its schedule is of another model or mesh.
    """
    parameters = gathered_by_fsdp2(model)
    for one in movable(forward, CollectiveKind.ALL_GATHER):
        of, key = parameters.get(one.module), forward.keys[one.key]
        if of is None:
            continue
        ranks = of.shard_group.size()
        if key.group_size != ranks:
            raise InputError(
                f"{one.module}: the schedule gathers it on {key.group_size} process ranks, and this"
                f" job on {ranks}; solve the step for the mesh of this job"
            )
        item = of.param_dtype if key.dtype == BYTES else getattr(torch, key.dtype, None)
        if not isinstance(item, torch.dtype):
            continue
        rows, whole = max(of.shape[of.dim], 1), of.shape.numel()  # of this rank's part under TP
        padded = whole // rows * (-(-rows // ranks) * ranks)
        elements = one.size_bytes // item.itemsize
        if not whole <= elements <= padded:
            raise InputError(
                f"{one.module}: the schedule gathers {elements} elements of it, and this model has"
                f" {whole}; solve the step of this model"
            )
