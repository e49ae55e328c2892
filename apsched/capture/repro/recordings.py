"""Finds the graphs that torch wrote in a directory, or in a trace log: one text each, in the format
of ``fx_graph_runnable``.

    torch_compile_debug/run_*/torchinductor/*/fx_graph_runnable.py      TORCH_COMPILE_DEBUG=1
    dedicated_log_torch_trace_rank_0_*.log, raw.log                     TORCH_TRACE=DIR
    [rank_0/]-_0_0_0/fx_graph_runnable_7.txt                            tlparse

A trace also has graphs as text (``aot_forward_graph``); they are taken where there is no
``fx_graph_runnable`` of that direction, as of a backend other than Inductor.

Files are read, never run; links are not followed. The graphs of one process are taken: those of the
lowest process rank, where names of files say the rank, and of the newest run.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from apsched.errors import InputError
from apsched.unpack import LIMIT_FLAG, read_within, unpacked_limit_bytes

MAX_ENTRIES = 20_000
"""Files and directories that are looked at."""
MAX_GRAPHS = 200
"""Graphs that one source may have."""

_RUNNABLE = re.compile(
    r"fx_graph_runnable(?:_\d+)?\.(?:py|txt)|(?P<printed>aot_(?:forward|backward|inference)_graph)"
    r"(?:_\d+)?\.txt"
)
_PRINTED = ("aot_forward_graph", "aot_backward_graph", "aot_inference_graph")
_NAME = re.compile(rf'"(?:fx_graph_runnable|create_symbol|{"|".join(_PRINTED)})"')
_WHOLE = re.compile(r"\d{1,18}")
_LOG = re.compile(r"dedicated_log_torch_trace_.*\.log|raw\.log")
_RECORD = re.compile(r"[A-Z]\d{4} \S+ \d+ [^\]]*\] (\{.*)")
_RANK = re.compile(r"(?:dedicated_log_torch_trace_)?rank_?(\d+)(?:_.*)?")
_DEBUG_DIRECTORY = re.compile(r"(.+)_(?:forward|backward|inference|joint)_\d+\.(\d{1,18})")
_OF_TLPARSE = re.compile(r"(.*_\d+)_\d+_\d+")
_PARTS = re.compile(r"(\D+|^)(\d{0,18})")
_RUN = re.compile(r"run_\d.*")
_PROCESS = re.compile(rb"[A-Z]\d{4} \S+ (\d{1,18}) ")
_PROCESS_OF_RUN = re.compile(r"run_\d.*-pid_(\d{1,18})")
_COMMUNICATION = re.compile(r"torch\.ops\.(?:_?c10d_functional|_dtensor|c10d|symm_mem)\w*\.")
_LACKING = re.compile(r"^ +self\.\w+ = <", re.MULTILINE)
_GRAPH = re.compile(r"^class Repro\b.*?^(?=mod = Repro\(\))", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGraph:
    """One graph as torch wrote it."""

    path: str
    """The file that has it."""
    lines_before: int
    """Lines of the file before it."""
    compilation: str
    """The same for the forward and the backward graph of one compilation."""
    text: str
    frame: str = ""
    """The same for all compilations of one function; empty where it is not known."""
    apart: bool = False
    """Of no function that Dynamo compiled: AOTAutograd was called with a module."""
    printed: bool = False
    """Printed by :func:`torch.fx.GraphModule.print_readable`, no file that runs."""
    symbols: Mapping[str, int] = field(default_factory=dict)
    """Values of symbolic sizes that stand in the log beside the graph."""
    as_printed: "RecordedGraph | None" = None
    """The same graph as printed, where the file that runs lacks subgraphs."""

    @property
    def is_backward(self) -> bool:
        """Whether it takes gradients of outputs."""
        _, _, forward = self.content.partition("def forward(")
        return "tangents_" in forward.partition(" = ")[0]

    @property
    def communicates(self) -> bool:
        """Whether it calls an operator that talks to other process ranks."""
        return _COMMUNICATION.search(self.text) is not None

    @property
    def content(self) -> str:
        """Identity of the graph: shapes and operators, no settings."""
        found = _GRAPH.search(self.text)
        return found[0] if found else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """The graphs of one process, in the order in which they were compiled."""

    graphs: tuple[RecordedGraph, ...]
    notes: tuple[str, ...]
    """Graphs that were found and left out."""


def is_trace_log(path: Path) -> bool:
    """Return whether ``path`` has the name of a log that ``TORCH_TRACE`` writes."""
    return _LOG.fullmatch(path.name) is not None


def is_runnable(path: Path) -> bool:
    """Return whether ``path`` has the name of a graph that torch or tlparse wrote."""
    return _RUNNABLE.fullmatch(path.name) is not None


def is_printed(path: Path) -> bool:
    """Return whether ``path`` has the name of a graph that tlparse wrote as torch printed it."""
    match = _RUNNABLE.fullmatch(path.name)
    return match is not None and match["printed"] is not None


def recorded_graphs(path: Path) -> Recordings:
    """Return the graphs in the directory or trace log ``path``, each once.

    Compilations without a collective are left out where there are others. Raises InputError where
    there is no graph, or more than can be read.
    """
    found = tuple(_files_of_torch(path)) if path.is_dir() else (path,)
    files, notes = _of_one_process(path, found) if path.is_dir() else (found, ())
    graphs = _each_once(_runnable_first(tuple(_within_limit(path, files))))
    if not graphs:
        raise _no_graph(path, tuple(file for file in found if file not in files))
    if len(graphs) > MAX_GRAPHS:
        raise InputError(
            f"{path}: expected at most {MAX_GRAPHS} graphs, found {len(graphs)}; hand in one of its"
            f" files, such as {graphs[0].path}"
        )
    used = {graph.compilation for graph in graphs if graph.communicates}
    kept = tuple(graph for graph in graphs if graph.compilation in used)
    if not kept:
        notes += (
            "no graph has a collective, so that nothing can be scheduled: torch.compile does not"
            " see those of fully_shard and DDP",
        )
    elif len(kept) < len(graphs):
        notes += (f"left out, without a collective: {len(graphs) - len(kept)} graphs",)
    notes += _compiled_again(kept or graphs) + _traced_apart(kept or graphs)
    logs = {graph.path for graph in kept or graphs if is_trace_log(Path(graph.path))}
    if len(logs) > 1:
        notes += (
            f"graphs of {len(logs)} logs, each of another run or process, count as one step; for"
            f" one of them hand in its log, such as {max(logs)}",
        )
    return Recordings(graphs=kept or graphs, notes=notes)


def _compiled_again(graphs: tuple[RecordedGraph, ...]) -> tuple[str, ...]:
    """Return a note if one function was compiled several times: for other shapes, of which a step
    runs one, or for each of several layers, of which it runs all. Traces do not say which.
    """
    found: dict[str, set[str]] = {}
    for graph in graphs:
        if graph.frame:
            found.setdefault(graph.frame, set()).add(graph.compilation)
    again = sum(len(compilations) - 1 for compilations in found.values())
    if not again:
        return ()
    which = (
        "1 compilation is of a function" if again == 1 else f"{again} compilations are of functions"
    )
    return (
        f"{which} compiled before, and all count as one step, as layers that share code do; if they"
        " are for other shapes, hand in the tlparse directory of one compilation",
    )


def _traced_apart(graphs: tuple[RecordedGraph, ...]) -> tuple[str, ...]:
    """Return a note if some graphs are of no function that Dynamo compiled, and others are: the
    latter may be the former, traced again.
    """
    num_apart = sum(graph.apart for graph in graphs)
    if num_apart in (0, len(graphs)):
        return ()
    return (
        f"{num_apart} of {len(graphs)} graphs were made outside of torch.compile, and all count as"
        " one step; if a compiled module runs them, as AutoParallel's does, hand in the tlparse"
        " directory of its compilation",
    )


def _no_graph(path: Path, others: tuple[Path, ...]) -> InputError:
    """Return the error for ``path`` without a graph; ``others`` are files of other process ranks or
    runs, which were not read.
    """
    solved = sorted(path.glob("*.graph")) if path.is_dir() else []
    if solved:
        remedy = f"a graph file of this directory, such as {solved[0]}"
    elif others:
        remedy = f"the log or directory of another process rank or run, such as {others[0]}"
    else:
        remedy = (
            "a directory of TORCH_COMPILE_DEBUG=1 (with Inductor), TORCH_TRACE or tlparse, or one"
            " of its files"
        )
    where = " in the files of the lowest process rank and the newest run" if others else ""
    return InputError(
        f"{path}: expected graphs that torch wrote, found none{where}; hand in {remedy}"
    )


def _files_of_torch(folder: Path) -> Iterator[Path]:
    """Yield the files of torch and tlparse in ``folder``, in the order of their names."""
    seen, waiting = 0, [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                inside = []
                for entry in entries:
                    seen += 1
                    if seen > MAX_ENTRIES:
                        raise InputError(
                            f"{folder}: expected at most {MAX_ENTRIES} files and directories, found"
                            " more; hand in the directory of one run"
                        )
                    inside.append(entry)
        except OSError as error:
            raise InputError(
                f"{error.filename}: expected a readable directory, found: {error.strerror}; check"
                " its permissions"
            ) from None
        inside.sort(key=lambda entry: _as_written(entry.name))
        for entry in inside:
            name = Path(entry.path)
            if entry.is_file(follow_symlinks=False) and (is_runnable(name) or is_trace_log(name)):
                yield name
        waiting += [Path(e.path) for e in reversed(inside) if e.is_dir(follow_symlinks=False)]


def _as_written(name: str) -> tuple[int, list[tuple[str, int]]]:
    """Return a key that sorts by the counter of TORCH_COMPILE_DEBUG (``model__0_backward_3.1``),
    and by numbers inside of names.
    """
    match = _DEBUG_DIRECTORY.fullmatch(name)
    counter = int(match[2]) if match else 0
    return counter, [(word, int(number or 0)) for word, number in _PARTS.findall(name)]


def _of_one_process(
    folder: Path, files: tuple[Path, ...]
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the files of one process, and lines about those of others."""
    notes: list[str] = []
    ranks = {file: _rank_of(file.relative_to(folder)) for file in files}
    known = sorted({rank for rank in ranks.values() if rank is not None})
    if len(known) > 1:
        files = tuple(file for file in files if ranks[file] in (None, known[0]))
        others = len(known) - 1
        notes.append(
            f"graphs of process rank {known[0]}; {others} other{'s' * (others > 1)} wrote here, too"
        )
    known_processes = {_process_of_log(file) for file in files}
    of_others = {_process_of_log(file) for file in ranks} - known_processes
    return _of_newest_run(folder, files, of_others, tuple(notes))


def _of_newest_run(
    folder: Path, files: tuple[Path, ...], of_others: set[str], notes: tuple[str, ...]
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the files of the newest run of TORCH_COMPILE_DEBUG, which has a directory for each
    process; ``of_others`` are the processes of other ranks. Logs of older runs are left out.
    """
    runs = {file: _run_of(file.relative_to(folder)) for file in files}
    named = sorted({run for run in runs.values() if run})
    if not named:
        return files, notes
    newest = [run for run in named if _process_of_run(run) not in of_others] or named
    process = _process_of_run(newest[-1])
    processes = {file: _process_of_log(file) for file in files}
    has_log = process in processes.values()
    files = tuple(
        file
        for file in files
        if runs[file] in ("", newest[-1])
        and not (has_log and is_trace_log(file) and processes[file] != process)
    )
    others = len(named) - 1
    if others:
        are = "other runs are" if others > 1 else "other run is"
        notes += (f"graphs of {PurePath(newest[-1]).name}; {others} {are} here",)
    return files, notes


def _process_of_log(file: Path) -> str:
    """Return the number of the process that wrote a log; empty where it is not known."""
    if not is_trace_log(file):
        return ""
    try:
        with file.open("rb") as log:
            match = _PROCESS.match(log.read(200))
    except OSError:
        return ""  # reading its graphs names the error
    return match[1].decode() if match else ""


def _process_of_run(run: str) -> str | None:
    """Return the number of the process that has the directory ``run``; None where it has none."""
    match = _PROCESS_OF_RUN.fullmatch(PurePath(run).name)
    return match[1] if match else None


def _rank_of(path: PurePath) -> int | None:
    found = (_RANK.fullmatch(part) for part in reversed(path.parts))
    return next((int(match[1][:18]) for match in found if match), None)


def _run_of(path: PurePath) -> str:
    """Return the directory of the run of TORCH_COMPILE_DEBUG; empty where there is none."""
    parts = path.parts
    ends = (k for k in range(len(parts) - 1) if _RUN.fullmatch(parts[k]))
    return next((str(PurePath(*parts[: k + 1])) for k in ends), "")


def _within_limit(path: Path, files: Iterable[Path]) -> Iterator[RecordedGraph]:
    """Yield the graphs of ``files``; InputError beyond the limit on the bytes of all."""
    size_bytes, limit_bytes = 0, unpacked_limit_bytes()
    for file in files:
        for graph in _logged(file) if is_trace_log(file) else (_written(file),):
            size_bytes += len(graph.text)
            if size_bytes > limit_bytes:
                raise InputError(
                    f"{path}: expected graphs of at most {limit_bytes} bytes together, found"
                    f" more; hand in one file, or raise the limit: {LIMIT_FLAG} BYTES"
                )
            yield graph


def _text_of(file: Path) -> str:
    """Return the text of ``file``; the reader of graphs refuses bytes that are no UTF-8 by their
    line.
    """
    try:
        return read_within(file).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise InputError(
            f"{file}: expected a readable file, found: {error.strerror}; check its permissions"
        ) from None
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def _written(file: Path) -> RecordedGraph:
    """Return the graph of a file of its own."""
    match = _DEBUG_DIRECTORY.fullmatch(file.parent.name)
    place = file.parent.parent / match[1] if match else file.parent
    frame = _OF_TLPARSE.fullmatch(place.name)
    return RecordedGraph(
        path=str(file),
        lines_before=0,
        compilation=str(place),
        frame=str(place.parent / frame[1]) if frame else "",
        text=_text_of(file),
        printed=is_printed(file),
    )


def _logged(file: Path) -> Iterator[RecordedGraph]:
    """Yield the graphs of a trace log: records in JSON, each with its payload behind tabs."""
    lines = _text_of(file).split("\n")
    symbols: dict[str, dict[str, int]] = {}
    row = 0
    while row < len(lines):
        match = _RECORD.match(lines[row])
        row += 1
        if match is None or _NAME.search(match[1]) is None:
            continue
        start = row
        while row < len(lines) and lines[row].startswith("\t"):
            row += 1
        try:
            record = json.loads(match[1])
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        keys = ("compiled_autograd_id", "frame_id", "frame_compile_id", "attempt")
        compilation = f"{file} {[record.get(key) for key in keys]}"
        frame = f"{file} {[record.get(key) for key in keys[:2]]}"
        values = symbols.setdefault(compilation, {})
        values |= _symbol(record.get("create_symbol"))
        printed = any(name in record for name in _PRINTED)
        if not (printed or _is_graph(record.get("artifact"))):
            continue
        yield RecordedGraph(
            path=str(file),
            lines_before=start,
            compilation=compilation,
            frame=frame,
            apart=all(record.get(key) is None for key in keys[:2]),
            text="\n".join(line[1:] for line in lines[start:row]),
            printed=printed,
            symbols=values,
        )


def _symbol(created: object) -> dict[str, int]:
    """Return name and value of the symbolic size that a record is about."""
    match created:
        case {"symbol": str() as name, "val": str() as value} if _WHOLE.fullmatch(value):
            return {name: int(value)}
    return {}


def _is_graph(artifact: object) -> bool:
    return isinstance(artifact, dict) and artifact.get("name") == "fx_graph_runnable"


def _runnable_first(graphs: tuple[RecordedGraph, ...]) -> Iterator[RecordedGraph]:
    """Yield ``graphs`` without printed ones that stand as files that run, too; these have the
    printed one beside them where torch could not write subgraphs.
    """
    places = [(graph.compilation, graph.is_backward) for graph in graphs]
    printed = {at: graph for at, graph in zip(places, graphs, strict=True) if graph.printed}
    runnable = {at for at, graph in zip(places, graphs, strict=True) if not graph.printed}
    for at, graph in zip(places, graphs, strict=True):
        if graph.printed and at in runnable:
            continue
        lacks = not graph.printed and _LACKING.search(graph.text)
        yield replace(graph, as_printed=printed.get(at)) if lacks else graph


def _each_once(graphs: Iterable[RecordedGraph]) -> tuple[RecordedGraph, ...]:
    """Return ``graphs`` without compilations that are written a second time: by the debug directory
    and the trace, for each of several equal layers, or when the job was traced again.
    """
    compilations: dict[str, dict[str, RecordedGraph]] = {}
    for graph in graphs:
        if graph.text.strip():
            compilations.setdefault(graph.compilation, {}).setdefault(graph.content, graph)
    once = {frozenset(found): found for found in reversed(compilations.values())}
    if len(once) <= MAX_GRAPHS:  # one that lacks its backward graph is part of another
        once = {key: found for key, found in once.items() if not any(key < other for other in once)}
    return tuple(graph for found in reversed(once.values()) for graph in found.values())
