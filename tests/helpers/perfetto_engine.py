"""Perfetto's trace processor, as its Python package drives it, with an engine that is here already:
the package would fetch one.

The engine is what ``PERFETTO_TRACE_PROCESSOR`` names: a folder with that of Perfetto's page, which
``trace_processor.mjs`` runs in node, or a ``trace_processor_shell``.
"""

import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from apsched.units import TICKS_PER_US

ENGINE = os.environ.get("PERFETTO_TRACE_PROCESSOR")
needs_engine = pytest.mark.skipif(
    ENGINE is None or find_spec("perfetto") is None,
    reason=(
        "needs perfetto (extra dev), and its engine where PERFETTO_TRACE_PROCESSOR says"
        " (docs/report.md)"
    ),
)


@contextmanager
def loaded(trace: Path) -> Iterator[Any]:
    """Yield a ``TraceProcessor`` that has read ``trace``."""
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    assert ENGINE is not None
    if not Path(ENGINE).is_dir():
        with TraceProcessor(
            trace=str(trace), config=TraceProcessorConfig(bin_path=ENGINE)
        ) as processor:
            yield processor
        return
    with TemporaryDirectory() as folder:  # pytest's own have longer names than a socket may have
        socket = f"{folder}/engine.sock"
        command = ["node", str(Path(__file__).with_name("trace_processor.mjs")), ENGINE, socket]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            try:
                assert engine.stdout is not None
                assert engine.stdout.readline() == "listening\n", (
                    "the engine did not start; what node said is above"
                )
                with _class_that_loads()(trace=str(trace), remote=socket) as processor:
                    yield processor
            finally:
                engine.terminate()


def _class_that_loads() -> type[Any]:
    """Return ``TraceProcessor``, able to load a trace through a socket, too: of that protocol, the
    package has but queries yet.
    """
    from perfetto.common.exceptions import PerfettoException
    from perfetto.trace_processor import TraceProcessor
    from perfetto.trace_processor.unix import TraceProcessorUnix

    class Backend(TraceProcessorUnix):  # type: ignore[misc]
        def parse(self, chunk: bytes) -> Any:
            return self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=chunk).append_result

        def notify_eof(self) -> None:
            if error := self._ask("TPM_FINALIZE_TRACE_DATA").finalize_data_result.error:
                raise PerfettoException(error)

        def _ask(self, request: str, **arguments: object) -> Any:
            stream = self.protos.TraceProcessorRpcStream()
            stream.msg.add(request=request, **arguments)
            self.transport.send(stream.SerializeToString())
            reply = self.protos.TraceProcessorRpc.FromString(self._read_payload())
            self._check_envelope(reply)
            return reply

    class Processor(TraceProcessor):  # type: ignore[misc]
        def _create_backend(self, remote: str, addr: None) -> Backend:
            return Backend(remote, self.protos)

    return Processor


def tick_read(at_us: float) -> int:
    """Return the tick that a reader takes a time for, by C's ``llround`` of its product with 1000:
    half a tick counts as one.
    """
    ticks = at_us * TICKS_PER_US
    return math.floor(ticks) + (ticks % 1 >= 0.5)
