"""``--hint``: sizes that depend on data, as the command line states them."""

import html
import importlib
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from apsched.capture.fake_world import world
from apsched.costs.measured_file import load_costs
from tests.conftest import Run

JOB = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.graphs.experts import Masked
from tests.helpers.graphs.small_models import WIDTH, shard


def build():
    return shard(Masked(), init_device_mesh("cpu", (4,))), (torch.randn(16, WIDTH),)
"""


def test_a_hint_is_used_and_a_wrong_one_named(run: Run, tmp_path, monkeypatch) -> None:
    (tmp_path / "masked_job.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    source = ("masked_job:build", "--mesh", "fsdp=4", "--direction", "forward")
    ran = run("audit", *source, "--hint", "s0=4")
    said = (
        "apsched: error: --hint: expected a symbol whose size depends on data, found 's0'; the"
        " graphs of masked_job:build have "
    )
    assert ran.code == 2
    assert ran.errors[0].startswith(said)
    name = ran.errors[0].removeprefix(said)

    ran = run("solve", *source, "--hint", f"{name}=4", "--budget", "0", "--json", "-o", "out")
    assert ran.code == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["options"]["--hint"] == [f"{name}=4"]
    (graph,) = report["graphs"]
    assert graph["assumed"]["sizes"] == {name: {"value": 4, "source": "stated"}}
    assert graph["round_trip_exact"]
    shown = run("report", "out", "--json")
    assert shown.code == 0, shown.stderr
    page = next((tmp_path / "out").glob("*.html")).read_text()
    assert f"Sizes that depend on data: {name} = 4 (as stated)" in page
    assert f"hints={{'{name}': 4}}" in html.unescape(page)

    ran = run("audit", "out/forward.graph", "--hint", f"{name}=4")
    assert ran.code == 2
    assert "--hint cannot change forward.graph: a graph file holds its sizes" in ran.stderr


def profiled(path: Path, num_rows: list[int]) -> None:
    """Run a step of the job of ``JOB`` for each number of rows that its mask keeps, and write the
    trace of torch's profiler.
    """
    with world(4):
        model, (x,) = importlib.import_module("masked_job").build()
        with profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            schedule=schedule(wait=0, warmup=1, active=len(num_rows), repeat=1),
            on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)),
        ) as trace:
            for count in (1, *num_rows):
                rows = torch.where(torch.arange(16).unsqueeze(1) < count, x.abs(), -x.abs())
                model(rows)
                trace.step()


def test_a_profile_gives_hints(run: Run, tmp_path, monkeypatch) -> None:
    (tmp_path / "masked_job.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    profiled(tmp_path / "trace.json", [5, 5, 5, 11, 3])
    source = ("masked_job:build", "--mesh", "fsdp=4", "--direction", "forward")
    given = ("calibrate", "--trace", "trace.json", "--cluster", "cpu", "--graph", *source)
    ran = run(*given, "-o", "costs.toml")
    assert ran.code == 0, ran.stderr
    costs = load_costs("costs.toml")
    ((name, size),) = costs.sizes.items()
    assert size == 5
    assert f"sizes that depend on data, medians over the steps: {name} = 5" in ran.stdout
    assert any("mm" in operation and "[5," in operation for operation in costs.compute)

    solve = ("solve", *source, "--costs", "costs.toml", "--budget", "0", "--json")
    for stated, value, origin in (((), 5, "profile"), (("--hint", f"{name}=4"), 4, "stated")):
        ran = run(*solve, *stated)
        assert ran.code == 0, ran.stderr
        (graph,) = json.loads(ran.stdout)["graphs"]
        assert graph["assumed"]["sizes"] == {name: {"value": value, "source": origin}}

    ran = run(*given, "--hint", f"{name}=11", "-o", "stated.toml", "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["sizes"] == {name: 11}

    (tmp_path / "costs.toml").write_text(Path("costs.toml").read_text().replace("= 5\n", "= -5\n"))
    ran = run(*solve)
    assert ran.code == 2
    assert "costs.toml: sizes: expected whole numbers from 0 to 2147483647" in ran.stderr


@pytest.mark.parametrize("vary", [(), ("--vary", "budget=0")])
def test_a_study_takes_a_hint(run: Run, tmp_path, monkeypatch, vary) -> None:
    (tmp_path / "masked_job.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    source = ("masked_job:build", "--mesh", "fsdp=4", "--direction", "forward")
    ran = run("study", *source, "--hint", "x9=4", *vary, "--memory-cap", "none", "--jobs", "1")
    assert ran.code == 2
    assert "--hint: expected a symbol whose size depends on data, found 'x9'" in ran.stderr


def test_torchs_scheduler_is_compared_with(run: Run, tmp_path, monkeypatch) -> None:
    """It asks for the prices of nodes that it has just added, in a half-written graph."""
    (tmp_path / "compared_job.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    ran = run("compare", "compared_job:build", "--mesh", "fsdp=4", "--budget", "0", "--json")
    assert ran.code == 0, ran.stderr
    for graph in json.loads(ran.stdout)["graphs"]:
        assert "inductor" in graph["baselines"], graph["notes"]


@pytest.mark.parametrize("hint", ["u0", "u0=", "u0=x", "=4", "u0=-1"])
def test_a_hint_that_is_none_is_refused(run: Run, hint: str) -> None:
    ran = run("audit", "llama3-debug", "--hint", hint)
    assert ran.code == 2
    assert ran.errors[0].startswith("apsched: error: --hint: expected ")
