"""What stands in for a sample and a loss that nobody gave."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from squeezebox.schema import OptionError


def random_inputs(model: torch.nn.Module, shape: tuple[int, ...], dtype: str | None) -> torch.Tensor:
    """Random inputs: tokens for a model that embeds them, where asked for or for a shape like 128.

    Raises:
        OptionError: torch has no such dtype, or none that it can fill.
    """
    wanted = getattr(torch, dtype or "float32", None)
    if not isinstance(wanted, torch.dtype):
        raise OptionError(f"--input-dtype {dtype}: torch has no such dtype; write int64, say.")
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    if embeddings and (len(shape) == 2 if dtype is None else not wanted.is_floating_point):
        tokens = torch.randint(0, embeddings[0].num_embeddings, shape)
        return tokens if dtype is None else tokens.to(wanted)
    try:
        return torch.randn(shape).to(wanted) if wanted.is_floating_point else torch.zeros(shape, dtype=wanted)
    except (NotImplementedError, RuntimeError) as error:
        raise OptionError(f"--input-dtype {dtype}: torch cannot fill such a tensor: {error}") from error


def stand_in(output: Any, target: Any = None) -> torch.Tensor:
    """The sum of what stands in for a loss of every output that a gradient can flow from."""
    leaves = tree_leaves(list(output.values()) if isinstance(output, dict) else output)
    losses = [_loss_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not losses:
        raise OptionError(
            f"the model's output ({type(output).__name__}) has no tensor that requires gradients; name its "
            "loss with --loss module:callable, or unfreeze a parameter."
        )
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


def _loss_of(output: torch.Tensor) -> torch.Tensor:
    """Cross-entropy against arbitrary classes where the output has classes last, else the mean square."""
    if output.dim() in (2, 3) and output.shape[-1] > 1:
        rows = output.flatten(0, -2)
        return functional.cross_entropy(rows, torch.arange(len(rows), device=rows.device) % rows.shape[-1])
    return output.square().mean()
