"""Quantities as people type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apsched.errors import InputError
from apsched.quantities import (
    MemoryCap,
    exact_bytes,
    parse_bytes,
    parse_count,
    parse_group_ranks,
    parse_memory_cap,
    parse_number,
    parse_optional_bytes,
    parse_optional_count,
    parse_share,
    show_bytes,
    show_gap,
    show_us,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("500MB", 500_000_000),
        ("60GiB", 60 * 2**30),
        ("60 gib", 60 * 2**30),
        ("1.5KiB", 1536),
        (".5 kB", 500),
        ("0.3B", 0),
        ("2TiB", 2**41),
        (" 7b ", 7),
    ],
)
def test_bytes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0"), (7, "7"), (100_000_000, "100MB"), (2**30, "1GiB"), (5000, "5kB"), (1536, "1536")],
)
def test_exact_bytes_are_short_and_read_back(size_bytes: int, text: str) -> None:
    assert exact_bytes(size_bytes) == text
    assert parse_bytes(text) == size_bytes


@given(st.integers(0, 2**40), st.sampled_from(["", "B"]))
def test_whole_bytes_are_exact(size_bytes: int, unit: str) -> None:
    """No float comes between the text and the number."""
    assert parse_bytes(f"{size_bytes}{unit}") == size_bytes


@given(st.decimals(0, 1000, places=3))
def test_caps_round_down(size: object) -> None:
    """A cap never grows by being read."""
    assert parse_bytes(f"{size}KiB") <= float(str(size)) * 1024 < parse_bytes(f"{size}KiB") + 1.001


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "1e9",
        "5 parsecs",
        "1.2.3MB",
        "0x10",
        "1,000",
        "inf",
        "99999999999TiB",
        "١٢",
    ],
)
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(InputError, match=r"--bucket-cap: expected .*found"):
        parse_bytes(text, "--bucket-cap")


@pytest.mark.parametrize(("text", "advice"), [("5.5", "5.5GiB"), (".5", ".5GiB")])
def test_a_part_of_a_byte_lacks_its_unit(text: str, advice: str) -> None:
    match = f"--bucket-cap: expected whole bytes.*found '{text}'; add the unit, such as {advice}"
    with pytest.raises(InputError, match=match):
        parse_bytes(text, "--bucket-cap")
    with pytest.raises(InputError, match="--memory-cap: expected whole bytes"):
        parse_memory_cap(f"floor+{text}")
    assert parse_bytes("5.0") == 5


def test_none_lifts_a_cap() -> None:
    assert parse_optional_bytes("none") is None
    assert parse_optional_bytes("None ") is None
    assert parse_optional_bytes("1kB") == 1000
    assert parse_optional_count("none") is None
    assert parse_optional_count("12") == 12


@pytest.mark.parametrize(
    ("text", "cap"),
    [
        ("none", MemoryCap()),
        ("60GiB", MemoryCap(size_bytes=60 * 2**30)),
        ("12345", MemoryCap(size_bytes=12345)),
        ("floor", MemoryCap(size_bytes=0, above_floor=True)),
        ("Floor + 2GiB", MemoryCap(size_bytes=2 * 2**30, above_floor=True)),
    ],
)
def test_memory_cap(text: str, cap: MemoryCap) -> None:
    assert parse_memory_cap(text) == cap


@pytest.mark.parametrize(
    "text", ["", "floor+", "floor-1GiB", "ceiling", "floor*2", "-1GiB", "12 apples", "2GiB+floor"]
)
def test_what_is_no_memory_cap(text: str) -> None:
    with pytest.raises(InputError, match="--memory-cap: expected"):
        parse_memory_cap(text)


@pytest.mark.parametrize(
    ("text", "share"), [("0.1%", 0.001), ("0.001", 0.001), ("0", 0.0), ("100 %", 1.0), ("1", 1.0)]
)
def test_share(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share, abs=1e-15)


@pytest.mark.parametrize("text", ["", "%", "101%", "-1%", "2", "nan", "a lot", "inf%"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(InputError, match=r"--time-slack: expected a share between 0 and 1"):
        parse_share(text, "--time-slack")


@pytest.mark.parametrize("text", ["", "-1", "1.5", "ten", "1e3", "2147483648", "+1"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(InputError, match="--seed: expected a whole number from 0 to 2147483647"):
        parse_count(text, "--seed")


def test_least_count() -> None:
    assert parse_count("1", least=1) == 1
    with pytest.raises(InputError, match="from 1 to"):
        parse_count("0", least=1)


@pytest.mark.parametrize("text", ["", "-0.5", "nan", "inf", "x"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(InputError, match="--budget: expected a finite number >= 0"):
        parse_number(text, "--budget")
    assert parse_number("2.5") == 2.5


def test_quantities_for_people() -> None:
    assert show_bytes(None) == "none"
    assert show_bytes(511) == "511 B"
    assert show_bytes(1536) == "1.50 KiB"
    assert show_bytes(64 * 2**30) == "64.00 GiB"
    assert show_us(12.5) == "12.50 µs"
    assert show_us(1_234_567.8) == "1,234.568 ms"


@pytest.mark.parametrize(
    ("text", "name", "ranks"),
    [
        ("dp=0-3", "dp", (0, 1, 2, 3)),
        ("tp=0,8,16", "tp", (0, 8, 16)),
        ("0=0-16:8", "0", (0, 8, 16)),
        ("a=b=7, 9-10", "a=b", (7, 9, 10)),
    ],
)
def test_process_ranks_of_a_group(text: str, name: str, ranks: tuple[int, ...]) -> None:
    assert parse_group_ranks(text) == (name, ranks)


@pytest.mark.parametrize(
    "text", ["", "dp", "dp=", "=0", "dp=3-1", "dp=0,0", "dp=-1", "dp=0-9999999"]
)
def test_what_are_no_process_ranks(text: str) -> None:
    with pytest.raises(InputError, match=r"--group-ranks: expected .*found"):
        parse_group_ranks(text)


def test_a_gap_is_not_shown_as_none() -> None:
    assert show_gap(0.0) == "0.000 %"
    assert show_gap(4e-6) == "< 0.001 %"
    assert show_gap(6e-6) == "0.001 %"
    assert show_gap(0.0123456) == "1.235 %"
