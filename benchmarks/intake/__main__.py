"""``python -m benchmarks.intake``: which graphs of other people's programs apsched takes.

For each case: whether torch's own scheduler takes the graphs, whether apsched does, launches before
and after, whether both graphs give the same bits on real tensors (with collectives of one process
that differ by process rank), and whether the round trip is exact. Exit status: 0 done (what is
refused stands on the page), 1 with --smoke where something is refused that torch takes, other bits
come out or a round trip is not exact, 2 wrong use.
"""

import argparse
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "torchtitan")
_NICE = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the survey; returns the exit status."""
    args = _parser().parse_args(arguments)
    os.nice(_NICE)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore")
    import torch

    from benchmarks.intake import page
    from benchmarks.intake.cases.every import every_case, prepare
    from benchmarks.intake.examine import examine
    from benchmarks.intake.isolation import outcomes

    torch.set_num_threads(1)
    try:
        pattern = re.compile(args.only)
    except re.error as error:
        print(f"benchmarks.intake: --only: {args.only!r} is none ({error})", file=sys.stderr)
        return 2
    chosen = [
        case
        for case in every_case()
        if pattern.search(f"{case.group}: {case.name}") and (case.smoke or not args.smoke)
    ]
    if args.list:
        print("\n".join(f"{case.group}: {case.name}" for case in chosen))
        return 0
    if not chosen:
        print(f"benchmarks.intake: --only: no case matches {args.only!r}", file=sys.stderr)
        return 2
    prepare()
    began, found = time.perf_counter(), []
    for outcome in outcomes(chosen, examine, timeout_s=args.timeout):
        found.append(outcome)
        print(page.line(outcome), flush=True)
        if args.page is not None:
            seconds = time.perf_counter() - began
            Path(args.page).write_text(page.markdown(found, _about(len(chosen), seconds)))
    rows = (page.headings(), *page.totals(found))
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    wrong = page.failures(found)
    for text in wrong if args.smoke else ():
        print(f"benchmarks.intake: {text}", file=sys.stderr)
    return 1 if args.smoke and wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.intake",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        metavar="REGEX",
        default="",
        help="only cases whose 'group: name' matches somewhere (--list prints them)",
    )
    parser.add_argument("--smoke", action="store_true", help="a few cases, under a minute")
    parser.add_argument("--page", metavar="FILE", help="write the page (Markdown) here")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=300.0, help="of one case (default 300)"
    )
    parser.add_argument("--list", action="store_true", help="print the cases, and run nothing")
    return parser


def _about(num_cases: int, seconds: float) -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{', '.join(versions)}; {num_cases} cases, {seconds / 60:.1f} minutes."


if __name__ == "__main__":
    sys.exit(main())
