"""Counter-based random numbers and permutations: pure functions of a key, the same on every machine.

A library's generator may change its stream between versions. Golden values in the tests pin these functions.
"""

import math

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
FEISTEL_ROUNDS = 16  # enough to make all orders of 7 samples equally likely (tested); large sets need fewer
_CHUNK = 1 << 14  # positions permuted at once; their temporaries stay in the cache of one core


def mix64(value: UInt64Array) -> UInt64Array:
    """Return hashes of `value`, by a bijection.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014) with the constants of Stafford's variant 13.
    """
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def derive_key(*values: int | npt.NDArray[np.integer]) -> UInt64Array:
    """Hash several integers, broadcast against each other, to 64-bit keys; their order matters."""
    state = np.zeros(1, dtype=np.uint64)
    for word in values:
        state = mix64((state + GOLDEN_GAMMA) ^ np.atleast_1d(np.asarray(word).astype(np.uint64)))
    return state


def uniform(key: UInt64Array) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits for each key."""
    return (key >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(positions: npt.NDArray[np.int64], count: int, key: UInt64Array) -> npt.NDArray[np.int64]:
    """Map `positions` [n] through the permutation of 0..count-1 that `key` [1 or n] defines.

    Generalised Feistel network on a rectangle of at least `count` cells, with cycle walking for the cells beyond it
    (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", methods 2 and 3). Nothing is stored.
    """
    out = np.empty(len(positions), dtype=np.int64)
    for begin in range(0, len(positions), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        out[chunk] = _cycle_walk(positions[chunk].astype(np.uint64), count, key if len(key) == 1 else key[chunk])
    return out


def _cycle_walk(cell: UInt64Array, count: int, key: UInt64Array) -> UInt64Array:
    height = math.isqrt(count - 1) + 1
    height += height % 2  # rotating an even column is an odd permutation; without it, half of all orders never occur
    width = -(-count // height)
    cell = _feistel(cell, height, width, key)
    outside = np.flatnonzero(cell >= count)
    while len(outside):
        cell[outside] = _feistel(cell[outside], height, width, key if len(key) == 1 else key[outside])
        outside = outside[cell[outside] >= count]
    return cell


def _feistel(cell: UInt64Array, height: int, width: int, key: UInt64Array) -> UInt64Array:
    rows, columns = np.uint64(height), np.uint64(width)
    row = cell // columns
    column = cell - row * columns
    keys = derive_key(key, np.arange(FEISTEL_ROUNDS)[:, np.newaxis])
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        row = _feistel_round(row, rows, column, first)
        column = _feistel_round(column, columns, row, second)
    return row * columns + column


def _feistel_round(half: UInt64Array, size: np.uint64, other: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Return half + F(other) modulo size; F is a random function into 0..size-1."""
    bits = np.uint64(32)
    half = half + ((mix64(other + key) >> bits) * size >> bits)
    turned: UInt64Array = np.minimum(half, half - size)  # unsigned: half - size wraps if half < size
    return turned
