"""A training step on an image that may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from squeezebox.streaming._graph import Streamed, analyse
from squeezebox.streaming._run import Context, Run, stages_of
from squeezebox.streaming._trace import Whole, trace


class StreamedStep:
    """x."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        memory: int | str | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        axis: int | None = None,
        height: int | None = None,
        recompute: bool = False,
        context: Context | None = None,
    ) -> None:
        self._whole = Whole(model, loss_fn, prepare or nn.Identity())
        self._axis, self._height = axis, height
        self._context, self._recompute = context, recompute

    def __call__(self, image: Any, target: Any) -> Tensor:
        axis = self._axis or -2
        shapes = pytree.tree_map(_form_of, (image, target))
        program = trace(self._whole, *shapes)
        streamed = analyse(program, axis)
        leaves = pytree.tree_leaves(target)
        given = {program.image: image} | {node: leaves[n] for node, n in program.targets.items()}

        def read(node: Node, start: int, stop: int) -> Tensor:
            rows = streamed.rows[node]
            value = given[node]
            index = [slice(None)] * value.ndim
            index[rows.dim] = slice(start, stop)
            part = value[tuple(index)]
            return part if isinstance(part, Tensor) else torch.from_numpy(np.array(part))

        run = Run(streamed, read, {n: torch.as_tensor(v) if hasattr(v, "ndim") else v for n, v in given.items() if n not in streamed.rows}, self._context)
        stages = stages_of(streamed)
        count = image.shape[axis]
        ahead = [s for s in stages if s.reduces]
        for stage in stages:
            run.begin(stage)
            for start in range(0, count, self._height):
                run.strip(stage, start, min(start + self._height, count), self._recompute)
            run.end(stage, stage is ahead[-1])
        return run.finish()


def _form_of(value: Any) -> Any:
    if hasattr(value, "shape"):
        dtype = value.dtype if isinstance(value, Tensor) else torch.from_numpy(np.empty(0, value.dtype)).dtype
        return torch.empty(tuple(value.shape), dtype=dtype, device="meta")
    return value
