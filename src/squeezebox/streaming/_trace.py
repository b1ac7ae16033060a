"""Model and loss as one graph of aten operators, traced at the image's own size without its memory.

The moments are reductions like any other then, and so are their gradients.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming._composed import COMPOSED
from squeezebox.streaming._untraced import untraced

_aten, _higher = torch.ops.aten, torch.ops.higher_order
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_LOGGERS = ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")
DETACHED = _aten.detach_copy.default
# Composed of others in torch's tables, and streamed better as they are.
_KEPT = (
    _aten.linear.default,
    _aten.pixel_shuffle.default,
    _aten.pixel_unshuffle.default,
    _aten.log_sigmoid_forward.default,
    _aten.logsumexp.default,
    _aten.scaled_dot_product_attention.default,
    *(_aten._euclidean_dist.default, _aten.inverse.default, _aten.linalg_inv.default),
    *(_aten.linalg_solve.default, _aten.linalg_cholesky.default),
    *(_aten.linalg_lu_factor.default, _aten.linalg_ldl_factor.default),
    *(_aten.upsample_nearest2d.vec, _aten.upsample_nearest2d.default),
    *(_aten._upsample_nearest_exact2d.vec, _aten._upsample_nearest_exact2d.default),
    *(_aten.upsample_bilinear2d.vec, _aten.upsample_bilinear2d.default),
    *(_aten.upsample_bicubic2d.vec, _aten.upsample_bicubic2d.default),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A graph from parameters, buffers, constants, the image and the target's tensors to ``outputs``.

    ``held`` are values that the model holds, ``trained`` those of them whose gradient is wanted, as is the
    image's if ``by_image``; ``mutations`` are the nodes whose values buffers get when the step is done.
    ``outputs`` are nodes, or plain values, in the order of ``form``. The only one of a step is its ``loss``.
    """

    graph: Graph
    held: Mapping[Node, Tensor]
    trained: Mapping[Node, Tensor]
    image: Node
    targets: Mapping[Node, int]
    mutations: Mapping[Node, Tensor]
    outputs: tuple[Any, ...]
    form: pytree.TreeSpec
    loss: Node | None
    by_image: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Aim:
    """What is wanted of an image: ``function(output, target)``; if it ``derives``, gradients of that too.

    With ``by_image``, the image's is among them.
    """

    function: Callable[[Any, Any], Any]
    derives: bool
    by_image: bool = False


class Whole(nn.Module):
    """Preparation, model, and a function of its output and the target, as one module; calls ``end`` last."""

    def __init__(
        self,
        model: nn.Module,
        function: Callable[[Any, Any], Any],
        prepare: Any,
        end: Callable[[], None],
    ) -> None:
        super().__init__()
        self.model, self.loss, self.prepare, self.end = model, function, prepare, end

    def forward(self, image: Tensor, target: Any) -> Any:
        """What the function gives."""
        made = self.loss(self.model(self.prepare(image)), target)
        self.end()
        return made


def trace(whole: Whole, aim: Aim, image: Tensor, target: Any, device: torch.device) -> Program:
    """Trace the module for an image and a target of these shapes (given as tensors on the meta device).

    Raises:
        UnsupportedModelError: torch.export cannot trace it, or the loss is no single number.
    """
    for name, module in whole.model.named_modules():
        counts = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if counts and module.training and module.momentum is None:
            raise UnsupportedModelError(
                f"module '{name or 'model'}' ({type(module).__name__}) has momentum=None, a mean over all "
                "steps; give it one, such as 0.1, or call eval()."
            )
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = pytree.tree_map_only(
            Tensor, lambda form: torch.empty(form.shape, dtype=form.dtype, device=device), (image, target)
        )
        fakes[0].requires_grad_(aim.by_image)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own tracing, about itself
            table = _decompositions()
            with _uncached(device), _quiet():
                with _Known(aim.derives) as known:
                    exported = torch.export.export(whole, fakes, strict=False)
                _keep_detached(exported.graph_module)
                exported = exported.run_decompositions(table)  # with autocast's casts
    except Exception as error:  # noqa: BLE001  whatever the model's own code raises while it is traced
        name = f"{type(whole.model).__name__}{' and its loss' * aim.derives}"
        raise UnsupportedModelError(untraced(name, image, target, error)) from error
    return _program(exported, whole, aim, known.free)


def autocast_on(device: torch.device) -> torch.dtype | None:
    """The precision that torch.autocast casts to at present; None where it does not."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _uncached(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast as it is, without the casts that it keeps."""
    dtype = autocast_on(device)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the graph that torch.export prints before it fails, and its log, which the error repeats."""
    loggers = [logging.getLogger(f"torch.{name}") for name in _LOGGERS]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


_Address = tuple[int, tuple[int, ...], tuple[int, ...]]


class _Known(TorchFunctionMode):
    """What torch.export takes for unknown, or loses.

    Lists of ``arange``, which MONAI's losses name dimensions by; ``.data``, which is ``detach()``;
    ``torch.no_grad()`` within ``torch.autocast()``; and which constants require a gradient.
    """

    def __init__(self, derives: bool) -> None:
        super().__init__()
        self._derives, self._nesting = derives, _nesting()
        self.free: dict[_Address, Tensor] = {}  # tensors that require a gradient and are no module's
        self._is_wanted = True  # by the model, which torch.no_grad() ends, and a Function's forward does not

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it."""
        if function is torch._C._set_grad_enabled and torch.is_grad_enabled() == self._is_wanted:
            self._is_wanted = bool(args[0])
        if function == _DATA:
            return args[0].detach()
        if self._derives and torch.is_grad_enabled() and function is not Tensor.detach:
            for each in pytree.tree_leaves((args, kwargs)):
                if type(each) in (Tensor, nn.Parameter) and each.requires_grad and each.numel():
                    self.free[_address(each)] = each
        if self._derives and not torch.is_grad_enabled():
            return self._without_gradient(function, args, kwargs or {})
        made = function(*args, **(kwargs or {}))
        if function is torch.arange and all(type(each) is int for each in args):
            made.tolist = lambda: [*range(*args)]
        return made

    def _without_gradient(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        versions = [(each, each._version) for each in leaves if each.requires_grad]
        if versions and self._is_wanted:
            raise NotImplementedError(
                "a torch.autograd.Function has a backward of its own, which the graph would lose. Write it "
                "by torch's operators: nn.SiLU for a Swish that saves memory, x + (f(x) - x).detach() for a "
                "straight-through estimator, checkpoint(use_reentrant=False)"
            )
        if _nesting() > self._nesting:
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda x: x.detach() if x.requires_grad else x, (args, kwargs)
            )
        made = function(*args, **kwargs)
        if any(each._version != version for each, version in versions):
            raise NotImplementedError(
                "a tensor that has a gradient is changed in place under torch.no_grad(). Make a new one: "
                "x + (f(x) - x).detach() for x.copy_(f(x))"
            )
        return made


def _nesting() -> int:
    """How many contexts of autocast there are."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _decompositions() -> dict[Any, Any]:
    """Of operators that are not elementwise: torch's own of those are quicker than their parts."""
    table = torch.export.default_decompositions()
    found = {
        operator: table[operator]
        for operator in table
        if operator not in _KEPT and torch.Tag.pointwise not in operator.tags
    }
    return found | COMPOSED


def _keep_detached(module: nn.Module) -> None:
    """Put copies without gradient in place of ``detach()`` and ``torch.no_grad()``, which would be lost."""
    for part in module.modules():  # a context's operators are a module of their own
        if not isinstance(part, GraphModule):
            continue
        for node in [*part.graph.nodes]:
            if node.target in (_aten.detach.default, _aten.detach_.default):
                node.target = DETACHED
            elif node.target is _higher.wrap_with_set_grad_enabled and not node.args[0]:
                for item in [*node.users]:
                    _detach(item)
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                if node.target is not _higher.wrap_with_autocast:
                    raise NotImplementedError(f"{node.target} in the model's forward")
        part.recompile()


def _detach(node: Node) -> None:
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(DETACHED, (node,))
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta = {**node.meta}


def _program(exported: Any, whole: nn.Module, aim: Aim, free: Mapping[_Address, Tensor]) -> Program:
    signature = exported.graph_signature
    nodes = {node.name: node for node in exported.graph.nodes}
    held: dict[Node, Tensor] = {}
    user: list[Node] = []
    for spec in signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            user.append(node)
        elif spec.kind is InputKind.PARAMETER:
            held[node] = whole.get_parameter(spec.target)
        elif spec.kind is InputKind.TOKEN:
            raise UnsupportedModelError(
                "an operator of the model or the loss has effects besides its result, such as a check of "
                "what it computes, and cannot be streamed. Leave it out."
            )
        elif spec.kind is InputKind.BUFFER and spec.persistent:
            held[node] = whole.get_buffer(spec.target)
        else:
            held[node] = _constant(exported, whole, spec.target, free)
    trained = {node: value for node, value in held.items() if value.requires_grad and value.is_leaf}
    mutations: dict[Node, Tensor] = {}
    outputs: list[Any] = []
    for spec in signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            mutations[nodes[spec.arg.name]] = whole.get_buffer(spec.target)
        elif spec.kind is not OutputKind.USER_INPUT_MUTATION:  # what is given stays as it is
            outputs.append(nodes.get(spec.arg.name, getattr(spec.arg, "value", None)))
    if aim.derives:
        _require_scalar(outputs)
    targets = {node: number for number, node in enumerate(user[1:])}
    return Program(
        graph=exported.graph,
        held=held,
        trained=trained if aim.derives else {},
        image=user[0],
        targets=targets,
        mutations=mutations,
        outputs=tuple(outputs),
        form=exported.call_spec.out_spec,
        loss=outputs[0] if aim.derives else None,
        by_image=aim.by_image,
    )


def _constant(exported: Any, whole: nn.Module, target: str, free: Mapping[_Address, Tensor]) -> Tensor:
    """A tensor that is no module's; with what requires a gradient among these, ``free``, in its place."""
    found = exported.constants.get(target)
    value: Tensor = found if found is not None else whole.get_buffer(target)
    if isinstance(value, FakeTensor):
        raise UnsupportedModelError(
            "a value of the image or the target is taken out of the graph of the model or the loss, "
            "such as by numpy or torch.tensor(), and cannot be streamed. Compute it by torch's operators."
        )
    if _address(value) not in free:
        return value
    original = free[_address(value)]
    if not original.is_leaf:
        raise UnsupportedModelError(
            f"the model or the loss reads a tensor of shape {tuple(value.shape)} that was computed before, "
            "so the gradient by that would be lost. Compute it in the model or the loss, or detach it."
        )
    return original


def _address(value: Tensor) -> _Address:
    return value.data_ptr(), tuple(value.shape), value.stride()


def _require_scalar(outputs: list[Any]) -> None:
    is_node = len(outputs) == 1 and isinstance(outputs[0], Node)
    shape = getattr(outputs[0].meta.get("val"), "shape", None) if is_node else None
    if shape is None or tuple(shape) != ():
        given = "no tensor" if shape is None else f"a tensor of shape {tuple(shape)}"
        raise OptionError(f"loss_fn gives {given}, and a step needs a single number; take its sum or mean.")
