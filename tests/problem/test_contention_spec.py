"""Which contention is asked for, and which links groups share on a cluster."""

import json
import random
from dataclasses import replace

import pytest

from apsched.cli.main import main
from apsched.compiler.ranks.problem_digest import problem_digest
from apsched.costs.clusters.cluster import cluster_names, load_cluster
from apsched.errors import InputError
from apsched.problem.contention import Contention
from apsched.problem.contention_spec import ContentionChoice, contended, parse_contention
from apsched.problem.problem import Problem, with_contention
from tests.helpers.problems.strategies import layered_problem

H100 = load_cluster("h100")


def with_groups(*sizes: int) -> Problem:
    """A problem with groups of these sizes, called by number."""
    problem = layered_problem(random.Random(1), num_layers=1)
    groups = tuple(str(k) for k in range(len(sizes)))
    shaped = enumerate(zip(groups, sizes, strict=True))
    keys = tuple(
        replace(problem.keys[0], group=group, group_size=size, stream=k)
        for k, (group, size) in shaped
    )
    return replace(problem, streams=groups, keys=keys)


def links(problem: Problem, ranks: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    found = contended(problem, ContentionChoice(links=True), H100, ranks).contention
    assert found is not None
    return dict(found.links_of_group)


def test_groups_use_the_links_that_their_ranks_need():
    ranks = {
        "0": tuple(range(8)),
        "1": tuple(range(0, 64, 8)),
        "2": tuple(range(16)),
        "3": (0, 1, 8, 9),
    }
    assert links(with_groups(8, 8, 16, 4), ranks) == {
        "0": (0,),
        "1": (1,),
        "2": (0, 1),
        "3": (0, 1),
    }
    assert links(with_groups(8, 64), {}) == {
        "0": (0,),
        "1": (0, 1),
    }  # ranks that nobody knows are contiguous


def test_what_changes_nothing_is_no_contention():
    problem = with_groups(8, 8)
    ranks = {
        "0": tuple(range(8)),
        "1": tuple(range(0, 64, 8)),
    }  # tensor parallel inside, FSDP across: no link in common
    assert contended(problem, ContentionChoice(links=True), H100, ranks) is problem
    assert contended(problem, ContentionChoice(), H100, ranks) is problem
    assert (
        contended(problem, parse_contention("compute=1,transfers=1,latency=1"), H100, ranks)
        is problem
    )


def test_each_rule_is_asked_for_alone():
    found = contended(
        with_groups(8, 8), parse_contention("transfers=1.1"), load_cluster("cpu"), {}
    ).contention
    assert found == Contention(transfer_slowdown=(11, 10))
    assert str(found) == "transfers slower by 1.1 while compute runs"
    found = contended(
        with_groups(8, 8), parse_contention("latency=3"), load_cluster("cpu"), {}
    ).contention
    assert found == Contention(latency_slowdown=(3, 1))
    assert str(found) == "latencies longer by 3 while compute runs"


def test_the_factor_is_the_cluster_s_unless_stated():
    problem = with_groups(8)
    stated = contended(problem, parse_contention("compute=1.25"), H100, {}).contention
    own = contended(problem, parse_contention("compute"), H100, {}).contention
    assert stated is not None
    assert own is not None
    assert stated.compute_slowdown == (5, 4)
    assert own.compute_slowdown == (119, 100)
    with pytest.raises(InputError, match="states no compute_slowdown"):
        contended(problem, parse_contention("compute"), load_cluster("cpu"), {})
    with pytest.raises(InputError, match="state it \\(--cluster\\)"):
        contended(problem, parse_contention("links"), None, {})
    assert all(
        load_cluster(name).compute_slowdown
        for name in cluster_names()
        if load_cluster(name).library == "nccl"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "link",
        "links=2",
        "links,links",
        "compute=",
        "compute=fast",
        "transfers",
        "transfers=",
        "latency",
    ],
)
def test_other_words_are_refused(text):
    with pytest.raises(InputError, match="expected none, or links"):
        parse_contention(text)


@pytest.mark.parametrize("factor", ["0.5", "nan", "11"])
@pytest.mark.parametrize("what", ["compute", "transfers", "latency"])
def test_other_factors_are_refused(what, factor):
    with pytest.raises(InputError, match=f"factor from 1 to 10 by which {what} (is|are) slower"):
        contended(with_groups(8), parse_contention(f"{what}={factor}"), H100, {})


def test_process_ranks_agree_on_contention_whatever_their_groups_are_called():
    problem = with_groups(8, 8)
    other = replace(
        problem,
        streams=("tp_1", "fsdp_1"),
        keys=tuple(replace(k, group=f"{k.group}_1") for k in problem.keys),
    )
    mine = Contention(links=("NIC",), links_of_group=(("0", (0,)), ("1", (0,))))
    theirs = Contention(links=("other",), links_of_group=(("tp_1", (0,)), ("fsdp_1", (0,))))
    digest = problem_digest(with_contention(problem, mine))
    assert digest == problem_digest(with_contention(other, theirs))
    assert digest != problem_digest(problem)
    assert digest != problem_digest(
        with_contention(problem, replace(mine, compute_slowdown=(6, 5)))
    )
    assert digest != problem_digest(
        with_contention(problem, replace(mine, transfer_slowdown=(6, 5)))
    )
    assert digest != problem_digest(
        with_contention(problem, replace(mine, latency_slowdown=(6, 5)))
    )


def test_solve_on_the_command_line_says_so_everywhere(tmp_path, capsys):
    source = [
        "llama3-debug",
        "--layers",
        "1",
        "--mesh",
        "fsdp=16,tp=2",
        "--cluster",
        "h100",
        "--memory-cap",
        "none",
        "--budget",
        "0.1",
    ]
    source += ["--direction", "backward", "--max-compute-move", "0"]
    main(["solve", *source, "--contention", "links,compute", "-o", str(tmp_path), "--json"])
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert graph["contention"]["compute_slowdown"] == 1.19
    assert "links of the node" in {
        link for users in graph["contention"]["links"].values() for link in users
    }
    assert graph["round_trip_exact"] is True  # the rewritten graph, under the same contention
    assert graph["bound_us"] <= graph["step_time_us"]
    assert (
        json.loads((tmp_path / "backward.schedule.json").read_text())["costs"]["contention"]
        == graph["contention"]
    )
    audit = [
        "audit",
        str(tmp_path / "backward.graph"),
        "--memory-cap",
        "none",
        "--budget",
        "0.1",
        "--max-compute-move",
        "0",
        "--json",
    ]
    main(audit)
    (free,) = json.loads(capsys.readouterr().out)["audit"]
    main([*audit, "--contention", "links,compute"])
    (slower,) = json.loads(capsys.readouterr().out)["audit"]
    assert (
        slower["step_time_us"] == free["step_time_us"]
    )  # as captured nothing runs beside anything
    assert slower["bound_us"] >= free["bound_us"]
    assert slower["graph"]["contention"] == graph["contention"]


@pytest.mark.parametrize(
    "text", ["none", "links", "compute", "links,compute=1.2", "transfers=1.1,latency=3.0"]
)
def test_a_choice_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_contention(text)) == text
