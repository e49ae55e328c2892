"""Private functions of torch: each has a contract, which the installed torch keeps; the command
that checks it; and the fence.
"""

import os
import subprocess
import sys

import pytest
import torch

import apsched.torch_compat.graphs
from apsched.errors import InputError
from apsched.torch_compat.contracts import compilers, graphs, groups, parallel, registry
from apsched.torch_compat.contracts.__main__ import main
from apsched.torch_compat.version import ANY_TORCH_VARIABLE, check_torch_version

MODULES = (compilers, graphs, groups, parallel)


@pytest.mark.parametrize("name", sorted(registry.wrappers()))
def test_the_contract_is_kept(name):
    assert registry.outcome(name) == registry.Outcome(name=name, found=True, broken="")


def test_every_private_function_has_a_contract_and_no_other_has():
    assert sorted(registry.CHECKS) == sorted(registry.wrappers())


def test_what_is_missing_or_broken_is_said(monkeypatch, capsys):
    """As with a torch that renamed one function and changed what another returns."""
    monkeypatch.delattr("torch.distributed.tensor.placement_types._StridedShard")
    monkeypatch.setattr("torch._C._dispatch_has_kernel_for_dispatch_key", lambda *arguments: False)
    only = {
        name: module
        for name, module in registry.wrappers().items()
        if name in ("strided_shard", "is_composite", "storage_key")
    }
    modules = {**only, "unheard_of": apsched.torch_compat.graphs}
    monkeypatch.setattr(registry, "wrappers", lambda: modules)
    assert main() == 1
    lines = {
        line.split()[0]: line.partition("  ")[2].strip()
        for line in capsys.readouterr().out.splitlines()[1:-1]
    }
    assert lines["strided_shard"].startswith(
        "NOT FOUND, contract BROKEN: ImportError: cannot import name '_StridedShard'"
    )
    assert (
        lines["is_composite"]
        == "found, contract BROKEN: AssertionError: aten.linear is made of other operators"
    )
    assert lines["storage_key"] == "found, contract kept"
    assert lines["unheard_of"] == "found, contract BROKEN: no contract is written down for it"


def test_the_command_runs_anywhere(tmp_path):
    """In a process of its own, away from the checkout, without pytest."""
    code = (
        "import sys; sys.modules['pytest'] = None; import runpy;"
        " runpy.run_module('apsched.torch_compat.contracts', run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith(f"torch {torch.__version__}, Python 3.")
    assert ran.stdout.endswith(f"{len(registry.CHECKS)} kept, 0 broken\n")


@pytest.mark.parametrize("version", ["2.10.1+cu128", "2.16.0", "3.0.0a0", "unknown"])
def test_another_torch_is_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.delenv(ANY_TORCH_VARIABLE, raising=False)
    with pytest.raises(
        InputError, match=r"torch \S+: apsched was run against torch 2\.11 to 2\.15"
    ) as error:
        check_torch_version()
    assert version in str(error.value)
    monkeypatch.setenv(ANY_TORCH_VARIABLE, "1")
    check_torch_version()


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "2.13.0.dev20260101", "2.15.0"])
def test_the_versions_that_were_run_are_taken(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    check_torch_version()


def test_the_fence_is_there_only_where_it_is_needed(tmp_path):
    """With a torch that is too new, graph files are solved, and a preset is refused in one line."""
    (tmp_path / "sitecustomize.py").write_text("import torch; torch.__version__ = '2.99.0'\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.pop(ANY_TORCH_VARIABLE, None)

    def ran(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    solving = (
        "import torch; assert torch.__version__ == '2.99.0'; import apsched.graph.graph_file,"
        " apsched.pipeline.steps, apsched.solver"
    )
    done = ran(solving)
    assert done.returncode == 0, done.stderr
    refused = ran(
        "import sys; from apsched.cli import main; sys.exit(main(['solve', 'llama3-debug',"
        " '--mesh', 'fsdp=2']))"
    )
    assert refused.returncode == 2
    assert (
        refused.stderr.strip()
        .splitlines()[-1]
        .startswith("apsched: error: torch 2.99.0: apsched was run against torch 2.11 to 2.15")
    )
