"""Graph files: the same graph comes back, without torch; what is broken is named."""

import gzip
import subprocess
import sys
from dataclasses import asdict

import orjson
import pytest
import torch

from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.graph.graph_file import VERSION, from_bytes, load_graph, save_graph, to_bytes
from apsched.graph.identity import graph_hash
from apsched.graph.records import ParameterShard
from tests.helpers.graphs.instrumented import UnitCosts, capture_of, traced

c10d = torch.ops._c10d_functional


def step(x, shard):
    whole = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(shard, 4, "dp"))
    return torch.ops.aten.mm.default(x, whole)


@pytest.fixture(scope="module")
def dag():
    module = traced(step, [torch.randn(4, 16), torch.randn(4, 16)])
    return export_graph(
        capture_of(module, ["shard"], parameters={"shard": "w"}),
        UnitCosts(),
        group_ranks={"dp": (0, 1, 2, 3)},
    )


def rewritten(dag, change):
    content = orjson.loads(gzip.decompress(to_bytes(dag)))
    change(content)
    return gzip.compress(orjson.dumps(content))


def test_the_same_graph_comes_back(dag, tmp_path):
    save_graph(dag, tmp_path / "g.graph")
    back = load_graph(tmp_path / "g.graph")
    assert dict(back.nodes(data="record")) == dict(dag.nodes(data="record"))
    assert set(back.edges(data="kind")) == set(dag.edges(data="kind"))
    assert back.graph == dag.graph
    assert graph_hash(back) == graph_hash(dag)
    assert to_bytes(back) == to_bytes(dag) == (tmp_path / "g.graph").read_bytes()


SHARD = ParameterShard(size_bytes=64, element_bytes=4, trained=False)


@pytest.mark.parametrize(("key", "value"), [("gradients", ("w",)), ("shards", {"w": SHARD})])
def test_gradients_and_shards_come_back(dag, key, value):
    assert key not in orjson.loads(gzip.decompress(to_bytes(dag)))["graph"]
    stated = dag.copy()
    stated.graph[key] = value
    assert from_bytes(to_bytes(stated)).graph[key] == value


def test_a_step_without_a_backward_graph_comes_back(dag):
    assert "has_backward" not in orjson.loads(gzip.decompress(to_bytes(dag)))["graph"]
    inference = dag.copy()
    inference.graph["has_backward"] = False
    assert from_bytes(to_bytes(inference)).graph["has_backward"] is False


def test_a_graph_file_is_read_without_torch(dag, tmp_path):
    save_graph(dag, tmp_path / "g.graph")
    code = (
        "import sys\nfrom apsched.graph.graph_file import"
        " load_graph\nload_graph(sys.argv[1])\nprint('torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "g.graph")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "False\n"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        InputError, match=r"absent\.graph: expected a graph file, found: No such file"
    ):
        load_graph(tmp_path / "absent.graph")


BROKEN = {
    "foreign": (
        lambda dag: b'{"a": 1}',
        r"expected a graph file of apsched, found something else \(not gzip\);.*TORCH_TRACE=DIR",
    ),
    "empty": (lambda dag: b"", "not gzip"),
    "of torch.export": (
        lambda dag: b"PK\x03\x04" + to_bytes(dag),
        r"found a zip archive; one of torch.export is .*optimize\(torch.export.load\(FILE\)",
    ),
    "cut off": (lambda dag: to_bytes(dag)[:-40], "broken or cut off"),
    "damaged": (
        lambda dag: to_bytes(dag)[:60] + b"\0\0\0\0" + to_bytes(dag)[64:],
        "broken or cut off",
    ),
    "no JSON": (lambda dag: gzip.compress(b"hello"), "expected JSON inside"),
    "other JSON": (
        lambda dag: gzip.compress(b'{"format": "other"}'),
        "found 'other'; this is a file of something else",
    ),
    "a list": (lambda dag: gzip.compress(b"[]"), "found list"),
    "newer": (
        lambda dag: rewritten(dag, lambda c: c.update(version=VERSION + 1)),
        "written by a newer apsched .*; upgrade apsched",
    ),
    "no version": (
        lambda dag: rewritten(dag, lambda c: c.pop("version")),
        "expected a version number, found None",
    ),
    "no nodes": (
        lambda dag: rewritten(dag, lambda c: c.pop("nodes")),
        "expected 'nodes' to be a list, found None",
    ),
    "field missing": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][2].pop("kind")),
        "node 2: expected the fields",
    ),
    "wrong kind": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][2].update(kind="x")),
        "node 2, kind: expected one of input, view",
    ),
    "wrong kind of collective": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][2]["collective"].update(kind="x")),
        "node 2, collective, kind: expected one of all_gather, .* found 'x'",
    ),
    "wrong type": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][2].update(duration_us="1")),
        "node 2, duration_us: expected float, found '1'",
    ),
    "list of text": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][2].update(reads=["a"])),
        "node 2, reads: expected a list of whole",
    ),
    "a step with half a backward": (
        lambda dag: rewritten(dag, lambda c: c["graph"].update(has_backward="half")),
        "has_backward: expected true or false, found 'half'",
    ),
    "a shard without elements": (
        lambda dag: rewritten(
            dag, lambda c: c["graph"].update(shards={"w": asdict(SHARD) | {"element_bytes": 0}})
        ),
        "shard of w: expected size_bytes >= 0 and element_bytes >= 1, found 64 and 0",
    ),
    "shards that are no records": (
        lambda dag: rewritten(dag, lambda c: c["graph"].update(shards={"w": 64})),
        "shard of w: expected the fields",
    ),
    "gradients that are no names": (
        lambda dag: rewritten(dag, lambda c: c["graph"].update(gradients=[1])),
        "gradients: expected a list of strings",
    ),
    "edge to nowhere": (
        lambda dag: rewritten(dag, lambda c: c["edges"][0].update(target=99)),
        "edge 0: expected ranks of two nodes",
    ),
    "edge backward": (
        lambda dag: rewritten(dag, lambda c: c["edges"][0].update(source=5, target=1)),
        "must come after",
    ),
    "storage": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][2].update(reads=[7])),
        "uses storage 7, which no node has allocated",
    ),
    "curve": (
        lambda dag: rewritten(dag, lambda c: c["graph"]["curves"].pop("copy")),
        "curves must hold the curve 'copy'",
    ),
    "negative": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][4].update(duration_us=-1.0)),
        "the duration must be finite, >= 0 and at most a day",
    ),
    "longer than a day": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][4].update(duration_us=1e16)),
        "the duration must be finite, >= 0 and at most a day",
    ),
    "a storage of more than 64 bits": (
        lambda dag: rewritten(dag, lambda c: c["graph"]["storages"][1].update(size_bytes=2**63)),
        r"storages 0 to 1 must be at most 2\^62 bytes in all, found .*; correct the sizes",
    ),
    "storages whose sum has more than 64 bits": (
        lambda dag: rewritten(
            dag,
            lambda c: [storage.update(size_bytes=2**61) for storage in c["graph"]["storages"]],
        ),
        r"storages 0 to \d must be at most 2\^62 bytes in all",
    ),
    "a message of more than 64 bits": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][2]["collective"].update(size_bytes=2**63)),
        r"the collectives up to node \w+ must be at most 2\^62 bytes in all",
    ),
    "a price of more than 64 bits": (
        lambda dag: rewritten(
            dag,
            lambda c: c["graph"]["curves"]["copy"].update(
                size_bytes=[0, 1], price_ticks=[0, 2**62]
            ),
        ),
        r"curve copy: the price of \d+ bytes, .* must be at most 2\^62 ticks",
    ),
    "no wait": (
        lambda dag: rewritten(dag, lambda c: c["nodes"][2]["collective"].update(wait=1)),
        "the collective needs a wait after it",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(dag, tmp_path, name):
    make, message = BROKEN[name]
    path = tmp_path / "broken.graph"
    path.write_bytes(make(dag))
    with pytest.raises(InputError, match=rf"broken\.graph: .*{message}"):
        load_graph(path)


def test_any_cut_is_an_input_error(dag):
    data = to_bytes(dag)
    for length in range(0, len(data) - 1, 97):
        with pytest.raises(InputError):
            from_bytes(data[:length])
