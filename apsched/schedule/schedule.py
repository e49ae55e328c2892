"""A schedule: a total order of steps, and the buckets that some steps stand for. Nothing else."""

from dataclasses import dataclass
from enum import IntEnum


class StepKind(IntEnum):
    """The kind of a step; ``Step.index`` is a node, a bucket or a collective accordingly."""

    NODE = 0  # a node of the graph (also start and wait of a collective that is in no bucket)
    COPY_IN = 1  # bucket: gather the payload of all members in one buffer
    START = 2  # bucket: launch
    WAIT = 3  # bucket: wait
    COPY_OUT = 4  # collective: copy this member of an all-gather bucket out of the buffer


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One entry of the order."""

    kind: StepKind
    index: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Two or more collectives of one key launched as one.

    Flat: one buffer, copied in and (all-gather) out, and one transfer. Coalesced: one launch of as
    many transfers as there are members, from and to memory of their own, without copies.
    """

    members: tuple[int, ...]
    """Indices of collectives, in payload order."""
    coalesced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A total order of all nodes, with the start and wait nodes of bucket members replaced by steps
    of their bucket.

    Steps that a flat bucket needs: COPY_IN, START, WAIT, once each; and for every member of an
    all-gather bucket a COPY_OUT. Members of other kinds are views of the bucket's result from the
    WAIT on. A coalesced bucket needs START and WAIT alone.
    """

    buckets: tuple[Bucket, ...]
    steps: tuple[Step, ...]


def as_captured(num_nodes: int) -> Schedule:
    """Return the order of the graph itself, without buckets."""
    return Schedule(buckets=(), steps=tuple(Step(StepKind.NODE, i) for i in range(num_nodes)))
