"""Cases in processes of their own, one or several at a time."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Self

from benchmarks.common.grid import Case
from benchmarks.common.records import CaseRecord, load_case

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The measurements of every case."""

    caps: tuple[str, ...]
    torch_up_to_nodes: int | None
    """Larger graphs are not given to torch's schedulers; ``None`` for all."""
    commit: str
    """State of the code."""
    timeout_s: int
    """Time limit of one case."""
    moves: bool = False
    """Whether the benchmark measures the gain of moving compute."""


@dataclass(slots=True)
class CaseProcesses:
    """Runs ``benchmarks.common.case``; when the body of ``with`` ends, whatever still runs is
    ended.
    """

    asked: Asked
    num_jobs: int = 1
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ended: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for process in tuple(self._running.values()):
            _kill(process)

    def measure(self, cases: Sequence[Case]) -> Iterator[CaseRecord]:
        """Yield the record of every case as it is done, ``num_jobs`` at a time."""
        done: SimpleQueue[CaseRecord | BaseException] = SimpleQueue()

        def work(case: Case) -> None:
            try:
                done.put(self.measure_one(case))
            except BaseException as error:
                done.put(error)

        with ThreadPoolExecutor(self.num_jobs) as pool:
            try:
                for case in cases:
                    pool.submit(work, case)
                for _ in cases:
                    record = done.get()
                    if isinstance(record, BaseException):
                        raise record
                    yield record
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self.__exit__()

    def measure_one(self, case: Case) -> CaseRecord:
        """Return the record from the process of ``case``; after a failure or a timeout, the part
        measured until then.
        """
        with TemporaryDirectory() as folder:
            file = Path(folder) / "case.json"
            file.write_text(json.dumps({**asdict(self.asked), "case": asdict(case)}))
            message = self._run(case, [sys.executable, "-m", "benchmarks.common.case", str(file)])
            try:
                record = load_case(file)
            except (ValueError, KeyError, TypeError):  # it never got as far as writing
                record = CaseRecord(
                    case=case.name,
                    model=case.model,
                    mesh=case.mesh,
                    seq_len=case.seq_len,
                    commit=self.asked.commit,
                )
        return replace(
            record, finished=record.finished and not message, message=record.message or message
        )

    def _run(self, case: Case, command: Sequence[str]) -> str:
        """Return why ``command`` did not succeed; empty where it did."""
        if self._ended:
            return "interrupted"
        process = subprocess.Popen(command, start_new_session=True, cwd=_ROOT)
        self._running[case.name] = process
        if self._ended:  # in between
            _kill(process)
        try:
            code = process.wait(timeout=self.asked.timeout_s)
            return "" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            return f"took more than {self.asked.timeout_s} s"
        finally:
            _kill(process)
            del self._running[case.name]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End ``process`` and the processes that it started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
