"""The cases that are measured, and the memory caps each is solved under."""

from collections import Counter
from dataclasses import dataclass

from apsched.config import DEFAULT_COMPUTE_MOVE
from apsched.kinds import CollectiveKind
from apsched.models.presets import PRESETS
from apsched.names import part_of
from apsched.problem.problem import Problem
from apsched.units import allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training step: a preset on a mesh."""

    model: str
    mesh: str
    seq_len: int
    batch: int = 1
    """Batch size of one process rank."""
    num_layers: int | None = None
    """``None``: as published."""
    again: bool = False
    """Solve its last graph (backward) again in other processes, and compare the schedule files byte
    for byte.
    """

    more_memory: tuple[float, ...] = ()
    """Shares of memory above the peak of torch's graph; moved compute is solved with each of these
    caps, too, which shows the gain of more memory.
    """
    other_moves: tuple[int, ...] = ()
    """Other caps on moves, in places, at the peak of torch's graph: how the default was chosen."""

    @property
    def name(self) -> str:
        """Return the name of the case, which ``--cases`` takes."""
        batch = "" if self.batch == 1 else f" batch={self.batch}"
        layers = "" if self.num_layers is None else f" layers={self.num_layers}"
        return f"{self.model} {self.mesh} seq={self.seq_len}{batch}{layers}"

    @property
    def weight(self) -> int:
        """Roughly how long it takes beside others: its number of layers."""
        return self.num_layers or PRESETS[self.model].num_layers


def _grid() -> tuple[Case, ...]:
    small = [
        Case(
            model="llama3-8b",
            mesh=mesh,
            seq_len=seq_len,
            again=(mesh, seq_len) in (("fsdp=64", 8192), ("fsdp=8,tp=8", 2048)),
        )
        for mesh in ("fsdp=64", "fsdp=256", "fsdp=8,tp=8", "fsdp=32,tp=8")
        for seq_len in (8192, 2048)
    ]
    return (
        *small,
        Case(model="deepseek-v3-16b", mesh="fsdp=64,ep=8", seq_len=8192),
        Case(model="llama3-70b", mesh="fsdp=256", seq_len=8192),
        Case(model="llama3-405b", mesh="fsdp=1024", seq_len=8192),
    )


GRID = _grid()
SMOKE = (Case(model="llama3-8b", mesh="fsdp=8,tp=8", seq_len=2048, num_layers=2, again=True),)

_OTHER_MOVES = (25, 50, 100, 400)
MOVES_GRID = (
    *(
        Case(
            model="llama3-8b",
            mesh=mesh,
            seq_len=8192,
            batch=batch,
            other_moves=_OTHER_MOVES if batch == 2 else (),
        )
        for mesh in ("fsdp=8,tp=8", "fsdp=32,tp=8")
        for batch in (1, 2, 4)
    ),
    *(
        Case(
            model="deepseek-v3-16b",
            mesh=mesh,
            seq_len=8192,
            more_memory=(0.025, 0.05, 0.1, 0.2),
            other_moves=_OTHER_MOVES,
        )
        for mesh in ("fsdp=64,ep=8", "fsdp=128,ep=8")
    ),
)
"""Collectives between compute nodes, which only moving compute can hide. With one sequence on 8
process ranks LLaMA-3 8B is bound by FSDP's own stream, so that nothing on the compute stream can
help much; hence the batches.
"""
MOVES_SMOKE = (
    Case(
        model="llama3-8b",
        mesh="fsdp=8,tp=8",
        seq_len=2048,
        num_layers=2,
        more_memory=(0.1,),
        other_moves=(25,),
    ),
)

TORCH_PEAK = "torch's peak"
"""The memory cap under which compute is moved: the peak of the graph that torch's
``schedule_overlap_bucketing`` makes.
"""
COMPUTE_MOVE = DEFAULT_COMPUTE_MOVE
"""Places by which compute may move, where it may."""


def more_memory(share: float) -> str:
    """Return the name of a memory cap above ``TORCH_PEAK``."""
    return f"{TORCH_PEAK} + {100 * share:g} %" if share else TORCH_PEAK


CAPS: dict[str, int | None] = {"floor": 0, "floor+1 layer": 1, "floor+3 layers": 3, "none": None}
"""Name of a memory cap -> layers of gathered weights above the least feasible memory; ``None`` for
no cap.
"""


def layer_bytes(problem: Problem) -> int:
    """Return the gathered weights of one layer, as allocated: the most that any transformer block
    gathers.

    A block is a module with a number in its name (``layers.7``); where there is none, any part of
    the model counts as one. Embedding and output, which are larger than a block of the 8B model,
    are no layers: a cap of one layer is the tighter for it.
    """
    gathered: Counter[str] = Counter()
    for c in problem.collectives:
        if not c.on_path and c.module and problem.keys[c.key].kind == CollectiveKind.ALL_GATHER:
            gathered[part_of(c.module)] += allocated_bytes(c.output_bytes)
    numbered = {
        block: size
        for block, size in gathered.items()
        if any(part.isdigit() for part in block.split("."))
    }
    return max((numbered or gathered).values(), default=0)
