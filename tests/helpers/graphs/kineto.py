"""Traces in the format in which Kineto prints them, made from a graph: what a job on GPUs with NCCL
would have left.

Where each field comes from (fields that nothing here reads are left out):

    trace      schemaVersion, deviceProperties, distributedInfo, traceEvents: libkineto/src/
               output_json.cpp, handleTraceStart and metadataToJSON;
               torch/profiler/profiler.py, _get_distributed_info
    operator   "cat": "cpu_op", "External id", "Input Dims", "Input type":
               torch/csrc/profiler/collection.cpp and util.cpp, inputTypes; checked
               against traces of real CPU jobs, which ``test_gloo_profile`` makes
    kernel     "cat": "kernel", "External id" of the operator that launched it, "device",
               "stream": libkineto/src/CuptiActivity.cpp
    NCCL       "record_param_comms" with "Collective name", "In msg nelems", "Out msg nelems",
               "Group size", "dtype" (as c10::toString),
               "Process Group Name", "Process Group Description", "Process Group Ranks":
               torch/csrc/profiler/util.cpp, saveNcclMeta; the first five are what
               torch/profiler/_trace_validator.py asks for; output_json.cpp, handleActivity, copies
               them to the kernel
    names      "_allgather_base", "_reduce_scatter_base", "allreduce":
               torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
    kernels    ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>):
               NCCL src/device/generate.py
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apsched.graph.records import NodeRecord
from apsched.kinds import NodeKind

KINETO_TYPES = {
    "float32": "float",
    "bfloat16": "c10::BFloat16",
    "int64": "long int",
    "float16": "c10::Half",
    "bool": "bool",
}
SCALAR_TYPES = {"float32": "Float", "bfloat16": "BFloat16", "int64": "Long"}
COLLECTIVES = {
    "all_gather": (
        "_allgather_base",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ),
    "reduce_scatter": (
        "_reduce_scatter_base",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ),
    "all_reduce": (
        "allreduce",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ),
}
_TENSOR = re.compile(r"(\w+)\[([\d,]*)\](?:\{[^}]*\})?")


@dataclass
class KinetoTrace:
    """A trace in the making: one host thread, a compute stream (7) and NCCL's (20)."""

    metadata_on_kernels: bool = True
    """As newer versions of Kineto have it."""
    events: list[dict[str, Any]] = field(default_factory=list)
    now_us: float = 4429083614374.545
    external_id: int = 0

    def operator(
        self,
        name: str,
        dims: list[Any],
        types: list[str],
        kernels: list[tuple[str, float, int, dict[str, Any]]],
    ) -> None:
        """Add an operator of the host that launches ``kernels``: name, duration, stream, further
        arguments.
        """
        self.external_id += 1
        begin = self.now_us
        self.now_us += 5
        args = {
            "External id": self.external_id,
            "Record function id": 0,
            "Input Dims": dims,
            "Input type": types,
        }
        self._add("cpu_op", name, begin, 12.0, 3456, args)
        for kernel, duration_us, stream, further in kernels:
            owner = self.external_id
            if further:
                self.external_id += 1
                owner = self.external_id
                self._add(
                    "cpu_op",
                    "record_param_comms",
                    self.now_us,
                    4.0,
                    3456,
                    {"External id": owner, "Record function id": 0} | further,
                )
            launched = {
                "External id": owner,
                "device": 0,
                "stream": stream,
                "correlation": owner + 100_000,
            }
            copied = (
                {k: v for k, v in further.items() if k != "Rank"}
                if self.metadata_on_kernels
                else {}
            )
            self._add(
                "kernel", kernel, self.now_us + 40, duration_us, stream, launched | copied, pid=0
            )
        self.now_us += 10

    def step(self, number: int, body: Callable[[], None]) -> None:
        """Add a step that ``prof.step()`` marks."""
        begin = self.now_us
        self.now_us += 1
        body()
        for category in ("user_annotation", "gpu_user_annotation"):
            self._add(
                category,
                f"ProfilerStep#{number}",
                begin,
                self.now_us - begin,
                3456,
                {"External id": 1},
            )
        self.now_us += 100

    def save(self, path: Path, device: str = "NVIDIA H100 80GB HBM3") -> Path:
        """Write the trace."""
        head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": device}],
            "record_shapes": 1,
        }
        path.write_text(json.dumps(head | {"traceEvents": self.events, "traceName": path.name}))
        return path

    def _add(
        self,
        category: str,
        name: str,
        ts: float,
        dur: float,
        tid: int,
        args: dict[str, Any],
        pid: int = 3456,
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": ts,
                "dur": dur,
                "args": args,
            }
        )


def run_node(
    trace: KinetoTrace,
    record: NodeRecord,
    price_us: Callable[[NodeRecord], float],
    ranks: list[int],
) -> None:
    """Add what running one node of a graph on GPUs leaves: its operator, and one kernel where it
    takes time.
    """
    if not record.operation:
        return
    name = record.operation.partition("(")[0]
    dims, types = inputs_of(record.operation)
    if record.kind is NodeKind.START:
        collective = record.collective
        assert collective is not None
        called, kernel = COLLECTIVES[collective.kind]
        item_bytes = {"float32": 4, "bfloat16": 2}[collective.dtype]
        message = {
            "Collective name": called,
            "In msg nelems": collective.input_bytes // item_bytes,
            "Out msg nelems": collective.output_bytes // item_bytes,
            "Group size": len(ranks),
            "dtype": SCALAR_TYPES[collective.dtype],
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": json.dumps(ranks),
            "Rank": 0,
        }
        copies = [("void at::native::copy", 3.5, 7, {})] if "all_reduce" in name else []
        trace.operator(name, dims, types, [*copies, (kernel, price_us(record), 20, message)])
    elif record.kind is NodeKind.COMPUTE:
        trace.operator(name, dims, types, [(f"void kernel_of_{name}", price_us(record), 7, {})])
    else:
        trace.operator(name, dims, types, [])


def inputs_of(operation: str) -> tuple[list[Any], list[str]]:
    """Return ``Input Dims`` and ``Input type`` as the profiler writes them for an operation; a list
    of tensors has one entry.
    """
    arguments = operation.partition(" -> ")[0].partition("(")[2].removesuffix(")")
    dims: list[Any] = []
    types: list[str] = []
    while arguments:
        if arguments.startswith("("):
            inner, _, arguments = arguments[1:].partition(")")
            dims.append([_shape(shape) for _, shape in _TENSOR.findall(inner)])
            types.append("TensorList")
        else:
            match = _TENSOR.match(arguments)
            assert match is not None, operation
            dims.append(_shape(match[2]))
            types.append(KINETO_TYPES[match[1]])
            arguments = arguments[match.end() :]
        arguments = arguments.lstrip(", ")
    return [*dims, []], [*types, "Scalar"]  # numbers are there, too


def _shape(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
