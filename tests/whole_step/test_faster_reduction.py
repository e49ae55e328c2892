"""``--reduce auto``: both forms are solved, and the faster one that fits is taken."""

import json

import pytest

from apsched.cli.main import main
from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import loaded
from apsched.pipeline.solve_graph import SolveRequest
from apsched.pipeline.sources import REDUCE_AUTO, SourceRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.whole_step.faster_reduction import FasterReduction, with_faster_reduction

SOURCE = SourceRequest(
    source="llama3-debug",
    mesh="fsdp=64",
    seq_len=64,
    num_micro_batches=2,
    reduce=REDUCE_AUTO,
)
COSTS, QUIET = CostChoice(cluster="h100"), Progress(quiet=True)


def chosen(
    caps: Caps, source: SourceRequest = SOURCE, cap_bytes: int | None = None
) -> FasterReduction | None:
    cap = None if cap_bytes is None else MemoryCap(size_bytes=cap_bytes)
    request = SolveRequest(caps=caps, memory_cap=cap, options=SolveOptions(budget=0.1))
    (found, *_), reduction = with_faster_reduction((source, COSTS, "both"), request, QUIET)
    assert found.reduce == (source.reduce if reduction is None else reduction.reduce)
    return reduction


def test_half_of_the_bytes_are_faster() -> None:
    found = chosen(Caps())
    assert found is not None
    assert found.reduce == "once"
    assert 0 < found.step_us["once"] < found.step_us["each"]


def test_what_fits_is_taken() -> None:
    """With compute as captured all gradients of the first micro-batch wait for the second."""
    found = chosen(Caps(max_compute_move=0), cap_bytes=940_000)
    assert found is not None
    assert found.reduce == "each"
    assert found.step_us["once"] is None
    assert found.note().startswith("reduce: each (once does not fit, each takes ")
    none = chosen(Caps(), cap_bytes=1_000)
    assert none is not None
    assert (none.reduce, [*none.step_us.values()]) == ("once", [None, None])


def test_buckets_of_the_user_count(tmp_path, capsys) -> None:
    command = "solve llama3-debug --mesh fsdp=64 --seq 16 --layers 1 --budget 0 --keep none"
    found = {}
    for reduce in ("auto", "once"):
        out = tmp_path / reduce
        more = f"--micro-batches 2 --reduce {reduce} --buckets none -o {out}"
        assert not main([*command.split(), *more.split()])
        found[reduce] = json.loads((out / "result.json").read_text())
    capsys.readouterr()
    backward = [g for g in found["once"]["graphs"] if not g["name"].startswith("forward")]
    step_us = sum(graph["fastest_us"] for graph in backward)
    assert found["auto"]["reduce"]["step_us"]["once"] == pytest.approx(step_us, rel=1e-3)


def test_a_stated_form_stays() -> None:
    for form in ("once", "each", None):
        source = SourceRequest(source="llama3-debug", num_micro_batches=2, reduce=form)
        assert chosen(Caps(), source) is None


def test_forward_reduces_nothing() -> None:
    request = SolveRequest(options=SolveOptions(budget=0.1))
    (found, *_), reduction = with_faster_reduction((SOURCE, COSTS, "forward"), request, QUIET)
    assert (found.reduce, reduction) == ("once", None)


def test_a_capture_alone_cannot_choose() -> None:
    with (
        pytest.raises(InputError, match=r"--reduce auto solves both forms.*state --reduce once"),
        loaded(SOURCE, COSTS, "both", QUIET),
    ):
        pass


def test_the_result_says_the_choice(tmp_path, capsys) -> None:
    command = "solve llama3-debug --mesh fsdp=2 --seq 16 --layers 1 --budget 0"
    assert not main(
        [*command.split(), "--micro-batches", "2", "--reduce", "auto", "-o", str(tmp_path)]
    )
    capsys.readouterr()
    reduce = json.loads((tmp_path / "result.json").read_text())["reduce"]
    assert reduce["reduce"] in reduce["step_us"]
    assert reduce["step_us"][reduce["reduce"]] == min(reduce["step_us"].values())
