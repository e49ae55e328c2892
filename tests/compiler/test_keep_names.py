"""Names in ``keep=`` of ``apsched.backend`` that fit no parameter of a graph."""

import logging

import pytest
import torch

from apsched.compiler import keep as module
from apsched.compiler.keep import chosen_parameters, none_fits
from apsched.compiler.settings import Settings
from apsched.whole_step.keep_request import keep_request

JOINT = torch.fx.GraphModule({}, torch.fx.Graph())


def chosen(*names: str) -> set[str]:
    request = keep_request(list(names), "keep")
    return {*chosen_parameters(request, JOINT, lambda: ..., Settings(), {}, None)}


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The parameters that the joint graph gathers."""
    found = {1: "first.weight", 2: "second.bias"}
    monkeypatch.setattr(module, "gather_nodes", lambda graph: found)
    return found


def test_an_entry_may_fit_another_graph_alone(gathered, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen("second.*", "of.another.graph") == {"second.bias"}
    assert caplog.text == ""


@pytest.mark.parametrize("entry", ["secondd.bias", "secondd.bias @node"])
def test_where_no_entry_fits_the_nearest_names_are_said(
    gathered, entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of several graphs goes on: the names may be those of another one."""
    message = f"found {entry}, of.another: the nearest names are second.bias"
    request = keep_request([entry, "of.another"], "keep")
    assert message in none_fits(request, [*gathered.values()])
    with caplog.at_level(logging.WARNING):
        assert chosen(entry, "of.another") == set()
    assert message in caplog.text
    assert "None is kept in this graph" in caplog.text


def test_a_graph_that_gathers_nothing_takes_any_entry(gathered) -> None:
    gathered.clear()
    assert chosen("first.weight") == set()


@pytest.mark.parametrize("mark", ["", " @node"])
def test_an_answer_for_a_graph_that_torch_wrote_names_placeholders(
    gathered, mark: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a graph has no other names of parameters, and a replay in the job keeps the same."""
    monkeypatch.setattr(
        module,
        "parameter_names",
        lambda graph: {"primals_1": "first.weight", "primals_2": "second.bias"},
    )
    with caplog.at_level(logging.WARNING):
        assert chosen(f"primals_2{mark}", "primals_7") == {f"second.bias{mark}"}
    assert caplog.text == ""
