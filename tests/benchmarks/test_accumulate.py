"""The benchmark of micro-batches in a row: it runs on a small model, and fails where a choice that
people make is faster.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accumulate.__main__ import main
from benchmarks.accumulate.cases import Row
from benchmarks.common.choices import beaten


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    out = tmp_path / "accumulate.md"
    assert main(["--smoke", "-o", str(out)]) == 0
    rows = [Row(**row) for row in json.loads(out.with_suffix(".json").read_text())]
    by_hand = ["none", "kept", "no_sync", "no_sync_kept", "once", "last_block", "fsdp2"]
    assert [row.choice for row in rows] == [*by_hand, "apsched"]
    assert sum(line.startswith("| llama3") for line in out.read_text().splitlines()) == len(rows)
    times = [row.step_ms or 0.0 for row in rows]
    assert times[-1] <= min(times) < times[0]
    assert not beaten(rows)
    assert beaten([replace(rows[0], step_ms=0.1), *rows[1:]])
