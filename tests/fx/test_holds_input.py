"""What the records say of the input of a collective is what torch does: held until the wait, or
not; a wait returns its argument.
"""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from apsched.fx.collectives import _CLONES_INPUT  # the claim under test
from tests.helpers.processes import run_processes

c10d = torch.ops._c10d_functional
LAUNCHES = {
    "all_gather_into_tensor": lambda x, g: c10d.all_gather_into_tensor(x, 2, g),
    "all_gather_into_tensor_out": lambda x, g: c10d.all_gather_into_tensor_out(
        x, 2, g, out=torch.empty(32, 4)
    ),
    "all_gather_into_tensor_coalesced": lambda x, g: c10d.all_gather_into_tensor_coalesced(
        [x], 2, g
    )[0],
    "all_to_all_single": lambda x, g: c10d.all_to_all_single(x, [8, 8], [8, 8], g),
    "all_reduce": lambda x, g: c10d.all_reduce(x, "sum", g),
    "all_reduce_coalesced": lambda x, g: c10d.all_reduce_coalesced([x], "sum", g)[0],
    "broadcast": lambda x, g: c10d.broadcast(x, 0, g),
}


def main(rank, world_size, folder):
    """On each process: launch every collective, and look when its input goes."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    group = dist.group.WORLD.group_name
    seen = {}
    for name, launch in LAUNCHES.items():
        x = torch.ones(16, 4)
        reference = StorageWeakRef(x.untyped_storage())
        started = launch(x, group)
        del x
        held = not reference.expired()
        done = c10d.wait_tensor(started)
        deadline = (
            time.monotonic() + 60
        )  # gloo's thread drops its last reference a little after the wait
        while not reference.expired() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen[name] = (
            held,
            not reference.expired(),
            done.untyped_storage()._cdata == started.untyped_storage()._cdata,
        )
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(seen))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")
@pytest.mark.ranks
def test_against_real_process_groups(tmp_path):
    """Gloo's reduce-scatter works on a copy and so holds nothing; NCCL's holds its input, as the
    records say.
    """
    seen, _ = run_processes(Path(__file__), tmp_path, 2, timeout_s=600)
    assert seen == {name: [name not in _CLONES_INPUT, False, True] for name in LAUNCHES}
