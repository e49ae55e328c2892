"""Uses the cache under conditions that only a process of its own can have; prints what it found as
JSON.

usage: cache_worker.py read-only|full|killed|crowd DIRECTORY ...
"""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from apsched.compiler.ranks.cache import Cache

NOBODY = 65534
DIGESTS = tuple(letter * 64 for letter in "abc")


def text(body: bytes | None) -> str | None:
    return None if body is None else body.decode()


def read_only(directory: Path, there: str, new: str) -> dict[str, object]:
    if os.getuid() == 0:
        os.setuid(NOBODY)  # the superuser may write anywhere
    cache = Cache(directory=directory)
    return {
        "read": text(cache.read(there)),
        "kept": cache.write(new, b"mine"),
        "again": text(cache.read(new)),
    }


def full(directory: Path, small: str, large: str) -> dict[str, object]:
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)], capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    try:
        cache = Cache(directory=directory)
        kept = {
            "small": cache.write(small, b"small"),
            "large": cache.write(large, os.urandom(1 << 18)),
        }
        left = sorted(path.name for path in directory.iterdir())
        return kept | {
            "read": text(cache.read(small)),
            "large read": text(cache.read(large)),
            "left": left,
        }
    finally:
        if mounted:
            subprocess.run(["umount", str(directory)], check=True)


def body_of(digest: str, turn: int) -> bytes:
    """Return an answer that says itself which it is, of some size."""
    return f"{digest} {turn} ".encode() + digest[:1].encode() * (1 << (10 + turn % 9))


def is_whole(digest: str, body: bytes) -> bool:
    return body == body_of(digest, int(body.split(b" ")[1]))


def write_for_ever(cache: Cache) -> None:
    turn = 0
    while True:
        cache.write(DIGESTS[turn % 3], body_of(DIGESTS[turn % 3], turn))
        turn += 1


def forked(run: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    return child


def killed(directory: Path, times: str, seed: str) -> dict[str, object]:
    import random

    rng, cache = random.Random(float(seed)), Cache(directory=directory)
    read, wrong, unfinished = 0, [], 0
    for _ in range(int(times)):
        child = forked(lambda: write_for_ever(cache))
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unfinished += len(list(directory.glob(".*.tmp")))
        for digest in DIGESTS:
            body = cache.read(digest)
            if (directory / f"{digest}.answer").exists():
                read += 1
                if body is None or not is_whole(digest, body):
                    wrong.append(digest[:1])
        for path in directory.glob(".*.tmp"):
            path.unlink()
    return {"killed": int(times), "read": read, "wrong": wrong, "unfinished": unfinished}


def crowd(directory: Path, writers: str, turns: str) -> dict[str, object]:
    limit = 2 * (len(body_of(DIGESTS[0], 0)) + 200)
    cache = Cache(directory=directory, limit_bytes=limit)

    def write() -> None:
        for turn in range(int(turns)):
            cache.write(DIGESTS[turn % 3], body_of(DIGESTS[turn % 3], 9 * turn))

    children = [forked(write) for _ in range(int(writers))]
    read, wrong = 0, []
    while children:
        for digest in DIGESTS:
            body = cache.read(digest)
            if body is not None:
                read += 1
                if not is_whole(digest, body):
                    wrong.append(digest[:1])
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
    cache.shrink()
    return {
        "read": read,
        "wrong": wrong,
        "bytes": sum(entry.size_bytes for entry in cache.entries()),
        "limit": limit,
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    runs = {"read-only": read_only, "full": full, "killed": killed, "crowd": crowd}
    print(json.dumps(runs[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))
