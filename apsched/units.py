"""The only conversions between units. Costs round up; caps round down."""

import math

TICKS_PER_US = 1000  # one tick is a nanosecond
LONGEST_US = 24 * 3600 * 1e6  # a day: the ticks of a step fit into 64 bits
LARGEST_MESSAGE_BYTES = 2**50  # a pebibyte: more than any device holds
MOST_RANKS = 2**20  # a million: more than any job has
# torch's CUDA allocator rounds every block up to this (c10/cuda/CUDACachingAllocator.cpp,
# kMinBlockSize)
ALLOCATION_BYTES = 512


def us_to_ticks(duration_us: float) -> int:
    """Return ``duration_us`` in ticks, rounded up to the next whole tick (up to float noise far
    below one).
    """
    return math.ceil(duration_us * TICKS_PER_US - 1e-6)


def ticks_to_us(duration_ticks: int) -> float:
    """Return ``duration_ticks`` in microseconds."""
    return duration_ticks / TICKS_PER_US


def allocated_bytes(size_bytes: int) -> int:
    """Return the bytes that the allocator takes for a storage of ``size_bytes``."""
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
