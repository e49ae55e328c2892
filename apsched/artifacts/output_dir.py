"""Output files of a command: all of them, or none."""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apsched.artifacts.stated_options import words
from apsched.atomic_files import StagedFile, stage_file, without_interrupts
from apsched.errors import ApschedError, InputError

_OF_AN_ANSWER = re.compile(r"(forward|backward|joint)(-\d+)?\.(graph|schedule\.json|py)|kept\.txt")
"""Files that ``solve`` writes next to ``result.json``."""
_ADVICE = "choose another place with -o"


def check_writable(directory: Path) -> None:
    """Raise ``InputError`` where files could not be written to ``directory``, which need not exist;
    touches nothing.
    """
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise InputError(
            f"{directory}: expected a directory to write to, found that {existing} is a file;"
            " choose another place with -o"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"{directory}: expected a directory to write to, found that {existing} cannot be"
            " written; choose another place with -o"
        )


def write_files(
    directory: Path, files: Mapping[str, bytes], *, advice: str = _ADVICE
) -> tuple[Path, ...]:
    """Write ``files`` (name -> content) to ``directory``: all of them, or, if one fails or
    the user interrupts, none; existing files stay, and new directories are removed.
    """
    new_directories = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    staged: list[StagedFile] = []
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{directory}: cannot make the directory: {error.strerror or error}; {advice}"
            ) from None
        for name, content in files.items():
            staged.append(stage_file(directory / name, content))
        with without_interrupts():
            for file in staged:
                file.put_in_place()
    except BaseException:
        for file in staged:
            file.discard()
        for folder in new_directories:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return tuple(directory / name for name in files)


def replaced_run(
    directory: Path, source: str, options: Mapping[str, Any], *, is_stated: bool
) -> str:
    """Return a note, for after the new files are written, if ``directory`` has a run with other
    options than ``options`` of ``source``; else an empty text. ``is_stated``: the user chose the
    directory, and needs no advice on that.
    """
    try:
        report = json.loads((directory / "result.json").read_bytes())
        before = {"": report["source"], **report["options"]}
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if before == json.loads(json.dumps({"": source, **options})):
        return ""
    stated = " ".join([str(before.pop("")), words(before)]).strip()
    advice = "" if is_stated else "; -o keeps the files of both"
    return f"the files of an earlier run in {directory} were replaced: {stated}{advice}"


def _left_over(directory: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Return the files of an earlier answer in ``directory`` that ``files`` do not replace."""
    if "result.json" not in files or not (directory / "result.json").is_file():
        return []
    return [
        path
        for path in sorted(directory.iterdir())
        if _OF_AN_ANSWER.fullmatch(path.name) and path.name not in files and path.is_file()
    ]


def write_run(
    directory: Path, files: Mapping[str, bytes], *, advice: str = _ADVICE
) -> tuple[Path, ...]:
    """Write the ``files`` of an answer as :func:`write_files` does; those of an earlier answer go,
    since they are not of this one.
    """
    left_over = _left_over(directory, files)
    written = write_files(directory, files, advice=advice)
    for path in left_over:
        path.unlink(missing_ok=True)
    return written


def write_or_rescue(directory: Path, files: Mapping[str, bytes]) -> tuple[tuple[Path, ...], str]:
    """Write ``files`` to ``directory``, else to a new temporary directory, so that no answer is
    lost.

    Returns their paths (none where neither can be written), and the text of the error; empty
    without one.
    """
    try:
        return write_run(directory, files), ""
    except (ApschedError, OSError) as error:
        wrong = str(error)
    try:
        rescued = Path(tempfile.mkdtemp(prefix="apsched-"))
        return write_files(rescued, files), f"{wrong}; the files are in {rescued} instead"
    except (ApschedError, OSError) as error:
        return (), f"{wrong}; nor could they be written to a temporary directory ({error})"
