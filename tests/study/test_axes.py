"""``--vary``: what is typed, and what it stands for."""

import re
from pathlib import Path

import pytest

from apsched.errors import InputError
from apsched.quantities import MemoryCap
from apsched.study.axes import AXES, Axis, MemoryAxis, MemoryRange, axis_text, label_of, parse_vary


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seq=2048,8192", ("2048", "8192")),
        ("seq=2048..8192:4", ("2048", "4096", "6144", "8192")),
        ("seq=8..9:3", ("8", "9")),
        ("budget=0..1:3", ("0", "0.5", "1")),
        ("cluster=h100,h200,my.toml", ("h100", "h200", "my.toml")),
        ("max-prefetch=none,30", ("none", "30")),
        ("mesh=fsdp=64,fsdp=128,fsdp=256", ("fsdp=64", "fsdp=128", "fsdp=256")),
        ("mesh=fsdp=8,tp=8", ("fsdp=8,tp=8",)),
        ("mesh=fsdp=64|fsdp=8,tp=8", ("fsdp=64", "fsdp=8,tp=8")),
        ("mesh=fsdp=8,tp=8,fsdp=16,tp=4", ("fsdp=8,tp=8", "fsdp=16,tp=4")),
        ("mesh=replicate=64|fsdp=64", ("replicate=64", "fsdp=64")),
        ("network=1x,2x", ("1x", "2x")),
    ],
)
def test_values(text: str, values: tuple[str, ...]) -> None:
    axes, memory = parse_vary([text])
    assert axes == (Axis(name=text.partition("=")[0].replace("-", "_"), values=values),)
    assert memory is None


def test_values_read_alike_in_tables_and_reports() -> None:
    """Tables begin with the text of an axis, reports with the value that the store has."""
    read = {"bucket_cap": 100_000_000, "in_flight_cap": 2**30, "time_slack": 0.001, "budget": 2.0}
    typed = {"bucket_cap": "0.1GB", "in_flight_cap": "1024MiB", "time_slack": "0.1%", "budget": "2"}
    shown = {"bucket_cap": "100MB", "in_flight_cap": "1GiB", "time_slack": "0.1%", "budget": "2"}
    assert {name: axis_text(name, value) for name, value in read.items()} == shown
    assert {name: label_of(name, text) for name, text in typed.items()} == shown
    assert axis_text("bucket_cap", None) == label_of("bucket_cap", "none") == "none"
    assert axis_text("bitwise", True) == label_of("bitwise", "yes") == "yes"
    assert label_of("mesh", "fsdp=2,tp=2") == "fsdp=2,tp=2"


def test_memory_caps_are_an_axis_of_their_own() -> None:
    axes, memory = parse_vary(
        ["memory_cap=floor..none:20", "memory_cap=40GiB,floor+1GiB", "seq=8", "seq=8,9"]
    )
    assert axes == (Axis(name="seq", values=("8", "9")),)
    whole = MemoryRange(first=MemoryCap(size_bytes=0, above_floor=True), last=MemoryCap(), count=20)
    assert memory == MemoryAxis(
        caps=(
            whole,
            MemoryCap(size_bytes=40 * 2**30),
            MemoryCap(size_bytes=2**30, above_floor=True),
        )
    )
    assert parse_vary(["memory_cap=..:20"])[1] == MemoryAxis(caps=(whole,))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("seq", "NAME=VALUES"),
        ("seq=", "NAME=VALUES"),
        ("memry_cap=1", "did you mean 'memory_cap'"),
        ("seq=1,,2", "between the separators"),
        ("mesh=fsdp=2..8:3", "ranges are for"),
        ("seq=4..8:0", "at least 2 values"),
        ("seq=4..8:1", "at least 2 values, found seq=4..8:1; state one value alone: seq=4"),
        ("memory_cap=floor..none:1", "state one value alone: memory_cap=floor"),
        ("memory_cap=..none:1", "state one value alone: memory_cap=floor"),
        ("seq=4..8:999999", "at most"),
        ("memory_cap=none..60GiB:3", "begins with"),
        ("memory_cap=60GiB..40GiB:3", "rises"),
        ("memory_cap=lots", "expected bytes"),
    ],
)
def test_what_is_wrong_is_said(text: str, word: str) -> None:
    with pytest.raises(InputError, match="--vary") as error:
        parse_vary([text])
    assert word in str(error.value)


def test_the_documentation_names_every_axis() -> None:
    page = Path(__file__).parents[2] / "docs" / "studies.md"
    table = page.read_text().partition("| `--vary` | means |")[2].partition("\n\n")[0]
    assert [axis for axis in AXES if not re.search(rf"`{axis}[`=]", table)] == []
