"""``python -m benchmarks.intake``: the graphs of other people's programs that apsched takes.

For each case: whether torch's own scheduler takes the graphs, whether apsched does, launches before
and after, whether both graphs give the same bits on real tensors (with collectives of one process
that differ by process rank), and whether the round trip is exact. Exit status: 0 done (the page
shows the refusals), 1 with --smoke where apsched refuses a graph that torch takes, other bits come
out or a round trip is not exact, 2 wrong use.
"""

import argparse
import os
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.intake.case import Case, CaseOutcome

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
    from benchmarks.intake.cases.every import every_case

    torch.set_num_threads(1)
    try:
        pattern = re.compile(args.only)
    except re.error as error:
        print(f"benchmarks.intake: --only: {args.only!r} is none ({error})", file=sys.stderr)
        return 2
    every = tuple(every_case())
    chosen = [
        case
        for case in every
        if pattern.search(f"{case.group}: {case.name}") and (case.smoke or not args.smoke)
    ]
    if args.list:
        print("\n".join(f"{case.group}: {case.name}" for case in chosen))
        return 0
    if not chosen:
        print(f"benchmarks.intake: --only: no case matches {args.only!r}", file=sys.stderr)
        return 2
    try:
        found = _surveyed(args, chosen, [(case.group, case.name) for case in every])
    except ValueError as error:
        print(f"benchmarks.intake: --results: {error}", file=sys.stderr)
        return 2
    rows = (page.headings(), *page.totals(found))
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    wrong = page.failures(found)
    for text in wrong if args.smoke else ():
        print(f"benchmarks.intake: {text}", file=sys.stderr)
    return 1 if args.smoke and wrong else 0


def _surveyed(
    args: argparse.Namespace, chosen: "Sequence[Case]", order: Sequence[tuple[str, str]]
) -> "list[CaseOutcome]":
    """Return the outcomes that are known and those of the cases that are not, in order, written
    down as soon as they are there.
    """
    from benchmarks.intake import page
    from benchmarks.intake.cases.every import prepare
    from benchmarks.intake.examine import examine
    from benchmarks.intake.isolation import outcomes
    from benchmarks.intake.stored import read, write

    results = None if args.results is None else Path(args.results)
    known = {} if results is None else read(results)
    missing = [case for case in chosen if args.again or (case.group, case.name) not in known]
    prepare()
    for outcome in outcomes(missing, examine, timeout_s=args.timeout):
        known[outcome.group, outcome.name] = outcome
        print(page.line(outcome), flush=True)
        if results is not None:
            write(results, [known[key] for key in order if key in known], _versions())
    found = [known[key] for key in order if key in known]
    if args.page is not None:
        Path(args.page).write_text(page.markdown(found, _about(found)))
    return found


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
        "--results",
        metavar="FILE",
        help="keep outcomes here (JSON); cases that it has are shown, and do not run again",
    )
    parser.add_argument("--again", action="store_true", help="run them again, and replace them")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=300.0, help="of one case (default 300)"
    )
    parser.add_argument("--list", action="store_true", help="print the cases, and run nothing")
    return parser


def _about(found: "Sequence[CaseOutcome]") -> str:
    minutes = sum(outcome.seconds for outcome in found) / 60
    return f"{_versions()}; {len(found)} cases, {minutes:.1f} minutes."


def _versions() -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return ", ".join(versions)


if __name__ == "__main__":
    sys.exit(main())
