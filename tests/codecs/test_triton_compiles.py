"""Every kernel compiles for a CUDA device, of which none is needed: the interpreter refuses less."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import itertools, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from squeezebox.codecs._triton import _block_kernels as blocks
from squeezebox.codecs._triton import _group_kernels as groups
from squeezebox.codecs._triton import _plane_kernels as planes
from squeezebox.codecs._triton._parts import SHAPES

def compiled(kernel, types, **constants):
    types = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})

def shaped(bits):
    a, b, c = SHAPES[bits]
    return {"BITS": bits, "ROWS": 8, "A": a, "B": b, "C": c}

sizes = {"numel": "i32", "groups": "i32", "seed": "i64", "floor": "fp32", "limit": "fp32"}
for dtype, bits in (("fp32", 4), ("bf16", 3), ("fp16", 8)):
    types = {**sizes, "flat": f"*{dtype}", "out": f"*{dtype}", "codes": "*u8", "scales": "*fp32"}
    for stochastic in (False, True):
        for kernel in (groups._pack_zero, groups._pack_minmax, groups._unpack_zero):
            compiled(kernel, types, STOCHASTIC=stochastic, **shaped(bits))
    compiled(groups._unpack_minmax, types, **shaped(bits))
    values = dict.fromkeys(("value", "lower", "upper", "zero", "one"), "fp32")
    types |= {**values, "others": "*i32", "packed": "*u8", "negative": "i32"}
    for kernel in (groups._pack_nonzero, groups._pack_positive, groups._unpack_bits):
        compiled(kernel, types, **shaped(1))
    compiled(groups._pack_between, types, INCLUSIVE=bits == 3, **shaped(1))
    types |= dict.fromkeys(("bound", "unit", "rounding"), "fp32")
    types |= dict.fromkeys(("arena", "spill", "table", "scratch"), "*i32")
    types |= {"scale": "*fp32", "counters": "*i64", "slot": "i32", "blocks": "i32", "room": "i32"}
    types |= {"spill_room": "i32", "inner": "i32", "count": "i32", "dither": "i32"}
    options = {"SCALED": bits != 4, "DITHERED": bits != 8, "ITEM_BYTES": 4 if dtype == "fp32" else 2}
    for kernel in (blocks._pack, blocks._unpack):
        compiled(kernel, types, **options)
    types |= {"heads": "*i16", "ends": "*i64", "least": "fp32", "most": "fp32", "ahead": "fp32"}
    types |= {"largest": "i32"}
    for placed in (False, True):
        compiled(planes._pack, types, SCALED=bits != 4, PLACED=placed, BLOCKS=8)
    compiled(planes._unpack, types, SCALED=bits != 4, BLOCKS=8)
types = {"codes": "*u8", "packed": "*u8", "numel": "i32", "groups": "i32"}
for kernel, bits in itertools.product((groups._pack_codes, groups._unpack_codes), (2, 3)):
    compiled(kernel, types, **shaped(bits))
types = dict.fromkeys(("indices", "base", "places", "out"), "*i64")
types |= {"codes": "*u8", "missing": "*i32"} | dict.fromkeys(("numel", "positions", "inner", "count"), "i32")
for kernel in (groups._pack_offsets, groups._unpack_offsets):
    compiled(kernel, types, BLOCK=1024)
print("compiled")
"""


@pytest.mark.slow
def test_kernels_compile_for_a_device() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr[-4000:]
