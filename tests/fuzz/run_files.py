"""Fuzz what reads files, guided by coverage (atheris, libFuzzer): any bytes are read, or refused
with an ``InputError`` that says why.

usage: python tests/fuzz/run_files.py [READER ...] [--runs 5000 | --minutes 60] [--seed 1]

Each reader has a process of its own, since libFuzzer ends it, and starts from a valid file. A
failing input is printed in full.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
_READERS = HERE / "file_readers.py"
_MEMORY_MB = 2048
"""Resources that a reader may use."""


def readers() -> list[str]:
    """Return the names of all readers."""
    done = subprocess.run(
        [sys.executable, str(_READERS)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def fuzz(reader: str, *, runs: int | None, seconds: int | None, seed: int, folder: Path) -> str:
    """Return what libFuzzer said of ``reader`` where an input broke it; empty where none did."""
    corpus = folder / "corpus"
    corpus.mkdir()
    limits = [f"-runs={runs}"] if runs is not None else [f"-max_total_time={seconds}"]
    inherited_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # libFuzzer counts it
    command = [
        sys.executable,
        str(_READERS),
        reader,
        str(corpus),
        *limits,
        f"-seed={seed}",
        "-max_len=20000",
        f"-rss_limit_mb={inherited_mb + _MEMORY_MB}",
        f"-malloc_limit_mb={_MEMORY_MB}",
        f"-artifact_prefix={folder}/",
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return ""
    inputs = [
        f"{path.name}: {path.read_bytes()!r}" for path in sorted(folder.iterdir()) if path.is_file()
    ]
    return "\n".join([done.stdout[-1500:], done.stderr[-3000:], *inputs])


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz what reads files, guided by coverage.")
    parser.add_argument(
        "readers", metavar="READER", nargs="*", help=f"of {', '.join(readers())} (default: all)"
    )
    parser.add_argument(
        "--runs", type=int, default=5000, help="inputs for each reader (default 5000)"
    )
    parser.add_argument("--minutes", type=float, help="for each reader, in place of --runs")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    broken = 0
    for reader in given.readers or readers():
        with tempfile.TemporaryDirectory() as folder:
            seconds = None if given.minutes is None else round(60 * given.minutes)
            found = fuzz(
                reader,
                runs=given.runs if seconds is None else None,
                seconds=seconds,
                seed=given.seed,
                folder=Path(folder),
            )
        print(f"{reader}: {'breaks' if found else 'holds'}", flush=True)
        if found:
            broken += 1
            print(found, flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
