"""Plan files: what they may say, and what a user hears who said it wrong."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from apsched.errors import InputError
from apsched.problem.plan.apply import check_matches, restricted
from apsched.problem.plan.plan_file import as_plan, load_plan, parse_plan
from apsched.problem.plan.rules import Plan, Rule
from tests.helpers.problems.by_hand_plans import gathers_and_reductions
from tests.helpers.problems.random_plans import named

TOML = r"""
# one gather for each layer, the output by itself, and the norm just in time
[[rule]]
match = 'layers\.(\d+)\..*'
kind = "all_gather"
group = true
by = '\1'
closed = true
prefetch = 2

[[rule]]
match = 'output\.weight'
forbid = true

[[rule]]
match = 'norm\.weight'
direction = "backward"
start = 'layers\.31'
"""
JSON = r"""{"rule": [
 {"match": "layers\\.(\\d+)\\..*", "kind": "all_gather", "group": true, "by": "\\1",
  "closed": true, "prefetch": 2},
 {"match": "output\\.weight", "forbid": true},
 {"match": "norm\\.weight", "direction": "backward", "start": "layers\\.31"}]}"""
RULES = (
    Rule(
        match=r"layers\.(\d+)\..*", kind="all_gather", group=True, by=r"\1", closed=True, prefetch=2
    ),
    Rule(match=r"output\.weight", forbid=True),
    Rule(match=r"norm\.weight", direction="backward", start=r"layers\.31"),
)


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    marked = ("marked.toml", "\ufeff" + TOML), ("marked.json", "\ufeff" + JSON)
    for name, text in (("plan.toml", TOML), ("plan.json", JSON), ("plan", JSON), *marked):
        (tmp_path / name).write_text(text)
        assert load_plan(tmp_path / name) == Plan(RULES)
        assert as_plan(str(tmp_path / name)) == as_plan(Plan(RULES)) == Plan(RULES)
    assert as_plan(None) == Plan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"p: expected rules, each as a table \[\[rule\]\]"),
        ("[[rules]]\nmatch = 'a'", r"p: expected rules, each as a table"),
        ("[[rule]]\nforbid = true", r"p: rule 1: expected match, a regular expression"),
        (
            "[[rule]]\nmatch = 'a'",
            (
                r"p: rule 1: match 'a': nothing: it decides nothing; state forbid, group, pin,"
                r" prefetch, start or keep"
            ),
        ),
        (
            "[[rule]]\nmatch = 'a'\nforbidden = true",
            r"p: rule 1: expected match, kind, .*; found 'forbidden'; did you mean 'forbid'\?",
        ),
        (
            "[[rule]]\nmatch = 'a('\nforbid = true",
            r"p: rule 1: match 'a\(': forbid: expected regular expressions, found missing \)",
        ),
        (
            "[[rule]]\nmatch = 'a'\nforbid = true\ngroup = true",
            r"forbid and group contradict each other",
        ),
        (
            "[[rule]]\nmatch = 'a'\npin = true\nprefetch = 1",
            r"pin and prefetch contradict each other",
        ),
        (
            "[[rule]]\nmatch = 'a'\nstart = 1\nprefetch = 1",
            r"prefetch and start contradict each other",
        ),
        ("[[rule]]\nmatch = 'a'\nforbid = true\nclosed = true", r"closed belongs to group = true"),
        (
            "[[rule]]\nmatch = 'a'\nprefetch = -1",
            r"prefetch: expected a whole number >= 0, found -1",
        ),
        ("[[rule]]\nmatch = 'a'\nkeep = 1", r"keep: expected true or false, found 1"),
        (
            "[[rule]]\nmatch = 'a'\nkeep = true\npin = true\nkind = 'all_gather'",
            r"keep is about the whole step, found pin and kind, too; state two rules",
        ),
        ("[[rule]]\nmatch = 'a'\nforbid = 1", r"forbid: expected true or false, found 1"),
        (
            "[[rule]]\nmatch = 'a'\nforbid = true\nkind = 'gather'",
            r"kind: expected all_gather, reduce_scatter, all_reduce; found 'gather'",
        ),
        (
            "[[rule]]\nmatch = 'a'\nforbid = true\ndirection = 'both'",
            r"direction: expected forward or backward; found 'both'",
        ),
        (
            '[[rule]]\nmatch = "layers\\.0"\nforbid = true',
            r"p: expected TOML, found: .*; regular expressions stand in single quotes",
        ),
        (
            "[[rule]]\nmatch = '.*w0'\ngroup = true\nby = '\\2'",
            r"p: rule 1: .*: by: '\\2' is no template for the groups of match \(invalid group",
        ),
        (
            "[[rule]]\nmatch = '.*w0'\ngroup = true\nby = '\\g<k>'",
            r"p: rule 1: .*: by: '\\g<k>' is no template for the groups of match \(unknown group",
        ),
        ("{", r"p: expected JSON, found an error in line 1"),
        ('{"a\n": 1}', r"line 1, column 4: Invalid control character; correct the file$"),
    ],
)
def test_a_broken_plan_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_plan(text.encode(), "p")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the plan .*none\.toml: No such file"):
        load_plan(tmp_path / "none.toml")


def refused(*rules: Rule) -> str:
    """Return the error of a plan on a problem of four gathers (layers 0 and 1) and two reductions,
    one after the other.
    """
    problem = named(gathers_and_reductions())
    try:
        check_matches([problem], Plan(rules))
        restricted(problem, Plan(rules))
    except InputError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        (Rule(match=r"layer\.0\.w0", forbid=True), "the nearest names are layers.0.w0"),
        (
            Rule(match=r"layers\.0", forbid=True),
            r"it names a module; collectives inside it match 'layers\.0\..*'",
        ),
        (
            Rule(match=r".*", kind="all_reduce", forbid=True),
            "such names there are, but only of all_gather and reduce_scatter",
        ),
    ],
)
def test_a_rule_that_matches_nothing_is_refused_with_the_nearest(rule: Rule, hint: str) -> None:
    said = refused(rule)
    assert said.startswith(f"rule 1 ({rule}) matches no collective of random: ")
    assert hint in said


def test_a_rule_of_the_other_direction_is_passed_over() -> None:
    """One plan serves both graphs, together or one by one."""
    forward = replace(named(gathers_and_reductions()), name="forward")
    plan = Plan(
        (
            Rule(match=r"nothing\.like\.this", direction="backward", forbid=True),
            Rule(match=r"layers\.0\.w0", forbid=True),
        )
    )
    check_matches([forward], plan)
    assert [c.may_share for c in restricted(forward, plan).collectives].count(False) == 1


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            (Rule(match=".*w0", forbid=True), Rule(match=".*w[01]", group=True)),
            r"rule 1 .* and rule 2 .*: .*w0.* cannot be alone and",
        ),
        (
            (Rule(match=".*w[01]", group=True), Rule(match=".*w1", group=True)),
            r"rule 1 .* and rule 2 .*: .*w1.* would be in two groups",
        ),
        (
            (Rule(match=".*w[02]", group=True),),
            r"cannot share a launch: process group dp and ep; narrow match, or tell them apart"
            r" with by",
        ),
        (
            (Rule(match=".*w0", start=r"layers\.3"),),
            r"rule 1 .*: contradict the data dependences: .*compute.* -> ",
        ),
        ((Rule(match=".*w4", start=r"layers\.0"),), r"rule 1 .*: contradict the data dependences"),
        (
            (Rule(match=".*w4", kind="reduce_scatter", prefetch=1),),
            r"no compute node needs .*layers.2.w4",
        ),
        (
            (Rule(match=".*w[0-3]", prefetch=1), Rule(match=".*w3", start=0)),
            r"rule 1 .* and rule 2 .*: .*cannot be launched both before",
        ),
        (
            (Rule(match=".*w0", start=r"lawyers\.3"),),
            r"start: no compute node is in a module .*; the nearest are layers.3.mlp",
        ),
        (
            (Rule(match=".*w0", start=10_000),),
            r"start: expected the rank of a node, below \d+; found 10000",
        ),
        (
            (Rule(match=".*w0", start=r"layers\.\1"),),
            r"start: .* refers to something that match does not capture",
        ),
    ],
)
def test_contradictions_are_refused_with_the_rules(rules: tuple[Rule, ...], said: str) -> None:
    assert re.search(said, refused(*rules)), refused(*rules)


def test_what_captures_fill_in() -> None:
    """A group for each value of ``by``, and each layer's gathers before the first compute node of
    that very layer.
    """
    problem = named(gathers_and_reductions())
    plan = Plan((Rule(match=r"layers\.(\d+)\..*", kind="reduce_scatter", group=True, by=r"\1"),))
    groups = [c.restriction.group for c in restricted(problem, plan).collectives]
    assert groups == [None, None, None, None, 0, 0]
    plan = Plan((Rule(match=r"layers\.(\d+)\.w[0-3]", start=r"layers\.\1"),))
    gaps = [c.restriction.start_slots for c in restricted(problem, plan).collectives]
    assert gaps == [(0, 0), (0, 0), (1, 1), (1, 1), None, None]
