"""``apsched models``: the presets."""

import argparse
import json
from dataclasses import asdict
from typing import TextIO

from rich.table import Table

from apsched.costs.clusters.cluster import (
    DEFAULT_CLUSTER,
    cluster_names,
    cluster_text,
    load_cluster,
)
from apsched.models.presets import PRESETS
from apsched.quantities import show_bytes
from apsched.report.summary import console


def run_models(args: argparse.Namespace, stdout: TextIO) -> None:
    """List the presets with their sizes."""
    if args.json:
        print(
            json.dumps(
                {"schema": 1, "models": {name: asdict(config) for name, config in PRESETS.items()}}
            ),
            file=stdout,
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model")
    for heading in ("layers", "dim", "heads", "vocabulary", "experts"):
        table.add_column(heading, justify="right")
    for name, config in PRESETS.items():
        experts = getattr(config, "num_experts", 0)
        sizes = (config.num_layers, config.dim, config.num_heads, config.vocab_size, experts or "-")
        table.add_row(name, *(str(size) for size in sizes))
    console(stdout).print(table)


def run_clusters(args: argparse.Namespace, stdout: TextIO) -> None:
    """List the clusters by name, or show one."""
    if args.name is not None and not args.json:
        print(cluster_text(args.name), file=stdout, end="")
        return
    clusters = {
        name: load_cluster(name)
        for name in ([args.name] if args.name is not None else cluster_names())
    }
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
