"""Random FX graphs as programs that can be printed, run and shortened.

A program is a list of lines over tensors of two dimensions: pointwise work, products, views,
splits, writes in place (through views, into inputs, into outputs), draws, results that nobody uses,
and collectives on several groups whose waits come at once or late. The work is done by aten
overloads, by python functions of torch and of somebody else, by overload packets and by
higher-order operators. No line reads the result of a collective before its wait, or writes what one
still reads: such a race has no result to compare.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

SIZES = (4, 8, 16)
GROUPS = ("world", "second")
"""Two groups of the same two process ranks."""
WORLD_SIZE = 2
DTYPES = ("float32", "bfloat16", "float64", "float16")


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program, as the generator knows it."""

    name: str
    shape: tuple[int, int]
    dtype: str
    storage: int
    dense: bool = True
    """Row after row, without gaps: what a collective takes."""


@dataclass(frozen=True, slots=True)
class Line:
    """``target = expression``."""

    target: str
    expression: str
    uses: tuple[str, ...]
    pending: str = ""
    """The wait that this start belongs to."""


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the program takes; who calls it keeps those that are ``kept``."""

    name: str
    shape: tuple[int, int]
    dtype: str
    kept: bool


@dataclass(frozen=True, slots=True)
class RandomProgram:
    """Inputs, lines and the names returned."""

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]

    def source(self, groups: Sequence[str] = GROUPS) -> str:
        """Return the program as Python; ``groups`` are the names of the process groups."""
        body = [f"    {line.target} = {line.expression}" for line in self.lines]
        text = "\n".join(
            [
                f"def program({', '.join(i.name for i in self.inputs)}):",
                *body,
                f"    return ({', '.join(self.outputs)},)",
            ]
        )
        for placeholder, name in zip(GROUPS, groups, strict=True):
            text = text.replace(f"<{placeholder}>", name)
        return text

    def tensors(self, seed: int) -> list[torch.Tensor]:
        """Return inputs of process rank or run ``seed``."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(*i.shape, generator=generator, dtype=torch.float64).to(
                getattr(torch, i.dtype)
            )
            for i in self.inputs
        ]

    def without(self, dropped: set[str]) -> "RandomProgram":
        """Return the program without the lines of these targets, what needs them, and starts that
        nothing waits for any longer.
        """
        gone, lines = set(dropped), []
        for line in self.lines:
            if line.target in gone or not gone.isdisjoint(line.uses):
                gone.add(line.target)
            else:
                lines.append(line)
        lines = [line for line in lines if line.pending not in gone]
        known = {line.target for line in lines}
        outputs = tuple(name for name in self.outputs if name in known)
        used = {name for line in lines for name in line.uses}
        inputs = tuple(i for i in self.inputs if i.name in used)
        return replace(self, inputs=inputs, lines=tuple(lines), outputs=outputs)


class _Generator:
    def __init__(self, rng: random.Random, num_lines: int) -> None:
        self.rng, self.num_lines = rng, num_lines
        self.values: list[Value] = []
        self.lines: list[Line] = []
        self.in_flight: dict[str, tuple[Value, int, int]] = {}
        """By the name of a start: the result of its wait, the line of the start, the storage that
        it reads.
        """
        self.gradients: list[str] = []
        self.states: list[str] = []
        """Saved states of the generator."""
        self.count = self.storages = 0

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def new(
        self,
        expression: str,
        uses: Sequence[Value],
        shape,
        dtype: str,
        *,
        storage: int | None = None,
        dense: bool = True,
    ) -> Value:
        """Append a line; without ``storage`` its result has one of its own."""
        name = self.fresh()
        if storage is None:
            self.storages += 1
            storage = self.storages
        value = Value(name, shape, dtype, storage, dense)
        self.lines.append(Line(name, expression, tuple(u.name for u in uses)))
        self.values.append(value)
        return value

    def copy(self, a: Value) -> Value:
        """Append a dense copy."""
        return self.new(
            f"aten.clone.default({a.name}, memory_format=torch.contiguous_format)",
            [a],
            a.shape,
            a.dtype,
        )

    def pick(self, **like) -> Value | None:
        """Return some value, a late one rather than an early one."""
        fitting = [
            v for v in self.values if all(getattr(v, key) == wanted for key, wanted in like.items())
        ]
        return (
            self.rng.choice(fitting[-12:] if self.rng.random() < 0.7 else fitting)
            if fitting
            else None
        )

    def start(self, source: Value, *, kind: str | None = None) -> str:
        """Launch a collective on ``source``; the wait comes later."""
        rng = self.rng
        if not source.dense:
            source = self.copy(source)
        group = rng.choice(GROUPS)
        rows, columns = source.shape
        kind = kind or rng.choice(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
        if kind == "all_gather":
            call, shape = (
                f"c10d.all_gather_into_tensor.default({source.name}, {WORLD_SIZE}, '<{group}>')",
                (rows * WORLD_SIZE, columns),
            )
        elif kind == "reduce_scatter":
            op = rng.choice(["sum", "avg"])
            call = (
                f"c10d.reduce_scatter_tensor.default({source.name}, '{op}', {WORLD_SIZE},"
                f" '<{group}>')"
            )
            shape = (rows // WORLD_SIZE, columns)
        elif kind == "all_reduce":
            call, shape = (
                (
                    f"c10d.all_reduce.default({source.name}, '{rng.choice(['sum', 'avg', 'max'])}',"
                    f" '<{group}>')"
                ),
                source.shape,
            )
        else:
            half = [rows // WORLD_SIZE] * WORLD_SIZE
            call, shape = (
                f"c10d.all_to_all_single.default({source.name}, {half}, {half}, '<{group}>')",
                source.shape,
            )
        name, waited = self.fresh(), self.fresh()
        self.storages += 1
        self.lines.append(Line(name, call, (source.name,), pending=waited))
        self.in_flight[name] = (
            Value(waited, shape, source.dtype, self.storages),
            len(self.lines),
            source.storage,
        )
        return name

    def wait(self, start: str) -> Value:
        value, _, _ = self.in_flight.pop(start)
        self.lines.append(Line(value.name, f"c10d.wait_tensor.default({start})", (start,)))
        self.values.append(value)
        return value

    def gather_parameter(self, shard: Value) -> None:
        """Gather an input, cast or viewed before and after as FSDP does."""
        rng = self.rng
        if rng.random() < 0.4:
            dtype = rng.choice(DTYPES)
            shard = self.new(
                f"prims.convert_element_type.default({shard.name}, torch.{dtype})",
                [shard],
                shard.shape,
                dtype,
            )
        start = self.start(shard, kind="all_gather")
        if rng.random() < 0.8:
            self.wait(start)

    def reduce_gradient(self) -> None:
        """Reduce what nothing but the outputs will use."""
        source = self.pick()
        if source is None or source.shape[0] < WORLD_SIZE:
            return
        value = self.wait(
            self.start(
                source, kind=self.rng.choice(["reduce_scatter", "reduce_scatter", "all_reduce"])
            )
        )
        self.values.remove(value)
        self.gradients.append(value.name)

    def compute(self) -> None:
        rng = self.rng
        a = self.pick()
        if a is None:
            return
        rows, columns = a.shape
        if rng.random() < 0.3:
            self.call(a)
            return
        what = rng.choice(
            [
                "unary",
                "binary",
                "mm",
                "view",
                "slice",
                "split",
                "cast",
                "cat",
                "draw",
                "sum",
                "write",
                "write",
                "copy",
            ]
        )
        if what == "unary":
            op = rng.choice(["tanh", "neg", "sin", "relu"])
            self.new(f"aten.{op}.default({a.name})", [a], a.shape, a.dtype, dense=a.dense)
        elif what == "binary":
            b = self.pick(shape=a.shape, dtype=a.dtype)
            op = rng.choice(["add", "mul", "sub"])
            self.new(
                f"aten.{op}.Tensor({a.name}, {b.name})",
                [a, b],
                a.shape,
                a.dtype,
                dense=a.dense and b.dense,
            )
        elif what == "mm":
            fitting = [b for b in self.values if b.dtype == a.dtype and b.shape[0] == columns]
            if fitting:
                b = rng.choice(fitting)
                product = self.new(
                    f"aten.mm.default({a.name}, {b.name})", [a, b], (rows, b.shape[1]), a.dtype
                )
                self.new(f"aten.tanh.default({product.name})", [product], product.shape, a.dtype)
        elif what == "view":
            if rng.random() < 0.5 or not a.dense:
                self.new(
                    f"aten.t.default({a.name})",
                    [a],
                    (columns, rows),
                    a.dtype,
                    storage=a.storage,
                    dense=False,
                )
            elif rows % 2 == 0:
                shape = (rows // 2, columns * 2)
                self.new(
                    f"aten.view.default({a.name}, {list(shape)})",
                    [a],
                    shape,
                    a.dtype,
                    storage=a.storage,
                )
        elif what == "slice" and rows >= 4:
            half = rows // 2
            at = rng.choice([0, half])
            self.new(
                f"aten.slice.Tensor({a.name}, 0, {at}, {at + half})",
                [a],
                (half, columns),
                a.dtype,
                storage=a.storage,
                dense=a.dense,
            )
        elif what == "split" and rows >= 4:
            name = self.fresh()
            self.lines.append(Line(name, f"aten.split.Tensor({a.name}, {rows // 2}, 0)", (a.name,)))
            for part in (0, 1):
                value = Value(self.fresh(), (rows // 2, columns), a.dtype, a.storage, a.dense)
                self.lines.append(Line(value.name, f"{name}[{part}]", (name,)))
                self.values.append(value)
        elif what == "cast":
            dtype = rng.choice([d for d in DTYPES if d != a.dtype])
            self.new(
                f"prims.convert_element_type.default({a.name}, torch.{dtype})",
                [a],
                a.shape,
                dtype,
                dense=a.dense,
            )
        elif what == "cat" and rows <= max(SIZES):
            b = self.pick(shape=a.shape, dtype=a.dtype)
            self.new(
                f"aten.cat.default([{a.name}, {b.name}])",
                [a, b],
                (2 * rows, columns),
                a.dtype,
                dense=a.dense and b.dense,
            )
        elif what == "draw":
            self.new(f"aten.rand_like.default({a.name})", [a], a.shape, a.dtype, dense=a.dense)
        elif what == "sum":
            self.new(f"aten.sum.dim_IntList({a.name}, [0], True)", [a], (1, columns), a.dtype)
        elif what == "write":
            self.write(a)
        elif what == "copy":
            self.copy(a)

    def call(self, a: Value) -> None:
        """Call what is no aten overload."""
        rows, columns = a.shape
        same = [
            f"torch.tanh({a.name})",
            f"F.dropout({a.name}, 0.5)",
            f"torch.rand_like({a.name})",
            f"call(aten.sin, {a.name})",
        ]
        same += [
            f"call(aten.rand_like, {a.name})",
            f"call(operator.mul, {a.name}, 0.5)",
            f"call(scaled_by_hand, {a.name})",
        ]
        same += [
            f"call(torch.rand, {a.name}.shape, dtype=torch.{a.dtype})",
            f"{a.name}[{list(range(rows))[::-1]}]",
        ]
        what = self.rng.choice(
            ["same", "same", "same", "alias", "item", "part", "body", "save", "again"]
        )
        if what == "same":
            self.new(self.rng.choice(same), [a], a.shape, a.dtype, dense=False)
        elif what == "alias":
            alias = self.rng.choice(
                ["F.dropout({a}, 0.5, False)", "aten.dropout.default({a}, 0.5, False)"]
            )
            self.new(
                alias.format(a=a.name), [a], a.shape, a.dtype, storage=a.storage, dense=a.dense
            )
        elif what in ("item", "part") and rows >= 4:
            part = f"{a.name}[0:{rows // 2}]" if what == "item" else f"call(part_by_hand, {a.name})"
            self.new(part, [a], (rows // 2, columns), a.dtype, storage=a.storage, dense=a.dense)
        elif what == "body":
            body = self.rng.choice(["pure_body", "noisy_body", "writing_body", "summing_body"])
            if body != "writing_body" or not self.is_sent(a):
                self.item(f"call({body}, {a.name})", [a], 0, a)
        elif what == "save":
            state = self.item(
                f"call(higher_order.run_and_save_rng_state, aten.rand_like.default, {a.name})",
                [a],
                1,
                a,
            )
            self.states.append(self.fresh())
            self.lines.append(Line(self.states[-1], f"{state}[0]", (state,)))
        elif what == "again" and self.states:
            state = self.rng.choice(self.states)
            name = self.new(
                f"call(higher_order.run_with_rng_state, {state}, aten.rand_like.default, {a.name})",
                [a],
                a.shape,
                a.dtype,
            ).name
            self.lines[-1] = replace(self.lines[-1], target=name, uses=(a.name, state))

    def item(self, expression: str, uses: Sequence[Value], at: int, like: Value) -> str:
        """Append a line whose result is a tuple, and one that takes its item ``at``, a tensor like
        ``like``; return the tuple's name.
        """
        name = self.fresh()
        self.lines.append(Line(name, expression, tuple(u.name for u in uses)))
        self.new(f"{name}[{at}]", [replace(like, name=name)], like.shape, like.dtype, dense=False)
        return name

    def is_sent(self, a: Value) -> bool:
        """Whether a collective in flight reads the storage of ``a``."""
        return any(storage == a.storage for _, _, storage in self.in_flight.values())

    def write(self, a: Value) -> None:
        """Write into ``a`` unless a collective in flight reads it."""
        if self.is_sent(a):
            return
        b = self.pick(shape=a.shape, dtype=a.dtype)
        in_place = [
            "aten.mul_.Tensor({a}, 0.5)",
            "aten.add_.Tensor({a}, 1.0)",
            "aten.copy_.default({a}, {b})",
            "call(aten.add_, {a}, {b})",
        ]
        in_place += [
            "call(operator.iadd, {a}, {b})",
            "F.relu({a}, inplace=True)",
            "torch.mul({b}, 0.5, out={a})",
            "call(aten.mul_, {a}, 0.5)",
        ]
        in_place += ["F.dropout({a}, 0.5, inplace=True)"]
        if self.rng.random() < 0.2:
            if self.rng.random() < 0.5:
                self.new(f"call(updated_by_hand, {a.name})", [a], a.shape, a.dtype, dense=False)
            else:
                self.lines.append(
                    Line(self.fresh(), f"call(operator.setitem, {a.name}, 0, 0.5)", (a.name,))
                )
            return
        operation = self.rng.choice(in_place)
        uses = [a] if "{b}" not in operation or b is None else [a, b]
        if len(uses) == 2 and b.storage == a.storage:
            return  # who reads what it writes through another view has no defined result
        self.new(
            operation.format(a=a.name, b=b.name),
            uses,
            a.shape,
            a.dtype,
            storage=a.storage,
            dense=a.dense,
        )

    def program(self) -> RandomProgram:
        rng = self.rng
        inputs = []
        for k in range(rng.randint(2, 8)):
            shape, dtype = (
                (rng.choice(SIZES), rng.choice(SIZES)),
                rng.choice(DTYPES if rng.random() < 0.3 else DTYPES[:1]),
            )
            inputs.append(Input(f"p{k}", shape, dtype, kept=rng.random() < 0.7))
            self.storages += 1
            self.values.append(Value(f"p{k}", shape, dtype, self.storages))
        shards = self.values[:]
        while len(self.lines) < self.num_lines:
            draw = rng.random()
            if draw < 0.12:
                self.gather_parameter(rng.choice(shards))
            elif draw < 0.22:
                self.reduce_gradient()
            elif (
                draw < 0.32
                and (source := self.pick()) is not None
                and source.shape[0] >= WORLD_SIZE
            ):
                self.start(source)
            elif draw < 0.45 and self.in_flight:
                self.wait(rng.choice(list(self.in_flight)))
            else:
                self.compute()
            self.values = [v for v in self.values if v.shape[0] * v.shape[1] <= 1024]
        while self.in_flight:
            self.wait(next(iter(self.in_flight)))
        returned = rng.sample(
            [v.name for v in self.values], min(len(self.values), rng.randint(1, 6))
        )
        targets = {line.target for line in self.lines}
        outputs = tuple(
            dict.fromkeys([*self.gradients, *(name for name in returned if name in targets)])
        ) or (self.lines[-1].target,)
        return RandomProgram(inputs=tuple(inputs), lines=tuple(self.lines), outputs=outputs)


def random_fx(seed: int, num_lines: int) -> RandomProgram:
    """Return the program of ``seed`` with about so many lines."""
    return _Generator(random.Random(seed), num_lines).program()
