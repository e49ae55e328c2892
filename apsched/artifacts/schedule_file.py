"""Schedule files: JSON for people and diffs, with the identity of the graph (design: files).

Equal input gives the same file, byte for byte: no times, no paths. A node goes by rank and name, a
bucket by number::

    {"format": "apsched-schedule", "version": 1, "graph": {...}, "caps": {...}, "result": {...},
     "buckets": [{"kind": ..., "group": ..., "dtype": ..., "bytes": ..., "members": [{"rank": 7,
     "node": ..., "module": ...}, ...]}, ...], "steps": ["4 mm", "copy_in 0", "start 0", "9 mm_1",
     "wait 0", "copy_out 7 all_gather_into_tensor", ...]}

A coalesced bucket has ``"form": "coalesced"`` before its members. Readers go by the rank (names of
nodes may differ between process ranks of one job, see ``graph.identity``); the name is for people.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from apsched.atomic_files import write_atomic
from apsched.config import Caps
from apsched.errors import InputError
from apsched.pipeline.assumptions import assumed_json
from apsched.pipeline.result import Result
from apsched.problem.contention import contention_json
from apsched.problem.plan.rules import digest
from apsched.problem.problem import Problem
from apsched.problem.second_group import second_groups, with_second_groups
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind
from apsched.unpack import read_within

FORMAT = "apsched-schedule"
VERSION = 2
_FLAT_VERSION = 1
"""Of files without coalesced buckets and second groups, which older readers understand."""
COALESCED = "coalesced"
_WORDS = {StepKind.COPY_IN: "copy_in", StepKind.START: "start", StepKind.WAIT: "wait"}
_KINDS = {word: kind for kind, word in _WORDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFile:
    """A schedule file as read; it still names nodes, of whatever graph it was made for."""

    path: str
    graph: Mapping[str, Any]
    caps: Caps
    costs: Mapping[str, Any]
    claimed: Mapping[str, Any]
    """The figures that its solver gave."""
    buckets: tuple[tuple[tuple[int, str], ...], ...]
    """Rank and name of the start nodes of each bucket, in payload order."""
    steps: tuple[str, ...]
    coalesced: frozenset[int] = frozenset()
    """Buckets that are coalesced."""
    second_groups: bool = False
    """Gathers run on groups of their own."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that solved it; empty if the file has none."""

    def problem_of(self, problem: Problem) -> Problem:
        """Return ``problem`` with the groups that the file was made for."""
        return (
            with_second_groups(problem)
            if self.second_groups and not second_groups(problem)
            else None
        ) or problem


def dump_schedule(result: Result) -> bytes:
    """Return the content of the schedule file of ``result``, which must have a schedule."""
    assert result.best is not None, "there is no schedule to write"
    assert result.chosen is not None
    problem, schedule = result.problem, result.best.schedule
    head = {
        "format": FORMAT,
        "version": (
            VERSION
            if second_groups(problem) or any(bucket.coalesced for bucket in schedule.buckets)
            else _FLAT_VERSION
        ),
        "graph": {
            "name": problem.name,
            "hash": problem.graph_hash,
            "num_nodes": problem.num_nodes,
            "num_collectives": len(problem.collectives),
        },
        **({"second_groups": second_groups(problem)} if second_groups(problem) else {}),
        "costs": {
            "cluster": result.cluster,
            **(
                {"contention": contention_json(problem.contention)}
                if problem.contention is not None
                else {}
            ),
        },
        "caps": asdict(result.caps),
        **(
            {"plan": {"digest": digest(problem.rules), "rules": problem.rules}}
            if problem.rules
            else {}
        ),
        "result": {
            "status": result.answer.status,
            "solved_by": result.answer.solved_by,
            "step_time_us": result.step_time_us,
            "bound_us": result.bound_us,
            "bound_source": result.answer.bound_source,
            "gap": round(result.gap, 9),
            "peak_memory_bytes": result.best.peak_memory_bytes,
            "peak_bound_bytes": result.answer.peak_bound_bytes,
            "num_launches": result.best.num_launches,
            "launches_bound": result.answer.launches_bound,
        },
        "chosen": asdict(result.chosen),
        **({} if result.assumptions is None else {"assumed": assumed_json(result.assumptions)}),
        "versions": {name: _version(name) for name in ("apsched", "ortools", "torch")},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines.append(_listed("buckets", [_bucket_text(problem, bucket) for bucket in schedule.buckets]))
    lines.append(
        _listed("steps", [json.dumps(_step_text(problem, step)) for step in schedule.steps])
    )
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def save_schedule(path: str | Path, result: Result) -> None:
    """Write the schedule of ``result`` to ``path``, whole or not at all."""
    write_atomic(path, dump_schedule(result))


def load_schedule(path: str | Path) -> ScheduleFile:
    """Return the schedule file ``path``; ``InputError`` names the file and the error."""
    try:
        content = read_within(path)
    except OSError as error:
        raise InputError(
            f"cannot read the schedule file {path}: {error.strerror or error}"
        ) from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return parse_schedule(content, str(path))


def bind_schedule(file: ScheduleFile, problem: Problem) -> Schedule:
    """Return the schedule that ``file`` states for ``problem``; ``InputError`` with the difference
    if it belongs to another graph.
    """
    if file.graph["hash"] != problem.graph_hash:
        raise InputError(
            f"{file.path}: the schedule belongs to another graph: {_difference(file, problem)};"
            " solve this graph instead"
        )
    if file.second_groups != bool(second_groups(problem)):
        expected, found = (
            ("second groups", "one group") if file.second_groups else ("one group", "second groups")
        )
        raise InputError(
            f"{file.path}: expected gathers on {expected}, as the file has them, found {found}; use"
            " second_group as it did"
        )
    starts = {c.start: i for i, c in enumerate(problem.collectives)}
    members = [
        tuple(_collective(rank, name, starts, file) for rank, name in bucket)
        for bucket in file.buckets
    ]
    buckets = tuple(
        Bucket(bucket_members, coalesced=b in file.coalesced)
        for b, bucket_members in enumerate(members)
    )
    steps = tuple(_step(text, file, problem.num_nodes, starts) for text in file.steps)
    return Schedule(buckets=buckets, steps=steps)


def _listed(key: str, entries: list[str]) -> str:
    """Return a JSON member whose entries stand one a line."""
    body = "".join(f"\n {entry}," for entry in entries)[:-1]
    return f"{json.dumps(key)}: [{body}\n]" if entries else f"{json.dumps(key)}: []"


def _bucket_text(problem: Problem, bucket: Bucket) -> str:
    members = [problem.collectives[c] for c in bucket.members]
    key = problem.keys[members[0].key]
    head = {
        "kind": key.kind,
        "group": key.group,
        "dtype": key.dtype,
        "bytes": sum(m.size_bytes for m in members),
    }
    head |= {"form": COALESCED} if bucket.coalesced else {}
    listed = ",\n  ".join(
        json.dumps({"rank": m.start, "node": problem.node_names[m.start], "module": m.module})
        for m in members
    )
    return f'{json.dumps(head)[:-1]}, "members": [\n  {listed}]}}'


def _step_text(problem: Problem, step: Step) -> str:
    match step.kind:
        case StepKind.NODE:
            return f"{step.index} {problem.node_names[step.index]}"
        case StepKind.COPY_OUT:
            start = problem.collectives[step.index].start
            return f"copy_out {start} {problem.node_names[start]}"
        case _:
            return f"{_WORDS[step.kind]} {step.index}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def parse_schedule(content: bytes, path: str) -> ScheduleFile:
    """Return the parsed content of the schedule file ``path``; ``InputError`` names the file and
    the error.
    """
    data = _json(content, path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(
            f'{path}: expected a schedule file of apsched ("format": "{FORMAT}"), found another'
            " kind of file"
        )
    found = data.get("version")
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise InputError(f"{path}: expected a version number of the file, found {found!r}")
    if found > VERSION:
        raise InputError(
            f"{path}: expected version {VERSION} of the file or older, found version {found};"
            " update apsched"
        )
    return _checked(data, path)


def _json(content: bytes, path: str) -> Any:
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        where = (
            "it ends too early"
            if error.pos >= len(error.doc.rstrip())
            else f"line {error.lineno}, column {error.colno}: {error.msg.removesuffix(' at')}"
        )
        raise InputError(
            f"{path}: expected a schedule file, found broken JSON ({where}); write it again with"
            " the command that made it (apsched solve, or apsched study)"
        ) from None
    except (UnicodeDecodeError, RecursionError):
        raise InputError(
            f"{path}: expected a schedule file, found something that is no JSON text"
        ) from None


def _checked(data: dict[str, Any], path: str) -> ScheduleFile:
    graph = _object(data, "graph", path)
    for key in ("name", "hash"):
        if not isinstance(graph.get(key), str):
            raise InputError(f"{path}: expected a string at graph.{key}, found {graph.get(key)!r}")
    steps = _array(data, "steps", path)
    if not all(isinstance(step, str) for step in steps):
        raise InputError(
            f"{path}: expected node names and bucket steps as strings in 'steps', found something"
            " else"
        )
    return ScheduleFile(
        path=path,
        graph=graph,
        caps=_caps(_object(data, "caps", path), path),
        costs=_object(data, "costs", path),
        claimed=_object(data, "result", path),
        buckets=tuple(
            _members(bucket, b, path) for b, bucket in enumerate(_array(data, "buckets", path))
        ),
        steps=tuple(steps),
        second_groups=bool(data.get("second_groups")),
        coalesced=frozenset(
            b
            for b, bucket in enumerate(_array(data, "buckets", path))
            if _is_coalesced(bucket, b, path)
        ),
        versions=(
            {str(k): str(v) for k, v in versions.items()}
            if isinstance(versions := data.get("versions"), dict)
            else {}
        ),
    )


def _object(data: Mapping[str, Any], key: str, path: str) -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected an object at {key!r}, found {_brief(value)}")
    return value


def _array(data: Mapping[str, Any], key: str, path: str) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list):
        raise InputError(f"{path}: expected a list at {key!r}, found {_brief(value)}")
    return value


def _brief(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _caps(data: Mapping[str, Any], path: str) -> Caps:
    known = [field.name for field in fields(Caps)]
    unknown = [key for key in data if key not in known]
    if unknown:
        raise InputError(f"{path}: expected caps among {', '.join(known)}; found {unknown[0]!r}")
    try:
        return Caps(**data)
    except InputError as error:
        raise InputError(f"{path}: caps: {error}") from None


def _members(bucket: object, b: int, path: str) -> tuple[tuple[int, str], ...]:
    members = bucket.get("members") if isinstance(bucket, dict) else None
    if not isinstance(members, list) or not all(
        isinstance(m, dict) and isinstance(m.get("node"), str) and _is_rank(m.get("rank"))
        for m in members
    ):
        raise InputError(
            f"{path}: expected bucket {b} to list its members by rank and node, found"
            f" {_brief(bucket)}"
        )
    return tuple((member["rank"], member["node"]) for member in members)


def _is_coalesced(bucket: Mapping[str, Any], b: int, path: str) -> bool:
    form = bucket.get("form", "flat")
    if form not in ("flat", COALESCED):
        raise InputError(
            f"{path}: expected the form of bucket {b} to be flat or {COALESCED}, found"
            f" {_brief(form)}"
        )
    return bool(form == COALESCED)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _difference(file: ScheduleFile, problem: Problem) -> str:
    """State the differences between the graph of ``file`` and ``problem``, the most telling
    first.
    """
    of_problem = {
        "name": problem.name,
        "num_nodes": problem.num_nodes,
        "num_collectives": len(problem.collectives),
    }
    labels = {
        "name": "name",
        "num_nodes": "number of nodes",
        "num_collectives": "number of collectives",
    }
    parts = [
        f"{labels[key]} {file.graph.get(key)!r} there, {value!r} here"
        for key, value in of_problem.items()
        if file.graph.get(key) != value
    ]
    known = {*problem.node_names}
    strange = [name for name in _named_nodes(file) if name not in known]
    if strange:
        parts.append(
            f"node {strange[0]!r} only there"
            + (f" (and {len(strange) - 1} more)" if len(strange) > 1 else "")
        )
    if not parts:
        parts.append("the same node names, but other dependences, shapes, dtypes or groups")
    return (
        f"{'; '.join(parts)} (hash {str(file.graph['hash'])[:12]} there, {problem.graph_hash[:12]}"
        " here)"
    )


def _named_nodes(file: ScheduleFile) -> list[str]:
    words = [text.split(" ", 1) for text in file.steps]
    return [w[1] for w in words if len(w) == 2 and w[0].isdigit()] + [
        name for members in file.buckets for _, name in members
    ]


def _step(text: str, file: ScheduleFile, num_nodes: int, starts: Mapping[int, int]) -> Step:
    match text.split(" ", 1):  # names of nodes in graph files may have blanks
        case [rank, _] if rank.isascii() and rank.isdigit():
            if int(rank) >= num_nodes:
                raise InputError(
                    f"{file.path}: expected nodes below {num_nodes} in 'steps', found {text!r}"
                )
            return Step(StepKind.NODE, int(rank))
        case ["copy_out", place]:
            rank, blank, name = place.partition(" ")
            if blank and rank.isascii() and rank.isdigit():
                return Step(StepKind.COPY_OUT, _collective(int(rank), name, starts, file))
        case [word, b] if (
            word in _KINDS and b.isascii() and b.isdigit() and int(b) < len(file.buckets)
        ):
            return Step(_KINDS[word], int(b))
    raise InputError(
        f"{file.path}: expected 'RANK NODE', 'copy_out RANK NODE', or copy_in, start or wait with a"
        f" bucket below {len(file.buckets)}, in 'steps'; found {text!r}"
    )


def _collective(rank: int, name: str, starts: Mapping[int, int], file: ScheduleFile) -> int:
    if rank not in starts:
        raise InputError(
            f"{file.path}: expected a start node of the graph, found node {rank} {name!r}"
        )
    return starts[rank]
