"""The default of ``--keep``: a choice where forward and backward of one step are solved."""

import json
from pathlib import Path

import pytest

from apsched.cli.main import main
from apsched.cli.parser import build_parser
from apsched.cli.requests import direction, kept_parameters
from apsched.errors import InputError
from apsched.whole_step.keep_request import AUTO, DEFAULT, KeepRequest
from tests.conftest import Run

SOURCE = ("llama3-debug", "--mesh", "fsdp=4", "--seq", "32", "--layers", "1", "--budget", "0")


def requested(*words: str) -> KeepRequest:
    args = build_parser().parse_args([*words])
    return kept_parameters(args, direction(args))


@pytest.mark.parametrize("verb", ["solve", "explain"])
def test_a_step_has_a_choice(verb: str) -> None:
    assert requested(verb, "llama3-8b") == DEFAULT
    assert DEFAULT.mode == AUTO
    assert requested(verb, "llama3-8b", "--direction", "joint") == DEFAULT
    assert requested(verb, "llama3-8b", "--keep", "none") == KeepRequest()
    assert requested(verb, "llama3-8b", "--keep", "auto") == KeepRequest(mode=AUTO)


@pytest.mark.parametrize(
    "words",
    [
        ("--direction", "forward"),
        ("--direction", "joint", "--solver", "milp"),
        ("--solver", "milp"),
    ],
    ids=" ".join,
)
def test_graphs_that_are_solved_alone_have_none(words: tuple[str, ...]) -> None:
    assert requested("solve", "llama3-8b", *words) == KeepRequest()


def test_graphs_that_torch_wrote_keep_what_their_job_keeps(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text("")
    assert requested("solve", str(tmp_path / "graph.py")) == KeepRequest()
    with pytest.raises(InputError, match="did you mean llama3-8b"):
        requested("solve", "lama3-8b")


@pytest.mark.parametrize("words", [("--frontier", "4"), ("--accumulate", "2")], ids=" ".join)
def test_what_needs_a_choice_states_it(words: tuple[str, ...]) -> None:
    """So that a source without one is an error."""
    assert requested("solve", "llama3-8b", *words) == KeepRequest(mode=AUTO)


def test_a_graph_file_is_solved_without_a_choice(run: Run, debug_graphs: dict[str, Path]) -> None:
    source = debug_graphs["forward"].parent / "step.graph"
    ran = run("solve", source, "--budget", "0", "-o", "out")
    assert ran.code == 0, ran.stderr
    assert "kept from forward to backward" not in ran.stdout
    ran = run("solve", source, "--budget", "0", "--frontier", "2", "-o", "out")
    assert ran.code == 2
    assert "frontier of the step and accumulation change both, found a graph file" in ran.errors[0]
    ran = run("solve", debug_graphs["forward"], "--budget", "0", "--accumulate", "2", "-o", "out")
    assert ran.code == 2
    assert "found a graph file; solve the source that it was made of" in ran.errors[0]


@pytest.mark.parametrize("verb", ["solve", "explain", "study", "apply"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_graph_has_no_choice(verb: str, direction: str, run: Run, tmp_path: Path) -> None:
    """Nothing is captured before."""
    schedules = [tmp_path / "schedule.json"] if verb == "apply" else []
    ran = run(verb, SOURCE[0], *schedules, "--direction", direction, "--keep", "all")
    assert ran.code == 2
    assert ran.errors == [
        "apsched: error: --keep: expected forward and backward, which keep parameters together,"
        f" found --direction {direction}; choose --direction both, or keep none"
    ]
    assert requested("solve", *SOURCE, "--direction", direction, "--keep", "none") == KeepRequest()


def test_the_advised_cap_fits_every_graph(run: Run) -> None:
    words = ("solve", *SOURCE, "--keep", "none", "-o", "out")
    ran = run(*words, "--memory-cap", "1")
    assert ran.code == 1
    (advised,) = {text.split()[0] for text in ran.errors[0].split("try --memory-cap ")[1:]}
    ran = run(*words, "--memory-cap", advised)
    assert ran.code == 0, ran.stderr


def test_a_step_without_gathers_is_solved_without_a_choice(run: Run) -> None:
    """DDP: nothing is gathered, so that no parameter can be kept."""
    ran = run("solve", SOURCE[0], "--mesh", "replicate=4", *SOURCE[3:], "--json", "-o", "out")
    assert ran.code == 0, ran.stderr
    assert '"keep"' not in ran.stdout


def test_a_rule_of_the_plan_needs_no_option(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[[rule]]\nmatch = 'output.*'\nkeep = true\n")
    ran = run("solve", *SOURCE, "--plan", plan, "-o", "out")
    assert ran.code == 0, ran.stderr
    assert "(1 as rules of the plan say)" in ran.stdout
    ran = run("solve", *SOURCE, "--mesh", "replicate=4", "--plan", plan, "-o", "out")
    assert ran.code == 2
    assert "matches no parameter that forward and backward both gather" in ran.errors[0]


def test_the_cap_that_is_advised_for_kept_parameters_fits(run: Run) -> None:
    """Shards of kept parameters are alive in backward next to its graph."""
    words = ("solve", *SOURCE, "--keep", "all", "-o", "out")
    ran = run(*words, "--memory-cap", "1")
    assert ran.code == 1
    assert "more than the cap of 1 B; try --memory-cap" in ran.errors[0]
    advised = int(ran.errors[0].split("--memory-cap ")[1].split(",")[0])
    ran = run(*words, "--memory-cap", advised)
    assert ran.code == 0, ran.stderr


@pytest.mark.parametrize("above", ["", "+64KiB"])
@pytest.mark.parametrize("more", [(), ("--accumulate", "3")], ids=["one", "several"])
def test_a_floor_is_that_of_the_parameters_that_are_stated(
    run: Run, above: str, more: tuple[str, ...]
) -> None:
    words = ("solve", *SOURCE, "--keep", "all", *more, "-o", "out")
    ran = run(*words, "--memory-cap", f"floor{above}")
    assert ran.code == 0, ran.stderr


def test_a_floor_leaves_room_for_gradients_of_micro_batches_before(run: Run) -> None:
    words = ("solve", *SOURCE, "--keep", "auto", "--accumulate", "3", "-o", "out")
    ran = run(*words, "--memory-cap", "floor")
    assert ran.code == 0, ran.stderr


def test_a_schedule_of_kept_parameters_is_applied_to_its_graph_file(run: Run) -> None:
    """The graph file has the choice made."""
    assert run("solve", *SOURCE, "--keep", "all", "-o", "out").code == 0
    ran = run("apply", "out/backward.graph", "out/backward.schedule.json")
    assert ran.code == 0, ran.stderr
    assert "a graph file: nothing was rewritten" in ran.stdout


def test_a_schedule_of_kept_parameters_is_audited(run: Run) -> None:
    """Of the source and of the graph files, with the figures of the solve."""
    assert run("solve", *SOURCE, "--keep", "all", "-o", "out").code == 0
    files = [f"out/{name}.schedule.json" for name in ("forward", "backward")]
    solved = json.loads(Path("out/result.json").read_text())["graphs"]
    stated = [word for file in files for word in ("--schedule", file)]
    ran = run("audit", *SOURCE, *stated, "--json")
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)["audit"]
    assert [a["step_time_us"] for a in found] == [g["step_time_us"] for g in solved]
    ran = run("audit", "out/backward.graph", "--schedule", files[1], "--budget", "0", "--json")
    assert ran.code == 0, ran.stderr
    (alone,) = json.loads(ran.stdout)["audit"]
    assert alone["step_time_us"] == found[1]["step_time_us"]


def test_one_graph_is_never_slower_than_with_stated_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default its choice is that of both apart; its graph file has no choice, and is replayed
    with the choice of its answer.
    """
    words = "solve llama3-debug --mesh fsdp=4 --seq 32 --direction joint --budget 0 --json"
    times = {}
    for keep in ("default", "none", "all"):
        stated = [] if keep == "default" else ["--keep", keep]
        assert main([*words.split(), *stated, "-o", str(tmp_path / keep)]) == 0
        report = json.loads(capsys.readouterr().out)
        times[keep] = report["graphs"][0]["step_time_us"]
        if keep == "default":
            cap_bytes = report["keep_apart"]["memory_cap_bytes"]
            assert cap_bytes == report["graphs"][0]["device_memory"]["left_bytes"]
    assert times["default"] <= min(times.values())
    assert len((tmp_path / "default" / "kept.txt").read_text().splitlines()) == 20
    source = f"{tmp_path}/default/joint.graph --direction joint"
    assert main([*f"solve {source} --budget 0 -o {tmp_path}/again".split()]) == 0
    assert "gathered again" not in capsys.readouterr().out
    source = "llama3-debug --mesh fsdp=4 --seq 32 --direction joint"
    schedule = f"{tmp_path}/default/joint.schedule.json"
    assert main(f"apply {source} {schedule} -o {tmp_path}/applied".split()) == 0
    assert "round trip exact" in capsys.readouterr().out
    assert main(f"audit {source} --schedule {schedule} --budget 0".split()) == 0


def test_the_floor_is_that_of_any_order_though_trials_leave_it_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the graphs were large: CP-SAT then solves no choice again."""
    monkeypatch.setattr("apsched.solver.reorder.min_memory._SMALL_LITERALS", -1)
    source = ("llama3-debug", "--mesh", "fsdp=8", "--seq", "16", "--layers", "6", "--budget", "0")
    words = ("solve", *source, "--memory-cap", "none", "--json", "-o", "out")
    found, stated = (
        [
            graph["floor_memory_bytes"]
            for graph in json.loads(run(*words, "--keep", keep).stdout)["graphs"]
        ]
        for keep in ("auto", "out/kept.txt")
    )
    assert found == stated
