"""``apsched.study``: the command ``apsched study`` as a function."""

import io
import re
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from apsched.cli.parser import build_parser
from apsched.cli.study_grid import answer_grid, lines_of, posed
from apsched.errors import InputError
from apsched.progress import Progress
from apsched.study.engine import Engine, GivenEngine, LocalEngine
from apsched.study.result import StudyResult

_FLAG = re.compile(r"--(?!help\b)([a-z][a-z-]*)")


def study(
    source: str | PathLike[str],
    vary: Mapping[str, object] | None = None,
    *,
    output: str | PathLike[str] | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    client: Any = None,
    quiet: bool = False,
    **options: object,
) -> StudyResult:
    """Answer a grid of questions about one source, as ``apsched study`` does.

    Parameters
    ----------
    source
        A preset, ``hf:CONFIG.json``, ``package.module:function``, a file that torch wrote, or a
        graph file.
    vary
        Axis -> values: those of ``--vary``, as its text (``{"memory_cap": "floor..none:20"}``) or
        as a sequence (``{"seq": [2048, 8192]}``).
    output
        Directory of the study: an earlier one in it is resumed, and the command reads it. By
        default nothing is kept.
    jobs
        Processes on this machine; with one, all is solved in this process.
    executor
        Any executor of ``concurrent.futures`` in place of ``jobs``. It is not shut down.
    client
        A ``dask.distributed.Client`` in place of ``jobs`` (extra ``apsched[dask]``). It stays
        connected.
    quiet
        Print no progress on stderr.
    options
        Options of the command by their names: ``mesh="fsdp=64"``, ``cluster="h100"``,
        ``memory_cap="60GiB"``, ``budget=2``, ``full=True``.

    Raises
    ------
    InputError
        where an option, an axis or the source cannot be used.
    """
    engine = _engine(jobs, executor, client)
    with ExitStack() as stack:
        directory = (
            Path(output)
            if output is not None
            else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        )
        words = ["study", str(source), *_flags(vary or {}, options), f"--out={directory}"]
        try:
            grid = posed(build_parser().parse_args(words), Progress(quiet=quiet))
            answer_grid(grid, engine, io.StringIO() if quiet else sys.stderr)
        except InputError as error:
            raise InputError(
                _FLAG.sub(lambda found: found[1].replace("-", "_"), str(error))
            ) from None
        return StudyResult(
            lines=tuple(lines_of(grid)),
            slowdown=grid.slowdown,
            path=None if output is None else directory,
        )


def _engine(jobs: int, executor: Executor | None, client: Any) -> Engine:
    if executor is not None and client is not None:
        raise InputError("study: expected an executor or a client; found both")
    if (executor is not None or client is not None) and jobs != 1:
        raise InputError("jobs: it counts processes on this machine; leave it out")
    if executor is not None:
        return GivenEngine(executor)
    if client is not None:
        from apsched.study.dask_engine import DaskEngine

        return DaskEngine(client)
    if not isinstance(jobs, int) or jobs < 1:
        raise InputError(f"jobs: expected a count of at least 1; found {jobs!r}")
    return LocalEngine(jobs)


def _flags(vary: Mapping[str, object], options: Mapping[str, object]) -> list[str]:
    """Return the words of the command line."""
    words = [
        f"--vary={name}={_text(value)}"
        for name, values in vary.items()
        for value in (values if isinstance(values, list | tuple | range) else (values,))
    ]
    for name, value in options.items():
        if name in ("what_if", "if", "engine", "out", "json"):
            raise InputError(f"study: expected an option of a grid; found {name!r}")
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [f"{flag}={one}" for one in value]
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")
    return words


def _text(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
