"""Hooks of MkDocs (``mkdocs.yml``): pages that come from the repository itself, and formulas as
MathML.

The first page is the README; the command line is the output of ``--help``; the API is the
docstrings of the names that ``apsched`` exports; notebooks are shown without outputs. Formulas
(between dollar signs, and blocks of the language ``math``) become MathML, which browsers draw
themselves: no script from elsewhere is needed.

The site links the repository that the checkout was cloned from, if that is on the web. ``mike
deploy VERSION`` adds the site to those of other versions, and a menu of these.
"""

import argparse
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import apsched
from apsched.cli.parser import build_parser

_ROOT = Path(__file__).resolve().parents[1]
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_DISPLAYED_BLOCK = re.compile(r"^```math\n(.+?)```$", re.DOTALL)
_DISPLAYED = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
_INLINE = re.compile(r"\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\d)")


def on_config(config: Any) -> Any:
    """Add the link to the repository, and the menu of versions."""
    origin = subprocess.run(
        ["git", "-C", str(_ROOT), "remote", "get-url", "origin"],
        capture_output=True,
        text=True,
        check=False,
    )
    if url := repository_url(origin.stdout.strip()):
        config["repo_url"], config["repo_name"] = url, url.split("/", 3)[3]
    if "MIKE_DOCS_VERSION" in os.environ:  # mike runs this build
        config["extra"]["version"] = {"provider": "mike"}
    return config


def repository_url(origin: str) -> str:
    """Return the address of the page of a repository whose remote is ``origin``, without a password
    in it; empty where it is not on the web.
    """
    found = re.fullmatch(
        r"(?:https?://(?:[^@/]+@)?|(?:ssh://)?[^@/]+@)([\w.-]+)(?::\d+)?[/:](.+?)(?:\.git)?/?",
        origin,
    )
    return "" if found is None else f"https://{found[1]}/{found[2]}"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    results = sorted((_ROOT / "benchmarks" / "results").glob("*.md"))
    pages = {
        "index.md": _for_site("README.md"),
        "contributing.md": _for_site("CONTRIBUTING.md"),
        "notebooks.md": _notebooks(),
        "changelog.md": _for_site("CHANGELOG.md"),
        "cli.md": _commands(),
        "api.md": _api(),
        "benchmarks.md": "---\nhide: [toc]\n---\n\n# Benchmarks\n\n"
        + "\n\n".join(_lowered(file.read_text()) for file in results),
    }
    for name, text in pages.items():
        if (plain := files.get_file_from_path(name)) is not None:  # a checkout has a short one
            files.remove(plain)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with formulas as MathML; notebooks are on one page of the site."""
    parts = _CODE.split(markdown)
    parts[::2] = [_with_formulas(part) for part in parts[::2]]
    parts[1::2] = [_code(part) for part in parts[1::2]]
    return re.sub(r"\]\((?:\.\./)?notebooks/[^)]*\)", "](notebooks.md)", "".join(parts))


def on_page_content(html: str, **_: object) -> str:
    """Return the page without the roles of Sphinx, which docstrings have for editors."""
    return re.sub(r":(?:class|func|meth|mod|attr):(?=<code>)", "", html)


def _code(part: str) -> str:
    """Return a block as a formula where it is one; in tables a bar of code is no end of a cell."""
    if part.startswith("```"):
        return _DISPLAYED_BLOCK.sub(_displayed, part)
    return part.replace("\\|", "|")


def _displayed(found: re.Match[str]) -> str:
    return f"<div>{convert(found[1].strip(), display='block')}</div>"


def _with_formulas(text: str) -> str:
    text = _DISPLAYED.sub(lambda found: convert(found[1].strip(), display="block"), text)
    return _INLINE.sub(lambda found: convert(found[1]), text)


def _for_site(name: str) -> str:
    """Return a page of the top folder, its links as those of the site."""
    text = (_ROOT / name).read_text()
    text = re.sub(r"\]\(benchmarks/results/[^)]*\)", "](benchmarks.md)", text)
    text = re.sub(r"\]\(([A-Z]+)\.md\)", lambda found: f"]({found[1].lower()}.md)", text)
    return text.replace("](docs/", "](")


def _notebooks() -> str:
    """Return all notebooks as one page; the repository has them without outputs."""
    parts = [
        "# Notebooks",
        "The notebooks are in `notebooks/`. Run them with Jupyter to see outputs and pictures.",
    ]
    for file in sorted((_ROOT / "notebooks").glob("*.ipynb")):
        parts.append(f"`notebooks/{file.name}`")
        for cell in json.loads(file.read_text())["cells"]:
            source = "".join(cell["source"]).replace("](../docs/", "](")
            code = cell["cell_type"] == "code"
            parts.append(f"```python\n{source}\n```" if code else _lowered(source))
    return "\n\n".join(parts)


def _lowered(text: str) -> str:
    """Return ``text`` with its headings one level down."""
    return re.sub(r"^#", "##", text, flags=re.MULTILINE)


def _commands() -> str:
    lines = ["# Command line", "", *_help(build_parser(), "apsched")]
    return "\n".join(lines)


def _help(parser: argparse.ArgumentParser, name: str) -> list[str]:
    lines = [f"## `{name}`", "", "```text", parser.format_help().rstrip(), "```", ""]
    for action in parser._actions:  # argparse has no other way to its subparsers
        if isinstance(action, argparse._SubParsersAction):
            for verb, inner in action.choices.items():
                lines += _help(inner, f"{name} {verb}")
    return lines


def _api() -> str:
    names = [name for name in apsched.__all__ if not name.startswith("__")]
    entries = [f"::: apsched.{name}\n" for name in names]
    return "\n".join(
        [
            "# Python",
            "",
            "Names are imported when they are first used: `import apsched` does not import torch.",
            "",
            *entries,
        ]
    )
