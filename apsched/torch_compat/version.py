"""Versions of torch that apsched was run against; checked where private functions of torch are
needed, and nowhere else.
"""

import os
import re

from apsched.errors import InputError

FIRST, BEYOND = (2, 11), (2, 16)
ANY_TORCH_VARIABLE = "APSCHED_ANY_TORCH"


def check_torch_version() -> None:
    """Raise ``InputError`` for a version of torch that apsched was never run against, unless
    ``$APSCHED_ANY_TORCH`` is set.
    """
    import torch

    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not FIRST <= version < BEYOND and not os.environ.get(ANY_TORCH_VARIABLE):
        raise InputError(
            f"torch {torch.__version__}: apsched was run against torch {FIRST[0]}.{FIRST[1]} to"
            f" {BEYOND[0]}.{BEYOND[1] - 1}, and needs private functions of it here; install one of"
            " these, or solve a graph file, which needs no torch; where `python -m"
            f" apsched.torch_compat.contracts` finds nothing broken, {ANY_TORCH_VARIABLE}=1 takes"
            " any version"
        )
