"""Tensors to packed bytes and back within an error bound.

In: a tensor and a bound. Out: a Packed, and the tensor again in its dtype, shape, strides and device.
May touch: squeezebox.schema, torch, numpy; numba and Blosc2 on first use; a few threads of its own; a process
that compiles kernels.
"""

from squeezebox.codecs._blocks import Arena, ArenaUse
from squeezebox.codecs._codec import Codec, Hints, Packed, kind_of
from squeezebox.codecs._kernels import compile_kernels, kernel, kernel_part, ready, require
from squeezebox.codecs._measures import LargestElements, energy, largest, mean, mean_abs, unit
from squeezebox.codecs._registry import available, get, load_kernels, register
from squeezebox.codecs._states import StateCodes
from squeezebox.codecs._wire import dumps, from_message, loads, pack_share, root_mean_square, to_message
from squeezebox.codecs._workers import run as in_threads
from squeezebox.codecs._workers import spans

__all__ = [
    "Arena",
    "ArenaUse",
    "Codec",
    "Hints",
    "LargestElements",
    "Packed",
    "StateCodes",
    "available",
    "compile_kernels",
    "dumps",
    "energy",
    "from_message",
    "get",
    "in_threads",
    "kernel",
    "kernel_part",
    "kind_of",
    "largest",
    "load_kernels",
    "loads",
    "mean",
    "mean_abs",
    "pack_share",
    "ready",
    "register",
    "require",
    "root_mean_square",
    "spans",
    "to_message",
    "unit",
]
