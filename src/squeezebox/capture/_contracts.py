"""Who decides how a tensor is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from squeezebox.capture._rules import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A codec's name and its error bound: absolute, or in units of the tensor's scale (``scaled``)."""

    codec: str
    bound: float | None = None
    scaled: bool = False


class Policy(Protocol):
    """Decides how a tensor of which backward reads the values is held."""

    def choose(self, key: str, rule: Rule, tensor: torch.Tensor) -> Choice:
        """The codec for a flat tensor; ``Choice(codec="keep")`` holds the tensor itself."""
