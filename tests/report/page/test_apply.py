"""How to apply a run: the printed commands make the same schedules again and take them, and the
printed line of a job means the same.
"""

import re
import shlex
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from apsched.artifacts.solved_run import load_run
from apsched.artifacts.stated_options import backend_arguments, stated_options, words
from apsched.errors import InputError
from apsched.report.page import report_page
from tests.conftest import Run
from tests.helpers.small_step import OPTIONS as SMALL

OPTIONS = (
    "--budget",
    "0.1",
    "--max-prefetch",
    "6",
    "--memory-cap",
    "none",
    "--contention",
    "compute=1.1",
    "--seed",
    "3",
)


@pytest.fixture
def printed(run: Run, debug_graphs: dict[str, Path]) -> list[str]:
    ran = run("solve", debug_graphs["backward"], *OPTIONS, "-o", "out")
    assert ran.code == 0, ran.stderr
    page = report_page(load_run("out")).decode()
    return [unescape(text) for text in re.findall("<pre>(.*?)</pre>", page, flags=re.DOTALL)]


def test_the_commands_do_what_they_say(run: Run, printed: list[str]) -> None:
    solve, check, *_ = printed
    assert shlex.split(solve)[3:] == [
        *OPTIONS[4:6],
        "--max-prefetch",
        "6",
        "--budget",
        "0.1",
        "--seed",
        "3",
        *OPTIONS[6:8],
    ]
    ran = run(*shlex.split(solve)[1:], "-o", "again")
    assert ran.code == 0, ran.stderr
    for file in ("backward.schedule.json", "backward.graph"):
        assert Path("again", file).read_bytes() == Path("out", file).read_bytes()
    ran = run(*shlex.split(check)[1:])
    assert ran.code == 0, ran.stderr
    assert "backward: step time" in ran.stdout


def test_the_line_of_a_job_means_the_same(
    printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be run as it stands: the settings are those of the run, the schedule is read, and a
    search has its budget and seed.
    """
    import torch

    monkeypatch.setattr(torch, "compile", lambda model, backend: backend)
    backends = []
    for code in printed[2:]:
        found: dict[str, Any] = {"model": None}
        exec(code, found)
        backends.append(found["model"])
    replayed, solved = (backend.settings for backend in backends)
    assert [Path(file.path).name for file in replayed.answers.schedules] == [
        "backward.schedule.json"
    ]
    assert replayed.memory_cap == solved.memory_cap == "none"
    assert replayed.max_prefetch == solved.max_prefetch == 6
    assert replayed.contention == solved.contention == "compute=1.1"
    assert (solved.budget, solved.seed) == (0.1, 3)
    assert not solved.answers.schedules


def test_options_become_flags_and_settings() -> None:
    stated = stated_options(
        {
            "source": "llama3-8b",
            "mesh": "fsdp=8",
            "direction": "both",
            "collectives": ["a b.txt", "c.txt"],
            "max_topo_span": "none",
            "unfused": True,
            "bitwise": False,
            "seed": "0",
            "out": "here",
            "json": True,
            "vary": ["seq=1,2"],
        }
    )
    assert (
        words(stated)
        == "--mesh fsdp=8 --collectives 'a b.txt' --collectives c.txt --max-topo-span none"
        " --unfused --seed 0"
    )
    assert words(stated, ("--mesh", "--unfused")) == "--mesh fsdp=8 --unfused"
    assert backend_arguments(stated) == {"max_topo_span": "None", "seed": "0"}
    model = "apsched.load_cost_model('c.json', cluster='h200')"
    assert backend_arguments({"--costs": "c.json", "--cluster": "h200"}) == {"cost_model": model}


def test_a_run_of_an_older_version_says_no_options(debug_run: Path, tmp_path: Path) -> None:
    """Its files are read as ever; the commands have the source alone."""
    import json
    import shutil

    shutil.copytree(debug_run, tmp_path / "old")
    said = json.loads((tmp_path / "old" / "result.json").read_text())
    assert said.pop("options") == {"--budget": "0.1"}
    (tmp_path / "old" / "result.json").write_text(json.dumps(said))
    assert "apsched solve " in report_page(load_run(tmp_path / "old")).decode()
    with pytest.raises(InputError):
        load_run(tmp_path)


def page_of_a_study(run: Run, *words: str, cap: str = "none") -> str:
    grid = (*words, "--memory-cap", cap, "--jobs", "1", "-o", "grid")
    assert run("study", "llama3-debug", *SMALL, *grid).code == 0
    assert run("report", "grid", "-o", "page.html").code == 0
    return unescape(Path("page.html").read_text())


@pytest.mark.slow
def test_commands_of_a_study_have_its_kept_parameters(run: Run) -> None:
    """``solve`` chooses them by default, and no file beside the schedules of a study has them."""
    page = page_of_a_study(run, "--vary", "keep=none,all,auto")
    blocks = re.split(r"<h3>", page[page.index("How to apply it") :])[1:]
    assert len(blocks) == 6
    for block in blocks:
        keep = "auto" if "keep auto" in block else "all" if "keep all" in block else "none"
        made, *checked = re.findall(r"<pre>(apsched [^<]*)</pre>", block)
        assert run(*shlex.split(made)[1:], "-o", keep).code == 0
        assert len(checked) == (keep != "auto")
        assert block.count(f"keep='{keep}'") == 1 + len(checked)
        for command in checked:
            words = shlex.split(command)[1:]
            assert run(*words, "-o", "checked").code == 0
            name = "forward" if block.startswith("forward") else "backward"
            assert Path(words[-1]).read_bytes() == Path(keep, f"{name}.schedule.json").read_bytes()


@pytest.mark.slow
def test_a_study_of_micro_batches_names_no_folder_without_an_answer(run: Run) -> None:
    page = page_of_a_study(run, "--accumulate", "2")
    assert "apply_fsdp2_micro_batches(model, 'apsched-out/...')" in page


@pytest.mark.slow
def test_a_floor_of_one_graph_is_not_said_to_be_made_again(run: Run) -> None:
    """``solve`` has one floor for both graphs of a stated choice, a study one for each."""
    page = page_of_a_study(run, "--keep", "all", cap="floor")
    assert page.count("This answers the same question") == 2
    assert "byte for byte" not in page
