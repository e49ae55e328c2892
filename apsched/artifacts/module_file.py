"""A rewritten FX graph as a file: Python that a person reads, torch runs, and apsched takes as a
SOURCE.
"""

import torch

from apsched.torch_compat.repro import graph_as_repro

_HEAD = '''"""The {name} graph as apsched wrote it back: the order of forward() is the order of
execution.

`python {name}.py` runs it on random tensors; `apsched audit {name}.py` scores it. Shapes are in
load_args().
"""

'''


def dump_module(module: torch.fx.GraphModule, name: str) -> bytes:
    """Return ``module`` in the format of the files that torch writes when a job is traced
    (``fx_graph_runnable``).
    """
    return (_HEAD.format(name=name) + graph_as_repro(module)).encode()
