"""Tables of measured collectives: nccl-tests output as printed by several versions, CSV,
interpolation, contradictions.
"""

from pathlib import Path

import pytest

from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.network.alpha_beta import GroupShape
from apsched.costs.network.table import load_table
from apsched.errors import InputError


def _ranks(num_nodes: int, per_node: int) -> str:
    lines = [
        f"#  Rank {node * per_node + gpu:2d} Group  0 Pid {31000 + gpu:6d} on  node{node} device"
        f" {gpu:2d} [0000:{gpu:02x}:00] NVIDIA H100"
        for node in range(num_nodes)
        for gpu in range(per_node)
    ]
    return "\n".join(lines)


NEW_ALL_GATHER = f"""# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 8589934592 step: 4(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
{_ranks(2, 8)}
NCCL version 2.28.7+cuda12.9
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           0             0     float    none      -1     5.70    0.00    0.00       0     5.54    0.00    0.00       0
           0             0     float    none      -1     5.92    0.00    0.00       0     5.51    0.00    0.00       0
        1024            16     float    none      -1    24.18    0.04    0.04       0    23.99    0.04    0.04       0
     1048576         16384     float    none      -1    41.20   25.45   23.86       0    40.88   25.65   24.05       0
   268435456       4194304     float    none      -1    793.1  338.46  317.31       0    790.2  339.71  318.48       0
  1073741824      16777216     float    none      -1   2926.8  366.87  343.94       0   2920.1  367.71  344.73       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 171.379
#
# Collective test concluded: all_gather_perf
"""  # noqa: E501 (as nccl-tests prints it)

OLD_ALL_REDUCE = f"""# nThread 1 nGpus 8 minBytes 8388608 maxBytes 33554432 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
{_ranks(1, 8).replace(" Group  0", " ")}
#
#                                                       out-of-place                       in-place
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     8388608       2097152     float     sum    113.5   73.91  129.34  5e-07    112.6   74.50  130.37  5e-07
    16777216       4194304     float     sum    172.8   97.09  169.91  5e-07    173.0   96.98  169.71  5e-07
    33554432       8388608     float     sum    291.1  115.27  201.72  5e-07    291.3  115.19  201.58  5e-07
# Out of bounds values : 0 OK
"""  # noqa: E501 (as nccl-tests prints it)

ALLTOALL = f"""# nThread 1 nGpus 1 minBytes 1048576 maxBytes 2097152 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
# Using devices
{_ranks(1, 4)}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576         65536     float    none      -1    27.61   37.98   28.48      0    27.00   38.84   29.13    N/A
     2097152        131072     float    none      -1    35.80   58.58   43.93      0    35.52   59.04   44.28    N/A
"""  # noqa: E501


def _shape(num_ranks: int, num_nodes: int) -> GroupShape:
    return GroupShape(
        num_ranks=num_ranks, num_nodes=num_nodes, ranks_per_node=num_ranks // num_nodes
    )


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_new_output_is_read_to_the_digit(tmp_path: Path) -> None:
    table = load_table(_write(tmp_path, "run.log", NEW_ALL_GATHER))
    shape = _shape(16, 2)
    for size, time_us in ((1024, 24.18), (1 << 20, 41.20), (1 << 28, 793.1), (1 << 30, 2926.8)):
        assert table.collective_us("all_gather", shape, size) == pytest.approx(time_us, rel=1e-12)


def test_kind_comes_from_the_file_name_in_older_output(tmp_path: Path) -> None:
    table = load_table(
        _write(tmp_path, "all_reduce_8xH100.txt", OLD_ALL_REDUCE),
        _write(tmp_path, "alltoall_perf.txt", ALLTOALL),
    )
    assert table.collective_us("all_reduce", _shape(8, 1), 16777216) == pytest.approx(
        173.0
    )  # in place
    assert table.collective_us("all_to_all", _shape(4, 1), 2097152) == pytest.approx(35.80)


def test_two_tests_in_one_file(tmp_path: Path) -> None:
    second = (
        NEW_ALL_GATHER.replace("all_gather_perf", "reduce_scatter_perf")
        .replace("24.18", "31.18")
        .replace("0.04", "0.03")
    )
    table = load_table(_write(tmp_path, "both.txt", NEW_ALL_GATHER + second))
    assert table.collective_us("all_gather", _shape(16, 2), 1024) == pytest.approx(24.18)
    assert table.collective_us("reduce_scatter", _shape(16, 2), 1024) == pytest.approx(31.18)


def test_a_table_fits_the_shape_that_it_was_measured_on(tmp_path: Path) -> None:
    table = load_table(_write(tmp_path, "ag.txt", NEW_ALL_GATHER))
    assert table.covers("all_gather", _shape(16, 2))
    assert not table.covers("all_gather", _shape(16, 16))
    assert not table.covers("all_gather", _shape(8, 1))
    assert not table.covers("reduce_scatter", _shape(16, 2))
    with pytest.raises(InputError, match="no all_gather on 8 ranks of 1 nodes"):
        table.collective_us("all_gather", _shape(8, 1), 1024)


CSV = """\
kind,group_size,size_bytes,time_us
all_gather,8,1000,10
all_gather,8,100000,40
all_gather,8,200000,30
all_gather,8,300000,60
"""


def test_interpolation_lifting_and_extrapolation_by_hand(tmp_path: Path) -> None:
    """Half way in log size: the geometric mean; a dip is lifted; the last two points' slope, 20 us
    per 100 kB, goes on.
    """
    table = load_table(_write(tmp_path, "t.csv", CSV))
    shape = _shape(8, 8)
    times = {
        size: table.collective_us("all_gather", shape, size)
        for size in (1, 1000, 10_000, 100_000, 150_000, 200_000, 300_000, 500_000)
    }
    assert times[1] == times[1000] == 10
    assert times[10_000] == pytest.approx(20)
    assert times[100_000] == times[150_000] == times[200_000] == pytest.approx(40)
    assert times[300_000] == pytest.approx(60)
    assert times[500_000] == pytest.approx(100)
    sampled = [table.collective_us("all_gather", shape, size) for size in range(1, 600_000, 997)]
    assert sampled == sorted(sampled)


def test_csv_may_say_how_a_group_lies_on_nodes(tmp_path: Path) -> None:
    """Eight ranks of one node and eight on eight nodes; three nodes are not in it, and a row
    without nodes counts for any.
    """
    header = "kind,group_size,num_nodes,size_bytes,time_us\n"
    spread = _write(
        tmp_path, "nodes.csv", header + "all_gather,8,1,1000,10\nall_gather,8,8,1000,70\n"
    )
    table = load_table(spread)
    assert [table.collective_us("all_gather", _shape(8, nodes), 1000) for nodes in (1, 8)] == [
        10,
        70,
    ]
    assert not table.covers("all_gather", _shape(8, 4))
    both = load_table(
        spread,
        _write(tmp_path, "any.csv", "kind,group_size,size_bytes,time_us\nall_gather,8,1000,30\n"),
    )
    assert [both.collective_us("all_gather", _shape(8, nodes), 1000) for nodes in (1, 4, 8)] == [
        10,
        30,
        70,
    ]
    for bad in ("0", "9", "x", ""):
        with pytest.raises(
            InputError,
            match=r"line 2: (8 ranks lie on 1 to 8 nodes|expected kind,group_size,num_nodes)",
        ):
            load_table(_write(tmp_path, "bad.csv", f"{header}all_gather,8,{bad},1000,10\n"))


def test_one_point_extrapolates_by_its_bandwidth(tmp_path: Path) -> None:
    table = load_table(
        _write(tmp_path, "t.csv", "kind,group_size,size_bytes,time_us\nall_reduce,2,1000,10\n")
    )
    assert table.collective_us("all_reduce", _shape(2, 1), 5000) == pytest.approx(50)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "line 1: expected the header kind,group_size,size_bytes,time_us"),
        (
            "t.csv",
            "kind,ranks,size,time\n",
            "time_us (or with num_nodes after group_size); found 'kind,ranks,size,time'",
        ),
        ("t.csv", "kind,group_size,size_bytes,time_us\n", "no measurements found"),
        (
            "t.csv",
            CSV + "all_gather,8,1e6,70\n",
            "line 6: expected kind,group_size,size_bytes,time_us with whole numbers",
        ),
        (
            "t.csv",
            CSV + "all_gather,8,1000000\n",
            "line 6: expected kind,group_size,size_bytes,time_us",
        ),
        ("t.csv", CSV + "all_gater,8,1000000,70\n", "line 6: expected a kind among"),
        (
            "t.csv",
            CSV + "all_gather,8,1000000,-70\n",
            "line 6: group size, bytes and time must be above 0",
        ),
        (
            "t.csv",
            CSV + "all_gather,8,1000000,nan\n",
            "line 6: group size, bytes and time must be above 0",
        ),
        *(
            ("t.csv", CSV + row, "and at most 1048576 ranks, 1125899906842624 bytes and a day")
            for row in (
                "all_gather,8,1000000,1e300\n",
                f"all_gather,8,1{'0' * 400},70\n",
                "all_gather,9999999,1000000,70\n",
            )
        ),
        (
            "t.csv",
            CSV + "all_gather,0,1000000,70\n",
            "line 6: group size, bytes and time must be above 0",
        ),
        (
            "t.csv",
            CSV + "all_gather,8,1000,11\n",
            "line 6: all_gather of 1000 bytes on 8 ranks takes 11 us, but 10 us in",
        ),
        ("ag.txt", "hello\n", "no measurements found"),
        (
            "ag.txt",
            NEW_ALL_GATHER.replace("338.46", "300.46"),
            "line 31: contradicts itself: 268435456 bytes in 793.1 us are 338.46 GB/s",
        ),
        (
            "ag.txt",
            NEW_ALL_GATHER.replace("317.31", "338.46"),
            "line 31: contradicts itself: all_gather on 16 ranks has busbw = 0.938",
        ),
        (
            "ag.txt",
            NEW_ALL_GATHER.replace("338.46  317.31       0", "338.46  317.31       7"),
            "line 31: the test found 7 wrong values",
        ),
        (
            "ag.txt",
            NEW_ALL_GATHER.replace("   793.1", "   79x.1"),
            "line 31: expected the columns size count type redop root time",
        ),
        (
            "ag.txt",
            NEW_ALL_GATHER.replace("   268435456", "   2684x5456"),
            "line 31: expected the columns size count type",
        ),
        (
            "ag.txt",
            NEW_ALL_GATHER.replace("(us)", "(ms)"),
            "line 26: times must be in microseconds",
        ),
        (
            "ag.txt",
            NEW_ALL_GATHER.replace("all_gather_perf", "broadcast_perf"),
            "line 2: no price is needed for broadcast_perf",
        ),
        (
            "ag.txt",
            NEW_ALL_GATHER.replace("#  Rank", "#  rank"),
            "keep the whole output of nccl-tests",
        ),
        (
            "ag.txt",
            NEW_ALL_GATHER + NEW_ALL_GATHER.replace("41.20", "42.20"),
            "takes 42.2 us, but 41.2 us in",
        ),
        ("run.txt", OLD_ALL_REDUCE, "cannot tell which collective this is"),
        (
            "all_gather.txt",
            OLD_ALL_REDUCE,
            "contradicts itself: all_gather on 8 ranks has busbw = 0.875",
        ),
    ],
)
def test_bad_tables_name_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = _write(tmp_path, name, text)
    with pytest.raises(InputError) as error:
        load_table(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


DATA = Path(__file__).parent / "data"


def test_published_output_of_three_versions_on_four_fabrics_is_read_to_the_digit() -> None:
    """Several files for several groups make one table; what an all-reduce takes in place counts,
    what others take out of place.
    """
    names = (
        "all_gather_8xh100_nvlink",
        "reduce_scatter_8xh100_nvlink",
        "all_reduce_32xh100_infiniband",
        "alltoall_64xv100_100gbit",
    )
    table = load_table(*(DATA / f"{name}.txt" for name in names))
    for kind, num_ranks, num_nodes, times in (
        (
            "all_gather",
            8,
            1,
            {128: 34.73, 1 << 20: 40.10, 1 << 26: 211.38, 1 << 30: 2726.63, 1 << 33: 20935.4},
        ),
        ("reduce_scatter", 8, 1, {128: 35.05, 1 << 20: 40.81, 1 << 28: 719.71, 1 << 33: 20753.7}),
        (
            "all_reduce",
            32,
            4,
            {
                8: 34.75,
                1 << 18: 66.86,
                1 << 20: 82.21,
                1 << 22: 154.0,
                1 << 23: 202.4,
                1 << 31: 11501,
                1 << 33: 45573,
            },
        ),
        ("all_to_all", 64, 8, {1 << 28: 520935, 1 << 29: 1041974}),
    ):
        for size_bytes, time_us in times.items():
            assert table.collective_us(
                kind, _shape(num_ranks, num_nodes), size_bytes
            ) == pytest.approx(time_us, rel=1e-12)
    assert not table.covers("all_gather", _shape(32, 4))


def test_times_that_fall_with_size_are_reported(tmp_path: Path) -> None:
    """1753.7 us at 2 MiB, 933.6 at 4 MiB: the network of a container; a few percent are noise and
    no note.
    """
    noisy = load_table(DATA / "all_gather_16xb200_roce.txt")
    (note,) = noisy.notes
    assert note.startswith(
        "all_gather on 16 ranks: 5 of 14 times fall with size, most at 4194304 bytes by 47% ("
    )
    assert "all_gather_16xb200_roce.txt, line 30)" in note
    assert noisy.collective_us("all_gather", _shape(16, 2), 4194304) == pytest.approx(1753.7)
    assert load_table(DATA / "all_gather_8xh100_nvlink.txt").notes == ()
    assert (
        load_table(_write(tmp_path, "t.csv", CSV))
        .notes[0]
        .startswith("all_gather on 8 ranks: 1 of 4 times fall with size, most at 200000")
    )


def test_a_table_that_is_faster_than_the_links_is_reported(tmp_path: Path) -> None:
    """Milliseconds for microseconds make a bandwidth that no link has."""
    cluster = load_cluster("h100")
    assert load_table(DATA / "all_gather_8xh100_nvlink.txt").beyond(cluster) == ()
    table = load_table(
        _write(
            tmp_path, "ms.csv", "kind,group_size,size_bytes,time_us\nall_gather,8,1073741824,2.7\n"
        )
    )
    (line,) = table.beyond(cluster)
    assert line.startswith(
        "all_gather on 8 ranks: 1073741824 bytes in 2.7 us are 347972 GB/s of bus bandwidth, more"
        " than"
    )


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "[1,3]<stderr>: ", "0: "])
def test_prefixes_of_launchers_are_taken_off(tmp_path: Path, prefix: str) -> None:
    printed = "\n".join(prefix + line for line in NEW_ALL_GATHER.splitlines())
    table = load_table(_write(tmp_path, "tagged.log", printed))
    assert table.collective_us("all_gather", _shape(16, 2), 1 << 20) == pytest.approx(41.20)


def test_wrong_values_in_either_column_are_refused(tmp_path: Path) -> None:
    text = NEW_ALL_GATHER.replace("339.71  318.48       0", "339.71  318.48       3")
    with pytest.raises(InputError, match="the test found 3 wrong values"):
        load_table(_write(tmp_path, "ag.txt", text))


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the table of collectives"):
        load_table(tmp_path / "absent.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="found binary data"):
        load_table(tmp_path / "b.csv")
    with pytest.raises(InputError, match="at least one file"):
        load_table()
