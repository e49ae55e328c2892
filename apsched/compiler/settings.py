"""Settings of scheduling inside of a compiler; one frozen value that every surface takes.

Options of the command line are parsed and checked in the same way, by the table of options
(:mod:`apsched.options_table`).
"""

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, cast

from apsched.artifacts.schedule_file import ScheduleFile
from apsched.compiler.ranks.answer import Sources
from apsched.compiler.ranks.cache import (
    DEFAULT_LIMIT_BYTES,
    DIRECTORY_VARIABLE,
    Cache,
    default_directory,
)
from apsched.compiler.ranks.job import DEFAULT_DEADLINE_S, running_job
from apsched.compiler.ranks.replayed import schedule_files
from apsched.config import (
    DEFAULT_COMPUTE_MOVE,
    DEFAULT_OPTIMIZER,
    DEFAULT_RESERVE,
    Caps,
    ScenarioOptions,
    SolveOptions,
    Unit,
    checked_switches,
    is_number,
    scenario_options,
)
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import DEFAULT_CLUSTER, load_cluster
from apsched.costs.model import CostModel
from apsched.costs.optimizer_state import JobOptimizer, StatedOptimizer, job_optimizer
from apsched.errors import InputError
from apsched.options_table import BY_NAME, CAPS, SETTINGS
from apsched.pipeline.solve_graph import SolveRequest
from apsched.problem.contention import Contention
from apsched.problem.contention_spec import parse_contention
from apsched.problem.plan.plan_file import as_plan
from apsched.problem.plan.rules import Plan
from apsched.quantities import MemoryCap, checked_group_ranks, parse_bytes
from apsched.torch_compat.compilers import plain_parameter_name

ON_ERROR = ("raise", "fallback")


_RECORDS: Mapping[str, type] = {"caps": Caps, "options": SolveOptions}
"""Record of several settings -> its type."""
_MICRO_BATCHES = (
    "several micro-batches are a setting of apsched.tune_fsdp2(accumulate=N) (eager FSDP2), of"
    " TorchTitan's register(micro_batches=N), and of apsched.micro_batches(module, N), whose result"
    " is compiled as one graph"
)
_ELSEWHERE = {
    "accumulate": _MICRO_BATCHES,
    "micro_batches": _MICRO_BATCHES,
    "keep": (
        "kept parameters change forward and backward together: pass keep to apsched.backend,"
        " apsched.solve_step, apsched.tune_fsdp2 or TorchTitan's register"
    ),
}
"""Setting of other functions -> where to state it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of scheduling in this job. Checked when made, so that a mistake shows before
    anything is traced.

    Sizes are bytes or texts as on the command line (``"60GiB"``); ``None`` is no limit unless
    stated otherwise.
    """

    cluster: str | Path | None = None
    """Device and network that prices stand for: a name of ``apsched clusters`` or a TOML file;
    ``None``: ``h100``.
    """
    cost_model: CostModel | None = None
    """Prices of the user's own, in place of a cluster."""
    memory_cap: int | str | None = None
    """Live bytes at any node: also ``"none"``, ``"floor"``, ``"floor+2GiB"``. ``None``: the memory
    of the device that costs stand for, less the bytes that it holds beside the graph.
    """
    optimizer: StatedOptimizer | JobOptimizer = DEFAULT_OPTIMIZER
    """Whose state the device holds: ``adamw``, ``adamw-bf16``, ``sgd`` (with momentum), ``none``, a
    ``torch.optim.Optimizer``, or a list of these; they are counted once, when settings are made.
    """
    reserve: float | str = DEFAULT_RESERVE
    """Share of the device's memory kept free for fragmentation, also as text: ``"5%"``."""
    bucket_cap: int | str | None = None
    max_topo_span: int | None = None
    max_prefetch: int | None = None
    in_flight_cap: int | str | None = None
    max_compute_move: int | None = DEFAULT_COMPUTE_MOVE
    """Places by which compute may move, where it has something to hide."""
    plan: Plan | str | PathLike[str] | None = None
    """Rules for collectives by name of their parameter; a file is read once, here."""
    bitwise: bool = False
    """Reduce gradients in the buckets and payload order of eager FSDP2."""
    contention: str | Contention | None = None
    """Contention of streams, as for ``--contention`` (``"links,compute=1.2"``), or in full;
    ``None``: none.
    """
    second_group: bool = False
    """Also try gathers on a second process group of the same process ranks, and keep the faster; it
    is made once, by all of them.
    """
    parameter_order: Sequence[str] | None = None
    """Names of the parameters as ``model.named_parameters()`` lists them. ``bitwise`` needs them
    under torch.compile, where graphs list parameters by first use.
    """
    scenarios: int | None = None
    """Choose the schedule that is best over so many sampled costs, on every process rank alike;
    ``None``: the costs as they are.
    """
    noise: float | None = None
    """Sigma of the lognormal factors of sampled costs; ``None``: 0.2."""
    robust: str | None = None
    """``mean`` or ``worst`` step time over the scenarios; ``None``: ``worst``."""
    time_slack: float | str = SolveOptions().time_slack
    """Share of the step time that less memory and fewer launches may cost, also as text:
    ``"0.1%"``.
    """
    hints: Mapping[str, int] | str | None = None
    """Symbol -> size, of sizes that depend on data (``{"u0": 6144}``); ``None``: as torch hints at
    them, else balanced, else 8192 (docs/compiler.md).
    """
    budget: float = SolveOptions().budget
    """Deterministic work of the search for one graph, not seconds; see
    :class:`apsched.SolveOptions`.
    """
    seed: int = SolveOptions().seed
    num_workers: int = SolveOptions().num_workers
    """Threads of CP-SAT; more than one is not reproducible across machines."""
    group_ranks: Mapping[str, Sequence[int]] | None = None
    """Process ranks of process groups by name; they have priority over groups that run here. The
    size in a graph has priority over both.
    """
    on_error: str = "raise"
    """``raise``: a problem in apsched stops compilation with its error. ``fallback``: it is logged,
    and the graph stays unchanged, on all process ranks of the job.
    """
    progress: bool = False
    """Tell on stderr where the solver stands, on process rank 0."""
    deadline_s: float | None = DEFAULT_DEADLINE_S
    """Seconds that one process rank waits for another that does nothing; ``None``: without limit.
    In a job of several processes one process rank solves for all, and all compare their launches
    before the first collective.
    """
    cache: str | PathLike[str] | bool | None = None
    """Directory that keeps answers, which jobs may share; ``True``: the directory of ``apsched
    cache``. ``None``: ``$APSCHED_CACHE``, if set.
    """
    cache_limit: int | str = DEFAULT_LIMIT_BYTES
    """Bytes of that directory; the least recently used answers are deleted first."""
    schedule: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None
    """Schedule files (or directories of ``*.schedule.json``) to replay in place of solving; one
    must belong to each graph.
    """
    start: str | PathLike[str] | Sequence[str | PathLike[str]] | bool | None = None
    """Schedule files, found under other caps, from which the search for the same graph starts;
    files of other graphs are ignored. ``True``: the latest answer in the cache for the same graph
    and costs, under other caps or options, so that the answer depends on the cache.
    """

    def __post_init__(self) -> None:
        if self.cluster is not None and self.cost_model is not None:
            raise InputError(
                "cluster and cost_model: expected one of them, found both; a cost model has its own"
                " prices"
            )
        if self.on_error not in ON_ERROR:
            raise InputError(
                f"on_error: expected {' or '.join(map(repr, ON_ERROR))}, found {self.on_error!r}"
            )
        checked_deadline(self.deadline_s)
        switches = [option.name for option in SETTINGS if option.unit is Unit.SWITCH]
        checked_switches(**{name: getattr(self, name) for name in (*switches, "progress")})
        _check_cost_model(self.cost_model)
        for name in _PATHS:
            _check_paths(name, getattr(self, name))
        if not isinstance(self.optimizer, str | JobOptimizer):
            object.__setattr__(self, "optimizer", job_optimizer(self.optimizer))
        if isinstance(self.contention, str):
            parse_contention(self.contention, "contention")
        if self.cost_model is None:
            load_cluster(self.known_cluster)
        object.__setattr__(self, "plan", as_plan(self.plan))
        object.__setattr__(self, "group_ranks", checked_group_ranks(self.group_ranks))
        if self.parameter_order is not None:
            object.__setattr__(self, "parameter_order", _names(self.parameter_order))
        _ = self.solve_request, self.stated_hints, self.answers, self.starts

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, unused: Iterable[str] = ()) -> "Settings":
        """Return the settings with these names and values; ``InputError`` for an unknown name.

        ``caps`` (:class:`apsched.Caps`) and ``options`` (:class:`apsched.SolveOptions`) state
        several settings in one record, as in :func:`apsched.optimize`. The message names none of
        ``unused``.
        """
        settings = _without_records(settings)
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                shown = [one for one in known if one not in unused]
                raise InputError(f"expected a setting, found {name!r}; {_remedy(name, shown)}")
        return cls(**settings)

    def check_traced_by_dynamo(self) -> None:
        """Raise InputError if a setting needs more information than graphs of torch.compile
        have.
        """
        if self.bitwise and self.parameter_order is None:
            raise InputError(
                "bitwise: expected parameter_order, found none; torch.compile lists parameters by"
                " first use, and eager FSDP2 as they were registered: hand in parameter_order=[name"
                " for name, _ in model.named_parameters()]"
            )

    def _read(self, name: str) -> Any:
        """Return the value of a setting, which may be stated as on the command line."""
        return BY_NAME[name].read(getattr(self, name), name)

    @cached_property
    def solve_request(self) -> SolveRequest:
        """Everything about the solve itself."""
        stated = self.optimizer
        counted = stated.counted if isinstance(stated, JobOptimizer) else None
        return SolveRequest(
            caps=self.caps,
            memory_cap=self.stated_memory_cap,
            optimizer=counted or self._read("optimizer"),
            reserve=self._read("reserve"),
            options=self.solve_options,
            plan=as_plan(self.plan),
            bitwise=self.bitwise,
            scenarios=self.scenario_options,
            second_group=self.second_group,
        )

    @cached_property
    def caps(self) -> Caps:
        """All caps but that on memory, which depends on the graph."""
        named = (*CAPS, BY_NAME["max_compute_move"])
        return Caps(
            **{
                option.field_name: self._read(option.name)
                for option in named
                if option.unit is not Unit.MEMORY_CAP
            }
        )

    @cached_property
    def scenario_options(self) -> ScenarioOptions | None:
        """Costs to sample; ``None`` for none."""
        return scenario_options(self.scenarios, self.noise, self.robust)

    @cached_property
    def stated_memory_cap(self) -> MemoryCap | None:
        """The cap on memory as stated; ``None``: the memory of the device, where the costs stand
        for one.
        """
        return memory_cap_of(self.memory_cap, "memory_cap")

    @cached_property
    def stated_hints(self) -> Mapping[str, int]:
        """Sizes that are stated for symbols."""
        hints = self._read("hints") or {}
        if not isinstance(hints, Mapping) or not all(map(_is_hint, hints, hints.values())):
            raise InputError(
                "hints: expected sizes >= 0 by name of a symbol, such as {'u0': 6144}; found"
                f" {self.hints!r}"
            )
        return dict(hints)

    @cached_property
    def solve_options(self) -> SolveOptions:
        """The budget of the search."""
        return SolveOptions(
            time_slack=self._read("time_slack"),
            budget=self._read("budget"),
            seed=self._read("seed"),
            num_workers=self.num_workers,
        )

    @cached_property
    def answers(self) -> Sources:
        """Sources of answers other than the solver."""
        cache = self._kept_answers()
        if self.start is True and cache is None:
            raise InputError(
                "start: expected a cache to start from, found none; hand in cache=True or a"
                " directory, or set $APSCHED_CACHE"
            )
        return Sources(
            cache=cache, schedules=schedule_files(self.schedule), near=self.start is True
        )

    @cached_property
    def starts(self) -> tuple[ScheduleFile, ...]:
        """Schedules that a search may start from."""
        return () if isinstance(self.start, bool) else schedule_files(self.start)

    @property
    def known_cluster(self) -> str | Path:
        """The cluster as stated, or the default one."""
        return DEFAULT_CLUSTER if self.cluster is None else self.cluster

    @property
    def agreements(self) -> bool:
        """Whether process ranks talk to each other now: there are several."""
        return running_job(self.deadline_s) is not None

    def _kept_answers(self) -> Cache | None:
        limit = self.cache_limit
        limit_bytes = parse_bytes(limit, "cache_limit") if isinstance(limit, str) else limit
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 0:
            raise InputError(
                "cache_limit: expected a whole number of bytes >= 0 or a text such as '1GiB',"
                f" found {limit!r}"
            )
        if self.cache is False or (self.cache is None and not os.environ.get(DIRECTORY_VARIABLE)):
            return None
        directory = (
            default_directory() if self.cache is None or self.cache is True else Path(self.cache)
        )
        return Cache(directory=directory.expanduser(), limit_bytes=limit_bytes)

    def prices(self, group_ranks: Mapping[str, tuple[int, ...]]) -> CostModel:
        """Return the prices to schedule by; ``group_ranks`` are the process groups that run
        here.
        """
        if self.cost_model is not None:
            return self.cost_model
        return ClusterCostModel(load_cluster(self.known_cluster), group_ranks)


def _remedy(name: str, known: Sequence[str]) -> str:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    near = difflib.get_close_matches(name, [*known, *_RECORDS], n=1)
    return f"did you mean {near[0]!r}?" if near else f"settings are {', '.join(known)}"


def _without_records(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with the values of their records as settings of their own; InputError
    for a value that a record and a setting state.
    """
    names = {option.field_name: option.name for option in CAPS}
    found = {name: value for name, value in settings.items() if name not in _RECORDS}
    for name, kind in _RECORDS.items():
        if (record := settings.get(name)) is None:
            continue
        if not isinstance(record, kind):
            raise InputError(f"{name}: expected apsched.{kind.__name__}(...), found {record!r}")
        for key in (field.name for field in fields(kind)):
            setting, value = names.get(key, key), getattr(record, key)
            if setting not in settings:
                found[setting] = value
            elif value != getattr(kind(), key):
                raise InputError(
                    f"{setting}: expected it once, found it in {name} and as a setting; leave one"
                    " out"
                )
    return found


def _check_cost_model(model: object) -> None:
    """Raise InputError if ``model`` has no prices."""
    methods = ("compute_us", "collective_us")
    if isinstance(model, type):
        raise InputError(
            f"cost_model: expected an object, found the class {model.__name__}; pass one that is"
            " made of it, or apsched.load_cost_model('costs.toml')"
        )
    if model is not None and not all(callable(getattr(model, name, None)) for name in methods):
        raise InputError(
            f"cost_model: expected an object with the methods {' and '.join(methods)}, as"
            f" apsched.CostModel has them, found {model!r}; pass"
            " apsched.load_cost_model('costs.toml') or a model of your own"
        )


_PATHS = {
    "cluster": (False, False),
    "schedule": (True, False),
    "start": (True, True),
    "cache": (False, True),
}
"""Setting with a path -> whether it may have several, and whether it may be True or False."""


def _check_paths(name: str, stated: object) -> None:
    """Raise InputError if the setting ``name`` has no value of :data:`_PATHS`."""
    several, switch = _PATHS[name]
    if stated is None or (switch and isinstance(stated, bool)):
        return
    paths: Sequence[object] = (stated,)
    if several and isinstance(stated, Sequence) and not isinstance(stated, str):
        paths = stated
    if not all(isinstance(path, str | PathLike) for path in paths):
        words = ["a name"] * (name == "cluster") + ["a path"] + ["a sequence of paths"] * several
        expected = ", ".join(words + ["True", "False"] * switch)
        raise InputError(f"{name}: expected {expected} or None; found {stated!r}")


def _is_hint(symbol: object, size: object) -> bool:
    return isinstance(symbol, str) and type(size) is int and size >= 0


def _names(stated: Sequence[str]) -> tuple[str, ...]:
    names = tuple(stated) if isinstance(stated, Iterable) else (stated,)
    if isinstance(stated, str) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"parameter_order: expected names of parameters, found {stated!r}; hand in [n for n, _"
            " in model.named_parameters()]"
        )
    return tuple(map(plain_parameter_name, names))


def memory_cap_once(memory_cap: int | str | None, same: int | str | None) -> MemoryCap | None:
    """Return the memory cap, which has two names; ``InputError`` where both are stated."""
    if memory_cap is None:
        return memory_cap_of(same, "memory_cap_bytes")
    if same is not None:
        raise InputError("memory_cap: expected it once, found memory_cap_bytes, too; leave one out")
    return memory_cap_of(memory_cap, "memory_cap")


def size_once(name: str, stated: int | str | None, same: int | str | None) -> int | None:
    """Return the bytes of the cap ``name``; ``InputError`` where both of its names are stated."""
    if stated is not None and same is not None:
        raise InputError(f"{name}: expected it once, found {name}_bytes, too; leave one out")
    size: int | None = BY_NAME[name].read(same if stated is None else stated, name)
    return size


def checked_deadline(deadline_s: float | None) -> float | None:
    """Return ``deadline_s``; ``InputError`` where it is no number of seconds above 0."""
    if deadline_s is not None and not (is_number(deadline_s) and 0 < deadline_s < float("inf")):
        raise InputError(
            "deadline_s: expected a finite number of seconds above 0, or None; found"
            f" {deadline_s!r}"
        )
    return deadline_s


def memory_cap_of(stated: int | str | None, label: str) -> MemoryCap | None:
    """Return a cap on memory as stated; ``InputError``, which names ``label``, where it is none."""
    match stated:
        case None:
            return None
        case str():
            return cast("MemoryCap", BY_NAME["memory_cap"].read(stated, label))
        case int() if not isinstance(stated, bool) and stated >= 0:
            return MemoryCap(size_bytes=stated)
    raise InputError(
        f"{label}: expected a whole number >= 0, a text such as '60GiB', or None; found {stated!r}"
    )
