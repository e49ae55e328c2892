"""What reads files, one function for each kind of file, and a valid file of that kind to start
from.

usage: file_readers.py                              print the readers
       file_readers.py READER CORPUS [OPTIONS]      fuzz one, with options of libFuzzer
"""

import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import atheris

PLAN = rb"""
[[rule]]
match = 'layers\.\d+\.attention\..*'
kind = "all_gather"
group = "attention"

[[rule]]
match = 'tok_embeddings\.weight'
direction = "forward"
forbid = "bucket"
prefetch = 3
"""
CSV = b"""\
kind,group_size,num_nodes,size_bytes,time_us
all_gather,8,1,1024,20
all_gather,8,1,1048576,60
"""
NCCL_TESTS = b"""# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 8589934592 step: 4(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  31000 on  node0 device  0 [0000:00:00] NVIDIA H100
#  Rank  1 Group  0 Pid  31001 on  node0 device  1 [0000:01:00] NVIDIA H100
#
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
        1024            16     float    none      -1    24.18    0.04    0.02       0    23.99    0.04    0.02       0
     1048576         16384     float    none      -1    41.20   25.45   12.73       0    40.88   25.65   12.83       0
"""  # noqa: E501 (as nccl-tests prints it)
TRACE = b"""{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [
{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0,
 "dur": 100, "args": {"External id": 1}},
{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0, "args":
 {"External id": 2, "Input Dims": [[4, 4], [4, 4]], "Input type": ["float", "float"],
  "Concrete Inputs": ["", ""]}},
{"ph": "X", "cat": "user_annotation", "name": "gloo:all_gather", "pid": 1, "tid": 2, "ts": 4,
 "dur": 9, "args": {"Input Dims": [[8]]}}]}
"""
COSTS = b"""format = "apsched costs"
version = 1
device = "cpu, 1 thread"
cluster = "cpu"
launch_us = { all_gather = 30.0 }
copies = [[1024, 3.0], [1048576, 90.0]]
compute = []
"""
TEXTS = (
    b"memory_cap=floor..none:20\nmesh=fsdp=64,fsdp=128\nlinks,compute=1.2\n60GiB\n0.1\nnetwork=2x"
)


def _in_file(read: Callable[[Path], object], suffix: str) -> Callable[[bytes], None]:
    folder = Path(tempfile.mkdtemp())

    def run(content: bytes) -> None:
        path = folder / f"file{suffix}"
        path.write_bytes(content)
        read(path)

    return run


def _each_line(*parsers: Callable[[str], object]) -> Callable[[bytes], None]:
    from apsched.errors import InputError

    def run(content: bytes) -> None:
        for line in content.decode(errors="replace").splitlines():
            for parse in parsers:
                try:
                    parse(line)
                except InputError:
                    continue

    return run


def graph_of_debug() -> bytes:
    """Return the JSON inside a small graph file."""
    from apsched.capture.fake_world import world
    from apsched.costs.cluster_model import ClusterCostModel
    from apsched.costs.clusters.cluster import load_cluster
    from apsched.graph.export.export import export_graph
    from apsched.graph.graph_file import to_bytes
    from apsched.models.build import build
    from apsched.models.mesh import MeshSpec
    from apsched.models.preset_capture import capture_built

    with world(2):
        capture = capture_built(
            build("llama3-debug", mesh=MeshSpec.parse("fsdp=2"), seq_len=8, num_layers=1)
        )
        dag = export_graph(
            capture.graphs[0],
            ClusterCostModel(load_cluster("cpu"), capture.group_ranks),
            group_ranks=capture.group_ranks,
        )
    return zlib.decompress(to_bytes(dag), wbits=47)


def table() -> dict[str, tuple[bytes, Callable[[bytes], object]]]:
    """Return a valid file and what reads it, for each kind."""
    from apsched.artifacts.schedule_file import parse_schedule
    from apsched.calibrate.profile.trace import load_trace
    from apsched.compiler.ranks.answer_codec import parse_answer
    from apsched.costs.clusters.cluster import load_cluster
    from apsched.costs.measured_file import load_costs
    from apsched.costs.network.table import load_table
    from apsched.graph.graph_file import from_bytes
    from apsched.problem.build import build_problem
    from apsched.problem.contention_spec import parse_contention
    from apsched.problem.plan.plan_file import parse_plan
    from apsched.quantities import parse_bytes, parse_memory_cap, parse_share
    from apsched.study.axes import parse_vary

    schedule = (
        b'{"format": "apsched-schedule", "version": 1, "graph": {"name": "forward", "hash": "00"},'
        b' "buckets": [], "order": [[0, 3]]}'
    )
    cluster = Path(sys.modules[load_cluster.__module__].__file__ or "").parent / "h100.toml"
    return {
        "graph": (b"", lambda content: build_problem(from_bytes(zlib.compress(content, wbits=31)))),
        "schedule": (schedule, lambda content: parse_schedule(content, "file")),
        "plan": (PLAN, lambda content: parse_plan(content, "file.toml")),
        "plan-json": (
            b'{"rule": [{"match": "a.*", "group": "g"}]}',
            lambda content: parse_plan(content, "file.json"),
        ),
        "cluster": (cluster.read_bytes(), _in_file(load_cluster, ".toml")),
        "costs": (COSTS, _in_file(load_costs, ".toml")),
        "nccl-tests": (NCCL_TESTS, _in_file(load_table, ".txt")),
        "csv": (CSV, _in_file(load_table, ".csv")),
        "trace": (TRACE, _in_file(load_trace, ".json")),
        "answer": (b"{}", parse_answer),
        "options": (
            TEXTS,
            _each_line(
                lambda t: parse_vary([t]),
                parse_contention,
                parse_memory_cap,
                parse_bytes,
                parse_share,
            ),
        ),
    }


def main(arguments: list[str]) -> None:
    with atheris.instrument_imports(include=["apsched"]):
        found = table()
        from apsched.errors import InputError
    if not arguments:
        print(*found)
        return
    name, corpus = arguments[0], Path(arguments[1])
    seed, read = found[name]
    (corpus / "valid").write_bytes(seed or graph_of_debug())

    def one_input(content: bytes) -> None:
        try:
            read(content)
        except InputError as error:
            if not str(error).strip():
                raise AssertionError("an error without a word") from error

    atheris.Setup([sys.argv[0], str(corpus), *arguments[2:]], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
