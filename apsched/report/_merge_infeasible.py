"""Why no schedule keeps the caps, in a sentence with the options that people type."""

from apsched.errors import ApschedError
from apsched.graph_result import Result
from apsched.options import show_bytes

_FLAGS = {
    "memory_cap_bytes": "--memory-cap",
    "bucket_cap_bytes": "--bucket-cap",
    "max_topo_span": "--max-topo-span",
    "max_prefetch": "--max-prefetch",
    "in_flight_cap_bytes": "--in-flight-cap",
}


def explain_infeasible(result: Result) -> str:
    """Return why no schedule keeps the caps: which clash, at which nodes, and the least that would do."""
    why = result.answer.infeasibility
    if why is None:
        raise ApschedError(f"{result.problem.name}: no schedule was found, and no reason")
    least = [f"{_FLAGS[cap]} {value}{f' ({show_bytes(value)})' if cap.endswith('bytes') else ''}" for cap, value in why.least]
    joined = (" and " if any(r.lifted for r in why.relaxations) else " or ").join(least)
    return f"{result.problem.name}: {why.message}" + (f"; try {joined}" if least else "")
