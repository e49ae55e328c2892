"""Names in ``keep=`` of ``apsched.backend`` that fit no parameter of a graph."""

import logging

import pytest
import torch

from apsched.compiler import keep as module
from apsched.compiler.keep import chosen_parameters
from apsched.compiler.settings import Settings
from apsched.whole_step.keep_request import keep_request


def test_where_no_entry_fits_a_warning_names_a_parameter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that fits another graph alone is no reason for a warning."""
    joint = torch.fx.GraphModule({}, torch.fx.Graph())
    monkeypatch.setattr(module, "gather_nodes", lambda graph: {1: "first.weight", 2: "second.bias"})

    def chosen(*names: str) -> set[str]:
        request = keep_request(list(names), "keep")
        return {*chosen_parameters(request, joint, lambda: ..., Settings(), {}, None)}

    with caplog.at_level(logging.WARNING):
        assert chosen("second.*", "of.another.graph") == {"second.bias"}
        assert caplog.text == ""
        assert chosen("nonsense.weight") == set()
    assert "no entry fits a parameter that this graph gathers (such as first.weight)" in caplog.text
    assert "nonsense.weight" in caplog.text
