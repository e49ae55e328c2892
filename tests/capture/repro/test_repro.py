"""Files that torch writes are read as they are, without CUDA, triton or running them; what cannot
be read is refused by line.
"""

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
from apsched.capture.fake_world import world
from apsched.capture.repro.reader import read_repro
from apsched.errors import InputError
from apsched.torch_compat.sizes import depends_on_data, size_hint

DATA = Path(__file__).parent / "data"
FILES = sorted(path.name for path in DATA.glob("*.py.txt"))
ON_CPU = [name for name in FILES if "_cuda" not in name]
WRITE = Callable[..., Path]


def nodes(capture: Capture) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in capture.graphs[0].module.graph.nodes}


def load_by_torch(path: Path) -> tuple[torch.nn.Module, list[Any]]:
    """Return the module and the real inputs of a repro file as torch itself gets them: by running
    it.
    """
    lines = [
        line
        for line in path.read_text().splitlines()
        if "config." not in line and "os.environ" not in line
    ]
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
        self.calls.append(
            (
                func,
                [
                    list(item.shape)
                    for item in tree_leaves((args, kwargs))
                    if isinstance(item, torch.Tensor)
                ],
            )
        )
        return func(*args, **kwargs or {})


def called_shapes(node: torch.fx.Node) -> list[list[int]]:
    values = [
        item.meta["val"]
        for item in tree_leaves((node.args, node.kwargs))
        if isinstance(item, torch.fx.Node)
    ]
    return [
        [size_hint(size) for size in value.shape]
        for value in values
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize("name", ON_CPU)
def test_graph_is_what_runs_when_torch_runs_the_file(name: str) -> None:
    module, inputs = load_by_torch(DATA / name)
    with world(64), torch.no_grad(), Recorder() as recorder:
        module(*inputs)
    read = [
        node
        for node in read_repro(DATA / name).graphs[0].module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]
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
        for fake, tensor in zip(
            tree_leaves(node.meta["val"]), tree_leaves(real[node.name]), strict=True
        ):
            if isinstance(tensor, torch.Tensor):
                assert [size_hint(size) for size in fake.shape] == list(tensor.shape), node.name
                assert [size_hint(size) for size in fake.stride()] == list(tensor.stride()), (
                    node.name
                )
                assert fake.dtype == tensor.dtype
            else:
                assert (fake if fake is None else size_hint(fake)) == tensor


@pytest.mark.parametrize("name", FILES)
def test_names_are_those_of_the_file(name: str) -> None:
    text = (DATA / name).read_text()
    for node in read_repro(DATA / name).graphs[0].module.graph.nodes:
        if node.op == "call_function":
            assert (
                text.splitlines()[node.meta["apsched_line"] - 1]
                .strip()
                .startswith(f"{node.name} = ")
            )


def test_cuda_file_is_the_same_graph_and_remembers_its_devices() -> None:
    plain, cuda = (
        read_repro(DATA / "fsdp_forward.py.txt"),
        read_repro(DATA / "fsdp_forward_cuda.py.txt"),
    )
    assert [str(node.meta.get("val")) for node in nodes(cuda).values()] == [
        str(node.meta.get("val")) for node in nodes(plain).values()
    ]
    assert {
        node.meta["apsched_device"] for node in nodes(cuda).values() if node.op != "output"
    } == {"cuda:0"}
    assert not any("apsched_device" in node.meta for node in nodes(plain).values())


def test_reading_needs_neither_triton_nor_the_modules_the_file_imports(write: WRITE) -> None:
    head = (
        "import triton\nimport no_such_module\nraise SystemExit('the file was run')\n1 +\nERROR:"
        " Repro will not work as intended\n"
    )
    assert nodes(
        read_repro(
            write("relu = torch.ops.aten.relu.default(primals_1)\nreturn (relu,)", head=head)
        )
    )["relu"]


@pytest.mark.parametrize(
    ("name", "direction", "kept"),
    [
        ("fsdp_forward.py.txt", "forward", {f"primals_{k}" for k in range(1, 6)}),
        ("fsdp_minifier.py.txt", "forward", {f"primals_{k}" for k in range(1, 6)}),
        ("fsdp_backward.py.txt", "backward", set()),
        ("fsdp_backward_symbolic.py.txt", "backward", {"primals_2"}),
    ],
)
def test_direction_and_kept_inputs_follow_the_names(
    name: str, direction: str, kept: set[str]
) -> None:
    capture = read_repro(DATA / name)
    assert (capture.graphs[0].name, capture.graphs[0].kept_inputs) == (direction, frozenset(kept))
    assert capture.group_sizes == {"0": 64}
    assert capture.group_ranks == {"0": ()}


def test_input_that_only_passes_through_needs_no_value() -> None:
    """The DeviceMesh of a DTensor: torch writes its type only, and reads it back as None."""
    mesh = nodes(read_repro(DATA / "dtensor_forward.py.txt"))["primals_2"]
    assert [user.op for user in mesh.users] == ["output"]
    assert mesh.meta["val"] is None


def test_size_of_a_group_is_what_the_graph_says_else_the_user_else_the_file(write: WRITE) -> None:
    reduce = "c = torch.ops._c10d_functional.all_reduce.default(primals_1, 'sum', 'dp')\n"
    wait = "w = torch.ops._c10d_functional.wait_tensor.default(c)\n"
    gather = (
        "g = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 2, 'dp')\n"
        "v = torch.ops._c10d_functional.wait_tensor.default(g)\n"
    )
    tail = "setup_fake_process_groups({'dp': {'size': 256, 'rank': 0}})"
    stated = {"dp": (0, 8, 16, 24)}
    unknown = write(reduce + wait + "return (w,)")
    with pytest.raises(InputError, match=r"--group-ranks NAME=0-7 on the command line"):
        read_repro(unknown)
    found = read_repro(unknown, group_ranks=stated)
    assert (found.group_sizes, found.group_ranks) == ({"dp": 4}, stated)
    by_file = read_repro(write(reduce + wait + "return (w,)", tail=tail))
    assert (by_file.group_sizes, by_file.group_ranks) == ({"dp": 256}, {"dp": ()})
    by_graph = write(reduce + wait + gather + "return (w, v)", tail=tail)
    assert read_repro(by_graph, group_ranks=stated).group_sizes == {"dp": 2}


def test_imports_define_the_operators_of_the_graph(
    write: WRITE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module that is named is imported, from the current directory too; the file is not run."""
    module = f"ops_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(
        "import torch\n"
        f"library = torch.library.Library('{module}', 'DEF')\n"
        "library.define('twice(Tensor x) -> Tensor')\n"
        "library.impl('twice', lambda x: torch.cat([x, x]), 'CompositeExplicitAutograd')\n"
    )
    monkeypatch.chdir(tmp_path)
    path = write(
        f"x = torch.ops.{module}.twice.default(primals_1)\nreturn (x,)",
        head="raise SystemExit('the file was run')\n",
    )
    with pytest.raises(InputError, match=rf"{module}\.twice\.default.*--import MODULE"):
        read_repro(path)
    assert nodes(read_repro(path, imports=(module,)))["x"].meta["val"].shape == (16, 16)
    with pytest.raises(InputError, match="--import: expected to import no_such, found no module"):
        read_repro(path, imports=("no_such",))


def test_symbolic_sizes_keep_their_values_as_hints() -> None:
    tokens = nodes(read_repro(DATA / "fsdp_forward_symbolic.py.txt"))["primals_3"].meta["val"]
    assert isinstance(tokens.shape[1], torch.SymInt)
    assert [size_hint(size) for size in tokens.shape] == [2, 16, 128]


def test_sizes_may_be_expressions(write: WRITE) -> None:
    args = (
        "reader.symint(6, expr='s0')\nbuf0 = reader.storage(None, 8*s0*Max(2, s0//2),"
        " dtype_hint=torch.float32)\nreader.tensor(buf0, (Max(2, s0//2), 2*s0), is_leaf=True)"
    )
    capture = read_repro(
        write(
            "mul = primals_1 * 2\nview = torch.ops.aten.view.default(x, [mul, -1])\nreturn (view,)",
            "primals_1, x",
            args,
        )
    )
    assert [size_hint(size) for size in nodes(capture)["view"].meta["val"].shape] == [12, 3]
    assert nodes(capture)["mul"].target is operator.mul


def test_tensors_of_one_storage_alias(write: WRITE) -> None:
    args = (
        "buf0 = reader.storage('abc', 515, device=device(type='cuda', index=1),"
        " dtype_hint=torch.bfloat16)\nreader.tensor(buf0, (16, 4), (1, 16), dtype=torch.bfloat16,"
        " storage_offset=64, is_leaf=True)\nreader.tensor(buf0, (8, 16), requires_grad=True)\nbuf1"
        " = reader.storage(None, 4)\nreader.tensor(buf1, ())"
    )
    found = nodes(read_repro(write("return (a, b, c)", "a, b, c", args)))
    a, b, c = (found[name].meta["val"] for name in "abc")
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata != c.untyped_storage()._cdata
    assert (a.stride(), a.storage_offset(), a.untyped_storage().nbytes()) == ((1, 16), 64, 515)
    assert (a.dtype, b.dtype, c.shape) == (torch.bfloat16, torch.float32, ())
    assert found["a"].meta["apsched_device"] == "cuda:1"


def test_calls_keep_their_arguments(write: WRITE) -> None:
    body = (
        "full = torch.ops.aten.full.default([2, 2], -inf, dtype = torch.float32, layout ="
        " torch.strided, device = device(type='cuda', index=3), pin_memory = False);  primals_1 ="
        " None\nclone = torch.ops.aten.clone.default(full, memory_format ="
        " torch.contiguous_format);  full = None\n_foreach_add ="
        " torch.ops.aten._foreach_add.Scalar([clone, clone], 1)\ngetitem = _foreach_add[0]; "
        ' getitem_1 = _foreach_add[1];  _foreach_add = getitem_1 = None\nsum_1: "f32[]" ='
        " torch.ops.aten.sum.default(getitem);  getitem = None\nsym_size_int ="
        " torch.ops.aten.sym_size.int(clone, 0)\nreturn [sum_1, None, sym_size_int]"
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
        "relu = torch.ops.aten.relu.default(primals_1)\ncopy_ ="
        " torch.ops.aten.copy_.default(primals_1, relu);  primals_1 = copy_ = None\nrand ="
        " torch.ops.aten.rand.default([4], pin_memory = False);  rand = None\nreturn (relu,)"
    )
    assert list(nodes(read_repro(write(body)))) == ["primals_1", "relu", "copy_", "rand", "output"]


def test_triton_kernels_are_opaque_but_shaped(write: WRITE) -> None:
    body = (
        "triton_kernel_wrapper_functional_proxy ="
        " torch.ops.higher_order.triton_kernel_wrapper_functional(kernel_idx = 0, constant_args_idx"
        " = 0, grid = [(1, 1, 1)], tma_descriptor_metadata = {}, kwargs = {'x': primals_1},"
        " tensors_to_clone = ['x'])\ngetitem = triton_kernel_wrapper_functional_proxy['x']; "
        " triton_kernel_wrapper_functional_proxy = None\ntriton_kernel_wrapper_mutation ="
        " torch.ops.higher_order.triton_kernel_wrapper_mutation(kernel_idx = 0, constant_args_idx ="
        " 0, grid = [(1, 1, 1)], tma_descriptor_metadata = {}, kwargs = {'x': getitem}); "
        " triton_kernel_wrapper_mutation = None\nreturn (getitem,)"
    )
    found = nodes(read_repro(write(body)))
    assert found["getitem"].meta["val"].shape == (8, 16)
    assert found["triton_kernel_wrapper_mutation"].meta["val"] is None


def test_random_state_operators_are_read(write: WRITE) -> None:
    body = (
        "run_and_save_rng_state ="
        " torch.ops.higher_order.run_and_save_rng_state(torch.ops.aten.native_dropout.default,"
        " primals_1, 0.5, True)\ngetitem = run_and_save_rng_state[1];  run_and_save_rng_state ="
        " None\ngetitem_1 = getitem[0]\ngraphsafe_run_with_rng_state ="
        " torch.ops.higher_order.graphsafe_run_with_rng_state("
        "torch.ops.aten.native_dropout.default, primals_1, 0.5, True,"
        " rng_state = fwd_rng_state_0)\ngetitem_2 ="
        " graphsafe_run_with_rng_state[0]\nreturn (getitem_1, getitem_2)"
    )
    args = (
        "buf0 = reader.storage(None, 512)\nreader.tensor(buf0, (8, 16))\nreader.generator('cuda',"
        " 0)  # fwd_rng_state_0"
    )
    found = nodes(read_repro(write(body, "primals_1, fwd_rng_state_0", args)))
    assert found["getitem_1"].meta["val"].shape == found["getitem_2"].meta["val"].shape == (8, 16)


def test_subgraph_that_the_file_only_names_is_no_obstacle_where_shapes_do_not_need_it(
    write: WRITE,
) -> None:
    init = "self.sdpa_score0 = <lambda>()\nself.sdpa_mask0 = GraphModule(\n(a): <lambda>()\n)\n"
    init += "self.register_buffer('_tensor_constant0', tensor([1, -2]).to(\"cuda:0\"))"
    body = (
        "_tensor_constant0 = self._tensor_constant0\nsdpa_score0 = self.sdpa_score0\nsdpa_mask0 ="
        " self.sdpa_mask0\nflex_attention = torch.ops.higher_order.flex_attention(primals_1,"
        " primals_1, primals_1, sdpa_score0, (16, 16, _tensor_constant0, _tensor_constant0, None,"
        " None, _tensor_constant0, _tensor_constant0, None, None, 128, 128, sdpa_mask0), 0.5, {},"
        " (), ())\ngetitem = flex_attention[0]\nreturn (getitem,)"
    )
    args = "buf0 = reader.storage(None, 8192)\nreader.tensor(buf0, (1, 2, 16, 64))"
    found = nodes(read_repro(write(body, args=args, init=init)))
    assert found["getitem"].meta["val"].shape == (1, 2, 16, 64)
    assert found["_tensor_constant0"].meta["val"].shape == (2,)


def test_subgraph_that_is_needed_is_refused_at_its_call(write: WRITE) -> None:
    body = (
        "sub = self.sub\nout = torch.ops.higher_order.cond(True, sub, sub, (primals_1,))\nreturn"
        " (out,)"
    )
    with pytest.raises(InputError, match=r"repro\.py:10: .*node out.*"):
        read_repro(write(body, init="self.sub = <lambda>()"))


def test_group_that_a_shape_depends_on_is_set_up_and_taken_down(write: WRITE) -> None:
    body = (
        "shard = torch.ops._dtensor.shard_dim_alltoall.default(primals_1, 0, 1, 'tp')\nreturn"
        " (shard,)"
    )
    capture = read_repro(
        write(
            body,
            tail=(
                "setup_fake_process_groups({'tp': {'size': 4, 'rank': 0}, '0': {'size': 8, 'rank':"
                " 0}})"
            ),
        )
    )
    assert nodes(capture)["shard"].meta["val"].shape == (32, 4)
    assert capture.group_sizes == {"0": 8, "tp": 4}
    assert not torch.distributed.is_initialized()


def test_group_of_keys_and_values_is_set_up(write: WRITE) -> None:
    body = (
        "keys = torch.ops.cplib.flex_cp_allgather.default(primals_1, primals_1, 0, 'cp')\nwhole ="
        " keys[1]\nreturn (whole,)"
    )
    tail = "setup_fake_process_groups({'cp': {'size': 4, 'rank': 0}})"
    capture = read_repro(write(body, tail=tail))
    assert capture.group_sizes == {"cp": 4}
    shard, whole = (nodes(capture)[name].meta["val"].shape for name in ("primals_1", "whole"))
    assert whole == (4 * shard[0], *shard[1:])


def test_all_to_all_and_coalesced_collectives_are_read(write: WRITE) -> None:
    body = (
        "all_to_all_single = torch.ops._c10d_functional.all_to_all_single.default(primals_1, [4,"
        " 4], [4, 4], '3')\nwait_tensor ="
        " torch.ops._c10d_functional.wait_tensor.default(all_to_all_single)\n"
        "all_gather_into_tensor_coalesced ="
        " torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([primals_1,"
        " wait_tensor], 2, '3')\ngetitem = all_gather_into_tensor_coalesced[0]\nwait_tensor_1 ="
        " torch.ops._c10d_functional.wait_tensor.default(getitem)\nreturn (wait_tensor_1,)"
    )
    capture = read_repro(write(body))
    assert nodes(capture)["wait_tensor_1"].meta["val"].shape == (16, 16)
    assert capture.group_sizes == {"3": 2}


def test_sizes_that_depend_on_data_have_symbols(write) -> None:
    body = "x = torch.ops.aten.nonzero.default(primals_1)\nreturn (x,)"
    (rows, _) = nodes(read_repro(write(body)))["x"].meta["val"].shape
    assert depends_on_data(rows)


def test_a_size_of_an_input_that_depends_on_data_keeps_its_name(write) -> None:
    args = (
        "reader.symint(None, expr='u3')\nbuf = reader.storage(None, 32*u3)\n"
        "reader.tensor(buf, (u3, 8))\nreader.symint(None, expr='u3 + u5')\n"
    )
    body = "x = torch.ops.aten.relu.default(b)\nreturn (x,)"
    found = nodes(read_repro(write(body, "a, b, c", args)))
    assert str(found["x"].meta["val"].shape[0]) == "u3"
    assert str(found["c"].meta["val"]) == "u3 + u5"
