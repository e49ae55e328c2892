"""The public names of apsched are those of its stub; names of earlier versions still work, and say
so.
"""

import ast
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import apsched

NAMES = (
    *(
        "optimize",
        "solve",
        "solve_step",
        "StepResult",
        "backend",
        "inductor_pass",
        "tune_fsdp2",
        "ddp_buckets",
    ),
    "micro_batches",
    "study",
    *("Caps", "SolveOptions", "Plan", "Rule", "load_plan"),
    *(
        "capture",
        "capture_graph",
        "export_graph",
        "Problem",
        "Schedule",
        "Result",
        "simulate",
        "verify",
    ),
    *("CostModel", "load_cost_model", "measure_costs"),
    *("ApschedError", "InputError", "InfeasibleError", "AgreementError", "RoundTripError"),
    "SelfCheckError",
)
RENAMED = {
    "ClusterCostModel": ("apsched.costs.cluster_model", "ClusterCostModel"),
    "MeasuredCostModel": ("apsched.costs.measured_model", "MeasuredCostModel"),
    "apply_fsdp2": ("apsched.integrations.fsdp2", "apply_fsdp2"),
    "capture_graph_module": ("apsched", "capture_graph"),
    "export": ("apsched", "export_graph"),
    "fsdp2_plan": ("apsched.integrations.fsdp2", "fsdp2_plan"),
    "hold_order": ("apsched.writeback.hold_order", "hold_order"),
    "load_cluster": ("apsched.costs.clusters.cluster", "load_cluster"),
    "load_costs": ("apsched.costs.measured_file", "load_costs"),
    "measure": ("apsched", "measure_costs"),
}


def test_public_names_are_there() -> None:
    """Each can be imported, without a warning, and is listed."""
    assert sorted(apsched.__all__) == sorted([*NAMES, "__version__"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        for name in apsched.__all__:
            assert getattr(apsched, name) is not None
    assert set(dir(apsched)) == set(apsched.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sovle'"):
        _ = apsched.sovle


def test_the_stub_states_each_name_once() -> None:
    """As type checkers read it: ``import NAME as NAME`` makes a name public."""
    tree = ast.parse(Path(apsched.__file__).with_suffix(".pyi").read_text())
    names = [
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]
    assert sorted(names) == sorted(NAMES)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_works_and_says_what_to_use(old: str) -> None:
    module, name = RENAMED[old]
    message = f"apsched.{old} is deprecated.*use {module}"
    with pytest.warns(DeprecationWarning, match=message) as warned:
        found = getattr(apsched, old)
    assert found is getattr(import_module(module), name)
    assert warned[0].filename == __file__
