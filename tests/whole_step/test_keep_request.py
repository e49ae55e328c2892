"""What a user asks to be kept, as text, as names and as a file; bad input is refused in words."""

import json
from pathlib import Path

import pytest

import apsched
from apsched.cli.main import main
from apsched.errors import InputError
from apsched.whole_step.choices import Choice
from apsched.whole_step.keep_request import KeepRequest, keep_request, kept_file

NAMES = ["layers.0.w", "layers.0.b", "layers.1.w", "norm.w"]


@pytest.mark.parametrize("text", ["none", "all", "auto"])
def test_words(text: str) -> None:
    assert keep_request(text) == KeepRequest(mode=text)
    assert keep_request("all").chosen(NAMES) == Choice(NAMES)
    assert keep_request("none").chosen(NAMES) == Choice()


def test_a_file_has_names_expressions_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "kept.txt"
    file.write_text("# the last block\nlayers[.]1[.].*\n\nnorm.w  # and the norm\n")
    assert keep_request(file).chosen(NAMES) == {"layers.1.w", "norm.w"}
    file.write_text("norm.w\n", encoding="utf-8-sig")  # a byte order mark is no part of a name
    assert keep_request(file).chosen(NAMES) == {"norm.w"}
    file.write_bytes(kept_file(Choice(["norm.w", "layers.0.b"])))
    assert file.read_text() == "layers.0.b\nnorm.w\n"
    assert keep_request(str(file)).chosen(NAMES) == {"layers.0.b", "norm.w"}


def test_entries_with_node_are_about_parameters_that_can_be_resharded(tmp_path: Path) -> None:
    entries = [*NAMES, *(f"{name} @node" for name in NAMES[:3])]
    assert keep_request("all").chosen(entries) == Choice(NAMES)
    assert keep_request([r"layers\.0\..* @node"]).chosen(entries) == {
        "layers.0.w @node",
        "layers.0.b @node",
    }
    assert keep_request([".*"]).chosen(entries) == Choice(NAMES)
    both = keep_request([".* @node", "layers.0.b", "norm.w"])
    assert both.chosen(entries) == {"layers.0.w @node", "layers.1.w @node", "layers.0.b", "norm.w"}
    file = tmp_path / "kept.txt"
    file.write_bytes(kept_file(both.chosen(entries)))
    assert keep_request(file).chosen(entries) == both.chosen(entries)
    with pytest.raises(InputError, match=r"over several nodes .* found none that 'norm.w @node'"):
        keep_request(["norm.w @node"]).chosen(entries)


def test_names_may_come_from_a_generator() -> None:
    assert keep_request(name for name in ("a", "b")).entries == ("a", "b")


def test_a_name_fits_itself_before_it_is_an_expression() -> None:
    assert keep_request(["a.b"]).chosen(["axb", "a.b"]) == {"a.b"}


def test_an_entry_that_fits_nothing_is_refused_but_for_one_of_several_graphs() -> None:
    asked = keep_request(["norm.w", "layers.7.w"])
    with pytest.raises(InputError, match=r"such as layers.0.w\), found none that 'layers.7.w' fit"):
        asked.chosen(NAMES)
    assert asked.fitting(NAMES) == {"norm.w"}


def test_of_a_misspelt_name_the_error_has_the_nearest() -> None:
    names = ["layers.0.attention.wq.weight", "layers.0.attention.wo.weight", "output.weight"]
    with pytest.raises(InputError, match=r"such as output\.weight\), found none that 'outputs\.w"):
        keep_request(["outputs.weight"]).chosen(names)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("no such file", "expected auto, none, all or a readable file"),
        (["("], r"expected the name of a parameter or a regular expression, found '\('"),
        (7, "expected auto, none, all, a file or names of parameters; found 7"),
        ([], r"expected auto, none, all, a file or names of parameters; found \[\]"),
    ],
)
def test_what_is_wrong_is_refused(stated: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        keep_request(stated)  # type: ignore[arg-type]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kept.txt"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="readable file"):
        keep_request(file)


SOLVE = ["llama3-debug", "--mesh", "fsdp=4", "--seq", "32", "--layers", "2", "--budget", "0"]


@pytest.mark.slow
def test_solve_reshards_in_the_node_and_apply_replays_it(tmp_path: Path, capsys) -> None:
    """Two nodes of eight; the memory cap has no room for all kept."""
    sizes = ["llama3-debug", "--mesh", "fsdp=16", "--seq", "32", "--layers", "2"]
    source = [*sizes, "--cluster", "h100-tcpx"]
    folder = tmp_path / "in node"
    solve = ["solve", *source, "--budget", "0", "--memory-cap", "floor+320KiB", "--keep", "auto"]
    assert main([*solve, "-o", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "resharded in their node" in printed
    report = json.loads((folder / "result.json").read_text())["keep"]
    names = (folder / "kept.txt").read_text().splitlines()
    assert report["kept"] == names
    assert report["num_in_node"] == sum(name.endswith(" @node") for name in names) > 0
    assert report["step_time_us"] < report["baselines"]["none"]["step_time_us"]
    assert "_in_node_gather" in (folder / "backward.py").read_text()
    schedules = [str(folder / f"{name}.schedule.json") for name in ("forward", "backward")]
    again = ["apply", *source, *schedules, "-o", str(tmp_path / "applied")]
    assert main(again) == 0
    assert capsys.readouterr().out.count("round trip exact") == 2
    joint = [*source, "--direction", "joint"]
    kept = ["--keep", str(folder / "kept.txt"), "--budget", "0", "-o", str(tmp_path / "one graph")]
    assert main(["solve", *joint, *kept]) == 0
    found = json.loads((tmp_path / "one graph" / "result.json").read_text())["keep_joint"]
    assert found["kept"] == names
    assert found["num_in_node"] == report["num_in_node"]
    capsys.readouterr()
    schedule = str(tmp_path / "one graph" / "joint.schedule.json")
    assert main(["apply", *joint, schedule, "-o", str(tmp_path / "one applied")]) == 0
    assert "round trip exact" in capsys.readouterr().out


def test_a_mark_needs_no_space() -> None:
    found = keep_request(["a.w@node", r"b\..*@next", "c@sum", "d@sum-shards", "e @node", "f"])
    assert found.entries == ("a.w @node", r"b\..* @next", "c @sum", "d @sum-shards", "e @node", "f")


def test_gradients_are_added_in_one_way() -> None:
    """All share whole gradients; one that is added whole has no shards to add."""
    names = ["a", "a @next", "a @sum", "a @sum-shards", "b @sum", "b @sum-shards"]
    assert keep_request("all").fitting(names) == {"a", "a @next", "a @sum", "b @sum"}
    stated = keep_request([".* @sum-shards", "b @sum"])
    assert stated.fitting(names) == {"a @sum-shards", "b @sum"}
    with pytest.raises(InputError, match="reduces to shards and then over replicas"):
        keep_request(["c @sum-shards"]).chosen(names)


@pytest.mark.slow
def test_solve_keeps_what_is_fastest_and_apply_replays_it(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "kept"
    solve = ["solve", *SOLVE, "-o", str(folder)]
    assert main(solve) == 0
    printed = capsys.readouterr().out
    assert "kept from forward to backward: 20 of 20 parameters" in printed
    report = json.loads((folder / "result.json").read_text())
    kept = report["keep"]
    assert kept["kept"] == (folder / "kept.txt").read_text().splitlines()
    step_us = sum(graph["step_time_us"] for graph in report["graphs"])
    assert kept["step_time_us"] == pytest.approx(step_us, rel=1e-12)
    assert kept["bound_us"] <= kept["step_time_us"] < kept["baselines"]["none"]["step_time_us"]
    schedules = [str(folder / f"{name}.schedule.json") for name in ("forward", "backward")]
    again = ["apply", *SOLVE[:-2], *schedules, "-o", str(tmp_path / "applied")]
    for stated in ([], ["--keep", str(folder / "kept.txt")]):
        assert main([*again, *stated]) == 0
        assert capsys.readouterr().out.count("round trip exact") == 2
    assert apsched.backend(schedule=folder).keep == keep_request(folder / "kept.txt")
    assert apsched.backend(schedule=folder, reshard_after_forward=False).keep is None
    for arguments, message in (
        (["solve", str(folder / "forward.graph"), "--keep", "all"], "found a graph file"),
        ([*again, "--keep", "auto"], "expected the file of kept parameters"),
        ([*again, "--keep", "none"], "solve this graph instead"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert (
        main([*solve, "--keep", "none"]) == 0
    )  # in the same directory: its kept.txt is of the answer before
    assert main(again) == 0
    assert apsched.backend(schedule=folder).keep is None


def test_one_direction_alone_has_nothing_to_keep(capsys) -> None:
    assert main(["solve", *SOLVE, "--direction", "forward", "--keep", "all"]) == 2
    assert "--keep: expected forward and backward, which keep" in capsys.readouterr().err


def test_an_entry_for_the_node_names_the_cluster_where_no_group_spans_nodes() -> None:
    """As where ``apsched apply`` replays an answer of another cluster: no entry was stated."""
    asked = keep_request(["a @node"], "--keep")
    with pytest.raises(InputError, match=r"\(there are none\).*state the cluster.*ranks_per_node"):
        asked.chosen(["a"])
    with pytest.raises(InputError, match=r"drop that entry$"):
        keep_request(["b @node"], "--keep").chosen(["a", "a @node"])
