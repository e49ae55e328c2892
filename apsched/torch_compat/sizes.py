"""Sizes as plain integers, without a guard: a symbolic size by torch's hint, and one that depends
on data by the assumed values of its symbols (torch/fx/experimental/symbolic_shapes.py, ShapeEnv).

An unbacked symbol (``u0``) has no value before the step. :func:`assume` decides one for each symbol
of a graph, for as long as the ShapeEnv of these symbols lives: forward and backward of one trace,
and a graph that was rewritten, have the same sizes. This is the only place where that is decided,
and :func:`size_hint` the only one where it is looked up.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apsched.kinds import AssumedSize, SizeSource

FALLBACK_SIZE = 8192
"""Assumed of a symbol of which nothing is known, within the bounds that torch knows of it; that of
torch/_inductor/config.py, unbacked_symint_fallback."""

DEPENDS_ON_DATA = re.compile(r"u\d{1,6}")
"""Names that torch gives to such symbols."""

Sum = Sequence[Any]
"""Sizes that are added."""


@dataclass(slots=True)
class _Assumed:
    """Assumed sizes in one ShapeEnv."""

    stated: dict[str, int]
    """Hints of the user's own."""
    profiled: dict[str, int] = field(default_factory=dict)
    """Sizes of a profile."""
    sizes: dict[sympy.Symbol, AssumedSize] = field(default_factory=dict)
    known: dict[sympy.Expr, int] = field(default_factory=dict)
    """Values of expressions that were looked up."""


_ASSUMED: WeakKeyDictionary[ShapeEnv, _Assumed] = WeakKeyDictionary()
_CHANGES: list[int] = [0]


def changes_of_assumed_sizes() -> int:
    """Return how often :func:`assume` has changed a value: figures of sizes hold until the next
    change.
    """
    return _CHANGES[0]


def size_hint(size: Any) -> int:
    """Return the value of a (symbolic) integer: its hint, or, if it depends on data, its assumed
    value (:func:`assume`), else the value that follows from ``FALLBACK_SIZE``. Adds no guard.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.has_hint():
        return int(size.node.hint)
    env, expression = size.node.shape_env, size.node.expr
    assumed = _ASSUMED.get(env)
    if assumed is None:
        return _value(env, expression, {})
    if expression not in assumed.known:
        assumed.known[expression] = _value(env, expression, assumed.sizes)
    return assumed.known[expression]


def _value(env: ShapeEnv, expression: sympy.Expr, sizes: Mapping[sympy.Symbol, AssumedSize]) -> int:
    values = _backed(env) | {
        symbol: sizes[symbol].value if symbol in sizes else _fallback(env, symbol)
        for symbol in _unbacked(env, expression)
    }
    try:
        return max(int(expression.xreplace(values)), 0)
    except (ArithmeticError, TypeError, ValueError):  # no number, such as a division by 0
        return FALLBACK_SIZE


def unknown_size(env: ShapeEnv, name: str) -> torch.SymInt:
    """Return a new size >= 0 that depends on data, called ``name`` where that is still free."""
    number = int(name.removeprefix("u"))
    names = (env.create_unbacked_symint() for _ in range(number + 1))
    found = next((size for size in names if str(size) == name), None)
    size = env.create_unbacked_symint() if found is None else found
    torch._check(size >= 0)  # type: ignore[no-untyped-call]
    return size


def depends_on_data(size: Any) -> bool:
    """Whether a size has no value before the step."""
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def same_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether sizes are the same whatever the symbols in them are."""
    return len(left) == len(right) and all(
        _expression(a) == _expression(b) for a, b in zip(left, right, strict=True)
    )


def assume(
    sizes: Iterable[Any],
    equal: Iterable[tuple[Sum, Sum]],
    stated: Mapping[str, int],
    profiled: Mapping[str, int] | None = None,
) -> tuple[AssumedSize, ...]:
    """Decide a value for each symbol of ``sizes`` that depends on data; return them by name.

    A symbol gets the value that is ``stated`` for its name, else the one ``profiled``, else torch's
    own hint (``torch._dynamo.mark_unbacked(..., hint_override=...)``), else an even share of a
    known sum: one that the graph asserts, or one in ``equal``, pairs of sums that are taken as
    equal; else ``FALLBACK_SIZE``. A value decided before in the same ShapeEnv stays, as long as
    ``stated`` and ``profiled`` are the same.
    """
    pairs = [*equal]
    found: dict[ShapeEnv, dict[sympy.Symbol, None]] = {}
    for size in sizes:
        if depends_on_data(size):
            env = size.node.shape_env
            found.setdefault(env, {}).update(dict.fromkeys(_unbacked(env, size.node.expr)))
    result = []
    for env, symbols in found.items():
        assumed = _ASSUMED.get(env)
        seen = dict(profiled or {})
        if assumed is None or (assumed.stated, assumed.profiled) != (dict(stated), seen):
            assumed = _ASSUMED[env] = _Assumed(dict(stated), seen)
        assumed.known.clear()
        before = dict(assumed.sizes)
        _decide(env, symbols, [_difference(env, *pair) for pair in pairs], assumed)
        _CHANGES[0] += assumed.sizes != before
        result += [assumed.sizes[symbol] for symbol in symbols]
    return tuple(sorted(set(result), key=lambda size: _order(size.symbol)))


def solved(seen: Iterable[tuple[Any, int]]) -> dict[str, int]:
    """Return the values of symbols that follow from sizes that were ``seen``, pairs of a size that
    depends on data and its value; symbols of which only the sum was seen share it evenly.
    """
    by_env: dict[ShapeEnv, list[sympy.Expr]] = {}
    for size, value in seen:
        by_env.setdefault(size.node.shape_env, []).append(size.node.expr - value)
    found: dict[str, int] = {}
    for env, zeros in by_env.items():
        assumed = _Assumed({})
        _share(env, sorted(zeros, key=lambda zero: len(_unbacked(env, zero))), assumed)
        found |= {str(symbol): size.value for symbol, size in assumed.sizes.items()}
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _decide(
    env: ShapeEnv,
    symbols: Iterable[sympy.Symbol],
    zeros: list[sympy.Expr],
    assumed: _Assumed,
) -> None:
    """Fill in ``assumed`` for ``symbols``, and for those of ``zeros``, expressions that are 0."""
    zeros = [*zeros, *_asserted(env)]
    in_zeros = {symbol for zero in zeros for symbol in _unbacked(env, zero)}
    for symbol in (*symbols, *in_zeros):
        if symbol not in assumed.sizes and (known := _known(env, symbol, assumed)):
            assumed.sizes[symbol] = known
    zeros = _share(env, zeros, assumed)
    for symbol in sorted(symbols, key=_order):
        if symbol not in assumed.sizes:
            value = _fallback(env, symbol)
            assumed.sizes[symbol] = _size(symbol, value, SizeSource.FALLBACK)
            if any(zero.has(symbol) for zero in zeros):
                zeros = _share(env, zeros, assumed)


def _known(env: ShapeEnv, symbol: sympy.Symbol, assumed: _Assumed) -> AssumedSize | None:
    name = str(symbol)
    if name in assumed.stated:
        return _size(symbol, assumed.stated[name], SizeSource.STATED)
    if name in assumed.profiled:
        return _size(symbol, assumed.profiled[name], SizeSource.PROFILE)
    # the first is a hint, the others are values of example inputs; names differ between versions
    for name in ("var_to_hint_override", "real_tensor_prop_unbacked_vals", "unbacked_var_to_val"):
        if (value := getattr(env, name, {}).get(symbol)) is not None:
            return _size(symbol, int(value), SizeSource.TORCH)
    return None


def _share(env: ShapeEnv, zeros: list[sympy.Expr], assumed: _Assumed) -> list[sympy.Expr]:
    """Have symbols that add up to a known number share it evenly; return the ``zeros`` that still
    have unknown symbols.
    """
    values = _backed(env) | {symbol: size.value for symbol, size in assumed.sizes.items()}
    left, before = zeros, len(zeros) + 1
    while len(left) < before:
        before, zeros, left = len(left), left, []
        for zero in zeros:
            rest = sympy.expand(zero.xreplace(values))
            symbols = sorted(rest.free_symbols, key=_order)
            terms = rest.as_coefficients_dict()
            factors = {terms[symbol] for symbol in symbols}
            if len(factors) == 1 and set(terms) - {sympy.S.One} == set(symbols):
                total = max(int(-terms[sympy.S.One] / factors.pop()), 0)
                share, more = divmod(total, len(symbols))
                for place, symbol in enumerate(symbols):
                    values[symbol] = share + (place < more)
                    assumed.sizes[symbol] = _size(symbol, values[symbol], SizeSource.BALANCED)
            elif symbols:
                left.append(zero)
    return left


def _order(symbol: object) -> tuple[int, str]:
    """Return a key that sorts ``u2`` before ``u10``."""
    return len(str(symbol)), str(symbol)


def _size(symbol: sympy.Symbol, value: int, source: SizeSource) -> AssumedSize:
    return AssumedSize(symbol=str(symbol), value=value, source=source)


def _asserted(env: ShapeEnv) -> list[sympy.Expr]:
    """Return expressions that are 0 by assertions of the graph."""
    asserted = (a.expr for some in env.deferred_runtime_asserts.values() for a in some)
    return [expr.lhs - expr.rhs for expr in asserted if isinstance(expr, sympy.Equality)]


def _difference(env: ShapeEnv, left: Sum, right: Sum) -> sympy.Expr:
    """Return the one sum less the other; 0 where symbols are not of ``env``."""
    total = sympy.S.Zero
    for sign, sizes in ((1, left), (-1, right)):
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.shape_env is not env:
                return sympy.S.Zero
            total += sign * _expression(size)
    return total


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _unbacked(env: ShapeEnv, expression: sympy.Expr) -> list[sympy.Symbol]:
    backed = _backed(env)
    return [symbol for symbol in expression.free_symbols if symbol not in backed]


def _backed(env: ShapeEnv) -> dict[sympy.Symbol, Any]:
    """Return the hints of symbols that have one by themselves."""
    backed: dict[sympy.Symbol, Any] | None = getattr(env, "backed_var_to_val", None)
    return env.var_to_val if backed is None else backed  # its older name


def _fallback(env: ShapeEnv, symbol: sympy.Symbol) -> int:
    bounds = env.var_to_range.get(symbol)
    value = FALLBACK_SIZE
    if bounds is not None:
        if isinstance(bounds.upper, sympy.Integer | int):
            value = min(value, int(bounds.upper))
        if isinstance(bounds.lower, sympy.Integer | int):
            value = max(value, int(bounds.lower))
    return value
