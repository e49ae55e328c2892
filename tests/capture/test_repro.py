"""Files that torch writes are read as they are, without CUDA, triton or running them; what cannot be read is refused by line."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.debug_utils import InputReader
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apsched.capture.captured import Capture
from apsched.capture.repro import read_repro
from apsched.capture.world import world
from apsched.errors import InputError
from apsched.torch_private import size_hint

DATA = Path(__file__).parent / "data"
FILES = sorted(path.name for path in DATA.glob("*.py.txt"))
ON_CPU = [name for name in FILES if "_cuda" not in name]
WRITE = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WRITE:
    """Write a small repro file: its forward, its inputs, and what else a test needs."""

    def make(
        body: str,
        signature: str = "primals_1",
        args: str | None = None,
        init: str = "",
        head: str = "import torch\n",
        tail: str = "mod = Repro()\n",
    ) -> Path:
        args = args if args is not None else "buf0 = reader.storage(None, 512)\nreader.tensor(buf0, (8, 16), is_leaf=True)  # primals_1"
        lines = [head, "class Repro(torch.nn.Module):", "    def __init__(self) -> None:", "        super().__init__()"]
        lines += [f"        {line}" for line in init.splitlines()]
        lines += ["", f"    def forward(self, {signature}):", *(f"        {line}" for line in body.splitlines()), ""]
        lines += ["def load_args(reader):", *(f"    {line}" for line in args.splitlines()), "load_args._version = 0", tail]
        path = tmp_path / "repro.py"
        path.write_text("\n".join(lines))
        return path

    return make


def nodes(capture: Capture) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in capture.graphs[0].module.graph.nodes}


def load_by_torch(path: Path) -> tuple[torch.nn.Module, list[Any]]:
    """Return the module and the real inputs of a repro file as torch itself gets them: by running it."""
    lines = [line for line in path.read_text().splitlines() if "config." not in line and "os.environ" not in line]
    scope: dict[str, Any] = {"__name__": "repro"}
    exec(compile("\n".join(lines), str(path), "exec"), scope)
    reader = InputReader()
    scope["load_args"](reader)
    return scope["mod"], reader.args


class Recorder(TorchDispatchMode):
    """Keeps every operator that runs, with the shapes of its tensor arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, list[list[int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, [list(item.shape) for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]))
        return func(*args, **kwargs or {})


def called_shapes(node: torch.fx.Node) -> list[list[int]]:
    values = [item.meta["val"] for item in tree_leaves((node.args, node.kwargs)) if isinstance(item, torch.fx.Node)]
    return [[size_hint(size) for size in value.shape] for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", ON_CPU)
def test_graph_is_what_runs_when_torch_runs_the_file(name: str) -> None:
    module, inputs = load_by_torch(DATA / name)
    with world(64), torch.no_grad(), Recorder() as recorder:
        module(*inputs)
    read = [node for node in read_repro(DATA / name).graphs[0].module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert [(node.target, called_shapes(node)) for node in read] == recorder.calls


@pytest.mark.parametrize("name", ON_CPU)
def test_every_node_has_the_shape_that_it_has_when_the_file_runs(name: str) -> None:
    read = read_repro(DATA / name).graphs[0].module
    _, inputs = load_by_torch(DATA / name)
    real: dict[str, Any] = {}

    class Values(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            real[n.name] = super().run_node(n)
            return real[n.name]

    with world(64), torch.no_grad():
        Values(read).run(*inputs, enable_io_processing=False)
    for node in read.graph.nodes:
        if node.op == "output":
            continue
        for fake, tensor in zip(tree_leaves(node.meta["val"]), tree_leaves(real[node.name]), strict=True):
            if isinstance(tensor, torch.Tensor):
                assert [size_hint(size) for size in fake.shape] == list(tensor.shape), node.name
                assert [size_hint(size) for size in fake.stride()] == list(tensor.stride()), node.name
                assert fake.dtype == tensor.dtype
            else:
                assert size_hint(fake) == tensor


@pytest.mark.parametrize("name", FILES)
def test_names_are_those_of_the_file(name: str) -> None:
    text = (DATA / name).read_text()
    for node in read_repro(DATA / name).graphs[0].module.graph.nodes:
        if node.op == "call_function":
            assert text.splitlines()[node.meta["apsched_line"] - 1].strip().startswith(f"{node.name} = ")


def test_cuda_file_is_the_same_graph_and_remembers_its_devices() -> None:
    plain, cuda = read_repro(DATA / "fsdp_forward.py.txt"), read_repro(DATA / "fsdp_forward_cuda.py.txt")
    assert [str(node.meta.get("val")) for node in nodes(cuda).values()] == [str(node.meta.get("val")) for node in nodes(plain).values()]
    assert {node.meta["apsched_device"] for node in nodes(cuda).values() if node.op != "output"} == {"cuda:0"}
    assert not any("apsched_device" in node.meta for node in nodes(plain).values())


def test_reading_needs_neither_triton_nor_the_modules_the_file_imports(write: WRITE) -> None:
    head = "import triton\nimport no_such_module\nraise SystemExit('the file was run')\n1 +\nERROR: Repro will not work as intended\n"
    assert nodes(read_repro(write("relu = torch.ops.aten.relu.default(primals_1)\nreturn (relu,)", head=head)))["relu"]


@pytest.mark.parametrize(
    ("name", "direction", "kept"),
    [
        ("fsdp_forward.py.txt", "forward", {f"primals_{k}" for k in range(1, 6)}),
        ("fsdp_minifier.py.txt", "forward", {f"primals_{k}" for k in range(1, 6)}),
        ("fsdp_backward.py.txt", "backward", set()),
        ("fsdp_backward_symbolic.py.txt", "backward", {"primals_2"}),
    ],
)
def test_direction_and_kept_inputs_follow_the_names(name: str, direction: str, kept: set[str]) -> None:
    capture = read_repro(DATA / name)
    assert (capture.graphs[0].name, capture.graphs[0].kept_inputs) == (direction, frozenset(kept))
    assert capture.group_sizes == {"0": 64}
    assert capture.group_ranks == {"0": ()}


def test_symbolic_sizes_keep_their_values_as_hints() -> None:
    tokens = nodes(read_repro(DATA / "fsdp_forward_symbolic.py.txt"))["primals_3"].meta["val"]
    assert isinstance(tokens.shape[1], torch.SymInt)
    assert [size_hint(size) for size in tokens.shape] == [2, 16, 128]


def test_sizes_may_be_expressions(write: WRITE) -> None:
    args = (
        "reader.symint(6, expr='s0')\nbuf0 = reader.storage(None, 8*s0*Max(2, s0//2), dtype_hint=torch.float32)\n"
        "reader.tensor(buf0, (Max(2, s0//2), 2*s0), is_leaf=True)"
    )
    capture = read_repro(
        write("mul = primals_1 * 2\nview = torch.ops.aten.view.default(x, [mul, -1])\nreturn (view,)", "primals_1, x", args)
    )
    assert [size_hint(size) for size in nodes(capture)["view"].meta["val"].shape] == [12, 3]
    assert nodes(capture)["mul"].target is operator.mul


def test_tensors_of_one_storage_alias(write: WRITE) -> None:
    args = (
        "buf0 = reader.storage('abc', 515, device=device(type='cuda', index=1), dtype_hint=torch.bfloat16)\n"
        "reader.tensor(buf0, (16, 4), (1, 16), dtype=torch.bfloat16, storage_offset=64, is_leaf=True)\n"
        "reader.tensor(buf0, (8, 16), requires_grad=True)\n"
        "buf1 = reader.storage(None, 4)\nreader.tensor(buf1, ())"
    )
    found = nodes(read_repro(write("return (a, b, c)", "a, b, c", args)))
    a, b, c = (found[name].meta["val"] for name in "abc")
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata != c.untyped_storage()._cdata
    assert (a.stride(), a.storage_offset(), a.untyped_storage().nbytes()) == ((1, 16), 64, 515)
    assert (a.dtype, b.dtype, c.shape) == (torch.bfloat16, torch.float32, ())
    assert found["a"].meta["apsched_device"] == "cuda:1"


def test_calls_keep_their_arguments(write: WRITE) -> None:
    body = (
        "full = torch.ops.aten.full.default([2, 2], -inf, dtype = torch.float32, layout = torch.strided,"
        " device = device(type='cuda', index=3), pin_memory = False);  primals_1 = None\n"
        "clone = torch.ops.aten.clone.default(full, memory_format = torch.contiguous_format);  full = None\n"
        "_foreach_add = torch.ops.aten._foreach_add.Scalar([clone, clone], 1)\n"
        "getitem = _foreach_add[0];  getitem_1 = _foreach_add[1];  _foreach_add = getitem_1 = None\n"
        'sum_1: "f32[]" = torch.ops.aten.sum.default(getitem);  getitem = None\n'
        "sym_size_int = torch.ops.aten.sym_size.int(clone, 0)\n"
        "return [sum_1, None, sym_size_int]"
    )
    found = nodes(read_repro(write(body)))
    assert found["full"].args == ([2, 2], -float("inf"))
    assert dict(found["full"].kwargs, device=None) == {
        "dtype": torch.float32,
        "layout": torch.strided,
        "device": None,
        "pin_memory": False,
    }
    assert found["full"].meta["apsched_device"] == found["sum_1"].meta["apsched_device"] == "cuda:3"
    assert found["clone"].kwargs == {"memory_format": torch.contiguous_format}
    assert (found["getitem_1"].target, found["getitem_1"].args[1]) == (operator.getitem, 1)
    assert list(found)[-1] == "output"
    assert found["output"].args == ([found["sum_1"], None, found["sym_size_int"]],)


def test_effects_without_users_stay(write: WRITE) -> None:
    body = (
        "relu = torch.ops.aten.relu.default(primals_1)\ncopy_ = torch.ops.aten.copy_.default(primals_1, relu);  primals_1 = copy_ = None\n"
        "rand = torch.ops.aten.rand.default([4], pin_memory = False);  rand = None\nreturn (relu,)"
    )
    assert list(nodes(read_repro(write(body)))) == ["primals_1", "relu", "copy_", "rand", "output"]


def test_triton_kernels_are_opaque_but_shaped(write: WRITE) -> None:
    body = (
        "triton_kernel_wrapper_functional_proxy = torch.ops.higher_order.triton_kernel_wrapper_functional("
        "kernel_idx = 0, constant_args_idx = 0, grid = [(1, 1, 1)], tma_descriptor_metadata = {}, kwargs = {'x': primals_1}, tensors_to_clone = ['x'])\n"
        "getitem = triton_kernel_wrapper_functional_proxy['x'];  triton_kernel_wrapper_functional_proxy = None\n"
        "triton_kernel_wrapper_mutation = torch.ops.higher_order.triton_kernel_wrapper_mutation("
        "kernel_idx = 0, constant_args_idx = 0, grid = [(1, 1, 1)], tma_descriptor_metadata = {}, kwargs = {'x': getitem});  triton_kernel_wrapper_mutation = None\n"
        "return (getitem,)"
    )
    found = nodes(read_repro(write(body)))
    assert found["getitem"].meta["val"].shape == (8, 16)
    assert found["triton_kernel_wrapper_mutation"].meta["val"] is None


def test_random_state_operators_are_read(write: WRITE) -> None:
    body = (
        "run_and_save_rng_state = torch.ops.higher_order.run_and_save_rng_state("
        "torch.ops.aten.native_dropout.default, primals_1, 0.5, True)\n"
        "getitem = run_and_save_rng_state[1];  run_and_save_rng_state = None\ngetitem_1 = getitem[0]\n"
        "graphsafe_run_with_rng_state = torch.ops.higher_order.graphsafe_run_with_rng_state(torch.ops.aten.native_dropout.default,"
        " primals_1, 0.5, True, rng_state = fwd_rng_state_0)\ngetitem_2 = graphsafe_run_with_rng_state[0]\nreturn (getitem_1, getitem_2)"
    )
    args = "buf0 = reader.storage(None, 512)\nreader.tensor(buf0, (8, 16))\nreader.generator('cuda', 0)  # fwd_rng_state_0"
    found = nodes(read_repro(write(body, "primals_1, fwd_rng_state_0", args)))
    assert found["getitem_1"].meta["val"].shape == found["getitem_2"].meta["val"].shape == (8, 16)


def test_subgraph_that_the_file_only_names_is_no_obstacle_where_shapes_do_not_need_it(write: WRITE) -> None:
    init = "self.sdpa_score0 = <lambda>()\nself.sdpa_mask0 = GraphModule(\n(a): <lambda>()\n)\n"
    init += "self.register_buffer('_tensor_constant0', tensor([1, -2]).to(\"cuda:0\"))"
    body = (
        "_tensor_constant0 = self._tensor_constant0\nsdpa_score0 = self.sdpa_score0\nsdpa_mask0 = self.sdpa_mask0\n"
        "flex_attention = torch.ops.higher_order.flex_attention(primals_1, primals_1, primals_1, sdpa_score0, (16, 16, _tensor_constant0,"
        " _tensor_constant0, None, None, _tensor_constant0, _tensor_constant0, None, None, 128, 128, sdpa_mask0), 0.5, {}, (), ())\n"
        "getitem = flex_attention[0]\nreturn (getitem,)"
    )
    args = "buf0 = reader.storage(None, 8192)\nreader.tensor(buf0, (1, 2, 16, 64))"
    found = nodes(read_repro(write(body, args=args, init=init)))
    assert found["getitem"].meta["val"].shape == (1, 2, 16, 64)
    assert found["_tensor_constant0"].meta["val"].shape == (2,)


def test_subgraph_that_is_needed_is_refused_at_its_call(write: WRITE) -> None:
    body = "sub = self.sub\nout = torch.ops.higher_order.cond(True, sub, sub, (primals_1,))\nreturn (out,)"
    with pytest.raises(InputError, match=r"repro\.py:10: .*node out.*"):
        read_repro(write(body, init="self.sub = <lambda>()"))


def test_group_that_a_shape_depends_on_is_set_up_and_taken_down(write: WRITE) -> None:
    body = "shard = torch.ops._dtensor.shard_dim_alltoall.default(primals_1, 0, 1, 'tp')\nreturn (shard,)"
    capture = read_repro(write(body, tail="setup_fake_process_groups({'tp': {'size': 4, 'rank': 0}, '0': {'size': 8, 'rank': 0}})"))
    assert nodes(capture)["shard"].meta["val"].shape == (32, 4)
    assert capture.group_sizes == {"0": 8, "tp": 4}
    assert not torch.distributed.is_initialized()


def test_all_to_all_and_coalesced_collectives_are_read(write: WRITE) -> None:
    body = (
        "all_to_all_single = torch.ops._c10d_functional.all_to_all_single.default(primals_1, [4, 4], [4, 4], '3')\n"
        "wait_tensor = torch.ops._c10d_functional.wait_tensor.default(all_to_all_single)\n"
        "all_gather_into_tensor_coalesced = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default("
        "[primals_1, wait_tensor], 2, '3')\n"
        "getitem = all_gather_into_tensor_coalesced[0]\nwait_tensor_1 = torch.ops._c10d_functional.wait_tensor.default(getitem)\n"
        "return (wait_tensor_1,)"
    )
    capture = read_repro(write(body))
    assert nodes(capture)["wait_tensor_1"].meta["val"].shape == (16, 16)
    assert capture.group_sizes == {"3": 2}


WAIT = "w = torch.ops._c10d_functional.wait_tensor.default(c)\nreturn (w,)"
STORAGE = "buf0 = reader.storage(None, 512)\n"
BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "unknown operator": (
        {"body": "x = torch.ops.my_lib.my_op.default(primals_1)\nreturn (x,)"},
        r":8: .*torch\.ops\.my_lib\.my_op\.default, which torch",
    ),
    "unknown overload": ({"body": "x = torch.ops.aten.relu.nonsense(primals_1)\nreturn (x,)"}, r":8: .*aten\.relu\.nonsense"),
    "no overload": ({"body": "x = torch.ops.aten.add(primals_1, 1)\nreturn (x,)"}, r":8: .*without its overload"),
    "unknown higher-order operator": ({"body": "x = torch.ops.higher_order.nope(primals_1)\nreturn (x,)"}, r":8: .*higher_order\.nope"),
    "call of the system": ({"body": "x = os.system('true')\nreturn (x,)"}, r":8: .*a call of os\.system"),
    "call of a torch function": ({"body": "x = torch.load('file')\nreturn (x,)"}, r":8: .*a call of torch\.load"),
    "private path under torch.ops": (
        {"body": "x = torch.ops.aten.__class__.__init__(primals_1)\nreturn (x,)"},
        r":8: .*torch\.ops\.aten\.__class__",
    ),
    "method call": ({"body": "x = primals_1.relu()\nreturn (x,)"}, r":8: .*primals_1\.relu.*before AOTAutograd"),
    "module call": ({"body": "x = self.linear(primals_1)\nreturn (x,)"}, r":8: .*self\.linear.*before AOTAutograd"),
    "control flow": ({"body": "if primals_1:\n    return 1\nreturn (primals_1,)"}, r":8: .*'if primals_1:'"),
    "unknown name": (
        {"body": "x = torch.ops.aten.relu.default(primals_2)\nreturn (x,)"},
        r":8: .*the name primals_2, which no line before",
    ),
    "use after free": (
        {"body": "x = torch.ops.aten.relu.default(primals_1);  primals_1 = None\nreturn (primals_1,)"},
        r":9: .*primals_1 after its last use",
    ),
    "no return": ({"body": "x = torch.ops.aten.relu.default(primals_1)"}, r":8: .*end with return"),
    "nested call": (
        {"body": "x = torch.ops.aten.relu.default(torch.ops.aten.relu.default(primals_1))\nreturn (x,)"},
        r":8: .*the argument torch\.ops",
    ),
    "unknown constant": (
        {"body": "x = torch.ops.aten._to_copy.default(primals_1, dtype = torch.float7)\nreturn (x,)"},
        r":8: .*torch\.float7",
    ),
    "unknown device": ({"body": "x = torch.ops.aten.ones.default([2], device = device(type='abacus'))\nreturn (x,)"}, r":8: .*abacus"),
    "missing attribute": ({"body": "x = self.x\nreturn (x,)"}, r":8: .*self\.x"),
    "shapes do not fit": ({"body": "x = torch.ops.aten.mm.default(primals_1, primals_1)\nreturn (x,)"}, r":8: .*at node x, found"),
    "wrong arguments": ({"body": "x = torch.ops.aten.mm.default(primals_1)\nreturn (x,)"}, r":8: .*at node x, found"),
    "no wait": (
        {
            "body": "c = torch.ops._c10d_functional.all_reduce.default(primals_1, 'sum', '0')\nreturn (c,)",
            "tail": "setup_fake_process_groups({'0': {'size': 2, 'rank': 0}})",
        },
        r":8: .*wait_tensor of the collective c",
    ),
    "group without size": (
        {"body": f"c = torch.ops._c10d_functional.all_reduce.default(primals_1, 'sum', '7')\n{WAIT}"},
        r":8: .*size of process group '7'",
    ),
    "group of two sizes": (
        {
            "body": f"c = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 2, '7')\n{WAIT}",
            "tail": "setup_fake_process_groups({'7': {'size': 4, 'rank': 0}})",
        },
        r":8: .*4 process ranks throughout, found 2",
    ),
    "odd groups": (
        {"body": "return (primals_1,)", "tail": "setup_fake_process_groups({'7': {'rank': 0}})"},
        r":14: .*of the process groups",
    ),
    "size that depends on data": (
        {"body": "x = torch.ops.aten.nonzero.default(primals_1)\nreturn (x,)"},
        r":8: .*sizes known before the step.*node x",
    ),
    "point to point": ({"body": "c = torch.ops._c10d_functional.nope.default(primals_1)\nreturn (c,)"}, r":8: .*_c10d_functional\.nope"),
    "too few inputs": ({"body": "return (a,)", "signature": "a, b"}, r":10: .*2 inputs in load_args.*found 1"),
    "no shape": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0)"},
        r":12: .*without its storage and shape",
    ),
    "no storage": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf1, (2,))"},
        r":12: .*buf1, a storage that no line",
    ),
    "storage too small": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (200,))"},
        r":12: .*needs 800 bytes in a storage of 512",
    ),
    "negative shape": ({"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (-2,))"}, r":12: .*negative shape"),
    "strides missing": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (2, 2), (1,))"},
        r":12: .*2 dimensions with 1 strides",
    ),
    "unknown symbol": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (s5, 2))"},
        r":12: .*symbolic size s5.*'s5 = <size>'",
    ),
    "dtype unknown": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (2,), dtype=torch.nope)"},
        r":12: .*torch\.nope",
    ),
    "code in load_args": ({"body": "return (a,)", "signature": "a", "args": "import os\n" + STORAGE}, r":11: .*'import os'"),
    "call in a shape": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (exit(3),))"},
        r":12: .*exit\(3\) where a size",
    ),
    "huge exponent": (
        {"body": "return (a,)", "signature": "a", "args": "buf0 = reader.storage(None, 9**9**9)\nreader.tensor(buf0, (2,))"},
        r":11: .*exponent",
    ),
    "unsupported input": (
        {"body": "x = torch.ops.aten.relu.default(a)\nreturn (x,)", "signature": "a", "args": "reader.unsupported('a')"},
        r":12: .*input a, which node x uses",
    ),
    "constant input": (
        {"body": "x = torch.ops.aten.relu.default(a)\nreturn (x,)", "signature": "a", "args": "reader.const('a')"},
        r":12: .*left out as a constant",
    ),
    "unknown reader method": ({"body": "return (a,)", "signature": "a", "args": "reader.hologram('a')"}, r":11: .*reader\.hologram"),
    "syntax in forward": ({"body": "x = torch.ops.aten.relu.default(primals_1\nreturn (x,)"}, r":8: .*Python in class Repro"),
    "syntax in load_args": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (2,"},
        r":12: .*Python in load_args",
    ),
    "constant too odd": (
        {"body": "x = self.x\nreturn (x,)", "init": "self.register_buffer('x', tensor(open('f').read()))"},
        r":6: .*constant tensor",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_refused_by_line(case: str, write: WRITE, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, message = BROKEN[case]
    path = write(**arguments)
    with pytest.raises(InputError, match=r"repro\.py" + message) as caught:
        read_repro(path)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert not torch.distributed.is_initialized()


FOREIGN: dict[str, tuple[bytes, str]] = {
    "empty": (b" \n", r"x\.py:1: expected a repro file, found an empty one"),
    "no Python": (b"hello there, general\n", r"x\.py:1: .*found no Python"),
    "binary": (b"PK\x03\x04\xff\xfe\x00\x00", r"x\.py:1: .*no UTF-8"),
    "zero bytes": (b"import torch\n\0\0\0", r"x\.py:2: .*binary data"),
    "another Python file": (b"import torch\nprint(1)\n", r"x\.py:1: expected class Repro\(torch\.nn\.Module\), found none"),
    "printed graph": (
        b"# printed\nclass <lambda>(torch.nn.Module):\n    def forward(self, x):\n        return x\n",
        r"x\.py:2: .*printed graph",
    ),
    "no repro written": (b"Repro is not generated due to existence of BackwardState in graph input", r"x\.py:1: torch wrote no repro"),
    "no load_args": (b"import torch\nclass Repro(torch.nn.Module):\n    def forward(self):\n        return ()\n", r"x\.py:4: .*load_args"),
    "no forward": (b"class Repro(torch.nn.Module):\n    pass\ndef load_args(reader):\n    pass\n", r"x\.py:1: .*forward"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_file_is_refused(case: str, tmp_path: Path) -> None:
    data, message = FOREIGN[case]
    (tmp_path / "x.py").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_repro(tmp_path / "x.py")


@pytest.mark.parametrize("part", [0.2, 0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("name", ["fsdp_forward_cuda.py.txt", "fsdp_backward_symbolic.py.txt"])
def test_truncated_file_is_refused(name: str, part: float, tmp_path: Path) -> None:
    text = (DATA / name).read_text()
    text = text[: text.index("load_args._version")]
    (tmp_path / "cut.py").write_text(text[: int(len(text) * part)])
    with pytest.raises(InputError, match=r"cut\.py:\d+: expected"):
        read_repro(tmp_path / "cut.py")


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.py: .*found nothing there"):
        read_repro(tmp_path / "none.py")
    with pytest.raises(InputError, match="found a directory; hand in the fx_graph_runnable"):
        read_repro(tmp_path)
    (tmp_path / "fx_graph_runnable_12.txt").touch()
    with pytest.raises(InputError, match=r"such as .*fx_graph_runnable_12\.txt"):
        read_repro(str(tmp_path))
