"""The table of options: the name, flag, unit, parser, default and help of each, once.

The command line, the settings of the compiler, the axes of studies, files of answers and
explanations read it. Texts of plans and contention are parsed by those who know them
(:mod:`apsched.problem`).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from apsched.config import (
    DEFAULT_COMPUTE_MOVE,
    DEFAULT_MEASURE,
    DEFAULT_NOISE,
    DEFAULT_OPTIMIZER,
    DEFAULT_RESERVE,
    OPTIMIZERS,
    RESERVE_OF_FIXED_SEGMENTS,
    MilpOptions,
    Option,
    SolveOptions,
    Unit,
    one_of,
)
from apsched.quantities import (
    parse_count,
    parse_group_ranks,
    parse_hints,
    parse_memory_cap,
    parse_module,
    parse_number,
    parse_optional_bytes,
    parse_optional_count,
    parse_share,
    show_bytes,
)
from apsched.unpack import DEFAULT_LIMIT_BYTES, LIMIT_VARIABLE

_SEARCH, _MILP = SolveOptions(), MilpOptions()
_AT_LEAST_ONE = partial(parse_count, least=1)


OPTIONS: tuple[Option, ...] = (
    Option(
        name="mesh",
        group="source",
        unit=Unit.TEXT,
        metavar="AXES",
        help=(
            "process ranks by axis of parallelism, such as fsdp=64 or fsdp=16,tp=8 (default:"
            " fsdp=64)"
        ),
    ),
    Option(
        name="seq",
        group="source",
        unit=Unit.COUNT,
        metavar="N",
        field="seq_len",
        parse=_AT_LEAST_ONE,
        help="tokens in a sequence, of a preset (default: 8192)",
    ),
    Option(
        name="batch",
        group="source",
        unit=Unit.COUNT,
        metavar="N",
        parse=_AT_LEAST_ONE,
        help="sequences per data-parallel process rank, of a preset (default: 1)",
    ),
    Option(
        name="layers",
        group="source",
        unit=Unit.COUNT,
        metavar="N",
        field="num_layers",
        parse=_AT_LEAST_ONE,
        help="number of layers, of a preset (default: all)",
    ),
    Option(
        name="micro_batches",
        group="source",
        unit=Unit.COUNT,
        metavar="N",
        field="num_micro_batches",
        parse=_AT_LEAST_ONE,
        axis=False,
        help=(
            "micro-batches of one step, interleaved where that is faster; the other options are"
            " about one of them (default: 1)"
        ),
    ),
    Option(
        name="reduce",
        group="source",
        unit=Unit.TEXT,
        metavar="WHEN",
        parse=one_of("once", "each", "auto"),
        axis=False,
        help=(
            "gradients of several micro-batches: once (added, then reduced), each, or auto: the"
            " faster of both, found by solving them (default: once)"
        ),
    ),
    Option(
        name="ac",
        group="source",
        unit=Unit.TEXT,
        metavar="KIND",
        field="activation_checkpoint",
        help=(
            "activation checkpointing of layers: none, full, selective or every-N (default: none)"
        ),
    ),
    Option(
        name="direction",
        group="source",
        unit=Unit.TEXT,
        metavar="WHICH",
        parse=one_of("forward", "backward", "both", "joint"),
        default="both",
        help="forward, backward, both, or joint: both as one graph (default: both)",
    ),
    Option(
        name="hints",
        group="source",
        unit=Unit.TEXT,
        metavar="SYMBOL=SIZE",
        typed="hint",
        parse=parse_hints,
        several=True,
        setting=True,
        axis=False,
        help=(
            "size of a symbol that depends on data, such as u0=6144; may be given again (default:"
            " torch's hint, else balanced, else 8192)"
        ),
    ),
    Option(
        name="group_ranks",
        group="source",
        unit=Unit.TEXT,
        metavar="NAME=RANKS",
        several=True,
        axis=False,
        parse=parse_group_ranks,
        default=(),
        help=(
            "process ranks of a named process group, such as dp=0-63 or tp=0,8,16,24 or"
            " dp=0-56:8; may be given again (default: the size in the graphs, from 0 on)"
        ),
    ),
    Option(
        name="import",
        group="source",
        unit=Unit.TEXT,
        metavar="MODULE",
        field="imports",
        several=True,
        axis=False,
        parse=parse_module,
        default=(),
        help=(
            "module that defines operators of the graphs, imported first (its code runs); may be"
            " given again"
        ),
    ),
    Option(
        name="unpacked_limit",
        group="source",
        unit=Unit.BYTES,
        metavar="BYTES",
        axis=False,
        help=(
            f"largest unpacked size of a file that is read (default: ${LIMIT_VARIABLE}, else"
            f" {show_bytes(DEFAULT_LIMIT_BYTES)})"
        ),
    ),
    Option(
        name="costs",
        group="costs",
        unit=Unit.TEXT,
        metavar="FILE",
        help="measured costs, as `apsched calibrate` writes them; --cluster prices the rest",
    ),
    Option(
        name="cluster",
        group="costs",
        unit=Unit.TEXT,
        metavar="NAME",
        setting=True,
        help="cluster by name (`apsched clusters`) or TOML file (default: h100)",
    ),
    Option(
        name="collectives",
        group="costs",
        unit=Unit.TEXT,
        metavar="FILE",
        several=True,
        help="measured collectives: nccl-tests output or CSV; may be given again",
    ),
    Option(
        name="unfused",
        group="costs",
        unit=Unit.SWITCH,
        default=False,
        help=(
            "price every node as a kernel of its own (eager, aot_eager), without Inductor's fusion"
        ),
    ),
    Option(
        name="memory_cap",
        group="caps",
        unit=Unit.MEMORY_CAP,
        metavar="BYTES",
        field="memory_cap_bytes",
        parse=parse_memory_cap,
        setting=True,
        help=(
            "bytes of the graph: 60GiB, none, floor (the least feasible) or floor+2GiB (default:"
            " the device's memory less the memory held outside of the graph)"
        ),
    ),
    Option(
        name="optimizer",
        group="device memory",
        unit=Unit.TEXT,
        metavar="NAME",
        parse=one_of(*OPTIMIZERS),
        default=DEFAULT_OPTIMIZER,
        setting=True,
        help=(
            "optimizer whose state is on the device: adamw (two moments of each parameter's dtype),"
            " adamw-bf16 (two of bf16), sgd (with momentum: one) or none (default:"
            f" {DEFAULT_OPTIMIZER})"
        ),
    ),
    Option(
        name="reserve",
        group="device memory",
        unit=Unit.SHARE,
        metavar="SHARE",
        parse=parse_share,
        default=DEFAULT_RESERVE,
        setting=True,
        help=(
            "share of the device's memory that fragmentation may take (default:"
            f" {100 * DEFAULT_RESERVE:g}%, enough with expandable segments;"
            f" {100 * RESERVE_OF_FIXED_SEGMENTS:g}% without)"
        ),
    ),
    Option(
        name="bucket_cap",
        group="caps",
        unit=Unit.BYTES,
        metavar="BYTES",
        field="bucket_cap_bytes",
        parse=parse_optional_bytes,
        setting=True,
        help="bytes of one bucket, such as 500MB (default: none)",
    ),
    Option(
        name="max_topo_span",
        group="caps",
        unit=Unit.COUNT,
        metavar="N",
        parse=parse_optional_count,
        setting=True,
        help="ranks between the first and the last member of a bucket (default: none)",
    ),
    Option(
        name="max_prefetch",
        group="caps",
        unit=Unit.COUNT,
        metavar="N",
        parse=parse_optional_count,
        setting=True,
        help="compute nodes between a launch and the first that needs it (default: none)",
    ),
    Option(
        name="in_flight_cap",
        group="caps",
        unit=Unit.BYTES,
        metavar="BYTES",
        field="in_flight_cap_bytes",
        parse=parse_optional_bytes,
        setting=True,
        help="output bytes of collectives started and not yet waited for (default: none)",
    ),
    Option(
        name="max_compute_move",
        group="compute",
        unit=Unit.COUNT,
        metavar="N",
        parse=parse_optional_count,
        default=DEFAULT_COMPUTE_MOVE,
        setting=True,
        help=(
            "places by which a compute node may move to hide a collective; 0: as captured (default:"
            f" {DEFAULT_COMPUTE_MOVE})"
        ),
    ),
    Option(
        name="time_slack",
        group="search",
        unit=Unit.SHARE,
        metavar="SHARE",
        parse=parse_share,
        default=_SEARCH.time_slack,
        setting=True,
        help=(
            "share of the step time that less memory and fewer launches may cost (default:"
            f" {100 * _SEARCH.time_slack:g}%)"
        ),
    ),
    Option(
        name="budget",
        group="search",
        unit=Unit.NUMBER,
        metavar="WORK",
        parse=parse_number,
        default=_SEARCH.budget,
        setting=True,
        help=(
            "deterministic work of the search, the same on every machine (default:"
            f" {_SEARCH.budget:g})"
        ),
    ),
    Option(
        name="seed",
        group="search",
        unit=Unit.COUNT,
        metavar="N",
        parse=parse_count,
        default=_SEARCH.seed,
        setting=True,
        help=f"seed of the search (default: {_SEARCH.seed})",
    ),
    Option(
        name="contention",
        group="contention",
        unit=Unit.TEXT,
        metavar="WHAT",
        setting=True,
        help=(
            "how streams slow each other, with commas: links (groups on one link share it), compute"
            " or compute=1.2 (slower during collectives), transfers=1.1 and latency=3 (slower"
            " during compute) (default: none)"
        ),
    ),
    Option(
        name="scenarios",
        group="scenarios",
        unit=Unit.COUNT,
        metavar="N",
        parse=_AT_LEAST_ONE,
        setting=True,
        help=(
            "choose the schedule that is best over so many sampled costs (default: the costs as"
            " they are)"
        ),
    ),
    Option(
        name="noise",
        group="scenarios",
        unit=Unit.NUMBER,
        metavar="SIGMA",
        parse=parse_number,
        setting=True,
        help=(f"error of sampled costs: sigma of lognormal factors (default: {DEFAULT_NOISE:g})"),
    ),
    Option(
        name="robust",
        group="scenarios",
        unit=Unit.TEXT,
        metavar="WHAT",
        setting=True,
        help=(
            f"objective: mean or worst step time over the scenarios (default: {DEFAULT_MEASURE})"
        ),
    ),
    Option(
        name="plan",
        group="plan",
        unit=Unit.TEXT,
        metavar="FILE",
        setting=True,
        help=(
            "rules for collectives and parameters by name, in TOML or JSON: forbid, group, pin,"
            " prefetch, start, keep (docs/files.md)"
        ),
    ),
    Option(
        name="bitwise",
        group="plan",
        unit=Unit.SWITCH,
        default=False,
        setting=True,
        help=(
            "reduce gradients in the buckets and payload order of eager FSDP2, so that sums are bit"
            " for bit the same; prints the price"
        ),
    ),
    Option(
        name="buckets",
        group="buckets",
        unit=Unit.TEXT,
        metavar="WHICH",
        axis=False,
        help=(
            "buckets by module: none, block (each transformer block) or a file with an entry a"
            " line, such as layers.[0-5] or norm+output (default: the solver's choice)"
        ),
    ),
    Option(
        name="keep",
        group="whole step",
        unit=Unit.TEXT,
        metavar="WHICH",
        help=(
            "parameters kept from forward to backward, not gathered again: none, all, auto (the"
            " fastest choice that fits, forward and backward together) or a file with a name or"
            " regular expression a line, with @node behind it to reshard the parameter in its node"
            " (default: auto in solve and explain, where forward and backward are solved and both"
            " gather parameters, unless torch wrote the graphs; else none)"
        ),
    ),
    Option(
        name="accumulate",
        group="accumulation",
        unit=Unit.COUNT,
        metavar="N",
        parse=partial(parse_count, least=2),
        help=(
            "solve a step of N micro-batches in a row: parameters gathered once or N times, and"
            " gradients reduced once or N times; not with --keep none"
        ),
    ),
    Option(
        name="inductor",
        group="baselines",
        unit=Unit.SWITCH,
        default=False,
        axis=False,
        help="run torch's own schedulers, too, which takes seconds",
    ),
    Option(
        name="second_group",
        group="process groups",
        unit=Unit.SWITCH,
        default=False,
        setting=True,
        help=(
            "also try gathers on a second process group of the same process ranks (a communicator"
            " more), and keep the faster"
        ),
    ),
    Option(
        name="solver",
        group="other solver",
        unit=Unit.TEXT,
        metavar="NAME",
        default="cp-sat",
        axis=False,
        help="cp-sat, milp (CBC) or milp:NAME with a solver that PuLP knows (default: cp-sat)",
    ),
    Option(
        name="time_limit",
        group="other solver",
        unit=Unit.NUMBER,
        metavar="SECONDS",
        field="time_limit_s",
        parse=parse_number,
        default=_MILP.time_limit_s,
        axis=False,
        help=f"of the milp, for each graph (default: {_MILP.time_limit_s:g})",
    ),
)

BY_NAME = {option.name: option for option in OPTIONS}
CAPS = tuple(option for option in OPTIONS if option.group == "caps")
FLAG_OF_CAP = {option.field_name: option.flag for option in CAPS}
"""Field of :class:`apsched.config.Caps` -> flag."""
CLASHING_CAPS = (CAPS[0].field_name, *(cap.field_name for cap in reversed(CAPS[1:])))
"""Fields of the caps in the order in which they are reported to clash: those on buckets, which
rarely do, come last.
"""
SETTINGS = tuple(option for option in OPTIONS if option.setting)
"""Those of ``apsched.backend``."""


def read_values(**stated: Any) -> dict[str, Any]:
    """Return values that a call states by name, texts parsed as on the command line."""
    return {name: BY_NAME[name].read(value, name) for name, value in stated.items()}


def in_group(group: str) -> Iterator[Option]:
    """Yield the options of ``group``, in the order of its help."""
    return (option for option in OPTIONS if option.group == group)
