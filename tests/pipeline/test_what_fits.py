"""Where the memory of the device is too small, other options are tried, each by a capture."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import apsched.costs.clusters
from apsched import progress
from apsched.pipeline import what_fits as module
from tests.conftest import Run

H100 = Path(apsched.costs.clusters.__file__).parent / "h100.toml"
SOURCE = ("llama3-debug", "--mesh", "fsdp=4", "--seq", "512")
COMPARE = ("compare", *SOURCE, "--batch", "4", "--budget", "0")


@pytest.fixture
def small_device(tmp_path: Path) -> Path:
    """An H100 that leaves about 12 MB for a graph: enough for two samples, not for four."""
    text, found = re.subn(
        r"memory_bytes = [\d_]+", "memory_bytes = 904_700_000", H100.read_text(), count=1
    )
    assert found == 1
    path = tmp_path / "small.toml"
    path.write_text(text)
    return path


def test_each_option_that_is_named_does_fit(run: Run, small_device: Path) -> None:
    where = ("--cluster", small_device, "--budget", "0", "--keep", "none", "-o", "out")
    ran = run("solve", *SOURCE, "--batch", "4", *where, "--json")
    assert ran.code == 1
    trials = json.loads(ran.stdout)["tried"]
    fitting = {trial["option"]: trial for trial in trials if trial["fits"]}
    too_large = {trial["option"]: trial for trial in trials if not trial["fits"]}
    assert "--batch 2" in fitting
    assert "--batch 1" not in {*fitting, *too_large}, "a family ends with the first that fits"
    assert {"--mesh fsdp=8", "--mesh fsdp=16"} <= too_large.keys()
    assert all(trial["needed_bytes"] <= trial["left_bytes"] for trial in fitting.values())
    (error,) = ran.errors
    assert "these fit: " in error
    assert "too large: --" in error
    assert "try --memory-cap" not in error, "the device has no more"
    for option in fitting:
        others = () if option.startswith("--batch") else ("--batch", "4")
        assert run("solve", *SOURCE, *others, *option.split(), *where).code == 0, option
    for option in too_large:
        flags = [*SOURCE[:1], *SOURCE[3:]] if option.startswith("--mesh") else SOURCE
        again = run("solve", *flags, "--batch", "4", *option.split(), *where)
        assert again.code == 1, option


def test_options_are_tried_with_no_parameter_kept_and_say_so(run: Run, small_device: Path) -> None:
    where = ("--batch", "4", "--cluster", small_device, "--budget", "0", "--keep", "all")
    ran = run("solve", *SOURCE, *where, "-o", "out", "--json")
    assert ran.code == 1
    tried = [trial["option"] for trial in json.loads(ran.stdout)["tried"]]
    assert tried[0] == "--keep none"
    assert all(option.startswith("--keep none") for option in tried)
    fitting = [trial["option"] for trial in json.loads(ran.stdout)["tried"] if trial["fits"]]
    assert "--keep none --batch 2" in fitting
    assert run("solve", *SOURCE, *where, *fitting[-1].split(), "-o", "out").code == 0


def test_nothing_is_tried_where_another_cap_is_stated(run: Run) -> None:
    ran = run("solve", *SOURCE, "--memory-cap", "1MiB", "--budget", "0", "--json", "-o", "out")
    assert ran.code == 1
    assert "tried" not in json.loads(ran.stdout)
    assert "try --memory-cap" in ran.errors[0]


def test_compare_names_them_too(run: Run, small_device: Path) -> None:
    ran = run(*COMPARE, "--cluster", small_device)
    assert ran.code == 1
    assert re.search(r"--batch 2 \([\d.]+ MiB of [\d.]+ MiB\)", ran.errors[0])


def test_what_is_missing_is_printed_before_the_trials_and_each_shows_its_stages(
    run: Run, small_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    ran = run(*COMPARE, "--cluster", small_device)
    lines = ran.stderr.splitlines()
    (first,) = (k for k, line in enumerate(lines) if line.startswith("no schedule fits: backward"))
    assert re.search(r"needs [\d.]+ MiB, has [\d.]+ MiB; .* Ctrl-C ends that$", lines[first])
    trials = [k for k, line in enumerate(lines) if line.startswith("try --")]
    assert min(trials) == first + 1
    assert sum("try --batch 2: capture" in line and "forward of" in line for line in lines) > 5
    assert any("--batch 2 fits: backward needs" in line for line in lines)
    assert any("--mesh fsdp=8 is too large: backward needs" in line for line in lines)


def test_an_interrupt_ends_the_trials_and_not_the_answer(
    run: Run, small_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = module._tried

    def interrupted(option: str, *others: Any) -> module.Trial | None:
        if option.startswith("--mesh"):
            raise KeyboardInterrupt
        return tried(option, *others)

    monkeypatch.setattr(module, "_tried", interrupted)
    ran = run(*COMPARE, "--cluster", small_device, "--json")
    assert ran.code == 1
    assert [trial["option"] for trial in json.loads(ran.stdout)["tried"]][-1] == "--batch 2"
    assert "--batch 2 (" in ran.errors[0]
    assert "interrupted: no more options are tried" in ran.stderr


def test_where_captures_are_long_one_option_that_fits_is_enough(
    run: Run, small_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONG_CAPTURE_SECONDS", 0.0)
    ran = run(*COMPARE, "--cluster", small_device, "--json")
    trials = json.loads(ran.stdout)["tried"]
    assert [trial["fits"] for trial in trials] == [*[False] * (len(trials) - 1), True]
    assert "--mesh" not in ran.errors[0]


def test_of_a_graph_that_is_much_too_large_the_greatest_change_comes_first_where_captures_are_long(
    run: Run, small_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[str] = []

    def tried(option: str, *_: Any) -> None:
        options.append(option)

    monkeypatch.setattr(module, "_tried", tried)
    much = ("compare", *SOURCE, "--batch", "16", "--budget", "0", "--cluster", small_device)
    assert run(*much).code == 1
    assert options[:2] == ["--ac selective", "--ac full"]
    options.clear()
    monkeypatch.setattr(module, "_LONG_CAPTURE_SECONDS", 0.0)
    assert run(*much).code == 1
    assert options[:4] == ["--ac full", "--ac selective", "--batch 1", "--batch 8"]
