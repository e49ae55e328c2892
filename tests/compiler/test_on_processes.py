"""Real gloo processes, two and four, train under ``torch.compile`` with apsched as they do without,
and as under eager FSDP2.
"""

import shutil

import pytest

from tests.helpers.processes import WORKERS, run_sizes

Reports = list[dict]
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]

FORMS = ("aot_eager", "inductor", "pass")
ROOT = ["inner.output.weight", "inner.output.bias", "inner.input.weight", "inner.input.bias"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[int, Reports]:
    return run_sizes(
        WORKERS / "training/compiler_worker.py", tmp_path_factory.mktemp("compiled"), timeout_s=800
    )


@pytest.fixture(params=[2, 4], ids="{} processes".format)
def reports(jobs, request) -> Reports:
    return jobs[request.param]


def assert_trained_alike(reports: Reports, case: str) -> None:
    for report in reports:
        found = report[case]
        assert found["num_unequal"] == 0
        assert found["exact"]
        assert {name for name, _, _ in found["graphs"]} == {"forward", "backward"}
        assert any(launches < captured for _, captured, launches in found["graphs"])


def test_losses_and_gradients_are_those_of_aot_eager(reports):
    """FSDP on two; on four FSDP times tensor parallelism, so that every sum is one of two values,
    which has the same bits in any order.
    """
    assert_trained_alike(reports, "preset")


@pytest.mark.parametrize("case", ["reshard", "graph breaks", "sizes that change"])
def test_other_ways_to_compile(jobs, case):
    assert_trained_alike(jobs[2], case)


def test_the_memory_in_use_on_any_process_rank_counts_on_all(reports):
    """Of 1, 2, ... GiB in use the largest; a few KiB of it are parameters, but it is rounded up."""
    largest = len(reports) * 2**30
    for report in reports:
        assert report["in use"] == {"forward": largest, "backward": largest}


def test_inference(jobs):
    for report in jobs[2]:
        assert report["inference"] == {"equal": True, "names": ["graph", "graph"]}


def test_full_inductor_computes_what_inductor_does(jobs):
    for report in jobs[2]:
        assert report["inductor"]["largest_distance"] < 1e-5, (
            "Inductor fuses other kernels, which round otherwise"
        )
        assert [launches < captured for _, captured, launches in report["inductor"]["graphs"]] == [
            True,
            True,
        ]


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_eager_fsdp2_after_each_step(reports, form):
    """Bit for bit: the model's own arithmetic has no sums that Inductor would order otherwise."""
    for report in reports:
        found = report["blocks"]
        assert len(set(found["eager"])) == 3, "each step changes the weights"
        assert found[form]["hashes"] == found["eager"]
    assert len({report["blocks"]["eager"][0] for report in reports}) == len(reports), (
        "each process rank has shards of its own"
    )


@pytest.mark.parametrize("form", ["aot_eager", "inductor"])
def test_gradients_are_reduced_unit_by_unit_in_order_of_registration(reports, form):
    units = [
        ROOT,
        *(
            [f"inner.layers.{k}.{m}.{p}" for m in ("second", "first") for p in ("weight", "bias")]
            for k in (1, 0)
        ),
    ]
    for report in reports:
        assert report["blocks"][form]["reduced"] == units


def test_a_preset_trains_as_under_eager_fsdp2(reports):
    for report in reports:
        found = report["llama"]
        assert found["hashes"] == found["eager"]
        assert len(set(found["eager"])) == 3
        assert [len(names) for names in found["reduced"]] == [3, 9, 9], "the root and two blocks"
        assert all(names == sorted(names, key=found["order"].index) for names in found["reduced"])


@pytest.mark.parametrize("form", FORMS)
def test_every_process_rank_launches_what_the_schedule_says(reports, form):
    """What torch's profiler sees in a step, against the schedules of forward and backward: kinds
    and bytes, in order.
    """
    for report in reports:
        found = report["blocks"][form]
        assert found["seen"] == found["planned"] == reports[0]["blocks"][form]["seen"]
        assert {kind for kind, _ in found["seen"]} == {"all_gather", "reduce_scatter"}
        assert len(found["seen"]) < 2 * len(report["blocks"]["order"]), "fewer than as captured"
