"""What the user may limit and choose; frozen, checked on construction."""

from dataclasses import dataclass, fields

from apsched.errors import InputError

DEFAULT_COMPUTE_MOVE = 200
"""Places by which compute may move where nobody says otherwise: two layers of LLaMA, further gains
nothing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Limits that a schedule must keep; ``None`` is no limit."""

    memory_cap_bytes: int | None = None
    """Live bytes at any step, parameters and other inputs included."""
    bucket_cap_bytes: int | None = None
    """Bytes of one bucket, counted once (a collective that is larger alone stays alone)."""
    max_topo_span: int | None = None
    """Rank of the latest member of a bucket minus rank of the first."""
    max_prefetch: int | None = None
    """Compute nodes between a start and the first compute node that needs its result."""
    in_flight_cap_bytes: int | None = None
    """Output bytes of all collectives, on-path ones too, started and not yet waited for."""
    max_compute_move: int | None = 0
    """Places among the compute nodes by which one of them may move from where it was captured."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(
                    f"{field.name}: expected a whole number >= 0 or None, found {value!r}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpOptions:
    """Who solves the MILP, and how long; checked where it runs."""

    solver_name: str = "PULP_CBC_CMD"
    """As PuLP calls it."""
    time_limit_s: float = 60.0
    """Seconds of all its solves together."""

    def __post_init__(self) -> None:
        if not 0 < self.time_limit_s < float("inf"):
            raise InputError(
                "time_limit_s: expected a finite number of seconds above 0, found"
                f" {self.time_limit_s!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """How long and in what sense to search."""

    time_slack: float = 0.001
    """Share of the best step time that lower memory and fewer launches may cost."""
    budget: float = 20.0
    """Deterministic work of CP-SAT (its deterministic time), not seconds."""
    seed: int = 0
    num_workers: int = 1
    """Threads of CP-SAT; more than one is not reproducible across machines."""

    def __post_init__(self) -> None:
        if not 0 <= self.time_slack <= 1:
            raise InputError(
                f"time_slack: expected a share between 0 and 1, found {self.time_slack!r}"
            )
        if not self.budget >= 0 or self.budget == float("inf"):
            raise InputError(f"budget: expected a finite number >= 0, found {self.budget!r}")
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed < 2**31
        ):
            raise InputError(f"seed: expected a whole number from 0 to 2^31-1, found {self.seed!r}")
        if (
            isinstance(self.num_workers, bool)
            or not isinstance(self.num_workers, int)
            or self.num_workers < 1
        ):
            raise InputError(
                f"num_workers: expected a whole number >= 1, found {self.num_workers!r}"
            )
