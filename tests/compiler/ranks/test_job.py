"""Real processes that schedule their graphs together: one answer, and an error on every one of them
where that cannot be.
"""

import re

import pytest
import torch.distributed as dist

from apsched.compiler.ranks.channel import ORDERS_BY
from apsched.compiler.ranks.job import DEFAULT_DEADLINE_S
from apsched.compiler.settings import Settings
from tests.helpers.processes import WORKERS, Job, run_jobs

pytestmark = [pytest.mark.alone, pytest.mark.waits]

WORKER = WORKERS / "ranks/job_worker.py"
Found = list[dict]

HARMED = {
    "dies": (2, True),
    "dies among four": (4, True),
    "dies, fallback": (2, True),
    "dies with the store": (2, False),
    "stopped with the store": (2, False),
}
"""What happens to process rank 0 while it solves: how many there are, and whether the store is in a
process of its own.
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Found]:
    """Return the results of each process of each job."""
    folder = tmp_path_factory.mktemp("jobs")
    servers = {
        name: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for name, (_, own) in HARMED.items()
        if own
    }
    asked = {
        "four": Job(folder=folder / "four", world_size=4, more=("usual", "")),
        "two": Job(folder=folder / "two", world_size=2, more=("usual", "")),
        "20 s late": Job(folder=folder / "late", world_size=2, more=("20 s late", "")),
    }
    for name, (size, _) in HARMED.items():
        port = str(servers[name].port) if name in servers else ""
        asked[name] = Job(
            folder=folder / name.replace(" ", "_"),
            world_size=size,
            more=(name, port),
            lost=(0,),
            wave=1,
        )
    return dict(zip(asked, run_jobs(WORKER, list(asked.values()), timeout_s=500), strict=True))


@pytest.fixture(scope="module")
def four(jobs) -> Found:
    return jobs["four"]


@pytest.fixture(params=["two", "four"])
def some(jobs, request) -> Found:
    """The reports of two processes, and of four."""
    return jobs[request.param]


def of(four: Found, case: str) -> Found:
    return [report[case] for report in four]


def same_error(found: Found, kind: str) -> str:
    """Return the text of the error that all process ranks got."""
    assert {report.get("error") for report in found} <= {*kind.split("|")}, found
    messages = {report["message"].removeprefix("process rank 2: ") for report in found}
    assert len(messages) == 1, messages
    return messages.pop()


def test_in_a_job_of_two_one_solves_and_both_launch_the_same(jobs):
    found = of(jobs["two"], "usual")
    assert [report["solves"] for report in found] == [1, 0]
    assert found[0]["value"] == found[1]["value"]
    assert found[0]["value"]["moved"]
    assert found[0]["value"]["close"]


@pytest.mark.parametrize("case", ["usual", "without a deadline", "again"])
def test_one_solves_for_all(four, case):
    found = of(four, case)
    assert [report["solves"] for report in found] == [1, 0, 0, 0], found


KEPT = [
    "cache, first",
    "cache, again",
    "cache, damaged",
    "read-only disk",
    "full disk",
    "without a deadline",
]


@pytest.mark.parametrize("case", ["usual", *KEPT, "again"])
def test_all_launch_the_same_and_compute_what_they_did(four, case):
    values = [
        {k: v for k, v in report["value"].items() if k != "said"} for report in of(four, case)
    ]
    assert values == [values[0]] * 4
    assert values[0]["moved"]
    assert values[0]["close"]
    assert values[0]["orders"] == four[0]["usual"]["value"]["orders"]


def named(odd: int, size: int) -> str:
    """Return how a message begins that says which process rank is the odd one, and in which
    group.
    """
    others = {
        2: "process rank 0",
        4: f"process ranks {', '.join(str(r) for r in range(4) if r != odd)}",
    }[size]
    whole = {2: "0, 1", 4: "0 to 3"}[size]
    return (
        f"process rank {odd} would launch other collectives than {others} in group '0' of process"
        f" ranks {whole}: "
    )


END = ". Nothing was launched. Run the same model, options, schedule files and versions on all"


def test_another_graph_is_named(some):
    """Its tensors are wider: which process rank, which group, which launch."""
    text, size = same_error(of(some, "another graph"), "AgreementError"), len(some)
    begin = named(2 if size == 4 else 1, size)
    assert text.startswith(begin)
    assert text.endswith(END)
    found = re.fullmatch(
        r"launch 1 is all_gather (.*), there it is all_gather (.*)",
        text.removeprefix(begin).removesuffix(END),
    )
    assert found, text
    mine, theirs = (
        [int(n) for n in re.findall(r"(\d+) -> (\d+) bytes of layers", part)[0]]
        for part in found.groups()
    )
    assert [n * size for n in (mine[0], theirs[0])] == [mine[1], theirs[1]]
    assert mine[0] > theirs[0]


def test_another_schedule_is_named(some):
    """As captured, where the others have buckets."""
    text, size = same_error(of(some, "another schedule"), "AgreementError"), len(some)
    assert text.startswith(named(1, size))
    assert text.endswith(END)
    found = re.match(
        r"launch (\d+) is (.*), there it is (.*)",
        text.removeprefix(named(1, size)).removesuffix(END),
    )
    assert found, text
    number, mine, theirs = int(found[1]), found[2], found[3]
    assert number > 1
    assert mine != theirs


def test_an_error_of_the_solver_is_the_same_on_all(four):
    text = same_error(of(four, "broken solver"), "ApschedError")
    assert text == "process rank 0: unexpected ZeroDivisionError: a bug (a bug of apsched)"


def test_one_that_is_too_late_is_an_error_on_all_and_on_itself(four):
    found = [report["value"] for report in of(four, "too late")]
    text = same_error(found, "AgreementError")
    assert text.startswith(
        "process rank 3 has not reported its launches in group '0' of process ranks 0 to 3, and has"
        " done nothing for 4.8 s: ended, hanging, or at another graph. Nothing was launched. See"
        " the log of that process rank"
    )


def test_what_fits_nowhere_is_the_same_error_or_the_same_fallback(four):
    found = of(four, "nothing fits")
    assert "memory" in same_error(found, "InfeasibleError")
    assert [report["value"] for report in of(four, "nothing fits, fallback")] == [True] * 4


@pytest.mark.parametrize(
    "case",
    [
        "own error",
        "own error of who solves",
        "another graph, fallback",
        "too late, fallback",
        "unprepared, fallback",
        "other joint settings, fallback",
    ],
)
def test_where_one_falls_back_all_do(four, case):
    """It would launch its collectives as captured, the others in buckets."""
    found = of(four, case)
    assert [report.get("value") for report in found] == [True] * 4, found
    if "late" not in case:
        assert max(report["seconds"] for report in found) < 20, "nobody waits for a deadline"


def test_a_joint_graph_that_one_cannot_prepare_is_an_error_on_all(four):
    assert same_error(of(four, "unprepared"), "InputError|AgreementError").endswith("no role")


def test_a_joint_graph_with_other_settings_on_one_is_an_error_that_names_them(four):
    """Before it is changed."""
    assert "reshard_after_forward True here, False there" in same_error(
        of(four, "other joint settings"), "AgreementError"
    )


def test_one_that_dies_while_it_solves_leaves_the_others_the_graph_as_it_was(jobs):
    (found,) = jobs["dies, fallback"]
    assert found["value"] is True
    assert found["seconds"] < 3 * 6


def test_stages_of_a_pipeline_agree_among_themselves(four):
    values = [report["value"] for report in of(four, "stages")]
    assert [len(value) for value in values] == [2, 2, 1, 1]
    assert values[0] == values[1]
    assert values[2] == values[3]
    assert [report["solves"] for report in of(four, "stages")] == [2, 0, 1, 0]


def test_other_settings_are_named(some):
    found, last = of(some, "other settings"), len(some) - 1
    assert f"process rank {last} and process rank 0 have the same graph" in same_error(
        found, "AgreementError"
    )
    assert "max_prefetch 3 here, None there" in found[0]["message"]


@pytest.mark.parametrize("case", ["read-only disk", "full disk"])
def test_a_disk_where_nothing_can_be_written_stops_no_job(four, case):
    assert [report["solves"] for report in of(four, case)] == [1, 0, 0, 0]
    said = [report["value"]["said"] for report in of(four, case)]
    assert "is left as it is" in said[0][-1], "by who solves"
    assert said[1:] == [[]] * 3


def test_the_cache_is_used_and_repaired(four):
    solves = {
        case: [r["solves"] for r in of(four, f"cache, {case}")]
        for case in ("first", "again", "damaged", "after")
    }
    assert solves == {
        "first": [1, 0, 0, 0],
        "again": [0] * 4,
        "damaged": [1, 0, 0, 0],
        "after": [0] * 4,
    }


def test_graphs_of_a_mesh_are_the_same_on_all_process_ranks(four):
    """FSDP times tensor parallelism: two groups, and others on every process rank."""
    hashes = of(four, "llama hashes")
    assert hashes == [hashes[0]] * 4
    assert hashes[0][0] != hashes[0][1]
    assert of(four, "llama groups") == [2] * 4
    found = of(four, "llama")
    assert [report["solves"] for report in found] == [2, 0, 0, 0]
    assert [report["value"] for report in found] == [found[0]["value"]] * 4


@pytest.mark.parametrize("name", ["dies", "dies among four"])
def test_one_that_dies_while_it_solves_is_named_by_all_others(jobs, name):
    whole = "0 to 3" if name == "dies among four" else "0, 1"
    assert len(jobs[name]) == HARMED[name][0] - 1
    for found in jobs[name]:
        assert (found["error"], found["solves"]) == ("AgreementError", 0)
        assert found["message"].startswith(
            f"process rank 0 has not reported the answer in group '0' of process ranks {whole}, and"
            " has done nothing for 4.8 s: ended, hanging, or at another graph. Nothing was"
            " launched. See the log of that process rank"
        )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dies with the store", "the store of the job is gone"),
        ("stopped with the store", "the store of the job has not answered for 6 s"),
    ],
)
def test_one_that_takes_the_store_with_it_is_an_error(jobs, name, text):
    (found,) = jobs[name]
    assert found["error"] == "AgreementError"
    assert found["message"].startswith(text)
    assert "process rank 0" in found["message"]


def test_one_that_is_20_s_late_is_waited_for(jobs):
    """With the deadline that is the default."""
    found = jobs["20 s late"]
    assert [report.get("error") for report in found] == [None, None], found
    assert [report["solves"] for report in found] == [1, 0]
    assert found[0]["value"] == found[1]["value"]
    assert found[0]["seconds"] > 19


def test_the_deadline_that_is_documented():
    """20 s late is waited for, 30 s is the end of it."""
    assert Settings().deadline_s == DEFAULT_DEADLINE_S == 30.0
    assert 20 < ORDERS_BY * DEFAULT_DEADLINE_S < 30
