"""Reads the export of ``torch.profiler`` (Kineto's Chrome trace, plain or gzipped): operators,
kernels, collectives, steps. No torch here.

Operators (``cat`` ``cpu_op``) carry their inputs where ``record_shapes`` was on; kernels name the
operator that launched them by ``External id`` (libkineto/src/output_json.cpp, handleActivity);
gloo's transfers are annotations ``gloo:all_gather`` on a thread of its own
(torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, AsyncWork).
"""

import gzip
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from apsched.costs.compute.operation import as_traced, operation_text, tensor_text
from apsched.errors import InputError
from apsched.unpack import GZIP_MAGIC, read_within, unpacked

STEP = "ProfilerStep#"
GLOO = "gloo:"
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# c10::TypeMeta names, as "Input type" has them (torch/csrc/profiler/util.cpp, inputTypes)
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "long int": "int64",
    "long": "int64",
    "long long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}


@dataclass(frozen=True, slots=True)
class HostOp:
    """One operator as the host ran it."""

    name: str
    operation: str
    """As :func:`apsched.costs.compute.operation.as_traced`; empty where shapes were not
    recorded.
    """
    begin_us: float
    end_us: float
    parent: int
    """Index of the operator that called it; -1 for none."""
    external_id: int
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel on a device's stream, or a transfer of gloo."""

    name: str
    begin_us: float
    duration_us: float
    external_id: int
    args: Mapping[str, Any]

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.begin_us + self.duration_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The work of one process rank, in microseconds of its own clock."""

    path: str
    device: str
    """Name of the GPU, or ``cpu``."""
    on_gpu: bool
    steps: tuple[tuple[float, float], ...]
    """Begin and end of each step that the job marked by ``prof.step()``; the whole trace where it
    marked none.
    """
    marked: bool
    ops: tuple[HostOp, ...]
    """By begin; an operator stands before those that it calls."""
    kernels: tuple[Work, ...]
    """On the device; empty on a CPU."""
    gloo: tuple[Work, ...]
    """Transfers of gloo by begin."""
    rank: int | None = None
    """Process rank of the job; ``None`` where the trace does not name it."""

    def ops_within(self, begin_us: float, end_us: float) -> range:
        """Return the indices of the operators that begin in a span of time."""
        return range(
            bisect_left(self.ops, begin_us, key=lambda op: op.begin_us),
            bisect_left(self.ops, end_us, key=lambda op: op.begin_us),
        )


def load_trace(path: str | Path) -> Trace:
    """Return the trace in ``path``; ``InputError`` where it is no trace, or lacks data that
    matching needs.
    """
    if path == "":  # as a path it is the working directory
        raise InputError(
            "the trace: expected the path of a file, found an empty path; torch.profiler's"
            " export_chrome_trace writes such files"
        )
    path = Path(path)
    content = read_chrome_trace(path)
    try:
        return _trace(path, content)
    except InputError:
        raise  # a ValueError, too, and complete as it is
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path}: expected events as torch.profiler writes them, found something else"
            f" ({found}); export it again"
        ) from None


def _trace(path: Path, content: Any) -> Trace:
    events = content if isinstance(content, list) else content.get("traceEvents")
    if not isinstance(events, list):
        raise InputError(
            f"{path}: expected a Chrome trace with traceEvents, as torch.profiler's"
            f" export_chrome_trace writes; found {_form(content)}; state such a file"
        )
    spans = [
        e
        for e in events
        if isinstance(e, dict)
        and e.get("ph") == "X"
        and "dur" in e
        and isinstance(e.get("args", {}), dict)
    ]
    transfers = [e for e in spans if str(e.get("name", "")).startswith(GLOO)]
    workers = {(e.get("pid"), e.get("tid")) for e in transfers}
    ops = _nested(
        [
            e
            for e in spans
            if e.get("cat") == "cpu_op" and (e.get("pid"), e.get("tid")) not in workers
        ]
    )
    if not ops:
        raise InputError(
            f"{path}: no operators in it (events of category cpu_op); profile with"
            " ProfilerActivity.CPU, too"
        )
    if not any(op.operation for op in ops):
        raise InputError(f"{path}: operators have no shapes in it; profile with record_shapes=True")
    kernels = tuple(
        sorted(
            (_work(e) for e in spans if e.get("cat") in _DEVICE_WORK),
            key=lambda work: work.begin_us,
        )
    )
    steps = sorted(
        (_begin(e), _end(e))
        for e in spans
        if str(e.get("name", "")).startswith(STEP) and e.get("cat") != "gpu_user_annotation"
    )
    whole = (ops[0].begin_us, max(op.end_us for op in ops) + 1)
    return Trace(
        path=str(path),
        device=_device(content, on_gpu=bool(kernels)),
        on_gpu=bool(kernels),
        steps=tuple(steps) or (whole,),
        marked=bool(steps),
        ops=ops,
        kernels=kernels,
        gloo=tuple(sorted((_work(e) for e in transfers), key=lambda work: work.begin_us)),
        rank=_rank(content),
    )


def _form(content: Any) -> str:
    """Return the form of a file without events, as an error shows it."""
    form = content.get("format") if isinstance(content, dict) else None
    return f"a file of {form!r}" if isinstance(form, str) else "none"


def read_chrome_trace(path: Path) -> Any:
    """Return the JSON of a Chrome trace, plain or gzipped; ``InputError`` where ``path`` is
    none.
    """
    try:
        data = read_within(path)
        content = orjson.loads(unpacked(data) if data.startswith(GZIP_MAGIC) else data)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path}: the trace is broken or cut off; export it again") from None
    except OSError as error:
        raise InputError(f"cannot read the trace {path}: {error.strerror or error}") from None
    except orjson.JSONDecodeError as error:
        raise InputError(
            f"{path}: expected a Chrome trace (JSON), found: {error}; export it again"
        ) from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if not isinstance(content, dict | list):
        raise InputError(f"{path}: expected a Chrome trace, found {type(content).__name__}")
    return content


def _rank(content: Any) -> int | None:
    job = content.get("distributedInfo") if isinstance(content, dict) else None
    rank = job.get("rank") if isinstance(job, dict) else None
    return rank if isinstance(rank, int) else None


def _device(content: Any, *, on_gpu: bool) -> str:
    properties = content.get("deviceProperties") if isinstance(content, dict) else None
    if not on_gpu:
        return "cpu"
    return (
        str(properties[0].get("name", "gpu"))
        if isinstance(properties, list) and properties
        else "gpu"
    )


def _nested(events: list[dict[str, Any]]) -> tuple[HostOp, ...]:
    """Return operators by begin, each with the innermost one of its thread that it runs in."""
    events.sort(key=lambda e: (_begin(e), -float(e["dur"])))
    running: dict[Any, list[int]] = {}
    ops: list[HostOp] = []
    for event in events:
        stack = running.setdefault((event.get("pid"), event.get("tid")), [])
        begin, end = _begin(event), _end(event)
        while stack and ops[stack[-1]].end_us <= begin:
            stack.pop()
        args = event.get("args", {})
        parent = stack[-1] if stack else -1
        ops.append(
            HostOp(
                str(event["name"]),
                _operation(str(event["name"]), args),
                begin,
                end,
                parent,
                _external_id(args),
                args,
            )
        )
        stack.append(len(ops) - 1)
    return tuple(ops)


def _operation(name: str, args: Mapping[str, Any]) -> str:
    """Return the operation of an operator's event: ``Input Dims`` and ``Input type`` have one entry
    an argument.
    """
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return ""
    arguments: list[str | list[str]] = []
    for shape, dtype in zip(shapes, types, strict=False):
        if dtype in _DTYPES:
            arguments.append(tensor_text(_DTYPES[dtype], tuple(shape)))
        elif shape and all(isinstance(inner, list) for inner in shape):
            arguments.append([tensor_text("", tuple(inner)) for inner in shape])
    return as_traced(operation_text(name, arguments))


def _work(event: Mapping[str, Any]) -> Work:
    args = event.get("args", {})
    return Work(
        str(event.get("name", "")), _begin(event), float(event["dur"]), _external_id(args), args
    )


def _begin(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _external_id(args: Mapping[str, Any]) -> int:
    try:
        return int(args.get("External id", -1))
    except (TypeError, ValueError):
        return -1


def ancestors(ops: tuple[HostOp, ...], index: int) -> Iterable[int]:
    """Yield an operator's index and those of all that it runs in, inside out."""
    while index >= 0:
        yield index
        index = ops[index].parent
