"""Commands on existing studies: compare, merge and export."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from apsched.artifacts.output_dir import check_writable
from apsched.errors import InputError
from apsched.quantities import show_bytes
from apsched.report.console import console, plain_table, print_json
from apsched.study.report.exports import flat, write_table
from apsched.study.report.merge import Compared, compared, merge
from apsched.study.rows import FILE, Point
from apsched.study.store import Store


def run_compare(args: argparse.Namespace, words: list[str], stdout: TextIO) -> None:
    """Put the answers of two studies to the same questions side by side."""
    one, other = (
        Store(Path(word)).points()
        for word in _exactly(words, 2, "two studies: apsched study compare A B")
    )
    found = compared(one, other, tuple(args.ignore or ()))
    if args.json:
        print_json(stdout, **_json(found))
        return
    figures = (f"{words[0]} ms", f"{words[1]} ms", "shorter by", "proven")
    labels_of = "options that differ from point to point"
    table = plain_table("graph", labels_of, "memory cap", *figures, right=figures)
    differing = _differing([pair.one for pair in found.pairs])
    for pair in found.pairs:
        labels = " ".join(f"{name}={pair.one.described.get(name)}" for name in differing)
        cap = pair.one.outcome.memory_cap_bytes
        gain = "" if pair.gain is None else f"{100 * pair.gain:.2f} %"
        cells = [
            pair.one.graph.name,
            labels,
            "none" if cap is None else show_bytes(cap),
            _ms(pair.one),
            _ms(pair.other),
            gain,
        ]
        table.add_row(*cells, "yes" if pair.proven else "no")
    out = console(stdout)
    out.print(table)
    out.print(
        f"{len(found.pairs)} points in both, {len(found.only_one)} only in {words[0]},"
        f" {len(found.only_other)} only in {words[1]}"
    )
    if found.only_one and found.only_other and not found.pairs:
        out.print(_why_no_pair(found), soft_wrap=True)


def run_merge(args: argparse.Namespace, words: list[str], stdout: TextIO) -> None:
    """Make one study of several; the better of two answers stays."""
    if len(words) < 2 or args.out is None:
        raise InputError(
            "expected studies and a directory to merge them into: apsched study merge A B -o DIR"
        )
    sources = [Store(Path(word)) for word in words]
    check_writable(Path(args.out))
    count = merge(sources, Store(Path(args.out), create=True))
    print(f"{count} points in {args.out}: {FILE}, graphs, schedules", file=stdout)


def run_export(args: argparse.Namespace, words: list[str], stdout: TextIO) -> None:
    """Write a study as one flat table."""
    (directory,) = _exactly(words, 1, "one study: apsched study export DIR -o FILE.csv")
    points = Store(Path(directory)).points()
    if args.out is None:
        raise InputError("-o: expected the name of a file that ends in .csv or .parquet")
    check_writable(Path(args.out).parent)
    write_table(points, Path(args.out))
    print(f"{len(points)} points, {len(flat(points)[0])} columns -> {args.out}", file=stdout)


ACTIONS: dict[str, Callable[[argparse.Namespace, list[str], TextIO], None]] = {
    "compare": run_compare,
    "merge": run_merge,
    "export": run_export,
}


def _exactly(words: list[str], count: int, what: str) -> list[str]:
    if len(words) != count:
        raise InputError(f"expected {what}; found {len(words)} names")
    return words


def _differing(points: list[Point]) -> list[str]:
    names = dict.fromkeys(name for point in points for name in point.described)
    return [
        name
        for name in names
        if len({json.dumps(point.described.get(name)) for point in points}) > 1
    ]


def _why_no_pair(found: Compared) -> str:
    """Return which options keep two studies from a common question, and the remedy."""
    sides = found.only_one, found.only_other

    def apart(name: str) -> bool:
        one, other = (
            {json.dumps(point.described.get(name)) for point in points} for points in sides
        )
        return not one & other

    names = sorted({name for points in sides for point in points for name in point.described})
    options = [name for name in names if apart(name)]
    one, other = ({point.graph.name for point in points} for points in sides)
    if not one & other:
        return "no question is in both: their graphs have other names; state studies of one source"
    if options:
        ignored = " ".join(f"--ignore {name}" for name in options)
        return f"no question is in both: they differ in {', '.join(options)}; add {ignored}"
    return (
        "no question is in both: expected a memory cap and options that both have; state the same"
        " ones for both studies, such as --vary memory_cap=none"
    )


def _ms(point: Point) -> str:
    return "none fits" if point.step_time_us is None else f"{point.step_time_us / 1000:,.3f}"


def _json(found: Compared) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "graph": pair.one.graph.name,
                "memory_cap": pair.one.memory_cap,
                "described": [dict(pair.one.described), dict(pair.other.described)],
                "step_time_us": [pair.one.step_time_us, pair.other.step_time_us],
                "bound_us": [pair.one.bound_us, pair.other.bound_us],
                "gain": pair.gain,
                "proven": pair.proven,
            }
            for pair in found.pairs
        ],
        "only_first": [point.point_id for point in found.only_one],
        "only_second": [point.point_id for point in found.only_other],
    }
