"""Share of the device's peak that a product or an attention reaches, by the class of its shape.

A matrix product is cut into tiles of its result; as many tiles as the device has processors make a
wave, and the last wave is as long as a full one (NVIDIA, "Matrix Multiplication Background User's
Guide": tile and wave quantization). Of the guide's tile sizes the best counts:

    share = max over tiles a x b of  speed(a, b) * M N / (a b P * waves),
    waves = ceil(ceil(M/a) ceil(N/b) count / P)

so that a result which fills few processors (narrow slices under tensor parallelism, few rows) is
slower than its operations say. Small tiles read more for each operation; ``speed`` is the square
root of operations a byte, relative to the largest: an assumption, as the guide gives their order
but no numbers. The share that a full device reaches is the device's own figure.
"""

import math
from collections.abc import Mapping
from typing import Any

from apsched.costs.clusters.cluster import Device
from apsched.fx.operands import shape_of, tensors_in

_TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
)  # the guide's, most efficient first


def _operations_a_byte(rows: int, columns: int) -> float:
    return rows * columns / (rows + columns)


_SPEED = {
    tile: math.sqrt(_operations_a_byte(*tile) / _operations_a_byte(*_TILES[0])) for tile in _TILES
}


def filled_share(num_processors: int, rows: int, columns: int, count: int = 1) -> float:
    """Return the share of a full device that ``count`` products with results of ``rows`` x
    ``columns`` reach together.
    """
    shares = []
    for a, b in _TILES:
        tiles = math.ceil(rows / a) * math.ceil(columns / b) * count
        waves = math.ceil(tiles / num_processors)
        shares.append(_SPEED[a, b] * rows * columns * count / (a * b * num_processors * waves))
    return max(shares)


def product_efficiency(
    device: Device, arguments: Mapping[str, Any], result: Any, *, grouped: bool
) -> float:
    """Return the share of the peak that a matrix product or convolution reaches.

    Of a grouped product only the sum of the groups' rows is known: they are taken as equal.
    """
    results = list(tensors_in(result))
    if device.num_processors is None or len(results) != 1 or results[0].dim() not in (2, 3):
        return device.matmul_efficiency
    *count, rows, columns = shape_of(results[0])
    if 0 in (*count, rows, columns):
        return device.matmul_efficiency
    groups = math.prod(count)
    if grouped and not count:
        left, right = (
            shape_of(tensor) for tensor in list(tensors_in(list(arguments.values())))[:2]
        )
        if len(right) == 3:  # rows of the left one belong to groups
            groups, rows = right[0], math.ceil(rows / right[0])
        else:
            groups, columns = left[0], math.ceil(columns / left[0])
    return device.matmul_efficiency * filled_share(device.num_processors, rows, columns, groups)


def attention_efficiency(device: Device, name: str) -> float:
    """Return the share of the peak that the attention operator ``name`` reaches."""
    backward = device.attention_backward_efficiency if name.endswith("_backward") else None
    return backward or device.attention_efficiency
