"""Whole steps that run for real, on a small scale: gradients and memory of each way to run a step
are those of the plain one and those predicted.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.execution.__main__ import main
from benchmarks.execution.machine.slow_network import why_not
from benchmarks.execution.steps import step_run
from benchmarks.execution.steps.report import pairs_apart, steps_section
from benchmarks.execution.steps.step_run import StepRun, is_same
from benchmarks.execution.steps.worker import counted_rounds

NAMES = {
    "keep": {"none", "all", "last_block"},
    "micro_batches": {"one at a time, twice", "in_a_row", "interleaved"},
    "accumulate": {"none", "kept", "no_sync", "once", "auto, tight cap"},
}


@pytest.mark.ranks
@pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")
@pytest.mark.parametrize("part", NAMES)
def test_every_way_to_run_a_step_has_the_same_bits_and_the_memory_that_was_predicted(
    tmp_path, part
):
    assert main(["--smoke", "--parts", part, "-o", str(tmp_path)]) == 0
    (numbers,) = tmp_path.glob("*.json")
    (run,) = json.loads(numbers.read_text())[part].values()
    rows = {row["name"]: row for row in run["found"]["runs"]}
    assert rows.keys() >= NAMES[part]
    for name, row in rows.items():
        assert row["is_close"], name
        assert row["same_bits"] is (row.get("num_summed", 0) == 0), name
        assert len(row["measured_us"]) == 2, "--smoke measures once, whatever runs beside it"
        assert 0 < row["predicted_alone_us"] <= row["predicted_us"]
        for graph in row["memory"]:
            assert graph["nodes_apart"] == 0, name
            assert graph["counted_bytes"] == graph["predicted_bytes"]
    text = numbers.with_suffix(".md").read_text()
    assert all(f"| {name} |" in text for name in rows)
    if part == "keep":
        assert rows["none"]["num_kept"] == 0 < rows["last_block"]["num_kept"]
        assert rows["last_block"]["num_kept"] <= rows["all"]["num_kept"]


def test_smoke_writes_nothing_without_a_folder(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        "benchmarks.execution.__main__.run_job",
        lambda *job, timeout_s: asked.append(
            (job[1], job[2]["part"], job[2]["num_layers"], job[2]["once"])
        ),
    )
    monkeypatch.setattr("benchmarks.execution.__main__.markdown", lambda report: "the page")
    monkeypatch.setattr("benchmarks.execution.__main__._RESULTS", None)
    assert main(["--smoke"]) == 0
    layers = {"keep": 2, "micro_batches": 1, "accumulate": 1}
    assert asked == [(2000, part, num_layers, True) for part, num_layers in layers.items()]
    assert capsys.readouterr().out == "the page\n"


def test_a_step_of_several_inputs_adds_losses_and_gradients(monkeypatch):
    monkeypatch.setattr(
        step_run,
        "run",
        lambda built, modules: (torch.tensor(built), {"w": torch.tensor([built, 10 * built])}),
    )
    step = StepRun(name="", inputs=(1.0, 2.0), capture=None, modules=())
    assert is_same(step.run(), (torch.tensor(3.0), {"w": torch.tensor([3.0, 30.0])}))


def test_steps_of_other_bits_are_not_the_same():
    one = torch.tensor(1.0), {"w": torch.ones(2)}
    assert is_same(one, (torch.tensor(1.0), {"w": torch.ones(2)}))
    assert not is_same(one, (torch.tensor(1.5), {"w": torch.ones(2)}))
    assert not is_same(one, (torch.tensor(1.0), {"w": torch.tensor([1.0, 1.0 + 2**-23])}))
    assert not is_same(one, (torch.tensor(1.0), {"w": torch.ones(2), "v": torch.ones(2)}))


def test_a_round_counts_where_all_its_steps_are_quiet():
    cores = {"a": [0.0, 0.9, 0.1, 0.0, 0.05, 0.0], "b": [0.0, 0.1, 0.1, 0.0, 0.0, 0.5]}
    assert counted_rounds(cores) == [0, 2, 3, 4]
    assert counted_rounds({"a": cores["a"], "b": [0.3, 0.0, 0.4, 0.1, 0.8, 0.7]}) == [0, 2, 3, 5]


def row(name, predicted, *measured, same_bits=True):
    memory = [{"counted_bytes": 2**20, "predicted_bytes": 2**20, "nodes_apart": 0}]
    return {
        "name": name,
        "num_kept": 0,
        "predicted_us": predicted,
        "predicted_alone_us": predicted,
        "measured_us": list(measured),
        "rounds_us": list(measured),
        "others_cores": [0.0] * len(measured),
        "memory": memory,
        "same_bits": same_bits,
    }


def test_pairs_that_noise_may_swap_are_not_compared():
    a, b, c = row("a", 1, 10, 11, 12), row("b", 2, 12, 13, 14), row("c", 3, 11, 12, 13)
    assert pairs_apart([c, b, a]) == []
    b = row("b", 2, 14, 15, 16)
    assert pairs_apart([c, b, a]) == [(c, b), (a, b)]


def test_the_page_names_other_bits_and_other_orders():
    rows = [row("none", 9e3, 5e3, 5e3, 5e3), row("all", 8e3, 7e3, 7e3, 7e3, same_bits=False)]
    contention = dict.fromkeys(("compute_slowdown", "transfer_slowdown", "latency_slowdown"), 1.5)
    run = SimpleNamespace(
        request={"part": "keep", "seq_len": 8, "budget": 1},
        found={"runs": rows, "contention": contention, "others_cores": 0.5},
    )
    lines = steps_section(
        vars(run) | {"processes": 2, "megabits_per_s": 20, "machine": "a machine"}
    )
    text = "\n".join(lines)
    assert "| none | 0 | 5.0 | 5.0 to 5.0 | 9.0 | +80.0 % | 9.0 | 1.00 | 1.00 | equal |" in text
    assert "| all | 0 | 7.0 | 7.0 to 7.0 | 8.0 | +14.3 % | 8.0 | 1.00 | 1.00 | **differ** |" in text
    assert "1 of 1 pairs have quartiles that do not overlap; 1 of them ran" in text
    assert "- none and all" in lines
    expected = "- all before none: 0 of 3 rounds; median ratio 0.714, predicted 1.125"
    assert lines[-1] == expected
