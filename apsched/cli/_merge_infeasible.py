"""What a command does where no schedule fits."""

import json
from collections.abc import Sequence
from typing import TextIO

from apsched.errors import InfeasibleError
from apsched.graph_result import Result
from apsched.infeasible import explain_infeasible
from apsched.report import report_json


def refuse_infeasible(results: Sequence[Result], *, source: str, cluster: str, stdout: TextIO, as_json: bool) -> None:
    """Raise ``InfeasibleError`` where a graph has no schedule, with the caps, the least that would do and the nodes that need it."""
    without = [result for result in results if result.best is None]
    if not without:
        return
    if as_json:
        print(json.dumps(report_json(source, cluster, results)), file=stdout)
    raise InfeasibleError("; ".join(explain_infeasible(result) for result in without))
