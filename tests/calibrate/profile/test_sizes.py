"""Sizes that depend on data, found among the operators of a trace."""

import pytest

from apsched.calibrate.profile.sizes import Shape, profiled_sizes
from apsched.calibrate.profile.trace import HostOp, Trace

MM = "aten::mm(float32[{},8], float32[8,8])"


def trace(*steps: list[str]) -> Trace:
    """Each step has its operations one after the other, a microsecond each."""
    ops, spans, now = [], [], 0.0
    for step in steps:
        begin = now
        for operation in step:
            name = operation.partition("(")[0]
            ops.append(HostOp(name, operation, now, now + 0.5, -1, -1, {}))
            now += 1
        spans.append((begin, now))
    return Trace(
        path="trace.json",
        device="cpu",
        on_gpu=False,
        steps=tuple(spans),
        marked=True,
        ops=tuple(ops),
        kernels=(),
        gloo=(),
    )


@pytest.mark.parametrize(
    ("shape", "operation", "found"),
    [
        (MM.format("<0>"), MM.format(37), {0: 37}),
        (MM.format("<0>"), MM.format(37).replace("mm", "bmm"), None),
        (MM.format("<0>"), MM.format(37).replace("[8,8]", "[8,9]"), None),
        ("aten::add(float32[<0>,<1>], float32[<0>,<1>])",) * 2 + (None,),
        (
            "aten::add(float32[<0>,<1>], float32[<0>,<1>])",
            "aten::add(float32[3,4], float32[3,4])",
            {0: 3, 1: 4},
        ),
        (
            "aten::add(float32[<0>,<1>], float32[<0>,<1>])",
            "aten::add(float32[3,4], float32[2,4])",
            None,
        ),
    ],
)
def test_a_shape_finds_its_sizes(shape, operation, found):
    assert Shape(shape).sizes_in(operation) == found


def test_the_median_of_steps_counts_between_neighbours_that_are_known():
    """A product of the same shape before the first known neighbour is another node's."""
    shapes = [
        Shape("aten::exp(float32[4])"),
        Shape(MM.format("<0>")),
        Shape("aten::sin(float32[4])"),
    ]
    steps = [
        [MM.format(99), "aten::exp(float32[4])", MM.format(size), "aten::sin(float32[4])"]
        for size in (10, 30, 20)
    ]
    assert profiled_sizes(shapes, [trace(*steps)]) == {0: 20}
    assert profiled_sizes(shapes, [trace(*steps), trace(*steps[1:2] * 3)]) == {0: 30}
    without = [["aten::exp(float32[4])", "aten::sin(float32[4])", MM.format(7)]]
    assert profiled_sizes(shapes, [trace(*without)]) == {}


def test_what_is_seen_most_often_in_a_step_counts():
    shapes = [Shape(MM.format("<0>"))] * 3
    assert profiled_sizes(shapes, [trace([MM.format(n) for n in (5, 6, 6)])]) == {0: 6}
