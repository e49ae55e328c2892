"""Prices between and beyond the points, rounding, sampling, and what is refused."""

import math
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apsched.costs.price_curve import PriceCurve, _without_collinear, sample_curve
from apsched.errors import InputError
from apsched.units import us_to_ticks


def curve(*points: tuple[int, int]) -> PriceCurve:
    return PriceCurve(
        size_bytes=tuple(size for size, _ in points),
        price_ticks=tuple(price for _, price in points),
    )


def test_at_its_points_the_price_is_the_points() -> None:
    c = curve((0, 5), (10, 7), (100, 70))
    assert [c(size) for size in (0, 10, 100)] == [5, 7, 70]


def test_between_points_it_is_the_line_rounded_up() -> None:
    # 0..10 rises by 2: 1 byte is 0.2 -> 6; 5 bytes is 1.0 -> 6; 6 bytes is 1.2 -> 7
    c = curve((0, 5), (10, 7), (100, 70))
    assert [c(size) for size in (1, 5, 6, 9)] == [6, 6, 7, 7]
    # 10..100 rises by 63: 0.7 a byte
    assert [c(size) for size in (11, 20, 99)] == [8, 14, 70]


def test_beyond_the_last_point_the_last_slope_goes_on() -> None:
    c = curve((0, 5), (10, 7), (100, 70))
    assert c(200) == 140
    assert c(101) == 71


@pytest.mark.parametrize(
    ("sizes", "prices", "message"),
    [
        (
            (0,),
            (1,),
            (
                "a price curve needs at least two points, the first at 0 bytes; found 1 sizes and 1"
                " prices"
            ),
        ),
        (
            (0, 1),
            (1,),
            (
                "a price curve needs at least two points, the first at 0 bytes; found 2 sizes and 1"
                " prices"
            ),
        ),
        (
            (1, 2),
            (1, 2),
            (
                "a price curve needs at least two points, the first at 0 bytes; found 2 sizes and 2"
                " prices"
            ),
        ),
        ((0, 2, 2), (1, 2, 3), "the sizes of a price curve must increase"),
        (
            (0, 1),
            (2, 1),
            "the prices of a price curve must be non-negative and must not decrease with size",
        ),
        (
            (0, 1),
            (-1, 1),
            "the prices of a price curve must be non-negative and must not decrease with size",
        ),
    ],
)
def test_what_is_no_curve_is_refused(
    sizes: tuple[int, ...], prices: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InputError) as error:
        PriceCurve(size_bytes=sizes, price_ticks=prices)
    assert str(error.value) == message


def _curves() -> st.SearchStrategy[PriceCurve]:
    step = st.tuples(st.integers(1, 10**9), st.integers(0, 10**9))
    return st.builds(_accumulate, st.integers(0, 10**6), st.lists(step, min_size=1, max_size=5))


def _accumulate(latency: int, steps: list[tuple[int, int]]) -> PriceCurve:
    points = [(0, latency)]
    for run, rise in steps:
        points.append((points[-1][0] + run, points[-1][1] + rise))
    return curve(*points)


@given(_curves(), st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_bytes_never_cost_less(c: PriceCurve, a: int, b: int) -> None:
    assert c(min(a, b)) <= c(max(a, b))


@given(_curves(), st.integers(0, 10**10))
def test_the_price_is_the_exact_line_rounded_up(c: PriceCurve, size: int) -> None:
    """Against fractions, however large the numbers."""
    segments = list(
        zip(c.size_bytes, c.size_bytes[1:], c.price_ticks, c.price_ticks[1:], strict=False)
    )
    x0, x1, y0, y1 = next((s for s in segments if s[0] <= size < s[1]), segments[-1])
    assert c(size) == math.ceil(y0 + Fraction(size - x0) * (y1 - y0) / (x1 - x0))


@pytest.mark.parametrize(
    "price_us", [lambda n: 5 + n / 450_000, lambda n: 12.5 + 3 * math.sqrt(n) / 1000, lambda n: 7.0]
)
def test_a_sampled_curve_is_within_a_tick_of_its_source_at_the_samples(price_us) -> None:
    c = sample_curve(price_us)
    for exponent in range(9, 41):
        assert abs(c(2**exponent) - us_to_ticks(price_us(2**exponent))) <= 1


def test_a_line_needs_few_points_and_a_kink_is_kept() -> None:
    """Latency and bandwidth with one change of protocol at 1 MiB: a handful of points out of 126,
    none lost at the kink.
    """
    assert len(sample_curve(lambda n: 10 + n / 100_000).size_bytes) == 2
    kink = sample_curve(
        lambda n: 10 + n / 10_000 if n <= 2**20 else 10 + 2**20 / 10_000 + (n - 2**20) / 100_000
    )
    assert 2**20 in kink.size_bytes
    assert len(kink.size_bytes) <= 4


def test_a_size_that_was_measured_keeps_its_price() -> None:
    """A step between two sizes of the grid, which a line would smear over both."""
    measured = {40_000: 100.0, 49_152: 101.0, 50_000: 400.0}

    def price_us(size: int) -> float:
        return next((us for at, us in measured.items() if size <= at), 400.0)

    assert sample_curve(price_us)(49_152) > 190_000
    c = sample_curve(price_us, measured)
    assert [c(size) for size in measured] == [100_000, 101_000, 400_000]


def test_a_price_that_falls_with_size_is_lifted_to_the_largest_before_it() -> None:
    c = sample_curve(lambda n: 20 if n <= 4096 else 10)
    assert c(4096) == 20_000
    assert c(2**30) == 20_000


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.floats(0, 100), st.floats(1e-6, 1e-2)
)
@settings(max_examples=30)
def test_sampling_never_decreases_and_stays_within_a_tick(
    jumps: list[float], latency: float, slope: float
) -> None:
    """Steps at powers of two, of any height, on a slope: what dropping points loses is at most a
    tick.
    """

    def price_us(size: int) -> float:
        return (
            latency
            + slope * size
            + sum(jump for k, jump in enumerate(jumps) if size >= 2 ** (12 + 3 * k))
        )

    c = sample_curve(price_us)
    for step in range(36, 161):
        size = round(2 ** (step / 4))
        assert abs(c(size) - us_to_ticks(price_us(size))) <= 1


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=30))
def test_the_points_that_are_left_out_are_those_that_a_line_hits(steps) -> None:
    """Each line reaches as far as all points before its end are within one tick of it."""
    sizes, prices = ([0, *accumulate(each)] for each in zip(*steps, strict=True))
    kept, _ = _without_collinear(sizes, prices)
    lines, first = [0], 0
    while first < len(sizes) - 1:
        last = first + 1
        while last + 1 < len(sizes) and is_near(sizes, prices, first, last + 1):
            last += 1
        lines.append(first := last)
    assert kept == tuple(sizes[k] for k in lines)


def is_near(sizes: list[int], prices: list[int], first: int, last: int) -> bool:
    slope = Fraction(prices[last] - prices[first], sizes[last] - sizes[first])
    between = range(first + 1, last)
    return all(
        abs(prices[k] - prices[first] - (sizes[k] - sizes[first]) * slope) <= 1 for k in between
    )
