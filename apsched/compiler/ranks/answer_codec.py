"""A solver's answer as bytes and back, whole: for the cache, and for messages between process
ranks.
"""

import zlib
from dataclasses import asdict
from typing import Any

import orjson

from apsched.errors import InputError
from apsched.schedule.result import (
    FullPlace,
    Infeasibility,
    Relaxation,
    Scored,
    SolveResult,
    Status,
    TradeOff,
)
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind
from apsched.unpack import unpacked_zlib

VERSION = 3
_KINDS = tuple(StepKind)


def dump_answer(answer: SolveResult) -> bytes:
    """Return ``answer`` as compressed JSON; equal answers give equal bytes."""
    plain = {key: getattr(answer, key) for key in _PLAIN}
    data = plain | {
        "version": VERSION,
        "best": None if answer.best is None else _scored(answer.best),
        "baselines": [_scored(b) for b in answer.baselines],
        "infeasibility": None if answer.infeasibility is None else asdict(answer.infeasibility),
        "trade_offs": [(t.peak_memory_bytes, t.step_time_ticks) for t in answer.trade_offs],
    }
    return zlib.compress(orjson.dumps(data), 1)


def parse_answer(content: bytes) -> SolveResult:
    """Return the answer that ``content`` has; ``InputError`` for anything that :func:`dump_answer`
    did not write.
    """
    try:
        data = orjson.loads(unpacked_zlib(content))
        if data["version"] != VERSION:
            raise InputError(f"expected version {VERSION} of an answer, found {data['version']!r}")
        return SolveResult(
            **(
                {key: _of(of, data[key], key) for key, of in _PLAIN.items()}
                | {"status": Status(data["status"])}
            ),
            best=None if data["best"] is None else _parse_scored(data["best"]),
            baselines=tuple(_parse_scored(b) for b in data["baselines"]),
            infeasibility=(
                None
                if data["infeasibility"] is None
                else _parse_infeasibility(data["infeasibility"])
            ),
            trade_offs=tuple(
                TradeOff(
                    peak_memory_bytes=_of(int, peak_bytes, "trade_offs"),
                    step_time_ticks=_of(int, ticks, "trade_offs"),
                )
                for peak_bytes, ticks in _of(list, data["trade_offs"], "trade_offs")
            ),
        )
    except (KeyError, TypeError, IndexError, ValueError, EOFError, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"expected an answer of the solver, found something else ({type(error).__name__}:"
            f" {error})"
        ) from None


_PLAIN = {
    "status": str,
    "bound_ticks": int,
    "bound_source": str,
    "floor_memory_bytes": int,
    "floor_bound_bytes": int,
    "fastest_ticks": int,
    "time_limit_ticks": int,
    "peak_bound_bytes": int,
    "launches_bound": int,
    "solved_by": str,
    "deterministic_work": float,
    "search_ticks": int,
}
_FIGURES = {
    "name": str,
    "step_time_ticks": int,
    "exposed_ticks": int,
    "peak_memory_bytes": int,
    "num_launches": int,
}


def _of(of: type, value: Any, what: str) -> Any:
    """Return ``value``; ``InputError`` where it is not of this type."""
    if type(value) is not of and not (of is float and type(value) is int):
        raise InputError(
            f"expected an answer of the solver, found one where {what} is {type(value).__name__},"
            f" not {of.__name__}"
        )
    return value


def _ints(values: Any, what: str) -> tuple[int, ...]:
    return tuple(_of(int, value, what) for value in _of(list, values, what))


def _scored(scored: Scored) -> dict[str, Any]:
    schedule = scored.schedule
    return {key: getattr(scored, key) for key in _FIGURES} | {
        "violations": scored.violations,
        "buckets": [(bucket.members, bucket.coalesced) for bucket in schedule.buckets],
        "kinds": [int(step.kind) for step in schedule.steps],
        "indices": [step.index for step in schedule.steps],
    }


def _parse_scored(data: dict[str, Any]) -> Scored:
    indices = _ints(data["indices"], "a step")
    steps = tuple(
        Step(_KINDS[kind], index) for kind, index in zip(data["kinds"], indices, strict=True)
    )
    buckets = tuple(
        Bucket(_ints(members, "a bucket"), coalesced=_of(bool, coalesced, "the form of a bucket"))
        for members, coalesced in data["buckets"]
    )
    return Scored(
        **{key: _of(of, data[key], key) for key, of in _FIGURES.items()},
        violations=tuple(_of(str, text, "a violation") for text in data["violations"]),
        schedule=Schedule(buckets=buckets, steps=steps),
    )


def _parse_infeasibility(data: dict[str, Any]) -> Infeasibility:
    return Infeasibility(
        clashes=tuple(tuple(clash) for clash in data["clashes"]),
        proven=data["proven"],
        nodes=tuple(_of(str, node, "a node") for node in data["nodes"]),
        relaxations=tuple(
            Relaxation(**(r | {"lifted": tuple(r["lifted"])})) for r in data["relaxations"]
        ),
        places=tuple(
            FullPlace(
                node=p["node"],
                live_bytes=p["live_bytes"],
                alive=tuple((what, n, size) for what, n, size in p["alive"]),
            )
            for p in data["places"]
        ),
        message=_of(str, data["message"], "the message"),
    )
