"""The survey of other people's graphs: what it counts, that other bits are seen, and that a case
that hangs or dies is one row.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.intake import execution, page, stored
from benchmarks.intake.__main__ import main
from benchmarks.intake.case import EQUAL, EXACT, TAKEN, Case, CaseOutcome, GraphOutcome, joined
from benchmarks.intake.isolation import outcomes

ROOT = Path(__file__).parents[2]


def graph(**changes: object) -> GraphOutcome:
    taken = {
        "name": "forward",
        "num_nodes": 9,
        "torch": TAKEN,
        "apsched": TAKEN,
        "launches": 5,
        "launches_after": 2,
        "bits": EQUAL,
        "round_trip": EXACT,
    }
    return GraphOutcome(**taken | changes)


def case(*graphs: GraphOutcome, **changes: object) -> CaseOutcome:
    return CaseOutcome(
        **{"name": "one", "group": "some", "graphs": graphs, "seconds": 1.0} | changes
    )


REFUSED = {"apsched": "InputError: no", "launches_after": 0, "bits": "", "round_trip": ""}


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (graph(), []),
        (graph(**REFUSED), ["one forward: refused: InputError: no"]),
        (graph(torch="AssertionError: x", **REFUSED), []),
        (graph(torch="AssertionError: x"), []),
        (graph(bits="1 of 2 outputs differ"), ["one forward: 1 of 2 outputs differ"]),
        (graph(bits="rewritten graph fails: x"), ["one forward: rewritten graph fails: x"]),
        (graph(bits="not run: x"), []),
        (graph(round_trip="differs"), ["one forward: differs"]),
    ],
)
def test_what_must_not_be_is_listed(found, wrong):
    assert page.failures([case(found)]) == wrong


def test_totals_count_graphs_and_cases_that_gave_none():
    found = [
        case(graph(), graph(**REFUSED)),
        case(graph(torch="E: x", bits="not run: y"), name="two"),
        case(name="three", group="other", not_traced="E: z"),
    ]
    rows = {row[0]: dict(zip(page.headings(), row, strict=True)) for row in page.totals(found)}
    some = {"cases": "2", "not traced": "0", "graphs": "3", "torch": "2", "apsched": "2"}
    some |= {"torch alone": "1", "equal bits": "1", "other bits": "0", "not run": "1", "exact": "2"}
    assert rows["some"] == {"group": "some", **some}
    assert rows["other"]["not traced"] == "1"
    assert rows["other"]["graphs"] == "0"
    assert rows["all"] == {"group": "all", **some, "cases": "3", "not traced": "1"}
    text = page.markdown(found, "about")
    assert "| some | one | forward | taken | InputError: no | 5 |  |  |  | 1.0 |" in text
    assert "| other | three | E: z |" in text


def test_other_bits_are_seen():
    x, y = torch.ones(4), torch.ones(4)
    before = make_fx(lambda x, y: x * y + 1)(x, y)
    values = execution.values_for(before, {})
    assert execution.compared(before, make_fx(lambda x, y: y * x + 1)(x, y), values) == EQUAL
    near = make_fx(lambda x, y: x * y + 1.0000001)(x, y)
    assert execution.compared(before, near, values) == "1 of 1 outputs differ, the first is 0"
    writes = make_fx(lambda x, y: x.mul_(y) + 1)(x.clone(), y)
    assert execution.compared(before, writes, values) == "1 of 2 inputs differ, the first is 0"
    fails = make_fx(lambda x, y: x[y.long()])(x, torch.zeros(4))
    found = execution.compared(before, fails, values | {"y_1": torch.full((4,), 9.0)})
    assert found.startswith("rewritten graph fails: IndexError")
    assert execution.compared(fails, before, values | {"y_1": torch.full((4,), 9.0)}).startswith(
        "not run: IndexError"
    )


def test_values_keep_their_strides():
    x = torch.randn(3, 1).expand(3, 4)
    taken = make_fx(lambda x: x + 1)(x)
    (values,) = execution.values_for(taken, {}).values()
    assert values.stride() == x.stride()
    assert execution.compared(taken, taken, {"x_1": x}) == EQUAL


def test_memory_that_is_not_written_is_the_same_each_time():
    filled = make_fx(lambda x: x.new_empty(4) + x)(torch.ones(4))
    (found,), _ = execution.run(filled, {"x_1": torch.ones(4)})
    assert found.isnan().all()


def test_a_value_of_another_shape_is_not_handed_on():
    taken = make_fx(lambda x: x + 1)(torch.ones(4))
    for known, same in (
        (torch.ones(4), True),
        (torch.ones(5), False),
        (torch.ones(4).int(), False),
    ):
        (value,) = execution.values_for(taken, {"x_1": known}).values()
        assert (value is known) == same
        assert value.shape == (4,)


def test_outcomes_are_kept_and_read_back(tmp_path):
    path = tmp_path / "results.json"
    assert stored.read(path) == {}
    found = [case(graph()), case(name="two", not_traced="E: x")]
    stored.write(path, found, "torch 2")
    assert stored.read(path) == {("some", "one"): found[0], ("some", "two"): found[1]}
    for text in ("[]", "{", '{"cases": [{"name": "one"}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected outcomes that --results wrote"):
            stored.read(path)


def test_the_survey_that_is_kept_meets_its_bar():
    (newest,) = sorted((ROOT / "benchmarks/results").glob("*-intake.json"))[-1:]
    found = list(stored.read(newest).values())
    assert page.failures(found) == []
    assert {outcome.group for outcome in found} == {
        "AutoParallel",
        "features",
        "gloo",
        "files",
        "Transformers",
        "TorchTitan",
    }


def test_of_several_processes_what_is_wrong_in_one_counts():
    wrong = graph(bits="1 of 2 outputs differ")
    assert joined([case(graph()), case(wrong, seconds=3.0)]) == case(wrong, seconds=3.0)
    assert joined([case(graph(round_trip="differs")), case(graph())]) == case(
        graph(round_trip="differs")
    )
    died = case(not_traced="the process ended with status 3")
    assert joined([case(graph()), died]).not_traced == died.not_traced


@pytest.mark.alone
def test_processes_of_a_case_are_one_group():
    def summed(one: Case) -> CaseOutcome:
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return case(graph(launches=int(total)))

    (found,) = outcomes(
        [Case(name="one", group="some", build=tuple, processes=2)], summed, timeout_s=60
    )
    assert [one.launches for one in found.graphs] == [2]


@pytest.mark.alone
def test_a_case_that_hangs_or_dies_is_one_row():
    def hangs(one: Case) -> CaseOutcome:
        time.sleep(60)
        raise AssertionError

    def dies(one: Case) -> CaseOutcome:
        os._exit(3)

    one = Case(name="one", group="some", build=tuple)
    (hung,) = outcomes([one], hangs, timeout_s=0.2)
    (died,) = outcomes([one], dies, timeout_s=20)
    assert hung.not_traced == "took more than 0 s"
    assert died.not_traced == "the process ended with status 3"


@pytest.mark.slow
def test_the_survey_runs_a_case_and_writes_its_page(tmp_path):
    command = [sys.executable, "-m", "benchmarks.intake", "--only", "features: (plain|forward al)"]
    ran = subprocess.run(
        [*command, "--page", str(tmp_path / "page.md")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "plain: forward 5 -> " in ran.stdout
    text = (tmp_path / "page.md").read_text()
    assert "| features | 2 | 0 | 3 | 3 | 3 | 0 | 3 | 0 | 0 | 3 |" in text
    assert "Of 3 graphs that torch takes, apsched takes 3." in text


def test_wrong_use_is_told(monkeypatch, capsys):
    monkeypatch.setattr(os, "nice", lambda more: more)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    for only, found in (("(", "is none"), ("nothing like it", "no case matches")):
        assert main(["--only", only]) == 2
        assert found in capsys.readouterr().err
