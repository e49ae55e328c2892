"""Code and commands of the documentation work as written.

Each Python block is run by a test, or has a mark with the reason (``<!-- not run: ... -->``) and
compiles. Each ``apsched`` command has arguments that the command line accepts.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from apsched.capture.fake_world import world
from apsched.cli.main import main
from apsched.cli.parser import build_parser
from apsched.errors import InputError
from tests.helpers.prose import ROOT
from tests.helpers.snippets import blocks_of, commands_of

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
RUN = {
    "train.py": "tests/compiler/test_example.py",
    "train_my_model.py": "tests/compiler/test_example.py",
    "my_model.py": "test_your_own_model",
    "my_study.py": "test_a_study_from_python",
    "my_step.py": "test_a_step_from_python",
    "my_accumulation.py": "test_micro_batches_from_python",
    "my_solved_once.py": "test_micro_batches_solved_once",
}
"""File of a block -> the test that runs it."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_arguments_that_exist(page: Path) -> None:
    wrong = []
    for arguments in commands_of(page):
        try:
            build_parser().parse_args(arguments)
        except (InputError, SystemExit) as error:
            wrong.append(f"{' '.join(arguments)}: {error}")
    assert wrong == []


def test_a_command_with_a_wrong_option_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text\n\n    $ apsched solve llama3-8b --memory-capp 60GiB   # wrong\n")
    (arguments,) = commands_of(page)
    with pytest.raises(InputError):
        build_parser().parse_args(arguments)


def test_pages_have_commands() -> None:
    assert sum(len(list(commands_of(page))) for page in PAGES) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_run_or_marked(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "toml":
            tomllib.loads(block.code)
        if block.language == "python":
            compile(block.code, block.page, "exec")
            assert block.run == (block.file in RUN), block.code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_work_in_a_checkout(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    paths = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [path for path in paths if not (page.parent / path).exists()] == []


def test_your_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module of docs/own-model.md, with the command of the same page."""
    page = ROOT / "docs" / "own-model.md"
    (block,) = (block for block in blocks_of(page) if block.file == "my_model.py")
    (tmp_path / "my_model.py").write_text(block.code)
    monkeypatch.chdir(tmp_path)
    command = next(words for words in commands_of(page) if words[:2] == ["solve", "my_model:build"])
    assert main([*command, "--budget", "0"]) == 0
    assert "round trip: the rewritten graph" in capsys.readouterr().out
    assert (tmp_path / "apsched-out").is_dir()


def test_a_study_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    """The program of docs/studies.md."""
    (block,) = (b for b in blocks_of(ROOT / "docs" / "studies.md") if b.file == "my_study.py")
    exec(compile(block.code, block.page, "exec"), {})
    assert "StudyResult: 4 points on 2 frontiers" in capsys.readouterr().out


def test_a_step_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program of docs/keep.md."""
    (block,) = (b for b in blocks_of(ROOT / "docs" / "keep.md") if b.file == "my_step.py")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block.code, block.page, "exec"), names)
    assert "kept from forward to backward: " in capsys.readouterr().out
    assert (tmp_path / "kept.txt").read_text().split() == [*names["step"].kept]


def sharded_own_model(page: str, file: str) -> tuple[dict[str, Any], Any, Any]:
    """Return the names of the block ``file`` of ``page``, and the sharded model of
    docs/own-model.md with its inputs.

    The block has a budget of one second, on which nothing here depends: it runs without.
    """
    names: dict[str, Any] = {}
    for name, wanted, budgets in (("own-model.md", "my_model.py", 0), (page, file, 1)):
        (block,) = (b for b in blocks_of(ROOT / "docs" / name) if b.file == wanted)
        assert block.code.count(" budget=1,") == budgets
        code = block.code.replace(" budget=1,", " budget=0,")
        exec(compile(code, block.page, "exec"), names)
    model, inputs = names["build"]()
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return names, model, inputs


def test_micro_batches_from_python() -> None:
    """The function of docs/accumulate.md, on the model of docs/own-model.md."""
    with world(2):
        names, model, inputs = sharded_own_model("accumulate.md", "my_accumulation.py")
        step = names["four_micro_batches"](model, inputs)
        step.begin(0)
    assert len(step.settings) == 4


def test_micro_batches_solved_once(tmp_path: Path) -> None:
    """The function of docs/troubleshooting.md on the first process rank, and on another one."""
    found = []
    for rank in (0, 1):
        with world(2, rank):
            names, model, inputs = sharded_own_model("troubleshooting.md", "my_solved_once.py")
            found.append(names["solved_once"](model, inputs, tmp_path / "solved"))
    assert len(found[0].settings) == 3
    assert found[0].settings == found[1].settings
