"""The table of rewrites."""

from __future__ import annotations

from squeezebox.rewriting._head import SlicedLoss
from squeezebox.rewriting._pairs import ProductOrder, Silu, SplitConvolution
from squeezebox.rewriting._program import Rule

RULES: tuple[Rule, ...] = (SlicedLoss(), SplitConvolution(), Silu(), ProductOrder())
