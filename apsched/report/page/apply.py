"""The use of the schedules of a report: commands and code, with the options that they were solved
with.
"""

import shlex
from collections.abc import Sequence
from html import escape
from itertools import groupby

from apsched.artifacts.solved_run import MODEL, SolvedGraph, SolvedRun
from apsched.artifacts.stated_options import APPLY_FLAGS, backend_arguments, words
from apsched.options_table import BY_NAME

_DECIDED = ("search", "scenarios", "process groups")
"""Groups of options that a schedule file has decided."""
_MICRO_BATCHES = (
    "In a job with eager FSDP2, if buckets are its units (--buckets, --max-compute-move 0):"
)
_REPLAYED = (
    "In the job, replayed: nothing is searched, every process rank checks the schedule against its"
    " own graph:"
)
_SOLVED = "Or solved in the job, once for all process ranks, where graphs differ from those above:"
_TORCHTITAN = (
    "In a job of TorchTitan's graph trainer with --compile.pass_pipeline apsched, solved there"
    " (torch.compile makes two graphs, and the schedule of one graph fits neither):"
)
_SAME = "This makes the same schedules again, byte for byte:"
_SAME_QUESTION = (
    "This answers the same question (the study found its schedule from those of other caps, or"
    " under a cap for this graph alone, so the answer may be another schedule):"
)
_CHECKED = (
    "This checks them against their graphs, and writes the rewritten modules unless the source is a"
    " graph file:"
)
_NO_SETTING = ("--collectives", "--unfused")
"""Prices that a job states as a cost model of its own."""


def how_to_apply(run: SolvedRun) -> str:
    """Return the commands and the code for each set of options that graphs were solved with."""
    together = [
        list(same)
        for _, same in groupby(
            run.graphs, key=lambda graph: (graph.title, graph.source, graph.options)
        )
    ]
    return (
        "\n".join(_block(graphs) for graphs in together)
        + "<p>A schedule file fits exactly one graph, by its hash; on any other it is refused, and"
        " the message names the difference.</p>"
    )


def _block(graphs: Sequence[SolvedGraph]) -> str:
    source, options, files = (
        graphs[0].source,
        graphs[0].options,
        [str(graph.schedule_path) for graph in graphs],
    )
    head = f"<h3>{escape(graphs[0].title)}</h3>" if graphs[0].title else ""
    if source.startswith(MODEL):
        return head + _texts([_in_python(graphs)])
    made = f"apsched solve {shlex.quote(source)} {words(options)}".rstrip()
    flags = (*APPLY_FLAGS, "--keep") if graphs[0].of_study else APPLY_FLAGS
    check = (
        f"apsched apply {shlex.quote(source)} {words(options, flags)}".rstrip()
        + f" {shlex.join(files)}"
    )
    again = (_SAME if graphs[0].is_made_again else _SAME_QUESTION, made)
    if "--accumulate" in options:
        return head + _texts([again, (_MICRO_BATCHES, _fsdp2(graphs))])
    is_joint = options.get("--direction") == "joint"
    parts = [again]
    if not graphs[0].of_study or options.get("--keep") != "auto":  # a choice that no file has
        parts.append((_CHECKED, check))
        parts += [] if is_joint else [(_REPLAYED, _code(graphs, replay=True))]
    if not any(flag in options for flag in _NO_SETTING):
        solved = _TORCHTITAN if is_joint else _SOLVED
        made = _register(graphs[0]) if is_joint else _code(graphs, replay=False)
        parts.append((solved, made))
    return head + _texts(parts)


def _texts(parts: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<p>{escape(text)}</p><pre>{escape(code)}</pre>" for text, code in parts)


def _in_python(graphs: Sequence[SolvedGraph]) -> tuple[str, str]:
    """Return the use of the answer of ``StepResult.save_run``, of one micro-batch or of several."""
    if len(graphs) > 2:
        return _MICRO_BATCHES, _fsdp2(graphs)
    return _REPLAYED, _code(graphs, replay=True)


def _fsdp2(graphs: Sequence[SolvedGraph]) -> str:
    folder = str(graphs[0].schedule_path.parent)
    if graphs[0].of_study:
        folder = "apsched-out/..."  # of the command above: a study has no result.json
    return (
        "from apsched.integrations.fsdp2_accumulation import apply_fsdp2_micro_batches\n\n"
        f"step = apply_fsdp2_micro_batches(model, {folder!r})\n"
        "for k, batch in enumerate(batches):\n"
        "    step.begin(k)\n"
        "    model(*batch).backward()\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()"
    )


def _register(graph: SolvedGraph) -> str:
    """Return the line of a job of TorchTitan with the options that gave the schedule."""
    given = backend_arguments(graph.options)
    if "--keep" in graph.options:
        given["keep"] = repr(str(graph.options["--keep"]))
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"from apsched.integrations.torchtitan import register\n\nregister({arguments})"


def _code(graphs: Sequence[SolvedGraph], *, replay: bool) -> str:
    """Return the line of a job that compiles with these schedules, or with the options that gave
    them.
    """
    given = backend_arguments(graphs[0].options)
    if replay:
        files = [str(graph.schedule_path) for graph in graphs]
        given = {"schedule": repr(files if len(files) > 1 else files[0])} | {
            name: value
            for name, value in given.items()
            if name not in BY_NAME or BY_NAME[name].group not in _DECIDED
        }
    if "--keep" in graphs[0].options and (graphs[0].of_study or not replay):
        given["keep"] = repr(str(graphs[0].options["--keep"]))
    if "bitwise" in given:
        given["parameter_order"] = "[name for name, _ in model.named_parameters()]"
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    return (
        "import apsched, torch\n\nmodel = torch.compile(model,"
        f" backend=apsched.backend({arguments}))"
    )
