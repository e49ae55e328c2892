"""Who slows whom, as the benchmark of real execution measures it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from apsched.capture.fake_world import world
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from benchmarks.execution import slowdown
from benchmarks.execution.compute_only import without_collectives
from benchmarks.execution.slowdown import Beside, contention_of

LATENCY_US = 2_000.0


def samples(
    f: float, g: float, h: float, compute_us: float
) -> list[dict[tuple[int, bool], Beside]]:
    """Return what the three rules make of messages at 1 GB/s, and one sample beside another
    program.
    """
    found = {}
    for elements in (slowdown._SMALL_ELEMENTS, slowdown._LARGE_ELEMENTS):
        for gather in (True, False):
            of_bytes_us = elements * 4 / 1e3 * (1 if gather else 2)
            found[elements, gather] = Beside(
                step_us=f * compute_us,
                message_us=h * LATENCY_US + g * of_bytes_us,
                message_alone_us=LATENCY_US + of_bytes_us,
            )
    disturbed = {
        messages: Beside(9 * one.step_us, 9 * one.message_us, one.message_alone_us)
        for messages, one in found.items()
    }
    return [found, found, disturbed, found]


@pytest.mark.parametrize(("f", "g", "h"), [(1.25, 1.0, 1.5), (1.5, 1.1, 3.0), (1.0, 1.0, 1.0)])
def test_the_three_rules_are_found(f: float, g: float, h: float) -> None:
    contention = contention_of(samples(f, g, h, compute_us=300_000.0), 300_000.0, LATENCY_US)
    assert [above / below for above, below in contention.slowdowns.values()] == pytest.approx(
        [f, g, h], rel=1e-2
    )


def test_nothing_is_faster_beside_something_else() -> None:
    contention = contention_of(samples(0.9, 0.9, 0.5, compute_us=300_000.0), 300_000.0, LATENCY_US)
    assert contention.changes_nothing


@pytest.mark.alone
def test_messages_count_that_end_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five beside work of 0.3 s three end in time, 50 ms apart; alone all count. How the first
    began is nobody's measure.
    """
    now_ns = [0]

    class Message:
        """One that ends when its time has come, or somebody waits for it."""

        def __init__(self) -> None:
            self.end_ns = (100, 150, 200, 900, 900)[len(sent)] * 1_000_000
            self.ended = False
            sent.append(self)

        def get_future(self) -> "Message":
            return self

        def then(self, callback: Callable[[object], None]) -> "Message":
            self.callback = callback
            return self

        def wait(self) -> None:
            if not self.ended:
                now_ns[0] = max(now_ns[0], self.end_ns)
                self.callback(None)
                self.ended = True

    sent: list[Message] = []

    def work() -> None:
        for message in sent[:3]:
            message.wait()
        now_ns[0] = 300_000_000

    monkeypatch.setattr(slowdown, "_launched", lambda whole, shard, *, gather: Message())
    monkeypatch.setattr(
        slowdown, "dist", SimpleNamespace(barrier=lambda: None, get_world_size=lambda: 2)
    )
    monkeypatch.setattr(slowdown, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns[0]))
    messages = slowdown._SMALL_ELEMENTS, True
    assert slowdown._queue(messages, 5, work) == (50_000.0, 300_000.0)
    now_ns[0] = 0
    sent.clear()
    assert slowdown._queue(messages, 5) == (200_000.0, 0.0)


def test_a_step_without_collectives_computes_the_same_and_sends_nothing() -> None:
    with world(2):
        built = build(
            "llama3-debug",
            mesh=MeshSpec.parse("fsdp=2"),
            seq_len=16,
            num_layers=1,
            materialize=True,
        )
        capture = capture_built(built)
    forward, backward = (captured.module for captured in capture.graphs)
    before = [str(forward.graph), str(backward.graph)]
    alone = without_collectives(forward), without_collectives(backward)
    for captured, without in zip((forward, backward), alone, strict=True):
        sent = [
            node
            for node in captured.graph.nodes
            if getattr(node.target, "namespace", "") == "_c10d_functional"
        ]
        assert sent
        kept = [
            node.target
            for node in captured.graph.nodes
            if node.op == "call_function" and node not in set(sent)
        ]
        assert [node.target for node in without.graph.nodes if node.op == "call_function"] == kept
        assert 2 * len(list(without.buffers())) == len(
            sent
        )  # one tensor for each collective and its wait
    loss, gradients = run_step(built, *alone)  # there is no process group any more
    assert loss.isfinite()
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert before == [str(forward.graph), str(backward.graph)]
