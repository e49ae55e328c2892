"""``--hint``: sizes that depend on data, as the command line states them."""

import html
import json

import pytest

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
