"""Texts use plain technical English: no banned word (``tests/rules/banned_words.toml``), and no
marker of a failed merge.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers.prose import CONFLICT, ROOT, banned, pages, rules, sources, texts_of

TEXTS = {".md", ".py", ".toml", ".yml", ".yaml", ".css", ".js", ".ipynb", ".json", ".cff", ".txt"}


def test_pages_have_no_banned_words() -> None:
    assert [line for file in pages() for line in banned(texts_of(file), page=True)] == []


def test_docstrings_comments_messages_and_help_texts_have_no_banned_words() -> None:
    assert [line for file in sources() for line in banned(texts_of(file), page=False)] == []


def test_no_file_has_a_marker_of_a_failed_merge() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else []
    files = [ROOT / name for name in names] or list(ROOT.rglob("*"))
    texts = [file for file in files if file.suffix in TEXTS and file.is_file()]
    assert texts
    assert [str(file) for file in texts if CONFLICT.search(file.read_text())] == []


@pytest.mark.parametrize("marker", ["<" * 7 + " HEAD", "|" * 7 + " base", ">" * 7 + " theirs"])
def test_a_marker_is_found(marker: str) -> None:
    assert CONFLICT.search(f"before\n{marker}\nafter\n")


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("Nobody waits.", 1),
        ("A step is foretold, and a run is gone on with.", 2),
        ("The stream\nstands still.", 1),
        ("What it takes is memory.", 2),
        ("## Does it happen?", 1),
        ("## What is left", 1),
        ("What moves is compute.", 1),
        ("A rank gets `nobody` from the code.", 0),
        ("```text\nnobody\n```", 0),
        ("The compute stream stalls. Which schedule is faster?", 0),
    ],
)
def test_a_page_is_checked(tmp_path: Path, text: str, num_found: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(banned(texts_of(page), page=True)) == num_found


def test_a_notebook_is_checked(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "Nobody reads it."]},
        {"cell_type": "code", "source": ["nobody = 1"]},
    ]
    notebook = tmp_path / "notebook.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    assert len(banned(texts_of(notebook), page=True)) == 1


@pytest.mark.parametrize(
    ("code", "num_found"),
    [
        ('"""Return what it\nadds."""', 1),
        ('raise ValueError(f"{x}: the rank was" " told")', 1),
        ("x = 1  # whoever calls", 1),
        ("nobody = 1", 0),
        ('"""``nobody`` is a name."""', 0),
        ('def f():\n    """What it\n    returns."""', 1),
        ('x = 1\n"""What is one."""', 1),
        ('"""Return the cost, and what it adds."""', 1),
        ('"""Answer what-if questions."""', 0),
        ('"""What is one? A number."""', 0),
        ('print("What is one.")', 1),
        ('print("What is one?")', 0),
        ('kind = "what"', 0),
    ],
)
def test_a_source_file_is_checked(tmp_path: Path, code: str, num_found: int) -> None:
    source = tmp_path / "source.py"
    source.write_text(code)
    assert len(banned(texts_of(source), page=False)) == num_found


def test_each_rule_says_what_to_write() -> None:
    assert all(rule.instead for rule in rules())
