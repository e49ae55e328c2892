"""One of two gloo processes that try random programs and shorten those that fail; writes what it
found as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``

``FOLDER/request.json`` says which seeds, and how long at most.
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.fuzz.check_program import failure_of
from tests.fuzz.random_fx import RandomProgram, random_fx


def agreed(value: str) -> str:
    """Return what the first process rank with something to say says, on every process rank."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return next(filter(None, said), "")


def shortened(
    program: RandomProgram, still_fails: Callable[[RandomProgram], bool]
) -> RandomProgram:
    """Return a part of ``program`` that still fails, and no longer does with any line less
    (Zeller's ddmin over lines).
    """
    size = max(1, len(program.lines) // 2)
    while True:
        smaller = program
        for at in range(0, len(program.lines), size):
            dropped = {line.target for line in program.lines[at : at + size]} & {
                line.target for line in smaller.lines
            }
            candidate = smaller.without(dropped) if dropped else smaller
            if (
                len(candidate.lines) < len(smaller.lines)
                and candidate.outputs
                and still_fails(candidate)
            ):
                smaller = candidate
        if size == 1 and smaller == program:
            return smaller
        program, size = smaller, max(1, size // 2)


def try_seed(seed: int, groups: list[str], *, solved: bool) -> dict[str, object] | None:
    """Return the shortest program found that fails, and how; None where all holds."""

    def fails(program: RandomProgram) -> str:
        return agreed(failure_of(program, groups, seed, solved=solved))

    program = random_fx(seed, num_lines=10 + seed % 50)
    first = fails(program) if program.outputs else ""
    if not first:
        return None
    kind = first.split(":")[0].split(" differs")[0]
    short = shortened(program, lambda candidate: fails(candidate).startswith(kind))
    return {"seed": seed, "solved": solved, "failure": fails(short), "program": short.source()}


def main(process_rank: int, world_size: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=process_rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    groups = [dist.group.WORLD.group_name, dist.new_group(list(range(world_size))).group_name]
    request = json.loads((folder / "request.json").read_text())
    end = time.monotonic() + request["seconds"]
    failures, tried = [], 0
    for seed in range(request["first_seed"], request["first_seed"] + request["num_seeds"]):
        if agreed("" if time.monotonic() < end else "time is up"):
            break
        tried += 1
        found = try_seed(
            seed,
            groups,
            solved=(seed - request["first_seed"]) % request["solve_every"]
            == request["solve_every"] - 1,
        )
        if found is not None:
            failures.append(found)
            if process_rank == 0:
                print(
                    f"seed {seed}: {found['failure']}\n{found['program']}",
                    file=sys.stderr,
                    flush=True,
                )
    dist.barrier()
    (folder / f"{process_rank}.json").write_text(json.dumps({"tried": tried, "failures": failures}))
    dist.destroy_process_group()
