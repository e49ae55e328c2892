"""``apsched clusters``: the clusters that ship with apsched."""

import argparse
import json
from dataclasses import asdict
from typing import TextIO

from rich.table import Table

from apsched.costs.cluster import DEFAULT_CLUSTER, cluster_names, cluster_text, load_cluster
from apsched.options import show_bytes
from apsched.report import console


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """List the clusters by name, or show one."""
    if args.name is not None and not args.json:
        print(cluster_text(args.name), file=stdout, end="")
        return
    clusters = {name: load_cluster(name) for name in ([args.name] if args.name is not None else cluster_names())}
    if args.json:
        shown = {name: asdict(cluster) for name, cluster in clusters.items()}
        print(json.dumps({"schema": 1, "default": DEFAULT_CLUSTER, "clusters": shown}), file=stdout)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cluster")
    for heading in ("ranks a node", "memory", "Gb/s a rank"):
        table.add_column(heading, justify="right")
    table.add_column("what it is")
    for name, cluster in clusters.items():
        table.add_row(
            name,
            str(cluster.ranks_per_node),
            show_bytes(cluster.device.memory_bytes),
            f"{cluster.inter_node.gbit_per_s_per_rank:g}",
            cluster.description,
        )
    console(stdout).print(table)
