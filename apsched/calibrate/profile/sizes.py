"""Sizes that depend on data, as the operators of a trace had them. No torch here."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from apsched.calibrate.profile.match import aligned
from apsched.calibrate.profile.trace import HostOp, Trace
from apsched.costs.compute.operation import operator_of

UNKNOWN = re.compile(r"<(\d+)>")
"""The placeholder of a size that depends on data in an operation: its number."""


@dataclass(frozen=True)
class Shape:
    """The operation of one node as a profiler sees it, with numbers of the sizes that depend on
    data: ``aten::mm(float32[<0>,64], float32[64,192])``.
    """

    traced: str

    @property
    def is_known(self) -> bool:
        """Whether no size of it depends on data."""
        return UNKNOWN.search(self.traced) is None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts: list[str] = []
        seen: set[str] = set()
        for k, part in enumerate(UNKNOWN.split(self.traced)):
            if k % 2 == 0:
                parts.append(re.escape(part))
            else:
                parts.append(f"(?P=n{part})" if part in seen else rf"(?P<n{part}>\d+)")
                seen.add(part)
        return re.compile("".join(parts))

    def sizes_in(self, operation: str) -> Mapping[int, int] | None:
        """Return number -> size where ``operation`` is of this shape, else ``None``."""
        found = self._pattern.fullmatch(operation)
        if found is None:
            return None
        return {int(name[1:]): int(value) for name, value in found.groupdict().items()}


def profiled_sizes(shapes: Sequence[Shape], traces: Sequence[Trace]) -> dict[int, int]:
    """Return the sizes of ``shapes``, in the order of the graphs, by their numbers: the median over
    the steps of all traces.

    Operations without such sizes are matched first, in order; those with some between their
    neighbours. Of several values in a step the one that is seen most often counts.
    """
    of_steps: dict[int, list[int]] = {}
    for trace in traces:
        for step in trace.steps:
            for number, values in _sizes_of_step(shapes, trace, step).items():
                ((most, _),) = values.most_common(1)
                of_steps.setdefault(number, []).append(most)
    return {number: round(median(values)) for number, values in sorted(of_steps.items())}


def _sizes_of_step(
    shapes: Sequence[Shape], trace: Trace, step: tuple[float, float]
) -> dict[int, Counter[int]]:
    ops = _candidates(shapes, trace, step)
    known = [k for k, shape in enumerate(shapes) if shape.is_known]
    pairs = aligned([shapes[k].traced for k in known], [op.operation for op in ops])
    anchors = [(-1, -1), *((known[i], j) for i, j in pairs), (len(shapes), len(ops))]
    found: dict[int, Counter[int]] = {}
    for (before, left), (after, right) in pairwise(anchors):
        place = left + 1
        for shape in shapes[before + 1 : after]:
            if shape.is_known:
                continue
            for j in range(place, right):
                sizes = shape.sizes_in(ops[j].operation)
                if sizes is not None:
                    place = j + 1
                    for number, size in sizes.items():
                        found.setdefault(number, Counter())[size] += 1
                    break
    return found


def _candidates(shapes: Sequence[Shape], trace: Trace, step: tuple[float, float]) -> list[HostOp]:
    """Return the operators of a step that the graphs name, without those inside of others that they
    name.
    """
    operators = {operator_of(shape.traced) for shape in shapes}
    inside: set[int] = set()
    found = []
    for index in trace.ops_within(*step):
        op = trace.ops[index]
        if op.parent in inside:
            inside.add(index)
        elif op.operation and operator_of(op.operation) in operators:
            inside.add(index)
            found.append(op)
    return found
