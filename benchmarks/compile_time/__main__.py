"""``python -m benchmarks.compile_time``: the time that scheduling adds to ``torch.compile``, beside
torch's own time, in one run.

The process group is a fake one of four. The benchmark times the first step (forward and backward,
where all graphs are compiled) with torch's backend and with apsched's, one after the other in one
process. Imports, loads and one-time compilations come before: the same steps with the smallest
model, whose time is reported, too. A model has the graph of a large one where it has as many
layers: ``llama3-debug`` with 32 has that of ``llama3-8b`` and fits into memory. Full Inductor
generates all its code, but no C++ compiler runs, and the step then runs node by node: compilers
take as long for both, so that ratios with them would be nearer to one. Exit status: 0, 2 wrong use.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.graph import GraphLowering

import apsched
from apsched.capture.fake_world import world
from apsched.compiler.backend import Backend
from apsched.errors import ApschedError
from apsched.models.build import BuiltModel, build
from apsched.models.mesh import MeshSpec
from apsched.quantities import parse_count, parse_number

_WORLD_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The first step of one model with torch's backend and with apsched's."""

    model: str
    against: str
    """Torch's backend: ``aot_eager`` or ``inductor``."""
    num_nodes: int
    """Number of nodes of all graphs together."""
    torch_s: float
    """Seconds of CPU: other work on the machine does not count."""
    apsched_s: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes with apsched."""
        return self.apsched_s / self.torch_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__)
    parser.add_argument("--preset", default="llama3-debug", help="model (default llama3-debug)")
    parser.add_argument(
        "--layers",
        metavar="NUMBERS",
        default="2,16",
        help="numbers of layers, by commas (default 2,16)",
    )
    parser.add_argument(
        "--mesh", default="fsdp=4", help="mesh of four process ranks (default fsdp=4)"
    )
    parser.add_argument(
        "--budget", default="20", help="work of the solver for each graph (default 20)"
    )
    parser.add_argument(
        "--against",
        metavar="BACKENDS",
        default="aot_eager,inductor",
        help="torch's backends (default both)",
    )
    args = parser.parse_args(arguments)
    try:
        layers = [parse_count(part, "--layers", least=1) for part in args.layers.split(",")]
        budget, mesh = parse_number(args.budget, "--budget"), MeshSpec.parse(args.mesh)
        with world(_WORLD_SIZE), torch._inductor.config.patch(fx_graph_cache=False), without_cpp():
            names = args.against.split(",")
            once = [measure(args.preset, mesh, min(layers), name, budget=budget) for name in names]
            measured = [
                measure(args.preset, mesh, number, name, budget=budget)
                for number in layers
                for name in names
            ]
    except ApschedError as error:
        print(f"benchmarks.compile_time: error: {error}", file=sys.stderr)
        return 2
    print(markdown(measured))
    for one in once:
        print(
            f"the first time in this process, {one.model}: {one.against} {one.torch_s:.1f} s, then"
            f" apsched {one.apsched_s:.1f} s"
        )
    return 0


@contextmanager
def without_cpp() -> Iterator[None]:
    """Have Inductor generate code and compile none; graphs are interpreted."""

    def interpreted(lowered: Any) -> SimpleNamespace:
        lowered.codegen()
        module = lowered.orig_gm
        return SimpleNamespace(
            call=lambda arguments: torch.fx.Interpreter(module).run(*arguments), __file__=""
        )

    original: Any = GraphLowering.compile_to_module
    lowering: Any = GraphLowering
    lowering.compile_to_module = interpreted
    try:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield
    finally:
        lowering.compile_to_module = original


def measure(
    preset: str, mesh: MeshSpec, num_layers: int, against: str, *, budget: float
) -> Measured:
    """Return how long the first step takes with torch's backend ``against``, and with apsched in
    its place.
    """
    if against not in ("aot_eager", "inductor"):
        raise apsched.InputError(f"--against: expected aot_eager or inductor, found {against!r}")
    built = build(preset, mesh=mesh, seq_len=32, num_layers=num_layers, materialize=True)
    own: Backend = apsched.backend(inductor=against == "inductor", budget=budget, memory_cap="none")
    torch_s = _first_step_s(built, against)
    apsched_s = _first_step_s(built, own)
    return Measured(
        model=f"{preset}, layers: {num_layers}",
        against=against,
        num_nodes=sum(result.problem.num_nodes for result in own.results),
        torch_s=torch_s,
        apsched_s=apsched_s,
    )


def _first_step_s(built: BuiltModel, backend: Any) -> float:
    torch._dynamo.reset()
    began_s = time.process_time()
    loss = torch.compile(built.module, backend=backend)(*built.inputs)
    loss.backward()
    return time.process_time() - began_s


def markdown(measured: Sequence[Measured]) -> str:
    """Return the table."""
    rows = [
        f"| {m.model} | {m.num_nodes} | {m.against} | {m.torch_s:.1f} | {m.apsched_s:.1f} |"
        f" {m.ratio:.2f} |"
        for m in measured
    ]
    head = "| model | nodes | torch's backend | torch, s of CPU | with apsched, s of CPU | ratio |"
    return "\n".join((head, "|---|---|---|---|---|---|", *rows))


if __name__ == "__main__":
    sys.exit(main())
