"""A window of a program, by hand."""

import numpy as np
import pytest

from apsched.config import Caps
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.cpsat.windows.subproblem import Window, WindowView
from apsched.solver.program.program import LAUNCH, NODE, WAIT, Program
from tests.helpers.problems.by_hand_gathers import two_gathers


@pytest.mark.parametrize(
    ("table", "first", "left"),
    [
        # the first gather has arrived before the window of the second: the whole cap is left
        ("launch:0 node:0 wait:0 node:1 launch:1 node:2 wait:1 node:3", 4, 1500),
        # it is waited for inside the window: its 512 bytes are taken off
        ("launch:0 node:0 node:1 launch:1 wait:0 node:2 wait:1 node:3", 3, 1500 - 512),
    ],
)
def test_bytes_in_flight_beside_a_window_are_taken_off_the_cap(
    table: str, first: int, left: int
) -> None:
    problem = two_gathers(needed_by=(2, 3))
    pricer = Pricer(Instance.of(problem))
    operations = {"launch": LAUNCH, "node": NODE, "wait": WAIT}
    steps = [(operations[word.split(":")[0]], int(word.split(":")[1])) for word in table.split()]
    operation, argument = np.array(steps, dtype=np.int64).T
    program = Program(
        partition=pricer.partition([(0,), (1,)]),
        operation=operation.copy(),
        argument=argument.copy(),
    )
    window = Window(first=first, past=len(steps) - 1, free=(1,))
    caps = Caps(in_flight_cap_bytes=1500)
    assert WindowView(pricer, caps, program, window).instance.caps.in_flight_cap_bytes == left
