"""``python -m apsched.torch_compat.contracts``: run every contract with the torch that is installed
here, and print the results.
"""

import logging
import os
import sys
import warnings

from apsched.torch_compat.version import ANY_TORCH_VARIABLE


def main() -> int:
    """Print a line for each private function of torch that apsched uses; return 0 where all are
    there and keep their contracts.
    """
    import torch

    from apsched.torch_compat.contracts import (  # noqa: F401  (they register their checks)
        compilers,
        graphs,
        groups,
        parallel,
    )
    from apsched.torch_compat.contracts.registry import outcomes, wrappers

    modules = wrappers()
    width = max(map(len, modules))
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    broken = 0
    for outcome in outcomes():
        kept = "contract kept" if not outcome.broken else f"contract BROKEN: {outcome.broken}"
        print(
            f"{outcome.name:{width}}  {'found' if outcome.found else 'NOT FOUND'}, {kept}",
            flush=True,
        )
        broken += bool(outcome.broken)
    print(f"{len(modules) - broken} kept, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    os.environ[ANY_TORCH_VARIABLE] = "1"  # this is how one finds out about other versions
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.exit(main())
