"""The same problem again, elsewhere: on one core, and on two cores that others keep busy. The
schedule file must not change by a byte.

``python -m benchmarks.solver.again GRAPH CAP_BYTES|none CORES OUT`` solves a graph file on that
many cores, and writes the schedule file.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import networkx as nx

from apsched.artifacts.schedule_file import save_schedule
from apsched.config import Caps
from apsched.graph.graph_file import save_graph
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import loaded
from apsched.pipeline.solve_graph import SolveRequest, solve_graph
from apsched.pipeline.sources import SourceRequest
from apsched.progress import Progress
from benchmarks.common.records import Again

_WAYS = (("1 core", 1, False), ("2 cores under load", 2, True))


def solve_again(
    dag: nx.DiGraph, direction: str, cap: str, memory_cap_bytes: int | None, expected: bytes
) -> Iterator[Again]:
    """Yield for each way whether it gives the schedule file ``expected``."""
    with TemporaryDirectory() as folder:
        graph, out = Path(folder) / "again.graph", Path(folder) / "again.schedule.json"
        save_graph(dag, graph)
        for how, num_cores, under_load in _WAYS:
            message = _unable(num_cores)
            if not message:
                stated = "none" if memory_cap_bytes is None else str(memory_cap_bytes)
                with _load(busy=under_load):
                    command = [
                        sys.executable,
                        "-m",
                        "benchmarks.solver.again",
                        str(graph),
                        stated,
                        str(num_cores),
                        str(out),
                    ]
                    ran = subprocess.run(command, capture_output=True, text=True, check=False)
                if ran.returncode != 0:
                    message = (ran.stderr.strip() or f"exit status {ran.returncode}").splitlines()[
                        -1
                    ]
            same = not message and out.read_bytes() == expected
            yield Again(direction=direction, cap=cap, how=how, same_bytes=same, message=message)


def _unable(num_cores: int) -> str:
    if not hasattr(os, "sched_setaffinity"):
        return "not run: the system cannot pin processes to cores"
    here = len(os.sched_getaffinity(0))
    return (
        f"not run: {num_cores} cores are needed, {here} may be used here"
        if here < num_cores
        else ""
    )


@contextmanager
def _load(*, busy: bool) -> Iterator[None]:
    """Keep a core busy while the body runs."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if spinning is not None:
            spinning.kill()
            spinning.wait()


def main(arguments: Sequence[str]) -> int:
    """Solve a graph file on so many cores, and write the schedule file."""
    graph, cap, num_cores, out = arguments
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(num_cores)])
    progress = Progress(quiet=True)
    with loaded(SourceRequest(source=graph), CostChoice(), "both", progress) as source:
        caps = Caps(memory_cap_bytes=None if cap == "none" else int(cap))
        save_schedule(out, solve_graph(source.graphs[0], SolveRequest(), progress, caps=caps))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
