"""The table of options is the only list: records, settings, flags and axes agree with it."""

import argparse
from dataclasses import MISSING, fields

import pytest

from apsched.artifacts.stated_options import backend_arguments
from apsched.cli.parser import build_parser
from apsched.cli.requests import direction, source_request
from apsched.compiler.settings import Settings
from apsched.config import Caps, SolveOptions, Unit
from apsched.errors import InputError
from apsched.options_table import (
    BY_NAME,
    CLASHING_CAPS,
    FLAG_OF_CAP,
    OPTIONS,
    SETTINGS,
    in_group,
)
from apsched.pipeline.sources import SourceRequest
from apsched.study.axes import AXES, SPEEDS

VALUES = {Unit.BYTES: "1MiB", Unit.SHARE: "1%"}


def test_each_option_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(OPTIONS)


def test_caps_and_search_options_are_all_in_the_table() -> None:
    caps = {field.name for field in fields(Caps)}
    assert {*FLAG_OF_CAP, "max_compute_move"} == caps
    assert set(CLASHING_CAPS) == set(FLAG_OF_CAP)
    search = {option.field_name: option.default for option in in_group("search")}
    usual = SolveOptions()
    assert search == {name: getattr(usual, name) for name in search}
    assert {field.name for field in fields(SolveOptions)} - set(search) == {"num_workers"}


@pytest.mark.parametrize("option", SETTINGS, ids=lambda option: option.name)
def test_a_setting_has_the_default_of_its_flag_and_reads_its_text(option) -> None:
    (field,) = (field for field in fields(Settings) if field.name == option.name)
    assert field.default is not MISSING
    assert field.default == option.default
    if (text := VALUES.get(option.unit)) is not None:
        typed, read = (
            Settings(**{option.name: value}).solve_request for value in (text, option.read(text))
        )
        assert typed == read


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_what_is_wrong_names_the_flag(option) -> None:
    if option.parse is None:
        assert option.read("as it is") == "as it is"
        return
    with pytest.raises(InputError, match=option.flag):
        option.read("no such thing")
    with pytest.raises(InputError, match="a label"):
        option.read("no such thing", "a label")


def test_every_flag_of_a_solve_is_in_the_table() -> None:
    (verbs,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    flags = {flag for action in verbs.choices["solve"]._actions for flag in action.option_strings}
    own = {"-h", "--help", "-o", "--out", "--json", "--metrics", "--frontier", "--no-inductor"}
    assert flags - own == {option.flag for option in OPTIONS}


def test_axes_are_the_options_that_may_vary() -> None:
    assert sorted(AXES) == sorted(
        ["source", *SPEEDS, *(option.name for option in OPTIONS if option.axis)]
    )


def test_stated_options_become_settings() -> None:
    typed = {"--scenarios": "4", "--robust": "mean", "--time-slack": "1%", "--second-group": True}
    arguments = backend_arguments(typed)
    assert arguments == {
        "scenarios": "4",
        "robust": "'mean'",
        "time_slack": "0.01",
        "second_group": "True",
    }
    request = Settings(scenarios=4, robust="mean", time_slack="1%").solve_request
    assert request.scenarios is not None
    assert (request.scenarios.count, request.scenarios.measure) == (4, "mean")
    assert request.options.time_slack == 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": 0.1}, "noise: it is about scenarios; state their number with scenarios"),
        ({"scenarios": 2, "robust": "best"}, "robust: expected mean or worst"),
        ({"scenarios": True}, "scenarios: expected a whole number"),
        ({"time_slack": "2"}, "time_slack: expected a share"),
        ({"num_workers": 0}, "num_workers"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings.of(settings)


def test_options_about_a_source_are_read() -> None:
    """``--direction`` and ``--unpacked-limit`` are no part of the source."""
    typed = ["--mesh", "fsdp=2", "--seq", "64", "--layers", "3", "--unpacked-limit", "1GiB"]
    args = build_parser().parse_args(["solve", "llama3-debug", *typed])
    assert source_request(args) == SourceRequest(
        source="llama3-debug", mesh="fsdp=2", seq_len=64, num_layers=3
    )
    assert direction(args) == "both"
