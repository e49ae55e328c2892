"""``--buckets``: buckets by module as a plan, from the names of parameters in the graphs alone."""

from collections.abc import Sequence
from pathlib import Path

from apsched.errors import InputError
from apsched.load_source import LoadedGraph
from apsched.plan import Plan


def with_buckets(plan: Plan, asked: str | None, graphs: Sequence[LoadedGraph]) -> Plan:
    """Return ``plan`` with the buckets that are ``asked`` for: ``none``, ``block``, or a file with an entry a line."""
    if asked is None:
        return plan
    from apsched.module_buckets import NO_BUCKETS, ModuleBuckets, user_buckets
    from apsched.solver.baselines import block_labels

    if asked == "none":
        return Plan((*plan.rules, *NO_BUCKETS.rules))
    labels: dict[str, str] = {}
    for graph in graphs:
        labels = block_labels(graph.problem) | labels
    labels.pop("", None)
    if not labels:
        raise InputError("--buckets: expected collectives that serve parameters with names, found none; leave it out")
    if asked == "block":
        buckets = {label: tuple(name for name in labels if labels[name] == label) for label in dict.fromkeys(labels.values())}
        made = ModuleBuckets(buckets=buckets)
    else:
        made = user_buckets(_entries(asked), list(labels))
    return Plan((*plan.rules, *made.plan([graph.problem for graph in graphs]).rules))


def _entries(path: str) -> list[str]:
    """Return the entries of a file: a line each, without empty lines and comments (``# ...``)."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--buckets: expected none, block or a file of module names, found {path!r}: {error}") from None
    entries = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not entries:
        raise InputError(f"--buckets: expected module names, one a line, in {path}; found none")
    return entries
