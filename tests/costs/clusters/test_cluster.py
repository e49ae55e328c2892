"""Cluster files: those that ship load, and each kind of mistake in a user's file names the file and
the key.
"""

import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from apsched.costs.clusters.cluster import DEFAULT_CLUSTER, cluster_names, load_cluster
from apsched.errors import InputError

H100 = resources.files("apsched.costs.clusters").joinpath("h100.toml").read_text()


def test_shipped_clusters_load_and_the_default_comes_first() -> None:
    names = cluster_names()
    assert names[0] == DEFAULT_CLUSTER == "h100"
    assert {"h100", "h200", "a100", "b200", "mi300x", "gb200-nvl72", "h100-efa", "cpu"} <= set(
        names
    )
    for name in names:
        assert load_cluster(name).name == name


def test_h100_has_the_published_figures() -> None:
    h100 = load_cluster()
    assert (
        h100.ranks_per_node,
        h100.device.peak_tflops.bf16,
        h100.device.memory_bandwidth_gb_per_s,
    ) == (8, 989.4, 3350.0)
    assert h100.inter_node.nic_gb_per_s == pytest.approx(47.0)  # 400 Gb/s / 8 * 0.94


@pytest.mark.parametrize("name", cluster_names())
def test_every_number_of_a_shipped_file_has_a_source(name: str) -> None:
    """A number's comment stands on its line; tables name theirs in the header."""
    for line in (
        resources.files("apsched.costs.clusters").joinpath(f"{name}.toml").read_text().splitlines()
    ):
        if "=" in line and '= "' not in line:
            assert "#" in line, line


def test_a_users_file_loads_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(H100.replace('name = "h100"', 'name = "mine"').replace("= 400.0", "= 800.0"))
    assert load_cluster(str(path)).inter_node.gbit_per_s_per_rank == 800.0
    assert load_cluster(path).name == "mine"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark
    assert load_cluster(path).name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "ranks_per_node = 8",
            "ranks_per_nod = 8",
            "unknown key 'ranks_per_nod' (did you mean 'ranks_per_node'?)",
        ),
        (
            "efficiency = 0.94",
            "eficiency = 0.94",
            "unknown key 'inter_node.eficiency' (did you mean 'efficiency'?)",
        ),
        ("launch_us = 5.0", "", "key 'launch_us' is missing"),
        ("[intra_node]", "[intra]", "unknown key 'intra' (did you mean 'intra_node'?)"),
        (
            "bf16 = 989.4",
            "bf16 = -989.4",
            "device.peak_tflops.bf16 must be finite and above 0; found -989.4",
        ),
        ("bf16 = 989.4", "bf16 = 0", "device.peak_tflops.bf16 must be finite and above 0; found 0"),
        (
            "bf16 = 989.4",
            "bf16 = nan",
            "device.peak_tflops.bf16 must be finite and above 0; found nan",
        ),
        (
            "bf16 = 989.4",
            "bf16 = inf",
            "device.peak_tflops.bf16 must be finite and above 0; found inf",
        ),
        ("bf16 = 989.4", 'bf16 = "fast"', "device.peak_tflops.bf16 must be a number; found 'fast'"),
        ("bf16 = 989.4", "bf16 = true", "device.peak_tflops.bf16 must be a number; found True"),
        (
            "ranks_per_node = 8",
            "ranks_per_node = 7.5",
            "ranks_per_node must be a whole number; found 7.5",
        ),
        (
            "matmul_efficiency = 0.74",
            "matmul_efficiency = 74",
            "device.matmul_efficiency must be at most 1",
        ),
        (
            'library = "nccl"',
            'library = "ncl"',
            "library must be one of nccl, gloo; found 'ncl' (did you mean 'nccl'?)",
        ),
        ('library = "nccl"', "library = 3", "library must be a non-empty string; found 3"),
        ("[inter_node]", "[inter_node", "not a TOML file"),
        (
            "= 84_930_000_000",
            "= 79.1",
            (
                "memory_bytes must be in bytes (80 GB is 80_000_000_000), between 1e+08 and 1e+14;"
                " found 79.1"
            ),
        ),
        ("= 3350.0", "= 3.35e12", "device.memory_bandwidth_gb_per_s must be in GB/s"),
        ("kernel_us = 2.0", "kernel_us = 2e-6", "device.kernel_us must be in microseconds"),
        ("bf16 = 989.4", "bf16 = 9.894e14", "device.peak_tflops.bf16 must be in TFLOP/s"),
        ("= 400.0", "= 4e11", "inter_node.gbit_per_s_per_rank must be in Gbit/s"),
        (
            "ranks_per_node = 8",
            "ranks_per_node = 100000",
            "ranks_per_node must be in process ranks, between 1 and 4096",
        ),
        (
            "num_processors = 132",
            "num_processors = 132.5",
            "device.num_processors must be a whole number; found 132.5",
        ),
        (
            "= 141.0",
            "= 500.0",
            "low_latency_busbw_gb_per_s cannot exceed intra_node.busbw_gb_per_s; found 500 and 360",
        ),
        (
            "[inter_node]",
            '[inter_node]\nprotocols = "LL Simpel"',
            "protocols must be names among LL LL128 Simple, Simple with them",
        ),
        ("[inter_node]", '[inter_node]\nprotocols = "LL"', "Simple with them; found 'LL'"),
        (
            'name = "h100"',
            'name = "h100"\nbase = "h10"',
            "base must be a cluster that ships with apsched",
        ),
    ],
)
def test_mistakes_name_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in H100
    path = tmp_path / "bad.toml"
    path.write_text(H100.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        load_cluster(path)
    assert message in str(error.value)
    assert "bad.toml" in str(error.value)


def test_a_file_on_a_base_says_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "h100"\nname = "mine"\n[device.peak_tflops]\nbf16 ='
        " 800.0\n[inter_node]\ngbit_per_s_per_rank = 200.0\n"
    )
    mine, h100 = load_cluster(path), load_cluster("h100")
    assert (mine.name, mine.device.peak_tflops.bf16, mine.inter_node.gbit_per_s_per_rank) == (
        "mine",
        800.0,
        200.0,
    )
    assert mine.intra_node == h100.intra_node
    assert (mine.device.peak_tflops.fp32, mine.device.memory_bytes) == (
        h100.device.peak_tflops.fp32,
        h100.device.memory_bytes,
    )
    path.write_text('base = "h100-efa"\n')  # a base may have a base
    assert load_cluster(path) == load_cluster("h100-efa")
    path.write_text('base = "h100"\n[inter_node]\ngbits = 200.0\n')
    with pytest.raises(InputError, match=r"mine.toml: unknown key 'inter_node.gbits'"):
        load_cluster(path)
    path.write_text('base = "h100"\ndevice = 3\n')
    with pytest.raises(InputError, match=r"'device' must be a table \[device\]; found 3"):
        load_cluster(path)


def test_a_section_that_is_a_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("device = 5\n" + H100.split("[device]")[0])
    with pytest.raises(InputError, match=r"'device' must be a table \[device\]; found 5"):
        load_cluster(path)


def test_unknown_names_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found 'h10' \(did you mean 'h100'\?\)"):
        load_cluster("h10")
    with pytest.raises(InputError, match=r"cannot read the cluster file .*absent\.toml"):
        load_cluster(tmp_path / "absent.toml")


def test_clusters_tables_and_prices_need_no_torch() -> None:
    code = (
        "import sys, apsched.costs.network.table, apsched.costs.network.alpha_beta,"
        " apsched.costs.clusters.cluster; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
