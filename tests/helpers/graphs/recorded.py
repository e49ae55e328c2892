"""Directories and logs as torch writes them."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch._logging._internal import TorchLogsFormatter

RUN = "torch_compile_debug/run_2026_01_02_03_04_05_678901-pid_7"


def debug_directory(folder: Path, graphs: Mapping[str, str], run: str = RUN) -> None:
    """Write what TORCH_COMPILE_DEBUG=1 does: a directory a graph."""
    for name, text in graphs.items():
        place = folder / run / "torchinductor" / name
        place.mkdir(parents=True)
        (place / "fx_graph_runnable.py").write_text(text)
        (place / "fx_graph_readable.py").write_text("class <lambda>(torch.nn.Module):\n")
        (place / "output_code.py").write_text("raise SystemExit('it was run')\n")


def trace_log(
    path: Path,
    graphs: Sequence[tuple[int | tuple[int | None, int | None], str]],
    printed: list[tuple[int, str, str]] | None = None,
    symbols: Mapping[str, int] | None = None,
    process: int = 7,
) -> Path:
    """Write what TORCH_TRACE does, with torch's own formatter: each graph with the number of its
    frame, or with that and the number of its compilation. Of ``printed`` ones also the kind of
    record (``aot_forward_graph``); ``symbols`` are sizes of frame 0. By default the process is that
    of RUN.
    """
    entries: list[tuple[dict[str, object], str | None]] = [({"str": ["job.py", 0]}, None)]
    for place, text in graphs:
        frame, compilation = (place, 0) if isinstance(place, int) else place
        context = {"rank": 0, "frame_id": frame, "frame_compile_id": compilation, "attempt": 0}
        runnable = {"artifact": {"name": "fx_graph_runnable", "encoding": "string"}}
        entries += [
            ({"aot_forward_graph": {}, **context}, "class GraphModule(torch.nn.Module):\n    ..."),
            ({**runnable, **context, "has_payload": "0"}, text),
            ({"chromium_event": {}, **context}, '{\n"name": "fx_graph_runnable"\n}'),
        ]
    context = {"rank": 0, "frame_id": 0, "frame_compile_id": 0, "attempt": 0}
    for name, value in (symbols or {}).items():
        entries.append(({"create_symbol": {"symbol": name, "val": str(value)}, **context}, None))
    for frame, kind, text in printed or ():
        entries.append(({kind: {}, **context, "frame_id": frame, "has_payload": "0"}, text))
    lines = []
    for metadata, payload in entries:
        record = logging.makeLogRecord({"levelname": "DEBUG", "pathname": "job.py", "msg": ""})
        record.metadata, record.payload, record.process = metadata, payload, process
        lines.append(TorchLogsFormatter(trace=True).format(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
