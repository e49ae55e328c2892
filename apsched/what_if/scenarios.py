"""Costs other than those that a schedule was made for: sampled scenarios, and the step time of a
schedule in each.

A scenario gives every node and every collective a factor, and on top of that one factor to all work
on the compute stream and one to all transfers: a device or a network that is slower as a whole.
Each factor is exp(sigma z - sigma^2 / 2) with z normal, so its mean is 1. Factors belong to nodes
and collectives, not to places in an order; a bucket has the mean of its members' factors, weighted
by bytes. So schedules are compared under the same bad luck, however they share launches. The
samples depend on the seed and on the problem's size alone. Memory follows the order, so a schedule
that keeps a cap keeps it in every scenario.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from apsched.config import ScenarioOptions
from apsched.costs.price_curve import PriceCurve
from apsched.problem.problem import Problem, with_contention
from apsched.schedule.schedule import Schedule, StepKind
from apsched.schedule.simulate import clock_of, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Factors of durations."""

    of_node: tuple[float, ...]
    of_collective: tuple[float, ...]
    """Of a bucket, the mean of its members' by bytes: all transfers together take as long, however
    they share launches.
    """
    of_compute: float = 1.0
    """Of all work on the compute stream."""
    of_network: float = 1.0
    """Of all transfers."""


def sampled(
    problem: Problem, sigma: float, seed: int | Sequence[int], *, correlated: bool = True
) -> Scenario:
    """Return one scenario; without ``correlated`` compute and network as a whole keep the speed of
    the costs.
    """
    rng = np.random.default_rng(seed)
    of_node, of_collective = (
        _factors(rng, sigma, count) for count in (problem.num_nodes, len(problem.collectives))
    )
    of_compute, of_network = _factors(rng, sigma, 2) if correlated else (1.0, 1.0)
    return Scenario(
        of_node=of_node, of_collective=of_collective, of_compute=of_compute, of_network=of_network
    )


def scenarios(problem: Problem, options: ScenarioOptions, seed: int) -> tuple[Scenario, ...]:
    """Return ``options.count`` scenarios; the first of more are those of fewer."""
    return tuple(sampled(problem, options.noise, (seed, k)) for k in range(options.count))


def _factors(rng: np.random.Generator, sigma: float, count: int) -> tuple[float, ...]:
    return tuple(np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2).tolist())


class Replay:
    """A schedule that runs with other durations, on the machine of ``simulate``, contention
    included.
    """

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self._problem = problem
        alone = simulate(with_contention(problem, None), schedule)
        launched = {transfer.start_step: k for k, transfer in enumerate(alone.transfers)}
        waited = {transfer.wait_step: k for k, transfer in enumerate(alone.transfers)}
        self._steps = [
            (
                step.index if step.kind is StepKind.NODE else -1,
                alone.end_ticks[k] - alone.begin_ticks[k],
                launched.get(k, -1),
                waited.get(k, -1),
            )
            for k, step in enumerate(schedule.steps)
        ]
        prices = [
            problem.keys[problem.collectives[t.members[0]].key].price for t in alone.transfers
        ]
        self._transfers = [
            (_weights(problem, t.members), t.stream, t.end_ticks - t.begin_ticks, price(0))
            for t, price in zip(alone.transfers, prices, strict=True)
        ]

    def step_time_ticks(self, scenario: Scenario) -> int:
        """Return the step time where durations are those of ``scenario``, each rounded to ticks."""
        clock = clock_of(self._problem)
        for node, ticks, launches, waits in self._steps:
            if waits >= 0:
                clock.wait(waits)
                continue
            clock.run(
                round(ticks * scenario.of_compute * (scenario.of_node[node] if node >= 0 else 1.0))
            )
            if launches >= 0:
                weights, stream, ticks, latency = self._transfers[launches]
                factor = scenario.of_network * sum(
                    weight * scenario.of_collective[c] for c, weight in weights
                )
                length = round(ticks * factor)
                clock.launch(stream, length, min(round(latency * factor), length))
        return clock.finish()


def _weights(problem: Problem, members: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Return each of ``members`` with its share of their bytes."""
    sizes = [problem.collectives[c].size_bytes for c in members]
    total = sum(sizes)
    return tuple(
        (c, size / total if total else 1 / len(members))
        for c, size in zip(members, sizes, strict=True)
    )


def priced_as(problem: Problem, scenario: Scenario) -> Problem:
    """Return ``problem`` with the costs of ``scenario``, to be solved: a key's curve by the mean of
    its collectives' factors, by bytes.
    """
    factors = []
    for k in range(len(problem.keys)):
        of_key = [
            (c.size_bytes, scenario.of_collective[i])
            for i, c in enumerate(problem.collectives)
            if c.key == k
        ]
        total = sum(size for size, _ in of_key)
        factors.append(
            scenario.of_network
            * (sum(size * factor for size, factor in of_key) / total if total else 1.0)
        )
    durations = [
        d * scenario.of_compute * f
        for d, f in zip(problem.duration_ticks, scenario.of_node, strict=True)
    ]
    return _repriced(problem, durations, factors)


def with_slower_network(problem: Problem, factor: float) -> Problem:
    """Return ``problem`` with every transfer longer by ``factor``: a schedule of it prefetches
    earlier.
    """
    return _repriced(problem, problem.duration_ticks, [factor] * len(problem.keys))


def _repriced(problem: Problem, durations: Sequence[float], factors: Sequence[float]) -> Problem:
    keys = tuple(
        replace(key, price=_scaled(key.price, factor))
        for key, factor in zip(problem.keys, factors, strict=True)
    )
    return replace(
        problem,
        duration_ticks=tuple(round(d) for d in durations),
        keys=keys,
    )


def _scaled(price: PriceCurve, factor: float) -> PriceCurve:
    exact = Fraction(factor)
    return PriceCurve(
        size_bytes=price.size_bytes, price_ticks=tuple(round(p * exact) for p in price.price_ticks)
    )
