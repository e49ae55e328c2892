"""What the benchmark of a GPU does, on the CPU and at debug size: every schedule runs, and
allocates what was predicted.
"""

import json

import pytest
import torch

from benchmarks.device import measure as device
from benchmarks.device.measure import NO_GPU, main, markdown

SMALL = [
    "--device",
    "cpu",
    "--preset",
    "llama3-debug",
    "--mesh",
    "fsdp=8",
    "--seq",
    "32",
    "--cluster",
    "cpu",
    "--budget",
    "0.05",
]


@pytest.fixture(scope="module")
def found() -> dict:
    torch.set_num_threads(1)
    return device.measured(
        "llama3-debug",
        device.MeshSpec.parse("fsdp=8"),
        32,
        cluster="cpu",
        budget=0.05,
        device=torch.device("cpu"),
    )


def test_every_schedule_allocates_what_was_predicted(found):
    names = {
        "as_captured",
        "transformer_block",
        "greedy_bytes",
        "greedy_bytes_span",
        "torch",
        "apsched",
    }
    assert {(row["schedule"], row["graph"]) for row in found["peaks"]} == {
        (n, g) for n in names for g in ("forward", "backward")
    }
    for row in found["peaks"]:
        assert row["predicted_bytes"] == row["measured_bytes"] > 0, row


def test_operators_and_copies_of_buckets_are_timed(found):
    rows = {row["name"]: row for row in found["classes"]}
    assert rows["aten::mm"]["num_nodes"] > 20
    assert sum(name.startswith("bucket: ") for name in rows) >= 2, "copy-in and copy-out"
    assert all(row["measured_us"] > 0 for row in rows.values())
    assert found["launch_us"]["measured"] is None
    text = markdown(found)
    assert all(name in text for name in rows)


def test_a_peak_that_is_off_is_an_exit_status(found, monkeypatch, capsys):
    monkeypatch.setattr(device, "measured", lambda *_, **__: found)
    assert main([*SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    first, *others = found["peaks"]
    wrong = {
        **found,
        "peaks": [{**first, "measured_bytes": first["measured_bytes"] * 102 // 100}, *others],
    }
    monkeypatch.setattr(device, "measured", lambda *_, **__: wrong)
    assert main(SMALL) == 1


def test_without_a_gpu_it_says_so_and_estimates_nothing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out.strip() == NO_GPU
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"skipped": NO_GPU}
