"""The summary that ``solve`` prints first, and the account of the device's memory."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from apsched.cli.output import refuse_infeasible
from apsched.config import Caps
from apsched.errors import InfeasibleError
from apsched.pipeline.device_memory import BesideGraph, MemoryAccount, account_json
from apsched.pipeline.rate import StepRate
from apsched.pipeline.result import Result, result_of
from apsched.quantities import show_bytes
from apsched.report.answer.account import account_table, memory_hint
from apsched.report.answer.first import best_baseline, first_lines
from apsched.report.answer.whole_step import choice_of_less_memory
from apsched.report.console import console
from apsched.report.summary import print_table
from apsched.schedule.result import AS_CAPTURED, TradeOff
from apsched.solver import solve
from apsched.whole_step.choices import Choice
from tests.helpers.problems.by_hand import ByHand, line

GIB = 2**30


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def _solved(caps: Caps) -> Result:
    """Three gathers of small parameters, each before its compute: buckets pay."""
    b = ByHand(prices={"all_gather": line(1_000)}, bucket_launch_ticks=1_000)
    x = b.input("x", 512)
    for k in range(3):
        start = b.start("all_gather", f"layers.{k}.ag", b.input(f"w{k}", 512), 512, 1024)
        x = b.compute(f"y{k}", 20_000, x, b.wait(f"g{k}", start), size=512)
    problem = b.output(x)
    return result_of(problem, caps, solve(problem, caps), cluster="h100", seconds={})


@pytest.fixture(scope="module")
def fits() -> Result:
    return _solved(Caps())


@pytest.fixture(scope="module")
def short() -> Result:
    return _solved(Caps(memory_cap_bytes=1024))


def _account(
    device_bytes: int, parameter_bytes: int = 0, memory_bytes_per_us: float = 0.0
) -> MemoryAccount:
    beside = BesideGraph(
        device_bytes=device_bytes,
        context_bytes=0,
        num_communicators=0,
        communicator_bytes=0,
        parameter_bytes=parameter_bytes,
        bf16_parameter_bytes=parameter_bytes // 2,
        other_parameter_bytes=0,
        memory_bytes_per_us=memory_bytes_per_us,
    )
    return MemoryAccount(beside=beside, reserve=0.0)


def test_the_first_line_has_the_whole_step_and_the_best_baseline_is_not_as_captured(fits) -> None:
    text = "\n".join(first_lines([fits, fits], None))
    total_us = 2 * fits.step_time_us
    assert f": {total_us:.2f} µs = {total_us / 2:.2f} µs + {total_us / 2:.2f} µs" in text
    found = best_baseline(fits)
    assert found is not None
    name, baseline_us = found
    assert name != AS_CAPTURED
    others = [b for b in fits.answer.baselines if b.fits and b.name != AS_CAPTURED]
    assert baseline_us == pytest.approx(min(b.step_time_ticks for b in others) / 1000)
    assert f"as fast as the best baseline that fits: {name}, {2 * baseline_us:.2f} µs" in text


def test_each_graph_is_compared_with_its_own_best_baseline(fits) -> None:
    """A baseline that is best for one graph need not fit the other."""
    captured = next(b for b in fits.answer.baselines if b.name == AS_CAPTURED)
    only_captured = replace(fits, answer=replace(fits.answer, baselines=(captured,)))
    found = best_baseline(fits)
    assert found is not None
    name, baseline_us = found
    total_us = baseline_us + captured.step_time_ticks / 1000
    text = " ".join("\n".join(first_lines([fits, only_captured], None)).split())
    graph = fits.problem.name
    expected = f"the best baselines that fit: {graph} {name}, {graph} {AS_CAPTURED}"
    assert f"{expected}, {total_us:.2f} µs" in text


def test_as_captured_counts_where_no_other_baseline_fits(fits) -> None:
    baselines = tuple(
        b if b.name == AS_CAPTURED else replace(b, violations=("too large",))
        for b in fits.answer.baselines
    )
    alone = replace(fits, answer=replace(fits.answer, baselines=baselines))
    assert (best_baseline(alone) or ("",))[0] == AS_CAPTURED
    none = replace(fits, answer=replace(fits.answer, baselines=()))
    assert best_baseline(none) is None
    planned = replace(none, problem=replace(none.problem, rules=("rule 1",)))
    assert "no baseline fits the caps" in first_lines([none], None)
    assert "no baseline fits the caps in every graph" in first_lines([none, fits], None)
    assert "no baseline fits the caps and the plan" in first_lines([planned], None)
    assert "no baseline fits the caps and the plan in every graph" in first_lines(
        [none, planned], None
    )


def test_a_step_as_fast_as_the_best_baseline_is_not_faster_by_nothing(fits) -> None:
    assert fits.best is not None
    equal = replace(fits, answer=replace(fits.answer, baselines=(replace(fits.best, name="own"),)))
    text = "\n".join(first_lines([equal], None))
    assert "as fast as the best baseline that fits: own" in text
    assert "0.00 %" not in text.split("(gap")[1].splitlines()[1]


def test_the_floor_is_a_hint_where_it_needs_less(fits) -> None:
    """Once for all graphs; not for kept parameters, whose step has another floor."""
    floor, peak = fits.answer.floor_memory_bytes, fits.best.peak_memory_bytes
    assert floor < 0.9 * peak
    text = "\n".join(first_lines([fits, fits], None))
    assert text.count("are enough, slower: --memory-cap floor") == 1
    assert "--memory-cap floor" not in "\n".join(first_lines([fits, fits], None, keeps=True))
    there = replace(fits, answer=replace(fits.answer, floor_memory_bytes=peak))
    assert "--memory-cap floor" not in "\n".join(first_lines([fits, there], None))


def test_tokens_and_mfu_are_those_of_the_whole_step(fits) -> None:
    step_us = 2 * fits.step_time_us
    rate = StepRate(num_samples=8000, num_ranks=4, model_us=step_us / 4)
    per_rank = 8000 / step_us * 1e6 / 4
    (found,) = [text for text in first_lines([fits, fits], rate) if "tokens/s" in text]
    assert found.startswith(f"{per_rank:,.0f} tokens/s a process rank")
    assert found.endswith("on all 4; MFU 25.0 %")


def test_a_step_has_its_optimizer_and_a_graph_alone_has_none(fits) -> None:
    """AdamW on 7000 bytes: 21,000 of parameters and gradients, 28,000 of its state; 100 a µs."""
    known = replace(fits, account=_account(3 * GIB, parameter_bytes=7000, memory_bytes_per_us=100))
    step_us = 2 * fits.step_time_us
    rate = StepRate(num_samples=8000, num_ranks=4, model_us=step_us / 4)
    lines = first_lines([known, known], rate)
    assert f"with the optimizer (adamw, 490.00 µs): {step_us + 490:.2f} µs" in lines
    per_rank = 8000 / (step_us + 490) * 1e6 / 4
    assert any(line.startswith(f"{per_rank:,.0f} tokens/s a process rank") for line in lines)
    assert not any("optimizer" in line for line in first_lines([known], None))
    without = replace(known, account=replace(known.account, optimizer="none"))
    assert not any("optimizer" in line for line in first_lines([without, without], rate))


def test_what_is_left_of_the_device_is_named(fits) -> None:
    peak = fits.best.peak_memory_bytes
    known = replace(fits, account=_account(peak + 3 * GIB))
    assert any("3.00 GiB of the device (3.00 GiB) left" in t for t in first_lines([known], None))
    less = replace(fits, account=_account(peak + GIB))
    less = replace(less, problem=replace(less.problem, name="other"))
    for first, second, place in ((known, less, " (other)"), (less, known, "")):
        (text,) = [t for t in first_lines([first, second], None) if "left" in t]
        highest = f"{first.problem.name} peaks at {show_bytes(peak)}; "
        left = f"{highest}1.00 GiB of the device (1.00 GiB) left{place}"
        assert text.partition("; memory cap")[0].rstrip(";") == left
    over = replace(fits, account=_account(peak - 512))
    assert any("512 B MORE than the device" in text for text in first_lines([over], None))


def test_a_large_launch_and_a_gap_are_worth_a_try(fits) -> None:
    large = replace(fits, chosen=replace(fits.chosen, bucket_bytes=30 * GIB))
    text = " ".join(line.strip() for line in first_lines([large], None))
    assert "one launch has 30.00 GiB" in text
    assert "consider --bucket-cap" in text
    loose = replace(fits, answer=replace(fits.answer, bound_ticks=fits.answer.bound_ticks // 2))
    assert any("--budget may gain up to" in text for text in first_lines([loose], None))


@pytest.mark.parametrize(("slower", "shown"), [(5, True), (50, False)])
def test_the_knee_is_worth_a_try_where_it_is_not_much_slower(fits, slower, shown) -> None:
    fast, peak = fits.best.step_time_ticks, fits.best.peak_memory_bytes
    trade_offs = tuple(
        TradeOff(peak_memory_bytes=share * peak // 100, step_time_ticks=ticks * fast // 100)
        for share, ticks in ((40, 200), (50, 100 + slower), (100, 100))
    )
    found = replace(fits, answer=replace(fits.answer, trade_offs=trade_offs, fastest_ticks=fast))
    assert found.answer.knee == trade_offs[1]
    text = " ".join(line.strip() for line in first_lines([found], None))
    assert (f"{slower}.00 % slower needs" in text) == shown


def test_a_knee_that_is_slower_than_a_baseline_is_had_by_a_cap_and_not_by_a_slack(fits) -> None:
    """No slack makes an answer slower than a baseline that fits."""
    fast, peak = fits.best.step_time_ticks, fits.best.peak_memory_bytes
    trade_offs = tuple(
        TradeOff(peak_memory_bytes=share * peak // 100, step_time_ticks=ticks * fast // 100)
        for share, ticks in ((40, 200), (50, 105), (100, 100))
    )

    def line(baseline_ticks: int, count: int) -> str:
        baselines = (replace(fits.best, name="theirs", step_time_ticks=baseline_ticks),)
        answer = replace(
            fits.answer, trade_offs=trade_offs, fastest_ticks=fast, baselines=baselines
        )
        found = [replace(fits, answer=answer)] * count
        return " ".join(text.strip() for text in first_lines(found, None))

    slower, size = trade_offs[1].step_time_ticks, trade_offs[1].peak_memory_bytes
    assert ": --time-slack 5." in line(slower, 1)
    assert f"5.00 % slower needs {show_bytes(size)}: --memory-cap {size}" in line(slower - 1, 1)
    assert "% (of every graph)" in line(slower, 2)
    of_two = line(slower - 1, 2)
    assert "5.00 % slower needs" in of_two
    assert "--time-slack" not in of_two
    assert f"--memory-cap {size}" not in of_two


def test_no_line_is_wider_than_80_columns(fits) -> None:
    named = replace(fits, account=_account(80 * GIB, 10 * GIB))
    assert all(len(text) <= 80 for text in first_lines([named] * 4, None))


def test_a_table_of_80_columns_has_every_name_in_full(fits, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")  # 80 columns, without colours
    stream = Terminal()
    print_table([fits], stream)
    for baseline in fits.answer.baselines:
        assert f" {baseline.name} " in stream.getvalue()
    assert "…" not in stream.getvalue()
    assert all(len(text.rstrip()) <= 80 for text in stream.getvalue().splitlines())


def test_the_account_adds_up(fits) -> None:
    known = replace(fits, account=_account(10 * GIB, GIB))
    found = account_json(known.account)
    assert found["left_bytes"] == found["device_bytes"] - sum(x["bytes"] for x in found["beside"])
    stream = io.StringIO()
    console(stream).print(account_table([known, known]))
    printed = " ".join(stream.getvalue().split())
    assert "- optimizer state (adamw) 2.00 GiB 2.00 GiB" in printed
    assert "= left for the graph 8.00 GiB 8.00 GiB" in printed
    assert account_table([fits]) is None


def test_what_is_missing_and_what_would_fit_are_named(short) -> None:
    need = short.answer.floor_memory_bytes
    known = replace(short, account=_account(need, (need - 1024) // 2))
    known = replace(known, caps=Caps(memory_cap_bytes=known.account.left_bytes))
    (text,) = memory_hint([known])
    assert f"h100 has {need / 1024:.2f} KiB, of which 1.00 KiB is left for the graph" in text
    assert "--optimizer none" in text
    assert "--optimizer adamw," not in text
    assert re.search(r"--cluster \S+ \(or .*h200", text)
    assert "cpu" not in text
    with pytest.raises(InfeasibleError, match="these fit: --optimizer none"):
        refuse_infeasible([known], source="s", cluster="h100", stdout=io.StringIO(), as_json=False)


def test_a_stated_memory_cap_needs_no_hint(short) -> None:
    assert memory_hint([replace(short, account=_account(80 * GIB))]) == []


def test_the_step_has_its_own_bound_and_suggestion(fits: Result) -> None:
    ticks = fits.best.step_time_ticks
    text = " ".join(
        line.strip() for line in first_lines([fits], None, bound_us=ticks / 4000, suggestion="this")
    )
    assert "(gap 75.00 %)" in text
    assert "try next: this" in text
    assert "try next: this" not in " ".join(first_lines([fits], None))


def test_a_choice_of_less_memory_is_suggested_with_its_price() -> None:
    def suggestion(step_ticks: int, peak_bytes: int, *kept: str) -> str:
        best, other = (
            SimpleNamespace(step_ticks=ticks, peak_bytes=size, kept=Choice(names))
            for ticks, size, names in (
                (1000, 100 * GIB, ["a", "b"]),
                (step_ticks, peak_bytes, kept),
            )
        )
        return choice_of_less_memory(SimpleNamespace(best=best, frontier=(other, best)))

    assert suggestion(1020, 90 * GIB) == (
        "2.00 % slower needs 90.00 GiB with no parameter kept: --keep none"
    )
    assert suggestion(1005, GIB + 1, "a", "b @node") == (
        "0.50 % slower needs 1.00 GiB with 1 kept, 1 in node: --memory-cap 1025MiB"
    )
    assert suggestion(1021, GIB) == "", "too slow"
    assert suggestion(1005, 91 * GIB) == "", "too little gain"


def test_the_choice_of_less_memory_is_the_fastest_of_those_with_about_the_least() -> None:
    """A hundredth more than the least is about the least."""
    figures = [
        (1009, 25_000, []),
        (1005, 25_250, ["a"]),
        (1002, 25_251, ["a", "b"]),
        (1000, 30_000, []),
    ]
    choices = [
        SimpleNamespace(step_ticks=ticks, peak_bytes=size * 2**20, kept=Choice(names))
        for ticks, size, names in figures
    ]
    text = choice_of_less_memory(SimpleNamespace(best=choices[-1], frontier=tuple(choices)))
    assert text == "0.50 % slower needs 24.66 GiB with 1 kept: --memory-cap 25250MiB"


def test_the_row_of_the_answer_has_its_name_where_it_is_the_schedule_of_a_baseline(fits) -> None:
    assert fits.best is not None
    equal = replace(fits, answer=replace(fits.answer, best=replace(fits.best, name="greedy_bytes")))
    out = io.StringIO()
    print_table([equal], out)
    assert out.getvalue().count("greedy_bytes ") == 1
    assert out.getvalue().count("apsched") == 1
