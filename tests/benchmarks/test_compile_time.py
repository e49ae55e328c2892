"""``python -m benchmarks.compile_time`` runs, and refuses what it does not know."""

import pytest

from benchmarks.compile_time.__main__ import Measured, main, markdown


def test_a_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--layers", "1", "--budget", "0", "--against", "aot_eager"]) == 0
    *_, row, once = capsys.readouterr().out.splitlines()
    assert once.startswith("the first time in this process, llama3-debug, layers: 1: aot_eager ")
    model, nodes, against, *seconds, ratio = (cell.strip() for cell in row.strip("|").split("|"))
    assert (model, against) == ("llama3-debug, layers: 1", "aot_eager")
    assert int(nodes) > 300
    assert all(float(number) >= 0 for number in seconds)
    assert float(ratio) > 0


def test_the_ratio_is_that_of_the_whole_step() -> None:
    one = Measured(model="m", against="inductor", num_nodes=3, torch_s=2.0, apsched_s=3.0)
    assert markdown([one]).splitlines()[-1] == "| m | 3 | inductor | 2.0 | 3.0 | 1.50 |"


@pytest.mark.parametrize(
    "wrong", [["--layers", "0"], ["--against", "nvfuser"], ["--mesh", "fsdp"], ["--budget", "-1"]]
)
def test_what_it_does_not_know(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrong) == 2
    assert "benchmarks.compile_time: error: " in capsys.readouterr().err
