"""Model and loss as one graph of aten operators, traced at the image's own size without its memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming._norms import NORMS

_aten = torch.ops.aten
DETACHED = _aten.detach_copy.default
# Composed of others in torch's tables, and streamed better as they are.
_KEPT = (
    _aten.linear.default,
    _aten.pixel_shuffle.default,
    _aten.pixel_unshuffle.default,
    _aten.log_sigmoid_forward.default,
    *(_aten.upsample_nearest2d.vec, _aten.upsample_nearest2d.default),
    *(_aten._upsample_nearest_exact2d.vec, _aten._upsample_nearest_exact2d.default),
    *(_aten.upsample_bilinear2d.vec, _aten.upsample_bilinear2d.default),
    *(_aten.upsample_bicubic2d.vec, _aten.upsample_bicubic2d.default),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A graph from parameters, buffers, constants, the image and the target's tensors to the loss.

    ``held`` are values that the model holds, ``trained`` those of them whose gradient is wanted;
    ``mutations`` are the nodes whose values buffers get when the step is done.
    """

    graph: Graph
    held: Mapping[Node, Tensor]
    trained: Mapping[Node, nn.Parameter]
    image: Node
    targets: Mapping[Node, int]
    mutations: Mapping[Node, Tensor]
    loss: Node


class Whole(nn.Module):
    """Preparation, model and loss as one module."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], prepare: Any) -> None:
        super().__init__()
        self.model, self.loss, self.prepare = model, loss_fn, prepare

    def forward(self, image: Tensor, target: Any) -> Tensor:
        """The loss."""
        return self.loss(self.model(self.prepare(image)), target)


def trace(whole: Whole, image: Tensor, target: Any, device: torch.device) -> Program:
    """Trace the module for an image and a target of these shapes (given as tensors on the meta device).

    Raises:
        UnsupportedModelError: torch.export cannot trace it, or the loss is no single number.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = pytree.tree_map_only(
            Tensor, lambda form: torch.empty(form.shape, dtype=form.dtype, device=device), (image, target)
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own tracing, about itself
            table = _decompositions()
            exported = torch.export.export(whole, fakes, strict=False)
            _keep_detached(exported.graph)
            exported = exported.run_decompositions(table)
    except Exception as error:  # noqa: BLE001  whatever the model's own code raises while it is traced
        raise UnsupportedModelError(
            f"torch.export cannot trace {type(whole.model).__name__} and its loss for an image of "
            f"{tuple(image.shape)}, so they cannot be streamed: {type(error).__name__}: {error}"
        ) from error
    return _program(exported, whole)


def _decompositions() -> dict[Any, Any]:
    """Of operators that are not elementwise: torch's own of those are quicker than their parts."""
    table = torch.export.default_decompositions()
    found = {
        operator: table[operator]
        for operator in table
        if operator not in _KEPT and torch.Tag.pointwise not in operator.tags
    }
    return found | NORMS


def _keep_detached(graph: Graph) -> None:
    """Put copies without gradient in place of ``detach()`` and ``torch.no_grad()``, which would be lost."""
    for node in [*graph.nodes]:
        if node.target in (_aten.detach.default, _aten.detach_.default):
            node.target = DETACHED
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
            for item in [*node.users]:
                with graph.inserting_after(item):
                    copy = graph.call_function(DETACHED, (item,))
                item.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
                copy.meta = {**item.meta}
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotImplementedError(f"{node.target} in the model's forward")


def _program(exported: Any, whole: nn.Module) -> Program:
    signature = exported.graph_signature
    nodes = {node.name: node for node in exported.graph.nodes}
    held: dict[Node, Tensor] = {}
    trained: dict[Node, nn.Parameter] = {}
    user: list[Node] = []
    for spec in signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            user.append(node)
        elif spec.kind is InputKind.PARAMETER:
            held[node] = parameter = whole.get_parameter(spec.target)
            if parameter.requires_grad:
                trained[node] = parameter
        elif spec.kind is InputKind.BUFFER and spec.persistent:
            held[node] = whole.get_buffer(spec.target)
        else:
            held[node] = _constant(exported, whole, spec.target)
    mutations: dict[Node, Tensor] = {}
    loss: list[Any] = []
    for spec in signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            mutations[nodes[spec.arg.name]] = whole.get_buffer(spec.target)
        else:
            loss.append(nodes.get(getattr(spec.arg, "name", "")))
    _require_scalar(loss)
    targets = {node: number for number, node in enumerate(user[1:])}
    return Program(
        graph=exported.graph,
        held=held,
        trained=trained,
        image=user[0],
        targets=targets,
        mutations=mutations,
        loss=loss[0],
    )


def _constant(exported: Any, whole: nn.Module, target: str) -> Tensor:
    found = exported.constants.get(target)
    return found if found is not None else whole.get_buffer(target)


def _require_scalar(loss: list[Any]) -> None:
    shape = (
        getattr(loss[0].meta.get("val"), "shape", None) if len(loss) == 1 and loss[0] is not None else None
    )
    if shape is None or tuple(shape) != ():
        given = "no tensor" if shape is None else f"a tensor of shape {tuple(shape)}"
        raise OptionError(f"loss_fn gives {given}, and a step needs a single number; take its sum or mean.")
