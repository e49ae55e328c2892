"""A solver's answer as bytes and back, whole: what the cache keeps, and what one process rank tells
the others.
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
)
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind

VERSION = 1
_MOST_BYTES = 1 << 30
_KINDS = tuple(StepKind)


def dump_answer(answer: SolveResult) -> bytes:
    """Return ``answer`` as compressed JSON; equal answers give equal bytes."""
    plain = {key: getattr(answer, key) for key in _PLAIN}
    data = plain | {
        "version": VERSION,
        "best": None if answer.best is None else _scored(answer.best),
        "baselines": [_scored(b) for b in answer.baselines],
        "infeasibility": None if answer.infeasibility is None else asdict(answer.infeasibility),
    }
    return zlib.compress(orjson.dumps(data), 1)


def parse_answer(content: bytes) -> SolveResult:
    """Return the answer that ``content`` has; ``InputError`` for anything that :func:`dump_answer`
    did not write.
    """
    try:
        data = orjson.loads(_decompressed(content))
        if data["version"] != VERSION:
            raise InputError(f"expected version {VERSION} of an answer, found {data['version']!r}")
        return SolveResult(
            **({key: data[key] for key in _PLAIN} | {"status": Status(data["status"])}),
            best=None if data["best"] is None else _parse_scored(data["best"]),
            baselines=tuple(_parse_scored(b) for b in data["baselines"]),
            infeasibility=(
                None
                if data["infeasibility"] is None
                else _parse_infeasibility(data["infeasibility"])
            ),
        )
    except (KeyError, TypeError, IndexError, ValueError, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"expected an answer of the solver, found something else ({type(error).__name__}:"
            f" {error})"
        ) from None


_PLAIN = (
    "status",
    "bound_ticks",
    "bound_source",
    "floor_memory_bytes",
    "floor_bound_bytes",
    "fastest_ticks",
    "time_limit_ticks",
    "peak_bound_bytes",
    "launches_bound",
    "solved_by",
    "deterministic_work",
)
_FIGURES = ("name", "step_time_ticks", "exposed_ticks", "peak_memory_bytes", "num_launches")


def _decompressed(content: bytes) -> bytes:
    inflate = zlib.decompressobj()
    text = inflate.decompress(content, _MOST_BYTES)
    if not inflate.eof:
        raise InputError(
            "expected an answer of the solver, found one that ends too early or is too large"
        )
    return text


def _scored(scored: Scored) -> dict[str, Any]:
    schedule = scored.schedule
    return {key: getattr(scored, key) for key in _FIGURES} | {
        "violations": scored.violations,
        "buckets": [(bucket.members, bucket.coalesced) for bucket in schedule.buckets],
        "kinds": [int(step.kind) for step in schedule.steps],
        "indices": [step.index for step in schedule.steps],
    }


def _parse_scored(data: dict[str, Any]) -> Scored:
    steps = tuple(
        Step(_KINDS[kind], index)
        for kind, index in zip(data["kinds"], data["indices"], strict=True)
    )
    buckets = tuple(
        Bucket(tuple(members), coalesced=coalesced) for members, coalesced in data["buckets"]
    )
    return Scored(
        **{key: data[key] for key in _FIGURES},
        violations=tuple(data["violations"]),
        schedule=Schedule(buckets=buckets, steps=steps),
    )


def _parse_infeasibility(data: dict[str, Any]) -> Infeasibility:
    return Infeasibility(
        clashes=tuple(tuple(clash) for clash in data["clashes"]),
        proven=data["proven"],
        nodes=tuple(data["nodes"]),
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
        message=data["message"],
    )
