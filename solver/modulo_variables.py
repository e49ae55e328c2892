"""Variables of the modulo schedule of one layer: one dictionary per symbol. The mathematics is in ``docs/formulation.md``.

Everything happens once in every layer, shifted by the period: layer i does at t + i·II what layer 0 does at t. Sites are numbered
through all layers (``apsched.solver.loop_body``), so that a site number fixes both the place in the body and the layer.
"""

from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from apsched.solver.loop_body import GATHER, REDUCTION, LoopBody
from apsched.solver.variables import Linear


@dataclass(frozen=True, slots=True)
class Since:
    """A literal for each site: whether something has happened at it or before. False below the window, true from its last site on."""

    first: int
    past: int
    """From this site on it has happened in any case."""
    literals: tuple[cp_model.IntVar, ...]

    def at(self, site: int) -> cp_model.IntVar | bool:
        """Return the literal of ``site``, or what is known of it."""
        if site < self.first:
            return False
        return True if site >= self.past else self.literals[site - self.first]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTimes:
    """When a site of layer 0 is reached, and when its steps are done: pinned launches, waits of reductions, their launches, gathers."""

    reached: cp_model.IntVar
    waited: cp_model.IntVar
    """Reductions waited for."""
    prefetching: cp_model.IntVar
    """Reductions launched."""
    needing: cp_model.IntVar
    """Gathers launched."""
    copied: cp_model.IntVar
    """Gathers waited for, and copied out."""
    done: cp_model.IntVar
    """Pinned collectives waited for: compute begins."""


@dataclass(slots=True)
class ModuloVariables:
    """All symbols."""

    model: cp_model.CpModel
    body: LoopBody
    horizon_ticks: int
    period: cp_model.IntVar
    """II"""
    peak_blocks: cp_model.IntVar
    chosen: list[cp_model.IntVar] = field(default_factory=list)
    """x[B]: column B is a bucket."""
    anchors: dict[int, cp_model.IntVar] = field(default_factory=dict)
    """z[s]: slot s is the anchor of its bucket."""
    joins: dict[tuple[int, int, int], cp_model.IntVar] = field(default_factory=dict)
    """j[s, a, i]: slot s of i layers on is in the bucket of anchor a."""
    launch_at: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    """l[s, q]: gather s is launched at site q."""
    launched: dict[int, Since] = field(default_factory=dict)
    """L[s, q]: gather s has been launched at site q or before."""
    wait_at: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    """v[s, q]: reduction s is waited for at site q."""
    waited: dict[int, Since] = field(default_factory=dict)
    """V[s, q]: reduction s has been waited for at site q or before."""
    launch_work: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    """w[s, q]: work of launching the bucket of anchor s at site q; 0 where it is not."""
    launch_end: dict[int, cp_model.IntVar] = field(default_factory=dict)
    """e[s]: when the launch of the bucket of anchor s is done."""
    transfer_end: dict[int, cp_model.IntVar] = field(default_factory=dict)
    """t[s]: when all transfers of its kind up to that of anchor s have ended."""
    times: list[SiteTimes] = field(default_factory=list)
    alive_blocks: list[Linear] = field(default_factory=list)
    """Blocks alive at each place, and at each copy-in and copy-out there."""

    def columns_of(self, anchor: int) -> list[int]:
        """Return the columns whose anchor is ``anchor``."""
        return [b for b, column in enumerate(self.body.columns) if column.anchor == anchor]

    def launch_ticks(self, anchor: int) -> Linear:
        """Return the work of launching the bucket of ``anchor``; 0 where it is none."""
        return sum(self.body.columns[b].launch_ticks * self.chosen[b] for b in self.columns_of(anchor))

    def transfer_ticks(self, anchor: int) -> Linear:
        """Return the length of the transfer of the bucket of ``anchor``; 0 where it is none."""
        return sum(self.body.columns[b].transfer_ticks * self.chosen[b] for b in self.columns_of(anchor))

    def instances(self, site: int, window: Since | range) -> list[int]:
        """Return the sites of ``window`` that are at place ``site`` of the body."""
        first, past = (window.first, window.past) if isinstance(window, Since) else (window.start, window.stop)
        size = self.body.num_sites
        return list(range(first + (site - first) % size, past, size))


def create_modulo_variables(body: LoopBody, horizon_ticks: int, cap_blocks: int) -> ModuloVariables:
    """Return all variables with their domains."""
    model = cp_model.CpModel()
    v = ModuloVariables(
        model=model,
        body=body,
        horizon_ticks=horizon_ticks,
        period=model.new_int_var(0, horizon_ticks, "II"),
        peak_blocks=model.new_int_var(0, max(cap_blocks, 0), "peak"),
    )
    v.chosen = [model.new_bool_var(f"x[{b}]") for b in range(len(body.columns))]
    for b, column in enumerate(body.columns):
        v.anchors.setdefault(column.anchor, model.new_bool_var(f"z[{column.anchor}]"))
        for s, shift in column.members:
            if (s, column.anchor, shift) not in v.joins:
                v.joins[s, column.anchor, shift] = model.new_bool_var(f"j[{s},{column.anchor},{shift},{b}]")
    longest = (2 * body.reach + 2) * horizon_ticks
    for s, slot in enumerate(body.slots):
        v.launch_end[s] = model.new_int_var(-longest, longest, f"e[{s}]")
        v.transfer_end[s] = model.new_int_var(-longest, longest, f"t[{s}]")
        if slot.role == GATHER:
            v.launched[s] = _window(model, v.launch_at, s, slot.ready_site, slot.wait_site, "launch")
            for q in range(slot.launch_site, slot.wait_site + 1):
                v.launch_work[s, q] = model.new_int_var(0, horizon_ticks, f"w[{s},{q}]")
        elif slot.role == REDUCTION:
            v.waited[s] = _window(model, v.wait_at, s, slot.launch_site + 1, slot.wait_site + body.num_sites, "wait")
    names = ("reached", "waited", "prefetching", "needing", "copied", "done")
    v.times = [
        SiteTimes(**{name: model.new_int_var(0, horizon_ticks, f"{name}[{site}]") for name in names}) for site in range(body.num_sites)
    ]
    return v


def _window(model: cp_model.CpModel, at: dict[tuple[int, int], cp_model.IntVar], s: int, first: int, last: int, name: str) -> Since:
    """Make the literals of one event that happens at one site of [first, last]."""
    for q in range(first, last + 1):
        at[s, q] = model.new_bool_var(f"{name}[{s},{q}]")
    return Since(first, last, tuple(model.new_bool_var(f"since_{name}[{s},{q}]") for q in range(first, last)))
