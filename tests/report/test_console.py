"""Lines of text on terminals and off them."""

import io

import pytest

from apsched.report.console import console, hanging


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


_LONG = (
    "  rests on: compute 72.99 %, launches, copies, casts 22.75 %, head: first of group 0 4.26 %"
)


def test_the_rest_of_a_long_line_is_indented() -> None:
    first, second = hanging(_LONG, 80).split("\n")
    assert len(first) <= 80
    assert second == "    group 0 4.26 %"
    assert first == _LONG[: len(first)]


@pytest.mark.parametrize("text", ["", "a  b", "short\n  and indented", "x" * 90])
def test_lines_that_fit_and_words_that_do_not_stay(text: str) -> None:
    assert hanging(text, 80) == text


def test_only_terminals_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal, file = _Terminal(), io.StringIO()
    console(terminal).print(_LONG, markup=False)
    console(file).print(_LONG, markup=False)
    assert terminal.getvalue().split("\n")[1] == "    group 0 4.26 %"
    assert file.getvalue() == _LONG + "\n"
