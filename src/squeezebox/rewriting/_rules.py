"""The table of rewrites, and which of them a plan does better without."""

from __future__ import annotations

from squeezebox.rewriting._gated import GatedProduct
from squeezebox.rewriting._head import SlicedLoss
from squeezebox.rewriting._invertible import InvertibleActivation
from squeezebox.rewriting._pairs import ProductOrder, Silu, SplitConvolution
from squeezebox.rewriting._program import Rule
from squeezebox.rewriting._upsampled import UpsampledConvolution

RULES: tuple[Rule, ...] = (
    SlicedLoss(),
    SplitConvolution(),
    UpsampledConvolution(),
    InvertibleActivation(),
    GatedProduct(),
    Silu(),
    ProductOrder(),
)
PLAIN_ONLY = (
    InvertibleActivation.name,
    GatedProduct.name,
)  # a plan neither packs nor recomputes what they hold
