"""apsched: the fastest communication schedule that fits the memory, with a proof of how far it can
be from the best.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from apsched.api import optimize as optimize
    from apsched.api import solve as solve
    from apsched.calibrate.measure_in_job import measure as measure
    from apsched.capture.graph_module import capture_graph_module as capture_graph_module
    from apsched.compiler.backend import backend as backend
    from apsched.compiler.inductor_pass import inductor_pass as inductor_pass
    from apsched.config import Caps as Caps
    from apsched.config import SolveOptions as SolveOptions
    from apsched.costs.cluster_model import ClusterCostModel as ClusterCostModel
    from apsched.costs.clusters.cluster import load_cluster as load_cluster
    from apsched.costs.measured_file import load_costs as load_costs
    from apsched.costs.measured_model import MeasuredCostModel as MeasuredCostModel
    from apsched.costs.measured_model import load_cost_model as load_cost_model
    from apsched.costs.model import CostModel as CostModel
    from apsched.errors import AgreementError as AgreementError
    from apsched.errors import ApschedError as ApschedError
    from apsched.errors import InfeasibleError as InfeasibleError
    from apsched.errors import InputError as InputError
    from apsched.errors import RoundTripError as RoundTripError
    from apsched.graph.export.export import export as export
    from apsched.integrations.fsdp2 import apply_fsdp2 as apply_fsdp2
    from apsched.integrations.fsdp2 import fsdp2_plan as fsdp2_plan
    from apsched.pipeline.result import Result as Result
    from apsched.problem.plan.plan_file import load_plan as load_plan
    from apsched.problem.plan.rules import Plan as Plan
    from apsched.problem.plan.rules import Rule as Rule
    from apsched.writeback.hold_order import hold_order as hold_order

_HOME = {
    "AgreementError": "apsched.errors",
    "ApschedError": "apsched.errors",
    "Caps": "apsched.config",
    "ClusterCostModel": "apsched.costs.cluster_model",
    "CostModel": "apsched.costs.model",
    "InfeasibleError": "apsched.errors",
    "InputError": "apsched.errors",
    "MeasuredCostModel": "apsched.costs.measured_model",
    "Plan": "apsched.problem.plan.rules",
    "Result": "apsched.pipeline.result",
    "RoundTripError": "apsched.errors",
    "Rule": "apsched.problem.plan.rules",
    "SolveOptions": "apsched.config",
    "apply_fsdp2": "apsched.integrations.fsdp2",
    "backend": "apsched.compiler.backend",
    "capture_graph_module": "apsched.capture.graph_module",
    "export": "apsched.graph.export.export",
    "fsdp2_plan": "apsched.integrations.fsdp2",
    "hold_order": "apsched.writeback.hold_order",
    "inductor_pass": "apsched.compiler.inductor_pass",
    "load_cluster": "apsched.costs.clusters.cluster",
    "load_cost_model": "apsched.costs.measured_model",
    "load_costs": "apsched.costs.measured_file",
    "load_plan": "apsched.problem.plan.plan_file",
    "measure": "apsched.calibrate.measure_in_job",
    "optimize": "apsched.api",
    "solve": "apsched.api",
}
"""Public name -> module; imported when first used (PEP 562), so that nothing imports torch before
it is needed.
"""

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'apsched' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
