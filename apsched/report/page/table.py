"""Tables as plain HTML, complete without scripts."""

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Markup already, not text to escape."""

    __slots__ = ()


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    text: Sequence[int] = (),
    best: int = -1,
) -> str:
    """Return a table; columns in ``text`` hold words that wrap, row ``best`` is bold, the first
    cell of each row heads it.
    """

    def cell(tag: str, k: int, value: str) -> str:
        kind = ' class="text"' if k in text else ""
        return (
            f"<{tag}{kind}>{value if isinstance(value, Html) else escape(value)}</{tag.split()[0]}>"
        )

    def line(row: Sequence[str], r: int) -> str:
        cells = "".join(
            cell('th scope="row"' if k == 0 else "td", k, value) for k, value in enumerate(row)
        )
        return f"<tr{' class=best' if r == best else ''}>{cells}</tr>"

    top = "".join(cell('th scope="col"', k, name) for k, name in enumerate(head))
    body = "\n".join(line(row, r) for r, row in enumerate(rows))
    caption_html = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{caption_html}<thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table>"
