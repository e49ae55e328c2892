"""The commands as a user runs them: what they print, what they write, and how they end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apsched.artifacts.schedule_file import bind_schedule, load_schedule
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.graph_file import load_graph
from apsched.problem.build import build_problem
from apsched.schedule.simulate import simulate
from tests.conftest import Run

GRAPH_KEYS = {
    "trade_offs",
    "name",
    "graph_hash",
    "num_nodes",
    "num_collectives",
    "status",
    "step_time_us",
    "bound_us",
    "bound_source",
    "gap",
    "fastest_us",
    "fastest_gap",
    "solved_by",
    "search_us",
    "compute_us",
    "exposed_us",
    "peak_memory_bytes",
    "peak_bound_bytes",
    "peak_gap",
    "floor_memory_bytes",
    "floor_bound_bytes",
    "memory_cap_bytes",
    "device_memory",
    "num_launches",
    "launches_bound",
    "launches_gap",
    "time_limit_us",
    "chosen",
    "rests_on",
    "round_trip_exact",
    "metrics",
    "costs",
    "without_buckets_us",
    "baselines",
    "seconds",
}
PRESET = ("llama3-debug", "--mesh", "fsdp=4", "--seq", "64")


def test_solve_a_preset_from_end_to_end(run: Run, tmp_path: Path) -> None:
    """The JSON object has the keys that were agreed, the round trip is exact, and the files say the
    same.
    """
    ran = run("solve", *PRESET, "--json", "--budget", "1", "-o", "out")
    assert ran.code == 0, ran.stderr
    report = json.loads(ran.stdout)
    keys = {"schema", "source", "options", "cluster", "graphs", "keep", "with_optimizer"}
    assert set(report) == keys
    assert report["options"]["--keep"] == "auto", "the default, so that the options say it"
    whole = report["with_optimizer"]
    assert 0 < whole["bound_us"] <= whole["beside_us"] <= whole["behind_us"]
    assert (report["schema"], report["source"], report["cluster"]) == (1, "llama3-debug", "h100")
    assert [graph["name"] for graph in report["graphs"]] == ["forward", "backward"]
    for graph in report["graphs"]:
        assert set(graph) == GRAPH_KEYS
        assert set(graph["chosen"]) == {
            "bucket_bytes",
            "topo_span",
            "prefetch",
            "in_flight_bytes",
            "moved_nodes",
            "compute_move",
        }
        assert set(graph["seconds"]) == {"capture", "export", "solve", "write_back"}
        assert set(graph["baselines"]) == {
            "as_captured",
            "transformer_block",
            "greedy_bytes",
            "greedy_bytes_span",
        }
        for baseline in graph["baselines"].values():
            assert set(baseline) == {
                "step_time_us",
                "exposed_us",
                "peak_memory_bytes",
                "num_launches",
                "fits",
                "violations",
            }
            assert not baseline["fits"] or graph["step_time_us"] <= baseline["step_time_us"]
        assert graph["status"] in ("optimal", "feasible")
        assert graph["round_trip_exact"] is True
        assert (
            graph["bound_us"]
            <= graph["step_time_us"]
            == pytest.approx(graph["compute_us"] + graph["exposed_us"])
        )
        assert graph["gap"] == pytest.approx(1 - graph["bound_us"] / graph["step_time_us"])
        assert graph["peak_memory_bytes"] <= graph["memory_cap_bytes"]
        problem = build_problem(load_graph(tmp_path / "out" / f"{graph['name']}.graph"))
        schedule = bind_schedule(
            load_schedule(tmp_path / "out" / f"{graph['name']}.schedule.json"), problem
        )
        assert simulate(problem, schedule).step_time_ticks == round(graph["step_time_us"] * 1000)
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == report

    audited = run("audit", "out/backward.py", "--memory-cap", "none", "--budget", "0", "--json")
    found = json.loads(audited.stdout)["audit"][0]
    solved = report["graphs"][1]
    assert (found["step_time_us"], found["num_launches"]) == (
        solved["step_time_us"],
        solved["num_launches"],
    )
    assert found["peak_memory_bytes"] == pytest.approx(solved["peak_memory_bytes"], rel=0.01), (
        "the file doesn't say which inputs are kept"
    )

    ran_alone = subprocess.run(
        [sys.executable, "out/forward.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert ran_alone.returncode == 0, ran_alone.stderr

    applied = run("apply", *PRESET, "out/forward.schedule.json", "--json", "-o", "again")
    figures = json.loads(applied.stdout)["graphs"]
    assert [(f["name"], f["step_time_us"], f["round_trip_exact"]) for f in figures] == [
        ("forward", report["graphs"][0]["step_time_us"], True)
    ]
    assert (tmp_path / "again" / "forward.py").read_bytes() == (
        tmp_path / "out" / "forward.py"
    ).read_bytes()


PLAN = r"""
[[rule]]
match = 'layers\.(\d+)\..*'
kind = "reduce_scatter"
group = true
by = '\1'
closed = true
[[rule]]
match = 'output\.weight'
kind = "all_gather"
direction = "backward"
forbid = true
"""


def test_solve_under_a_plan(run: Run, tmp_path: Path) -> None:
    """The schedule has the buckets that the plan asks for, says so, and replays; baselines that
    break it do not fit.
    """
    (tmp_path / "plan.toml").write_text(PLAN)
    ran = run("solve", *PRESET, "--plan", "plan.toml", "--json", "--budget", "1", "-o", "out")
    assert ran.code == 0, ran.stderr
    forward, backward = json.loads(ran.stdout)["graphs"]
    assert "plan" not in forward, "no rule is about the forward graph"
    assert backward["round_trip_exact"] is True
    assert (
        "launches, not in one (rule 1 (match 'layers"
        in backward["plan"]["not_kept_by"]["as_captured"]
    )
    assert not backward["baselines"]["as_captured"]["fits"]
    written = json.loads((tmp_path / "out" / "backward.schedule.json").read_text())
    assert written["plan"] == {key: backward["plan"][key] for key in ("digest", "rules")}
    layers = [
        {m["module"].split(".")[1] for m in b["members"]}
        for b in written["buckets"]
        if b["kind"] == "reduce_scatter"
    ]
    num_layers = len(
        {
            m["module"].split(".")[1]
            for b in written["buckets"]
            for m in b["members"]
            if m["module"].startswith("layers")
        }
    )
    assert sum(len(layer) == 1 for layer in layers) >= num_layers > 1
    assert "output.weight" not in {
        m["module"] for b in written["buckets"] if b["kind"] == "all_gather" for m in b["members"]
    }
    applied = run("apply", *PRESET, "out/backward.schedule.json", "--json", "-o", "again")
    assert json.loads(applied.stdout)["graphs"][0]["step_time_us"] == backward["step_time_us"]

    shown = run(
        "compare",
        *PRESET,
        "--plan",
        "plan.toml",
        "--budget",
        "0",
        "--direction",
        "backward",
        "--no-inductor",
    )
    assert shown.code == 0, shown.stderr
    assert (
        f"plan {backward['plan']['digest']} of 2 rules; it is not kept by as_captured"
        in shown.stdout
    )

    (tmp_path / "typo.toml").write_text("[[rule]]\nmatch = 'outputs.weight'\nforbid = true\n")
    ran = run("solve", *PRESET, "--plan", "typo.toml")
    assert ran.code == 2
    assert ran.errors == [
        "apsched: error: rule 1 (match 'outputs.weight': forbid) matches no collective of forward,"
        " backward: the nearest names are output.weight, norm.weight, tok_embeddings.weight"
    ]


def test_rewritten_modules_of_several_groups_read_back(run: Run) -> None:
    """Groups of all-to-alls and of gathers, known in the file by name and size only: the step time
    is the one that was promised.
    """
    ran = run(
        "solve",
        "deepseek-v3-debug",
        "--mesh",
        "fsdp=4,ep=2",
        "--seq",
        "64",
        "--budget",
        "0",
        "--json",
        "-o",
        "out",
    )
    assert ran.code == 0, ran.stderr
    forward = json.loads(ran.stdout)["graphs"][0]
    assert forward["round_trip_exact"] is True
    ran = run("audit", "out/forward.py", "--budget", "0", "--memory-cap", "none", "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["audit"][0]["step_time_us"] == forward["step_time_us"]


def test_capture_then_solve_without_the_source(run: Run, tmp_path: Path) -> None:
    """Both graphs under one name; the costs go with them."""
    ran = run("capture", *PRESET, "-o", "step.graph")
    assert ran.code == 0, ran.stderr
    assert "-> step.forward.graph" in ran.stdout
    ran = run("solve", "step.graph", "--json", "--budget", "0")
    report = json.loads(ran.stdout)
    assert report["cluster"] == "h100"
    assert [graph["round_trip_exact"] for graph in report["graphs"]] == [None, None]
    assert sorted(path.name for path in (tmp_path / "apsched-out" / "step").iterdir()) == [
        "backward.graph",
        "backward.schedule.json",
        "forward.graph",
        "forward.schedule.json",
        "result.json",
    ]
    ran = run("capture", "step.graph", "--direction", "backward", "-o", "only.graph")
    assert ran.stdout.rstrip().endswith("-> only.graph")
    assert (tmp_path / "only.graph").read_bytes() == (tmp_path / "step.backward.graph").read_bytes()


def test_the_table_names_every_schedule(run: Run, debug_graphs: dict[str, Path]) -> None:
    ran = run("solve", debug_graphs["backward"], "--budget", "0")
    assert ran.code == 0
    for word in (
        "as_captured",
        "transformer_block",
        "greedy_bytes",
        "greedy_bytes_span",
        "apsched",
        "bound",
        "gap",
        "largest bucket",
    ):
        assert word in ran.stdout, word
    assert "nothing was rewritten" in ran.stdout
    assert "files in apsched-out" in ran.stdout
    assert "solve backward" in ran.stderr, "progress"
    assert max(len(line) for line in ran.stdout.splitlines()) <= 160


def test_the_same_answer_twice(run: Run, tmp_path: Path, debug_graphs: dict[str, Path]) -> None:
    """Byte for byte, whatever the clock says."""
    for folder in ("a", "b"):
        assert run("solve", debug_graphs["backward"], "--budget", "1", "-o", folder).code == 0
    for name in ("backward.graph", "backward.schedule.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_caps_are_kept(run: Run, debug_graphs: dict[str, Path]) -> None:
    """And they bind: without them the schedule chose more."""
    free = json.loads(
        run(
            "solve", debug_graphs["backward"], "--memory-cap", "none", "--budget", "0", "--json"
        ).stdout
    )["graphs"][0]
    assert free["memory_cap_bytes"] is None
    options = (
        "--bucket-cap 20KiB --max-topo-span 60 --max-prefetch 5 --in-flight-cap 64KiB --memory-cap"
        " floor+1MiB --budget 0 --json"
    )
    ran = run("solve", debug_graphs["backward"], *options.split())
    capped = json.loads(ran.stdout)["graphs"][0]
    assert capped["chosen"]["bucket_bytes"] <= 20 * 1024 < free["chosen"]["bucket_bytes"]
    assert capped["chosen"]["topo_span"] <= 60 < free["chosen"]["topo_span"]
    assert capped["chosen"]["prefetch"] <= 5
    assert capped["chosen"]["in_flight_bytes"] <= 64 * 1024 < free["chosen"]["in_flight_bytes"]
    assert capped["step_time_us"] >= free["bound_us"]


def test_nothing_fits(run: Run, tmp_path: Path, debug_graphs: dict[str, Path]) -> None:
    """Exit 1, the least cap that would do, the nodes that need it, and no file; with that cap it
    works.
    """
    ran = run(
        "solve",
        debug_graphs["forward"],
        "--memory-cap",
        "64KiB",
        "--json",
        "--budget",
        "0",
        "-o",
        "out",
    )
    assert ran.code == 1
    assert len(ran.errors) == 1
    graph = json.loads(ran.stdout)["graphs"][0]
    assert graph["status"] == "infeasible"
    assert graph["step_time_us"] is None
    least = graph["infeasibility"]["least"]["memory_cap_bytes"]
    assert f"--memory-cap {least}" in ran.errors[0]
    names = {
        record.name
        for record in (
            load_graph(debug_graphs["forward"]).nodes[i]["record"]
            for i in range(graph["num_nodes"])
        )
    }
    assert set(graph["infeasibility"]["nodes"]) & names
    assert any(node in ran.errors[0] for node in graph["infeasibility"]["nodes"])
    assert not (tmp_path / "out").exists()
    assert (
        run("solve", debug_graphs["forward"], "--memory-cap", str(least), "--budget", "0").code == 0
    )


def test_compare_has_a_ratio(run: Run, tmp_path: Path, debug_graphs: dict[str, Path]) -> None:
    ran = run("compare", debug_graphs["forward"], "--budget", "0")
    assert ran.code == 0
    assert "ratio to apsched" in ran.stdout
    assert not list(tmp_path.iterdir())


def test_audit_says_how_far_above_the_bound(
    run: Run, tmp_path: Path, debug_graphs: dict[str, Path]
) -> None:
    ran = run("audit", debug_graphs["forward"], "--budget", "0")
    assert ran.code == 0
    assert "% above the bound" in ran.stdout
    found = json.loads(run("audit", debug_graphs["forward"], "--budget", "0", "--json").stdout)[
        "audit"
    ][0]
    assert found["above_bound"] == pytest.approx(found["step_time_us"] / found["bound_us"] - 1)
    assert not list(tmp_path.iterdir())


def test_apply_without_an_fx_graph(run: Run, tmp_path: Path, debug_graphs: dict[str, Path]) -> None:
    """The schedule is checked; there is nothing to rewrite, which is said. Its figures have the
    units of ``solve``: the peak of a small graph was 0.00 GiB.
    """
    solved = run("solve", debug_graphs["forward"], "--budget", "0", "-o", "out").stdout
    step, peak = (line.split(";")[0].split(": ")[-1] for line in solved.splitlines()[:4:3])
    ran = run("apply", debug_graphs["forward"], "out/forward.schedule.json", "-o", "again")
    assert ran.code == 0, ran.stderr
    assert "nothing was rewritten" in ran.stdout
    assert f"forward: step time {step}, {peak}, " in ran.stdout
    assert not (tmp_path / "again").exists()


def test_lists(run: Run) -> None:
    assert "llama3-8b" in run("models").stdout
    assert set(json.loads(run("models", "--json").stdout)["models"]) >= {
        "llama3-debug",
        "llama3-405b",
        "deepseek-v3-671b",
    }
    assert "h100" in run("clusters").stdout
    assert json.loads(run("clusters", "--json").stdout)["clusters"]["h100"]["ranks_per_node"] == 8
    assert set(json.loads(run("clusters", "h100", "--json").stdout)["clusters"]) == {"h100"}


def test_the_file_of_a_cluster_is_a_start_for_ones_own(run: Run, tmp_path: Path) -> None:
    shown = run("clusters", "h100-efa").stdout
    assert 'base = "h100"' in shown
    assert "# bf16 = 989.4 # datasheet, dense" in shown  # what it has from its base
    (tmp_path / "mine.toml").write_text(shown.replace('name = "h100-efa"', 'name = "mine"'))
    assert load_cluster(tmp_path / "mine.toml").inter_node == load_cluster("h100-efa").inter_node
    ran = run("clusters", "h100-ef")
    assert ran.code == 2
    assert "found 'h100-ef' (did you mean 'h100-efa'?)" in ran.stderr


@pytest.mark.parametrize(
    "args", ["--help", "solve --help", "models", "clusters", "solve GRAPH --budget 0 --json"]
)
def test_torch_is_imported_by_those_that_need_it(
    args: str, tmp_path: Path, debug_graphs: dict[str, Path]
) -> None:
    """Help and lists are quick, and a graph file is solved on a machine without torch."""
    shown = [str(debug_graphs["forward"]) if arg == "GRAPH" else arg for arg in args.split()]
    code = (
        "import sys\nclass Refuse:\n    def find_spec(self, name, path=None, target=None):\n       "
        " if name.split('.')[0] == 'torch': raise ImportError('torch is not installed"
        " here')\nsys.meta_path.insert(0, Refuse())\nfrom apsched.cli import main\ntry:\n    code ="
        " main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = stop.code\nassert 'torch' not"
        " in sys.modules\nsys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *shown],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_version_and_module(tmp_path: Path) -> None:
    import apsched

    done = subprocess.run(
        [sys.executable, "-m", "apsched", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == f"apsched {apsched.__version__}"


def test_what_a_users_function_prints_stays_off_stdout(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--json`` stdout is one object, whatever the captured code says."""
    (tmp_path / "chatty_job.py").write_text(
        "import torch\ndef build():\n    print('hello from the job')\n    return"
        " torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)), (torch.ones(2, 4),)\n"
    )
    monkeypatch.delitem(sys.modules, "chatty_job", raising=False)
    ran = run("compare", "chatty_job:build", "--json", "--budget", "0")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["source"] == "chatty_job:build"
    assert "hello from the job" in ran.stderr
