"""``solve --accumulate``: several micro-batches in a row, printed, written, and in the report."""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import apsched
from apsched.artifacts.solved_run import load_run
from apsched.cli.main import main
from apsched.errors import InputError
from apsched.problem.storage_origins import KEPT_ACROSS
from apsched.quantities import show_bytes, show_us
from apsched.report.page import report_page
from apsched.report.page.columns import page_data
from tests.conftest import Run

SOURCE = ("solve", "llama3-debug", "--mesh", "fsdp=8", "--seq", "64", "--layers", "2")
FAST = ("--budget", "0", "--max-compute-move", "0")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder, out = tmp_path_factory.mktemp("accumulate"), StringIO()
    words = [*SOURCE, *FAST, "--accumulate", "3", "--frontier", "2"]
    words += ["-o", str(folder)]
    with redirect_stdout(out):
        assert main(words) == 0
    return folder, out.getvalue()


def test_the_step_is_its_micro_batches(report: tuple[Path, str]) -> None:
    folder, printed = report
    written = json.loads((folder / "result.json").read_text())
    step = written["accumulate"]
    assert "keep" not in written
    assert sum(one["count"] for one in step["micro_batches"]) == 3
    total = sum(one["count"] * sum(one["step_time_us"]) for one in step["micro_batches"])
    assert total == pytest.approx(step["step_time_us"])
    assert step["bound_us"] <= step["step_time_us"]
    fitting = [one["step_time_us"] for one in step["baselines"].values() if one["fits"]]
    assert step["step_time_us"] <= min(fitting) < step["baselines"]["none"]["step_time_us"]
    for name, excluded in step["excluded"].items():
        assert step["step_time_us"] <= excluded["bound_us"]
        row = next(line for line in printed.splitlines() if line.startswith(f"{name} "))
        assert f">= {excluded['bound_us'] / 1000:,.3f}" in row
        assert row.endswith("not solved")
    names = {name for one in step["micro_batches"] for name in one["graphs"]}
    assert [graph["name"] for graph in written["graphs"]] == sorted(
        names, key=lambda name: (name.partition("-")[2], name.startswith("b"))
    )
    assert all((folder / f"{name}.schedule.json").is_file() for name in names)
    assert f"step of 3 micro-batches: {show_us(step['step_time_us'])}" in printed
    assert "micro-batch 2: forward-2" in printed
    assert "gradients of the micro-batches before" in printed
    assert "tokens/s" in printed
    tight, loose = step["along_caps"]
    assert len(tight["choice"]) < len(loose["choice"])
    assert loose["step_time_us"] < tight["step_time_us"]
    assert show_bytes(step["along_caps"][0]["memory_cap_bytes"]) in printed
    accounts = {g["name"]: g["device_memory"]["gradient_bytes"] for g in written["graphs"]}
    assert accounts["forward"] == accounts["backward"] == 0
    assert accounts["forward-2"] > accounts["backward-2"] == 0, "backward takes the sums"


def test_a_file_makes_the_same_choice_again(run: Run, report: tuple[Path, str]) -> None:
    folder, _ = report
    kept = folder / "kept.txt"
    lines = kept.read_text().splitlines()
    assert {line.rpartition(" ")[2] for line in lines if " " in line} == {"@next", "@sum"}
    ran = run(*SOURCE, *FAST, "--keep", str(kept), "--accumulate", "3", "-o", "again")
    assert ran.code == 0, ran.stderr
    for file in folder.glob("*.schedule.json"):
        assert Path("again", file.name).read_bytes() == file.read_bytes()


def test_the_page_has_the_micro_batches_and_no_code_that_cannot_apply(
    report: tuple[Path, str],
) -> None:
    step = json.loads((report[0] / "result.json").read_text())["accumulate"]
    page = report_page(load_run(report[0])).decode()
    assert '<section class="graph" id="micro-batches"' in page
    assert '<a href="#micro-batches">micro-batches</a>' in page
    excluded = {name: f"≥ {show_us(one['bound_us'])}" for name, one in step["excluded"].items()}
    solved = {**step["baselines"], "apsched": step}
    times = {name: show_us(choice["step_time_us"]) for name, choice in solved.items()}
    assert excluded
    for name, time in {**times, **excluded}.items():
        row = page[page.index(f'<th scope="row">{name}</th>') :]
        assert f"<td>{time}</td>" in row[: row.index("</tr>")]
    assert "apply_fsdp2_micro_batches" in page
    assert page.count("<h3>Memory against step time</h3>") == 1
    along = page[page.index("<h3>Memory against step time</h3>") :]
    assert all(show_us(one["step_time_us"]) in along for one in step["along_caps"])
    assert "apsched.backend(" not in page


def kept_bytes(shown: dict[str, Any], label: int, *, at_end: bool) -> int:
    """Return the bytes of that label alive at the first or the last step of the solved order."""
    order = shown["orders"][1]
    at, lives = (len(order["steps"]["live"]) - 1) * at_end, order["lives"]
    figures = (lives[name] for name in ("label", "first", "last", "bytes"))
    return sum(
        size
        for name, first, last, size in zip(*figures, strict=True)
        if name == label and first <= at <= last
    )


def test_parameters_that_stay_gathered_have_a_label_of_their_own(
    report: tuple[Path, str],
) -> None:
    """Each graph ends with those that the next one begins with; the last backward takes none that
    is for a next micro-batch alone, such as the embedding.
    """
    run = load_run(report[0])
    step = json.loads((report[0] / "result.json").read_text())["accumulate"]
    found = {graph.result.problem.name: list(graph.kept_tensors) for graph in run.graphs}
    assert found == step["tensors"]
    data = page_data(run)
    label = data["strings"].index(KEPT_ACROSS)
    order = [name for one in step["micro_batches"] for name in one["graphs"]]
    shown = {graph["name"]: graph for graph in data["graphs"]}
    assert kept_bytes(shown[order[0]], label, at_end=False) == 0
    assert kept_bytes(shown[order[-1]], label, at_end=True) == 0
    for before, after in pairwise(order):
        handed = kept_bytes(shown[before], label, at_end=True)
        taken = kept_bytes(shown[after], label, at_end=False)
        assert handed > taken > 0 if after == order[-1] else handed == taken > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--accumulate", "1", "--keep", "auto"), "--accumulate: expected"),
        (
            ("--accumulate", "2", "--keep", "none"),
            "choose --keep auto, --keep all or --keep",
        ),
        (("--accumulate", "2", "--keep", "all", "--frontier", "3"), "it needs --keep auto"),
        (("--accumulate", "2", "--keep", "all", "--direction", "backward"), "--direction both"),
    ],
)
def test_requests_that_cannot_be(run: Run, words: tuple[str, ...], message: str) -> None:
    ran = run(*SOURCE, *words)
    assert ran.code == 2
    assert message in " ".join(ran.stderr.split())
    assert not ran.stdout


def test_too_little_memory_names_a_cap_that_fits(run: Run) -> None:
    words = [*SOURCE, *FAST, "--keep", "all", "--accumulate", "2", "--memory-cap"]
    ran = run(*words, "1KiB", "--json")
    assert ran.code == 1
    assert json.loads(ran.stdout)["graphs"][0]["infeasibility"]
    (cap,) = re.findall(r"try --memory-cap (\d+)", ran.stderr)
    assert run(*words, str(int(cap) - 512)).code == 1
    assert run(*words, cap).code == 0


def test_replays_of_one_micro_batch_refuse_the_choice(run: Run, report: tuple[Path, str]) -> None:
    folder, _ = report
    schedule, kept = folder / "backward.schedule.json", folder / "kept.txt"
    ran = run("apply", *SOURCE[1:], "--keep", str(kept), str(schedule))
    assert ran.code == 2
    assert "an entry of a step of several micro-batches" in ran.stderr
    with pytest.raises(InputError, match="apply_fsdp2_micro_batches"):
        apsched.backend(keep=kept)
