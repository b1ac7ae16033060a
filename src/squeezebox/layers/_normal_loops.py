"""The numbers of ``_normals``, compiled: a block of 1024 at a time, in loops that a CPU runs in lanes."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from typing import Any

import numpy as np

from squeezebox.codecs import kernel, kernel_part
from squeezebox.layers import _normals as numbers

_BLOCK = 4 * numbers.RUN
_RUN = numbers.RUN
_LOW = np.uint64(numbers.LOW)
_HALF = np.uint64(32)
_M0, _M1 = (np.uint64(each) for each in numbers.MULTIPLIERS)
_W0, _W1 = (np.uint64(each) for each in numbers.WEYL)
_ONE, _TWO, _A_HALF, _LN2 = np.float32(1), np.float32(-2), np.float32(0.5), np.float32(numbers.LN2)
_STEP, _BELOW, _TURN = np.float32(2.0**-32), np.float32(2.0**-33), np.float32(2.0**-30)
_ROOT, _FRACTION = np.int32(numbers.ROOT_HALF), np.int32(numbers.FRACTION)
_SHIFT = np.int32(numbers.EXPONENT_BITS)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7 = (np.float32(each) for each in numbers.LOG)
_S0, _S1, _S2, _S3 = (np.float32(each) for each in numbers.SINE)
_C0, _C1, _C2, _C3 = (np.float32(each) for each in numbers.COSINE)


@kernel_part
def _words(block, seed, draw, sample, module, found):
    for run in range(_RUN):
        a, b, c, d = np.uint64(block * _RUN + run) & _LOW, draw, sample, module
        first, second = seed & _LOW, seed >> _HALF
        for _ in range(10):
            x, y = _M0 * a, _M1 * c
            a, b = (y >> _HALF) ^ b ^ first, y & _LOW
            c, d = (x >> _HALF) ^ d ^ second, x & _LOW
            first, second = (first + _W0) & _LOW, (second + _W1) & _LOW
        found[0, run] = np.uint32(a)
        found[1, run] = np.uint32(b)
        found[2, run] = np.uint32(c)
        found[3, run] = np.uint32(d)


@kernel_part
def _normals(words, uniform, bits, split, fraction, values):
    """Pairs of runs of words into pairs of runs of values; the arrays between have one run each."""
    for pair in range(2):
        first, second = words[2 * pair], words[2 * pair + 1]
        for run in range(_RUN):
            uniform[run] = np.float32(first[run]) * _STEP + _BELOW
        for run in range(_RUN):
            split[run] = np.int32((np.int32(bits[run] - _ROOT) & _FRACTION) + _ROOT)
        for run in range(_RUN):
            exponent = np.float32(np.int32(np.int32(bits[run] - _ROOT) >> _SHIFT))
            f = fraction[run] - _ONE
            s = f * f
            p = _L7 * f + _L6
            p = p * f + _L5
            p = p * f + _L4
            p = p * f + _L3
            p = p * f + _L2
            p = p * f + _L1
            p = p * f + _L0
            log = exponent * _LN2 + (f - _A_HALF * s + s * f * p)
            radius = np.sqrt(_TWO * log)
            word = np.int32(second[run])
            t = np.float32(np.int32((word & np.int32(0x3FFFFFFF)) - np.int32(0x20000000))) * _TURN
            s = t * t
            sine = t * (((_S3 * s + _S2) * s + _S1) * s + _S0)
            cosine = _ONE + s * (((_C3 * s + _C2) * s + _C1) * s + _C0)
            cosine = -cosine if word & np.int32(0x40000000) else cosine
            swapped = word < 0
            x = sine if swapped else cosine
            y = cosine if swapped else sine
            values[2 * pair * _RUN + run] = radius * x
            values[(2 * pair + 1) * _RUN + run] = radius * y


@kernel_part
def _scratch():
    words = np.empty((4, _RUN), np.uint32)
    uniform, split = np.empty(_RUN, np.float32), np.empty(_RUN, np.int32)
    return words, uniform, uniform.view(np.int32), split, split.view(np.float32), np.empty(_BLOCK, np.float32)


@kernel_part
def _block(block, seed, draw, sample, module, scratch):
    words, uniform, bits, split, fraction, values = scratch
    _words(block, seed, draw, sample, module, words)
    _normals(words, uniform, bits, split, fraction, values)
    return values


@kernel
def add(values, mean, start, seed, draw, sample, module):
    """In place, values = mean + values * normals; ``start`` is a multiple of 1024."""
    scratch = _scratch()
    for at in range(0, values.size, _BLOCK):
        noise = _block((start + at) // _BLOCK, seed, draw, sample, module, scratch)
        here, middle = values[at : at + _BLOCK], mean[at : at + _BLOCK]
        for i in range(here.size):
            here[i] = middle[i] + here[i] * noise[i]


@kernel
def scale(values, start, seed, draw, sample, module):
    """In place, values *= normals."""
    scratch = _scratch()
    for at in range(0, values.size, _BLOCK):
        noise = _block((start + at) // _BLOCK, seed, draw, sample, module, scratch)
        here = values[at : at + _BLOCK]
        for i in range(here.size):
            here[i] = here[i] * noise[i]


def key(seed: int, draw: int, sample: int, module: int) -> tuple[Any, Any, Any, Any]:
    """A key's words in the type that the loops take."""
    return np.uint64(seed), np.uint64(draw), np.uint64(sample), np.uint64(module)
