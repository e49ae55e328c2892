# The public names of apsched, each once: `apsched/__init__.py` reads them here, and imports them
# when they are first used.

from types import ModuleType
from typing import Any

from apsched.api import capture as capture
from apsched.api import optimize as optimize
from apsched.api import solve as solve
from apsched.api import solve_step as solve_step
from apsched.calibrate.measure_in_job import measure_costs as measure_costs
from apsched.capture.graph_module import capture_graph as capture_graph
from apsched.capture.micro_batches import micro_batches as micro_batches
from apsched.cli.study_function import study as study
from apsched.compiler.backend import backend as backend
from apsched.compiler.inductor_pass import inductor_pass as inductor_pass
from apsched.config import Caps as Caps
from apsched.config import SolveOptions as SolveOptions
from apsched.costs.measured_model import load_cost_model as load_cost_model
from apsched.costs.model import CostModel as CostModel
from apsched.errors import AgreementError as AgreementError
from apsched.errors import ApschedError as ApschedError
from apsched.errors import InfeasibleError as InfeasibleError
from apsched.errors import InputError as InputError
from apsched.errors import RoundTripError as RoundTripError
from apsched.errors import SelfCheckError as SelfCheckError
from apsched.graph.export.export import export_graph as export_graph
from apsched.integrations.ddp_buckets import ddp_buckets as ddp_buckets
from apsched.integrations.tune_fsdp2 import tune_fsdp2 as tune_fsdp2
from apsched.pipeline.result import Result as Result
from apsched.problem.plan.plan_file import load_plan as load_plan
from apsched.problem.plan.rules import Plan as Plan
from apsched.problem.plan.rules import Rule as Rule
from apsched.problem.problem import Problem as Problem
from apsched.report.answer.step import StepResult as StepResult
from apsched.schedule.schedule import Schedule as Schedule
from apsched.schedule.simulate import simulate as simulate
from apsched.schedule.verify import verify as verify

__version__: str

class CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

__all__: list[str]
