"""Names of the price curves that travel with a graph. No torch here."""

COPY = "copy"


def collective_curve_name(kind: str, group: str) -> str:
    """Return the name of the curve of ``kind`` on ``group``."""
    return f"{kind}:{group}"


def launch_curve_name(kind: str, group: str) -> str:
    """Return the name of the curve of launching a bucket of ``kind`` on ``group``; it is flat."""
    return f"launch:{kind}:{group}"


def coalesced_curve_name(kind: str, group: str) -> str:
    """Return the name of the curve of what each member adds to a coalesced launch of ``kind`` on ``group``; it is flat."""
    return f"coalesced:{kind}:{group}"


def asked_kind(kind: str) -> str:
    """Return the kind that a cost model is asked for: a broadcast is priced as an all-gather, since each link carries as much."""
    return "all_gather" if kind == "broadcast" else kind
