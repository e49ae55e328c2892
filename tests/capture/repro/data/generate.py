"""Writes the repro files of this folder with torch's own writer: ``python
tests/capture/repro/data/generate.py``.

The CUDA variants are the files that a machine with GPUs would write, made from the others by
editing their text.
"""

import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.repro.after_aot import save_graph_repro
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

FOLDER = Path(__file__).parent
RANKS = 64


class Gather(torch.autograd.Function):
    """What FSDP does with a parameter: all-gather in bf16, reduce-scatter of the gradient in
    fp32.
    """

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(shard.to(torch.bfloat16), 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter_tensor(gradient.float(), "sum", 0, dist.group.WORLD)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.randn(width // RANKS, 3 * width))
        self.out = torch.nn.Parameter(torch.randn(width // RANKS, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            (x @ Gather.apply(self.qkv)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        )
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
        y = (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)
        return x + torch.nn.functional.dropout(y @ Gather.apply(self.out), 0.1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(128) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.all_reduce(x.float().mean(), "sum", dist.group.WORLD)


class Columns(torch.nn.Module):
    """A multilayer perceptron under tensor parallelism: its inputs and outputs are DTensors, whose
    DeviceMesh the graphs take and return.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(128, 256)
        self.down = torch.nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def tensor_parallel() -> None:
    """Write the graphs of a model of DTensors."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    layouts = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
    model = parallelize_module(Columns(), mesh, layouts)
    x = DTensor.from_local(torch.randn(8, 128), mesh, [Replicate()])
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler("dtensor_forward"),
        bw_compiler=compiler("dtensor_backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(model, backend=backend)(x).sum().full_tensor().backward()


def write(name: str, gm: torch.fx.GraphModule, args: Any, **options: Any) -> None:
    for key in [key for key in os.environ if "TORCH" in key]:
        del os.environ[key]
    text = io.StringIO()
    save_graph_repro(text, gm, args, "inductor", **options)
    (FOLDER / f"{name}.py.txt").write_text(text.getvalue())


def compiler(name: str) -> Any:
    def compile_graph(gm: torch.fx.GraphModule, args: Any) -> Any:
        write(name, gm, args)
        if name == "fsdp_forward":
            write("fsdp_minifier", gm, args, command="minify")
        return make_boxed_func(gm.forward)

    return compile_graph


def on_cuda(name: str) -> None:
    """Write the CUDA variant of file ``name``, as a machine with triton kernels would write it."""
    text = (FOLDER / f"{name}.py.txt").read_text()
    text = text.replace("device(type='cpu')", "device(type='cuda', index=0)")
    lines = []
    for line in text.splitlines():
        if "= reader.storage(" in line:
            head, comma, hint = line.partition(", dtype_hint")
            line = (
                head.removesuffix(")")
                + ", device=device(type='cuda', index=0)"
                + (comma + hint if comma else ")")
            )
        lines.append(line)
        if line.startswith("import torch.distributed as dist"):
            lines += ["import triton", "import triton.language as tl"]
        if line.endswith("kernel_side_table.reset_table()"):
            lines += [
                "",
                "@triton.jit",
                "def scale_0(x_ptr, n: tl.constexpr):",
                "    tl.store(x_ptr, tl.load(x_ptr) * n)",
                "",
            ]
            lines += [
                "torch._higher_order_ops.triton_kernel_wrap.kernel_side_table.add_kernel(scale_0)"
            ]
    (FOLDER / f"{name}_cuda.py.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    for suffix in ("", "_symbolic"):
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=compiler(f"fsdp_forward{suffix}"),
            bw_compiler=compiler(f"fsdp_backward{suffix}"),
            partition_fn=min_cut_rematerialization_partition,
        )
        x = torch.randn(2, 16, 128, dtype=torch.bfloat16)
        if suffix:
            torch._dynamo.mark_dynamic(x, 1)
        torch.compile(Model(), backend=backend)(x).backward()
    for name in ("fsdp_forward", "fsdp_backward", "fsdp_backward_symbolic"):
        on_cuda(name)
    tensor_parallel()


if __name__ == "__main__":
    main()
