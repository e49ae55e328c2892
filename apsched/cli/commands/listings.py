"""``apsched models`` and ``apsched clusters``: the known names."""

import argparse
from dataclasses import asdict
from typing import Any, TextIO

from apsched.cli.arguments import add_json, add_verb
from apsched.quantities import show_bytes


def add_parser(verbs: Any) -> None:
    """Add the two verbs."""
    add_json(add_verb(verbs, "models", "list the presets", run_models))
    clusters = add_verb(
        verbs,
        "clusters",
        "list the clusters, or print the file of one",
        run_clusters,
    )
    clusters.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="print its file, with the source of every number: a template for your own",
    )
    add_json(clusters)


def run_models(args: argparse.Namespace, stdout: TextIO) -> None:
    """List the presets with their sizes."""
    from apsched.models.presets import PRESETS
    from apsched.report.console import console, plain_table, print_json

    if args.json:
        print_json(stdout, models={name: asdict(config) for name, config in PRESETS.items()})
        return
    figures = ("layers", "dim", "heads", "vocabulary", "experts")
    table = plain_table("model", *figures, right=figures)
    for name, config in PRESETS.items():
        experts = getattr(config, "num_experts", 0)
        sizes = (config.num_layers, config.dim, config.num_heads, config.vocab_size, experts or "-")
        table.add_row(name, *(str(size) for size in sizes))
    console(stdout).print(table)


def run_clusters(args: argparse.Namespace, stdout: TextIO) -> None:
    """List the clusters by name, or show one."""
    from apsched.costs.clusters.cluster import (
        DEFAULT_CLUSTER,
        cluster_names,
        cluster_text,
        load_cluster,
    )
    from apsched.report.console import console, plain_table, print_json

    if args.name is not None and not args.json:
        print(cluster_text(args.name), file=stdout, end="")
        return
    names = [args.name] if args.name is not None else cluster_names()
    clusters = {name: load_cluster(name) for name in names}
    if args.json:
        shown = {name: asdict(cluster) for name, cluster in clusters.items()}
        print_json(stdout, default=DEFAULT_CLUSTER, clusters=shown)
        return
    figures = ("ranks a node", "memory", "Gb/s a rank")
    table = plain_table("cluster", *figures, "description", right=figures)
    for name, cluster in clusters.items():
        table.add_row(
            name,
            str(cluster.ranks_per_node),
            show_bytes(cluster.device.memory_bytes),
            f"{cluster.inter_node.gbit_per_s_per_rank:g}",
            cluster.description,
        )
    console(stdout).print(table)
