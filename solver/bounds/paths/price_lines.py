"""Lines below a price curve: the least cost of a bucket, as a latency and a price per byte.

A bucket of S bytes costs at least min over the lines of alpha + rate * S. With a line for each
bucket, its latency is the cost of the bucket and its rate that of each member, for any
other members.
"""

import numpy as np
import numpy.typing as npt

from apsched.costs.price_curve import PriceCurve

Floats = npt.NDArray[np.float64]


def lines_below(price: PriceCurve, smallest: int, largest: int) -> Floats:
    """Return (lines, 2), (W1): alpha >= 0 and rate >= 0 such that price(S) >= min(alpha + rate * S)
    for all S in [smallest, largest].

    Of several families the one that lies highest on average, where sizes count by their logarithm.
    """
    sizes, prices = _points(price, smallest, max(smallest, largest))
    families = [_one_line(sizes, prices, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    families.append(_pieces(sizes, prices))
    at = np.exp(np.linspace(np.log(max(sizes[0], 1.0)), np.log(max(sizes[-1], 1.0)), 33))
    reached = np.maximum(np.interp(at, sizes, prices), 1.0)
    heights = [
        float((_lowest(lines, at) / reached).mean()) if (lines >= 0).all() else -1.0
        for lines in families
    ]
    best: Floats = families[int(np.argmax(heights))] * (1 - 1e-12)
    return best


def _points(price: PriceCurve, smallest: int, largest: int) -> tuple[Floats, Floats]:
    """Return the breakpoints of the curve from ``smallest`` to ``largest``, both included; a price
    that is rounded up is lowered by one.
    """
    inside = [s for s in price.size_bytes if smallest < s < largest]
    sizes = sorted({smallest, *inside, largest})
    prices = [float(price(s)) if s in inside else max(price(s) - 1.0, 0.0) for s in sizes]
    return np.array(sizes, dtype=np.float64), np.maximum.accumulate(np.array(prices))


def _one_line(sizes: Floats, prices: Floats, share: float) -> Floats:
    """Return the line whose latency is ``share`` of the least price, and whose rate is the largest
    that stays below the curve.
    """
    alpha = share * prices[0]
    positive = sizes > 0
    rate = float(((prices[positive] - alpha) / sizes[positive]).min()) if positive.any() else 0.0
    return np.array([[alpha, rate]])


def _pieces(sizes: Floats, prices: Floats) -> Floats:
    """Return the lines of the pieces, without those steeper than one before them: the curve stays
    above that one.
    """
    lines: list[tuple[float, float]] = []
    for x, y, p, q in zip(sizes, sizes[1:], prices, prices[1:], strict=False):
        slope = (q - p) / (y - x)
        if not lines or slope < lines[-1][1]:
            lines.append((p - slope * x, slope))
    return np.array(lines or [(prices[0], 0.0)])


def _lowest(lines: Floats, sizes: Floats) -> Floats:
    lowest: Floats = (lines[:, :1] + lines[:, 1:] * sizes).min(axis=0)
    return lowest
