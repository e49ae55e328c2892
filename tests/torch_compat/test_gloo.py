"""Gathers of gloo in the processes that the tests start (``torch_compat.gloo``)."""

import pytest
import torch

from apsched.torch_compat.gloo import avoid_coalesced_gathers
from tests.helpers.processes import WORKERS, run_processes

ROUNDS = 300


@pytest.mark.ranks
def test_many_gathers_at_once_have_the_right_values(tmp_path):
    worker = WORKERS / "graphs" / "gathers_worker.py"
    found = run_processes(worker, tmp_path, 4, str(ROUNDS), timeout_s=200)
    assert [each["wrong"] for each in found] == [0] * 4
    assert {each["gathers"] for each in found} == {found[0]["gathers"]}
    assert found[0]["gathers"] > 3 * ROUNDS


def test_kernels_are_replaced_only_where_it_is_asked_for():
    avoid_coalesced_gathers.cache_clear()
    for name in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"):
        operator = f"_c10d_functional::{name}"
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU")
    library = avoid_coalesced_gathers()
    for name in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"):
        operator = f"_c10d_functional::{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU")
    library._destroy()
    avoid_coalesced_gathers.cache_clear()
