"""Reads the output of ``all_gather_perf``, ``reduce_scatter_perf``, ``all_reduce_perf`` and
``alltoall_perf`` of nccl-tests.

The layout of a row is taken from the header above it, since versions differ in columns; old ones
leave ``redop`` blank where nothing is reduced. A row has two times: the time in place counts for an
all-reduce, which torch does in place (a functional one on a clone), and the time out of place for
all other kinds, since their results are separate. A row that contradicts itself (algbw is not size
/ time, busbw does not fit the number of ranks) is an error, because then its size, its unit or the
group is wrong. Prefixes that launchers put before each line (``mpirun --tag-output``, ``srun
--label``) are taken off.
"""

import re
from dataclasses import dataclass, field

from apsched.errors import InputError
from apsched.kinds import CollectiveKind
from apsched.units import LARGEST_MESSAGE_BYTES, LONGEST_US, MOST_RANKS

_KIND_NAMES = {
    "all_gather": CollectiveKind.ALL_GATHER,
    "allgather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "allreduce": CollectiveKind.ALL_REDUCE,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
}
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_STARTS = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_LAUNCHER = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:\s?|\s*\d+: )")
_TOLERANCE = 0.05
_ROUNDING_GB_PER_S = 0.011  # bandwidths are printed with two decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured time of one collective."""

    kind: CollectiveKind
    num_ranks: int
    num_nodes: int | None
    """``None`` if the file does not have the nodes of the ranks."""
    size_bytes: int
    time_us: float
    where: str
    """File and line."""


def check_measurement(row: Measurement) -> None:
    """Raise ``InputError`` where group size, bytes or time are impossible."""
    in_range = (
        1 <= row.num_ranks <= MOST_RANKS,
        1 <= row.size_bytes <= LARGEST_MESSAGE_BYTES,
        0 < row.time_us <= LONGEST_US,
    )
    if not all(in_range):
        raise InputError(
            f"{row.where}: group size, bytes and time must be above 0, and at most {MOST_RANKS}"
            f" ranks, {LARGEST_MESSAGE_BYTES} bytes and a day, in microseconds; found"
            f" {row.num_ranks}, {row.size_bytes} and {row.time_us:g}"
        )


@dataclass(slots=True)
class _Section:
    """State while reading: one test, that is one collective on one group."""

    kind: CollectiveKind | None
    hosts: dict[tuple[int, int], str] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)


def kind_in_name(name: str) -> CollectiveKind | None:
    """Return the kind that a file or program name contains, or ``None``."""
    lowered = name.lower().replace("-", "_")
    found = {kind for text, kind in _KIND_NAMES.items() if text in lowered}
    return found.pop() if len(found) == 1 else None


def parse_nccl_tests(text: str, where: str, file_name: str) -> list[Measurement]:
    """Return the measurements in the output of nccl-tests.

    ``where`` names the file in errors; ``file_name`` gives the collective if the output does not
    (versions before 2.17). Raises ``InputError`` with file and line if a row cannot be read or
    contradicts itself.
    """
    section = _Section(kind=kind_in_name(file_name))
    measurements = []
    for number, printed in enumerate(text.splitlines(), 1):
        line = _LAUNCHER.sub("", printed)
        if line.lstrip().startswith("#"):
            _read_comment(section, line.strip(), f"{where}, line {number}")
        elif _is_row(section, line):
            row = _read_row(section, line.split(), f"{where}, line {number}")
            if row is not None:
                measurements.append(row)
    return measurements


def _read_comment(section: _Section, line: str, where: str) -> None:
    if starts := _STARTS.match(line):
        section.kind = kind_in_name(starts[1])
        if section.kind is None:
            raise InputError(
                f"{where}: no price is needed for {starts[1]}; hand in one of all_gather,"
                " reduce_scatter, all_reduce, alltoall"
            )
    elif line.startswith("# nThread"):
        section.hosts, section.columns = {}, []
    elif rank := _RANK.match(line):
        section.hosts[int(rank[2] or 0), int(rank[1])] = rank[3]
    elif line.split()[1:3] == ["size", "count"]:
        section.columns = line.split()[1:]
        if "time" not in section.columns:
            raise InputError(
                f"{where}: expected a column of times; found the columns"
                f" {' '.join(section.columns)}: keep the whole output"
            )
    elif "(elements)" in line and "(us)" not in line:
        raise InputError(
            f"{where}: times must be in microseconds; found the units {line.lstrip('# ')!r}"
        )


def _is_row(section: _Section, line: str) -> bool:
    """Rows have a number of elements second and a dtype third; NCCL and launchers print other lines
    between them.
    """
    tokens = line.split()
    return (
        bool(section.columns)
        and len(tokens) > section.columns.index("time")
        and (tokens[0].isdigit() or tokens[1].isdigit())
    )


def _read_row(section: _Section, tokens: list[str], where: str) -> Measurement | None:
    if section.kind is None:
        raise InputError(
            f"{where}: cannot tell which collective this is: the file has no line '# Collective"
            " test starting' and its name contains none of all_gather, reduce_scatter, all_reduce,"
            " alltoall; rename the file"
        )
    if not section.hosts:
        raise InputError(
            f"{where}: no lines '#  Rank  0 Group  0 Pid ... on HOST device ...' above: keep the"
            " whole output of nccl-tests"
        )
    columns = section.columns
    if "redop" in columns and len(tokens) == len(columns) - 1:
        columns = [name for name in columns if name != "redop"]
    out_of_place = columns.index("time")
    in_place = (
        columns.index("time", out_of_place + 1) if columns.count("time") > 1 else out_of_place
    )
    time_column = in_place if section.kind == CollectiveKind.ALL_REDUCE else out_of_place
    try:
        size_bytes = int(tokens[0])
        time_us, algbw, busbw = (float(token) for token in tokens[time_column : time_column + 3])
        wrong = max(_number_wrong(columns, tokens, column) for column in {out_of_place, in_place})
    except (ValueError, IndexError):
        raise InputError(
            f"{where}: expected the columns {' '.join(columns)}; found {' '.join(tokens)!r}"
        ) from None
    if wrong:
        raise InputError(
            f"{where}: the test found {wrong:g} wrong values, so its times cannot be trusted;"
            " repair the fabric and measure again"
        )
    if size_bytes == 0:
        return None  # sizes below one element a rank are printed as 0
    num_ranks, num_nodes = _group(section, where)
    row = Measurement(
        kind=section.kind,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        size_bytes=size_bytes,
        time_us=time_us,
        where=where,
    )
    check_measurement(row)
    _check_bandwidth(section.kind, num_ranks, size_bytes, time_us, algbw, busbw, where)
    return row


def _number_wrong(columns: list[str], tokens: list[str], time_column: int) -> float:
    """Return the count in ``#wrong``; older versions print the largest error there, which is not a
    count.
    """
    if columns[time_column + 3 : time_column + 4] != ["#wrong"] or tokens[time_column + 3] == "N/A":
        return 0
    return float(tokens[time_column + 3])


def _group(section: _Section, where: str) -> tuple[int, int]:
    """Return the ranks and the nodes of the group (with several groups side by side: of each)."""
    hosts_of: dict[int, list[str]] = {}
    for (group, _), host in section.hosts.items():
        hosts_of.setdefault(group, []).append(host)
    shapes = {(len(hosts), len(set(hosts))) for hosts in hosts_of.values()}
    if len(shapes) != 1:
        raise InputError(
            f"{where}: the groups of one test must have one shape; found (ranks, nodes)"
            f" {sorted(shapes)}"
        )
    return shapes.pop()


def _check_bandwidth(
    kind: CollectiveKind,
    num_ranks: int,
    size_bytes: int,
    time_us: float,
    algbw: float,
    busbw: float,
    where: str,
) -> None:
    expected = size_bytes / time_us / 1e3
    if abs(algbw - expected) > _TOLERANCE * expected + _ROUNDING_GB_PER_S:
        raise InputError(
            f"{where}: contradicts itself: {size_bytes} bytes in {time_us:g} us are {expected:.2f}"
            f" GB/s, but algbw says {algbw:g}; size must be in bytes (of the whole output of an"
            " all-gather) and time in microseconds"
        )
    factor = (2 if kind == CollectiveKind.ALL_REDUCE else 1) * (num_ranks - 1) / num_ranks
    if (
        num_ranks > 1
        and abs(busbw - factor * expected) > _TOLERANCE * factor * expected + _ROUNDING_GB_PER_S
    ):
        raise InputError(
            f"{where}: contradicts itself: {kind} on {num_ranks} ranks has busbw = {factor:.3f} x"
            f" algbw = {factor * expected:.2f} GB/s, but the row says {busbw:g}; is it another"
            " collective, or are '# Rank' lines missing?"
        )
