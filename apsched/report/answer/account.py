"""The memory of a device line by line: the memory outside of a graph, and the rest for the
graph.
"""

from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from apsched.config import OPTIMIZERS
from apsched.costs.clusters.cluster import cluster_names, load_cluster
from apsched.pipeline.device_memory import MemoryAccount
from apsched.pipeline.result import Result
from apsched.pipeline.what_fits import Trial, default_is_too_small
from apsched.quantities import show_bytes
from apsched.report.console import plain_table


def account_table(results: Sequence[Result]) -> Table | None:
    """Return the account of the device, a line for each thing and a column for each graph; ``None``
    where no device is known.

    The peak of a graph is that of the schedule found, or the least memory that the graph is known
    to need if there is no schedule.
    """
    known = [(result, result.account) for result in results if result.account is not None]
    if not known:
        return None
    names = [result.problem.name for result, _ in known]
    table = plain_table("device memory", *names, right=names)
    found = [{line.what: line.size_bytes for line in account.lines} for _, account in known]
    rows = {
        "device": [account.beside.device_bytes for _, account in known],
        **{
            f"- {what}": [lines.get(what, 0) for lines in found]
            for what in dict.fromkeys(what for lines in found for what in lines)
        },
        "= left for the graph": [account.left_bytes for _, account in known],
        "peak of the graph": [_needed_bytes(result) for result, _ in known],
    }
    for what, sizes in rows.items():
        table.add_row(what, *(show_bytes(size) for size in sizes))
    return table


def account_in_words(result: Result) -> str:
    """Return the account of the device as one sentence, the largest first, if the default memory
    cap is too small; else an empty text.
    """
    if result.account is None or not default_is_too_small(result):
        return ""
    lines = sorted(result.account.lines, key=lambda line: -line.size_bytes)
    return (
        f"{show_bytes(result.account.left_bytes)} of the device"
        f" ({show_bytes(result.account.beside.device_bytes)}) is left for the graph: "
        + ", ".join(f"{show_bytes(line.size_bytes)} {line.what}" for line in lines)
    )


def memory_hint(results: Sequence[Result], trials: Sequence[Trial] = ()) -> list[str]:
    """Return the missing bytes if the default memory cap is too small, and the options that fit: of
    ``trials``, and of the other optimizers and shipped clusters; empty if another cap clashes.

    The order with the least known peak keeps all other caps, and its peak depends neither on the
    optimizer nor on the cluster.
    """
    short = [result for result in results if default_is_too_small(result)]
    if not short:
        return []
    worst = max(short, key=_missing_bytes)
    assert worst.account is not None
    device = show_bytes(worst.account.beside.device_bytes)
    text = (
        f"{show_bytes(_missing_bytes(worst))} is missing: {worst.problem.name} needs"
        f" {show_bytes(_needed_bytes(worst))}; {worst.cluster} has {device}, of which"
        f" {show_bytes(worst.account.left_bytes)} is left for the graph"
    )
    accounts = [result.account for result in results if result.account is not None]
    needs = [_needed_bytes(result) for result in results if result.account is not None]
    would = [_trial_text(trial) for trial in trials if trial.fits]
    would += [
        f"--optimizer {name}"
        for name in OPTIMIZERS
        if _fit([replace(account, optimizer=name) for account in accounts], needs)
    ]
    clusters = [
        name
        for name in cluster_names()
        if load_cluster(name).library == "nccl" and _fit(_on(name, accounts), needs)
    ]
    if clusters:
        others = f" (or {', '.join(clusters[1:])})" if clusters[1:] else ""
        would.append(f"--cluster {clusters[0]}{others}")
    fitting = f"these fit: {', '.join(would)}" if would else "no option that was tried fits"
    too_large = [_trial_text(trial) for trial in trials if not trial.fits]
    return [f"{text}; {fitting}" + (f"; too large: {', '.join(too_large)}" if too_large else "")]


def _trial_text(trial: Trial) -> str:
    return f"{trial.option} ({show_bytes(trial.needed_bytes)} of {show_bytes(trial.left_bytes)})"


def _on(cluster: str, accounts: Sequence[MemoryAccount]) -> list[MemoryAccount]:
    memory_bytes = load_cluster(cluster).device.memory_bytes
    return [
        replace(account, beside=replace(account.beside, device_bytes=memory_bytes))
        for account in accounts
    ]


def _fit(accounts: Sequence[MemoryAccount], needs: Sequence[int]) -> bool:
    pairs = zip(accounts, needs, strict=True)
    return all(need <= account.left_bytes for account, need in pairs)


def _needed_bytes(result: Result) -> int:
    if result.best is not None:
        return result.best.peak_memory_bytes
    return result.answer.floor_memory_bytes


def _missing_bytes(result: Result) -> int:
    return _needed_bytes(result) - (result.account.left_bytes if result.account else 0)
