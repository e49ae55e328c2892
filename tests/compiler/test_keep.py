"""What is kept under torch.compile and on graphs: real gloo processes train bit for bit as with all
gathered again.
"""

import pytest

import apsched
from apsched.errors import InputError
from tests.helpers.processes import WORKERS, run_sizes


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[int, list[dict]]:
    script = WORKERS / "training/keep_worker.py"
    return run_sizes(script, tmp_path_factory.mktemp("kept"), timeout_s=400)


@pytest.mark.ranks
def test_losses_and_gradients_are_those_of_all_gathered_again(jobs) -> None:
    for report in jobs[2]:
        found = report["compiled"]
        for choice in ("none", "all", "one", "auto", "no memory"):
            assert found[choice]["num_unequal"] == 0, choice
            assert found[choice]["exact"], choice
        again = found["none"]["gathers"]["backward"]
        assert len(again) > 2
        assert found["all"]["gathers"]["backward"] == []
        assert found["one"]["gathers"]["backward"] == [n for n in again if n != found["kept"]]
        assert len(found["auto"]["gathers"]["backward"]) < len(again)
        assert len(found["no memory"]["gathers"]["backward"]) >= len(
            found["auto"]["gathers"]["backward"]
        )
        assert all(found[c]["gathers"]["forward"] for c in ("none", "all", "auto"))


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["two nodes", "two nodes, inductor"])
def test_parameters_resharded_in_their_node_are_gathered_there(jobs, where) -> None:
    """Two nodes of two process ranks: losses and gradients are bit for bit the same."""
    for report in jobs[4]:
        found = report[where]
        for choice in ("all", "in node", "auto"):
            assert found[choice]["num_unequal"] == 0, choice
            assert found[choice]["exact"], choice
        assert found["all"]["gathers"]["backward"] == []
        assert found["none"]["sizes"] == {"forward": [4], "backward": [4]}
        assert found["in node"]["sizes"] == {"forward": [4], "backward": [2]}
        again = found["none"]["gathers"]["backward"]
        assert found["in node"]["gathers"]["backward"] == [n for n in again if n != "1.weight"]
        assert 2 in found["auto"]["sizes"]["backward"]
        assert found["auto"] == jobs[4][0][where]["auto"]


@pytest.mark.ranks
def test_all_process_ranks_keep_the_same(jobs) -> None:
    first = jobs[2][0]["compiled"]
    for report in jobs[2]:
        for choice in ("auto", "no memory"):
            assert report["compiled"][choice]["gathers"] == first[choice]["gathers"]


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["aot_eager", "inductor"])
def test_where_one_has_another_choice_all_have_the_graphs_of_torch(jobs, form) -> None:
    """With ``on_error="fallback"``: the joint graph is not changed on any process rank."""
    for report in jobs[2]:
        assert report["other on one"][form]["num_unequal"] == 0


@pytest.mark.ranks
@pytest.mark.parametrize("label", ["names", "names, inductor", "sums, inductor"])
def test_where_one_fails_before_the_joint_graph_all_have_the_graphs_of_torch(jobs, label) -> None:
    """The others gathered again in backward, or reduced sums of gradients, and waited for it."""
    for report in jobs[2]:
        assert report["failed on one"][label]["num_unequal"] == 0


@pytest.mark.ranks
def test_a_joint_pass_of_the_user_may_tag_nodes_before(jobs) -> None:
    """As AutoParallel's backend does for activation checkpointing; Inductor may fuse kernels
    differently where backward gathers again.
    """
    for report in jobs[2]:
        found = report["behind a joint pass"]
        for choice in ("none", "all", "auto"):
            assert found["aot_eager"][choice]["num_unequal"] == 0, choice
            assert found["inductor"][choice]["largest_distance"] < 1e-6, choice
            assert min(found[form][choice]["tagged"] for form in found) > 0, choice
        for form in ("aot_eager", "inductor"):
            again = found[form]["none"]["gathers"]["backward"]
            assert len(again) > 2
            assert found[form]["all"]["gathers"]["backward"] == []
            assert len(found[form]["auto"]["gathers"]["backward"]) < len(again)


@pytest.mark.ranks
def test_graphs_compute_the_same_whatever_is_kept(jobs) -> None:
    for report in jobs[4]:
        assert report["graphs"]["num"] > 2
        assert report["graphs"]["all"]
        assert report["graphs"]["some"]


def test_keep_stands_in_place_of_resharding() -> None:
    with pytest.raises(InputError, match="keep: expected it in place of reshard_after_forward"):
        apsched.backend(keep="all", reshard_after_forward=True)
    with pytest.raises(InputError, match="keep: expected auto, none, all or a readable file"):
        apsched.backend(keep="no such file")
    with pytest.raises(InputError, match="keep: expected auto, none, all, a file or names"):
        apsched.backend(keep=[3])
