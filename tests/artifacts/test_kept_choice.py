"""The choice of an answer, read beside its schedules."""

import json
from pathlib import Path

import pytest

from apsched.artifacts.kept_choice import kept_beside
from apsched.errors import InputError


def answer(folder: Path, report: object = None, kept: str | None = None) -> Path:
    folder.mkdir()
    if report is not None:
        (folder / "result.json").write_text(json.dumps(report))
    if kept is not None:
        (folder / "kept.txt").write_text(kept)
    return folder / "forward.schedule.json"


@pytest.mark.parametrize(
    ("report", "kept", "expected"),
    [
        (None, None, ()),
        (None, "a.w\nb.w @node\n", ("a.w", "b.w @node")),
        ({"keep": {"kept": ["a.w"]}}, "of an earlier answer\n", ("a.w",)),
        ({"graphs": []}, "of an earlier answer\n", ()),
        ({"keep": {"kept": []}}, None, ()),
        ({"keep_apart": {"kept": ["a.w"]}}, None, ("a.w",)),
        ({"keep_joint": {"kept": ["a.w"]}, "keep_apart": {"kept": ["b.w"]}}, None, ("a.w",)),
        ({"keep_joint": {"kept": []}, "keep_apart": {"kept": ["b.w"]}}, None, ()),
        ({"accumulate": {"choice": ["a.w @sum"]}}, None, ("a.w @sum",)),
        ([], None, ()),
        ({"keep": ["a.w"]}, None, ()),
        ({"keep": {"kept": "a.w"}}, None, ()),
    ],
)
def test_a_file_and_its_directory_have_the_choice(
    tmp_path: Path, report: object, kept: str | None, expected: tuple[str, ...]
) -> None:
    file = answer(tmp_path / "run", report, kept)
    assert kept_beside([file], "--keep").entries == expected
    assert kept_beside([file.parent], "--keep").entries == expected


def test_schedules_of_two_answers_have_to_keep_the_same(tmp_path: Path) -> None:
    first = answer(tmp_path / "first", {"keep": {"kept": ["a.w"]}})
    second = answer(tmp_path / "second", {"keep": {"kept": ["b.w"]}})
    same = answer(tmp_path / "same", {"keep": {"kept": ["a.w"]}})
    assert kept_beside([first, same], "--keep").entries == ("a.w",)
    with pytest.raises(InputError, match=r"first and .*second keep different parameters"):
        kept_beside([first, second], "--keep")
