"""Which of its profiles a calibration reads."""

import json

from torch.profiler import record_function

from benchmarks.calibration.second_profile import second_profile


def test_the_profile_is_the_second_of_its_process(tmp_path):
    ran = []

    def step():
        with record_function(f"step {len(ran)}"):
            ran.append(len(ran))

    trace = tmp_path / "trace.json"
    second_profile(step, 3, trace)
    read = [
        event["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if str(event.get("name")).startswith("step ")
    ]
    assert read == [f"step {k}" for k in ran[-3:]]
    assert len(ran) >= 6
