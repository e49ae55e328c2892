"""SOURCE, as every command takes it: a preset, ``hf:CONFIG.json``, ``package.module:function``, a
file that torch wrote, or a graph file.

No torch is imported before a source turns out to need it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx

from apsched.capture.repro.recordings import is_runnable, is_trace_log
from apsched.errors import InputError
from apsched.models.presets import PRESETS
from apsched.names import graph_order, is_graph_name

if TYPE_CHECKING:
    from apsched.capture.captured import Capture
    from apsched.capture.micro_batches import MicroBatchChoice
    from apsched.models.mesh import MeshSpec

DEFAULT_MESH = "fsdp=64"
DEFAULT_SEQ_LEN = 8192
GRAPH_SUFFIX = ".graph"
TRANSFORMERS_PREFIX = "hf:"
REDUCE_AUTO = "auto"
"""The request to choose when gradients are reduced, which takes a solve."""


class SourceKind(Enum):
    """The kind of a SOURCE."""

    PRESET = "preset"
    TRANSFORMERS = "configuration of Transformers"
    FUNCTION = "function"
    REPRO = "file written by torch"
    GRAPH_FILE = "graph file"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """A SOURCE and the choices about it; ``None`` where nothing was chosen."""

    source: str
    mesh: str | None = None
    seq_len: int | None = None
    batch: int | None = None
    num_layers: int | None = None
    num_micro_batches: int | None = None
    reduce: str | None = None
    """When gradients of several micro-batches are reduced."""
    activation_checkpoint: str | None = None
    count_saved: bool | None = None
    """Whether to count the bytes that forward saves for backward, with and without tags on gathers.
    """
    hints: tuple[tuple[str, int], ...] = ()
    """Symbol and size, of sizes that depend on data."""
    group_ranks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and process ranks of process groups that the graphs name."""
    imports: tuple[str, ...] = ()
    """Modules that define operators of the graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSource:
    """The content of a SOURCE: captured graphs, or graphs exported earlier."""

    label: str
    """The source in words that are the same on every machine: no directories."""
    slug: str
    """For names of files."""
    mesh: "MeshSpec | None" = None
    """Mesh that the source was captured on, where one is stated or assumed."""
    takes_images: bool = False
    """Whether a sample of the model is an image, not a sequence of tokens."""
    capture: "Capture | None" = None
    dags: tuple[nx.DiGraph, ...] = ()


def classify(source: str) -> SourceKind:
    """Return the kind of ``source``; ``InputError`` if it names nothing."""
    if source in PRESETS:
        return SourceKind.PRESET
    if source.startswith(TRANSFORMERS_PREFIX):
        return SourceKind.TRANSFORMERS
    path = Path(source)
    if (source and path.is_dir()) or is_trace_log(path) or is_runnable(path):
        return SourceKind.REPRO
    if path.is_file():
        return SourceKind.REPRO if path.suffix == ".py" else SourceKind.GRAPH_FILE
    if graph_file_set(path):
        return SourceKind.GRAPH_FILE
    if source and path.exists():  # a pipe, a socket or a device
        raise InputError(
            f"SOURCE: expected a file, found that {source} is a pipe or a device; files are read by"
            " name, and more than once: write a file first, and pass its name"
        )
    if ":" in source and not any(mark in source for mark in ("/", "\\", " ")):
        return SourceKind.FUNCTION
    near = get_close_matches(source, PRESETS, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; `apsched models` lists the presets"
    raise InputError(
        "expected a preset, hf:CONFIG.json, package.module:function, a file or directory written by"
        f" torch or a graph file; found {source!r}, which is none{hint}"
    )


def graph_file_set(path: Path) -> tuple[Path, ...]:
    """Return the files that ``apsched capture -o PATH`` writes for a source of several graphs, as
    far as they exist.
    """
    start, end = f"{path.stem}.", path.suffix or GRAPH_SUFFIX
    try:
        beside = [file.name.removeprefix(start) for file in path.parent.iterdir()]
    except OSError:
        return ()
    names = {name for name in (part.removesuffix(end) for part in beside) if is_graph_name(name)}
    files = (member_path(path, name) for name in sorted(names, key=graph_order))
    return tuple(file for file in files if file.is_file())


def check_not_source(directory: Path, source: str) -> None:
    """Raise ``InputError`` where ``directory``, to which files are to be written, has the name of
    ``source``, which could not be opened any more.
    """
    of_files = (SourceKind.GRAPH_FILE, SourceKind.REPRO)
    if classify(source) in of_files and directory.resolve() == Path(source).resolve():
        raise InputError(
            f"-o: expected another name than that of SOURCE, found {directory}; a directory of that"
            " name would hide the source: choose another one"
        )


def member_path(path: Path, graph_name: str) -> Path:
    """Return the name of the file of one of several graphs: ``step.graph`` ->
    ``step.forward.graph``.
    """
    suffix = path.suffix or GRAPH_SUFFIX
    return path.with_name(f"{path.stem}.{graph_name}{suffix}")


@contextmanager
def opened(request: SourceRequest) -> Iterator[OpenedSource]:
    """Capture or read the source; a process group that its graphs need runs (fake, unless a real
    one runs) until the body ends.
    """
    kind = checked_kind(request)
    with ExitStack() as stack:
        match kind:
            case SourceKind.PRESET:
                yield _open_preset(request, stack)
            case SourceKind.TRANSFORMERS:
                yield _open_transformers(request, stack)
            case SourceKind.FUNCTION:
                yield _open_function(request, stack)
            case SourceKind.REPRO:
                yield _open_repro(request, stack)
            case SourceKind.GRAPH_FILE:
                yield _open_graph_files(request)


def _open_preset(request: SourceRequest, stack: ExitStack) -> OpenedSource:
    from apsched.capture.fake_world import world
    from apsched.models.mesh import MeshSpec
    from apsched.models.options import ModelOptions
    from apsched.models.preset_capture import capture_preset

    mesh = MeshSpec.parse(DEFAULT_MESH if request.mesh is None else request.mesh)
    options = ModelOptions(activation_checkpoint=request.activation_checkpoint or "none")
    stack.enter_context(world(mesh.world_size))
    capture = capture_preset(
        request.source,
        mesh=mesh,
        seq_len=request.seq_len or DEFAULT_SEQ_LEN,
        batch=request.batch or 1,
        num_layers=request.num_layers,
        options=options,
        count_saved=bool(request.count_saved),
        micro_batches=_micro_batches(request),
    )
    return OpenedSource(
        label=request.source,
        slug=f"{request.source}-{_slug(str(mesh))}",
        mesh=mesh,
        capture=capture,
    )


def _open_transformers(request: SourceRequest, stack: ExitStack) -> OpenedSource:
    from apsched.capture.fake_world import world
    from apsched.models.mesh import MeshSpec
    from apsched.models.options import ModelOptions
    from apsched.models.preset_capture import capture_built
    from apsched.models.transformers.config import build_from_config

    path = Path(request.source.removeprefix(TRANSFORMERS_PREFIX))
    mesh = MeshSpec.parse(DEFAULT_MESH if request.mesh is None else request.mesh)
    stack.enter_context(world(mesh.world_size))
    built = build_from_config(
        path,
        mesh=mesh,
        seq_len=request.seq_len or DEFAULT_SEQ_LEN,
        batch=request.batch or 1,
        num_layers=request.num_layers,
        options=ModelOptions(activation_checkpoint=request.activation_checkpoint or "none"),
    )
    name = path.name if path.is_dir() or path.stem != "config" else path.resolve().parent.name
    return OpenedSource(
        label=built.name,
        slug=_slug(f"{name.removesuffix('.json')}-{mesh}"),
        mesh=mesh,
        takes_images=built.takes_images,
        capture=capture_built(
            built,
            count_saved=bool(request.count_saved),
            micro_batches=_micro_batches(request),
        ),
    )


def _open_function(request: SourceRequest, stack: ExitStack) -> OpenedSource:
    from apsched.capture.fake_world import world
    from apsched.capture.function import capture_function, import_module
    from apsched.models.mesh import MeshSpec

    mesh = None if request.mesh is None else MeshSpec.parse(request.mesh)
    if mesh is not None:
        stack.enter_context(world(mesh.world_size))
    for name in request.imports:
        import_module(name, imported_for="--import")
    capture = capture_function(
        request.source,
        mesh=mesh,
        activation_checkpoint=request.activation_checkpoint or "none",
        micro_batches=_micro_batches(request),
    )
    ranks = {**capture.group_ranks, **dict(request.group_ranks)}
    name = request.source if mesh is None else f"{request.source}-{mesh}"
    return OpenedSource(
        label=request.source,
        slug=_slug(name),
        mesh=mesh,
        capture=replace(capture, group_ranks=ranks),
    )


def _micro_batches(request: SourceRequest) -> "MicroBatchChoice":
    from apsched.capture.micro_batches import REDUCE_ONCE, MicroBatchChoice

    count = request.num_micro_batches or 1
    if request.reduce is not None and count == 1:
        raise InputError(
            f"--reduce {request.reduce} is about several micro-batches, and there is one; state"
            " --micro-batches, or leave it out"
        )
    if request.reduce == REDUCE_AUTO:
        raise InputError(
            "--reduce auto solves both forms, which only `solve`, `explain` and `compare` do; state"
            " --reduce once or --reduce each"
        )
    return MicroBatchChoice(count=count, reduce=request.reduce or REDUCE_ONCE)


def _open_repro(request: SourceRequest, stack: ExitStack) -> OpenedSource:
    from apsched.capture.repro.groups import fake_groups
    from apsched.capture.repro.reader import read_repro

    path = Path(request.source)
    capture = read_repro(path, imports=request.imports, group_ranks=dict(request.group_ranks))
    if capture.group_sizes:
        stack.enter_context(fake_groups(capture.group_sizes))
    label = path.name or path.resolve().name
    return OpenedSource(label=label, slug=_slug(Path(label).stem), capture=capture)


def _open_graph_files(request: SourceRequest) -> OpenedSource:
    from apsched.graph.graph_file import load_graph

    path = Path(request.source)
    files = (path,) if path.is_file() else graph_file_set(path)
    dags = tuple(load_graph(file) for file in files)
    names = [dag.graph["name"] for dag in dags]
    if len({*names}) < len(names):
        raise InputError(
            f"{path}: expected graphs of different names, as files are named by them; found"
            f" {', '.join(names)}; capture again"
        )
    return OpenedSource(label=path.name, slug=_slug(path.stem), dags=dags)


_OPTIONS = {
    "mesh": "--mesh",
    "seq_len": "--seq",
    "batch": "--batch",
    "num_layers": "--layers",
    "num_micro_batches": "--micro-batches",
    "reduce": "--reduce",
    "activation_checkpoint": "--ac",
    "count_saved": "--saved-bytes",
}
_TEXTS = {"mesh": "fsdp=64", "activation_checkpoint": "selective"}
"""Field -> a text that it takes; an empty one is not the default."""
_OPTIONS_OF_GRAPHS = {"group_ranks": "--group-ranks", "imports": "--import"}


def checked_kind(request: SourceRequest) -> SourceKind:
    """Return the kind of the source. Refuse empty texts, options of presets for a graph that exists
    already, and those about names of groups and operators for presets and priced graphs.
    """
    kind = classify(request.source)
    for field, example in _TEXTS.items():
        text = getattr(request, field)
        if text is not None and not text.strip():
            raise InputError(
                f"{_OPTIONS[field]}: expected a text such as {example}, found {text!r}; state it,"
                f" or leave {_OPTIONS[field]} out"
            )
    built = tuple(_OPTIONS)
    allowed = {
        SourceKind.PRESET: built,
        SourceKind.TRANSFORMERS: built,
        SourceKind.FUNCTION: ("mesh", "activation_checkpoint", "num_micro_batches", "reduce"),
    }.get(kind, ())
    for field, flag in _OPTIONS.items():
        if getattr(request, field) is not None and field not in allowed:
            raise InputError(
                f"{flag} chooses how a preset is built, but {request.source!r} is a {kind.value};"
                f" leave {flag} out"
            )
    if kind in (SourceKind.FUNCTION, SourceKind.REPRO):
        return kind
    for field, flag in _OPTIONS_OF_GRAPHS.items():
        if getattr(request, field):
            raise InputError(
                f"{flag} is about graphs that torch wrote and functions, but {request.source!r} is"
                f" a {kind.value}; leave {flag} out"
            )
    return kind


def _slug(text: str) -> str:
    kept = "".join(
        letter if letter.isalnum() or letter in "-_." else "-" for letter in text.replace("=", "")
    )
    return kept.strip("-.") or "graph"
