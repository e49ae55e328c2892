"""Time against bytes as a list of points: how prices of buckets travel without torch and without
floats.

A bucket has sizes that no node of the captured graph has, so its price cannot be a number in the
graph. A curve is sampled once from the cost model, at sizes that depend on no graph (a fixed grid,
and those that were measured), and read by integer interpolation everywhere after: by the solver, by
``simulate`` and by the export of the rewritten graph. So all of them agree to the tick.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from apsched.errors import InputError
from apsched.units import us_to_ticks

_POINTS_PER_OCTAVE = 4
_FIRST_EXPONENT, _LAST_EXPONENT = 9, 40  # 512 B to 1 TiB


def _grid() -> list[int]:
    steps = range(_FIRST_EXPONENT * _POINTS_PER_OCTAVE, _LAST_EXPONENT * _POINTS_PER_OCTAVE + 1)
    return [0, *(round(2 ** (step / _POINTS_PER_OCTAVE)) for step in steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceCurve:
    """Piecewise linear, non-decreasing price in ticks of a number of bytes."""

    size_bytes: tuple[int, ...]
    """Breakpoints, increasing, from 0."""
    price_ticks: tuple[int, ...]
    """Price at each breakpoint."""

    def __post_init__(self) -> None:
        sizes, prices = self.size_bytes, self.price_ticks
        if len(sizes) != len(prices) or len(sizes) < 2 or sizes[0] != 0:
            raise InputError(
                f"a price curve needs at least two points, the first at 0 bytes; found {len(sizes)}"
                f" sizes and {len(prices)} prices"
            )
        if any(a >= b for a, b in pairwise(sizes)):
            raise InputError("the sizes of a price curve must increase")
        if prices[0] < 0 or any(a > b for a, b in pairwise(prices)):
            raise InputError(
                "the prices of a price curve must be non-negative and must not decrease with size"
            )

    def __call__(self, size_bytes: int) -> int:
        """Return the price of ``size_bytes`` in ticks, rounded up; beyond the last point the last
        slope continues.
        """
        sizes, prices = self.size_bytes, self.price_ticks
        k = min(max(bisect_right(sizes, size_bytes) - 1, 0), len(sizes) - 2)
        rise, run = prices[k + 1] - prices[k], sizes[k + 1] - sizes[k]
        return prices[k] - (-(size_bytes - sizes[k]) * rise // run)


def sample_curve(
    price_us: Callable[[int], float], measured_bytes: Iterable[int] = ()
) -> PriceCurve:
    """Return the curve of ``price_us`` (bytes -> microseconds) on the fixed grid and at
    ``measured_bytes``, without the points that a line replaces.

    A size that was measured keeps its price, to the tick.

    A cost that falls with size is lifted to the largest before it, since a smaller message can
    always be padded.
    """
    sizes = sorted({*_grid(), *measured_bytes})
    prices: list[int] = []
    for size in sizes:
        ticks = us_to_ticks(price_us(size))
        prices.append(max(ticks, prices[-1]) if prices else ticks)
    return PriceCurve(
        **dict(zip(("size_bytes", "price_ticks"), _without_collinear(sizes, prices), strict=True))
    )


def _without_collinear(
    sizes: list[int], prices: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Drop points that the line between their kept neighbours hits within one tick."""
    kept = [0]
    while kept[-1] < len(sizes) - 1:
        kept.append(_end_of_line(sizes, prices, kept[-1]))
    return tuple(sizes[k] for k in kept), tuple(prices[k] for k in kept)


def _end_of_line(sizes: list[int], prices: list[int], first: int) -> int:
    """Return the last point up to which lines from ``first`` to each point hit all points between
    within one tick: the slopes that do so, as a (rise, run) at least and at most, narrow.
    """
    last = first + 1
    least, most = (-1, 0), (1, 0)
    while last + 1 < len(sizes):
        rise, run = prices[last] - prices[first], sizes[last] - sizes[first]
        if (rise - 1) * least[1] > least[0] * run:
            least = rise - 1, run
        if (rise + 1) * most[1] < most[0] * run:
            most = rise + 1, run
        rise, run = prices[last + 1] - prices[first], sizes[last + 1] - sizes[first]
        if rise * least[1] < least[0] * run or rise * most[1] > most[0] * run:
            break
        last += 1
    return last
