"""Transformer blocks changed in place, so that several ranks share their activations and products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from squeezebox.layers._sequence import Columns, Part, Place, Rows, Shared, Whole
from squeezebox.schema import OptionError

Blocks = TypeVar("Blocks", bound=Sequence[nn.Module] | nn.ModuleList | nn.Sequential)
ATTENTION = "scaled_dot_product_attention"


def split_sequence_(
    blocks: Blocks,
    *,
    columns: Sequence[str] | Mapping[str, int],
    rows: Sequence[str],
    core: str | None = ATTENTION,
    group: dist.ProcessGroup | None = None,
) -> Blocks:
    """Share the activations of transformer blocks, W ranks each with S/W positions of the sequence.

    Between products a rank has its own positions of all features; within them, all positions of its own
    heads or hidden units. A block keeps 1/W of what it keeps on one rank, and of the attention its
    inputs alone (sequence parallelism with selective recomputation, arXiv:2205.05198). All ranks give the same
    batch and have the same random state; input and output of the blocks are whole. Weights are those of the group's
    first rank. Make the optimizer afterwards.

    Args:
        blocks: in the order in which the model calls them, each with (B, S, ...) as the first tensor among its
            arguments and its outputs.
        columns: names, within a block, of the ``nn.Linear`` whose outputs are split: queries, keys, values and
            the MLP's first ones. With {name: n}, n equal parts of one layer's outputs are split each,
            such as 3 for one layer of queries, keys and values. A module within the block that holds such a layer
            gets all positions. It must take the number of heads from the layer's output.
        rows: names of the ``nn.Linear`` that follow, whose inputs are split.
        core: what backward computes again: calls of this function, or a module within each block; or None.
        group: the ranks; all of them if not given.

    Returns:
        The blocks. Split weights are DTensors.

    Raises:
        OptionError: before anything is changed, if a name is of no ``nn.Linear``, or the ranks do not divide
            its size. In forward, on all ranks, if their inputs differ or they do not divide S.
    """
    place = Place.of(group)
    parts = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, 1)
    _check(blocks, parts, rows, core, place.ranks)
    stack = _Stack(place, core == ATTENTION)
    mesh = _mesh(group, next(blocks[0].parameters()).device.type)
    for block in blocks:
        shared = Shared(place)
        for name, count in parts.items():
            _replace(block, name, lambda layer, n=count, inner="." in name: _columns(layer, n, mesh, shared, inner))
        for name in rows:
            _replace(block, name, lambda layer: _rows(layer, mesh, place))
        if core not in (ATTENTION, None):
            _replace(block, core, _recomputed)
        for name in {name.rpartition(".")[0] for name in parts} - {""}:
            _gather_into(block.get_submodule(name), shared)
        stack.enclose(block, shared)
    stack.open_and_close(blocks[0], blocks[-1])
    _add_gradients([each for block in blocks for each in block.parameters()], place)
    return blocks


def _check(
    blocks: Any, parts: Mapping[str, int], rows: Sequence[str], core: str | None, ranks: int
) -> None:
    if not blocks or not parts or not rows:
        raise OptionError("There is nothing to split: give blocks, and names of columns and rows within a block.")
    owners = [each for block in blocks for module in block.modules() for each in module._parameters.values()]
    for number, block in enumerate(blocks):
        modules = dict(block.named_modules())
        for name in [*parts, *rows]:
            layer = modules.get(name)
            if type(layer) is not nn.Linear:
                found = "has no such module" if layer is None else f"has {type(layer).__name__} there"
                raise OptionError(
                    f"{name!r} is to be an nn.Linear, but block {number} {found}; give names of its nn.Linear."
                )
            if sum(each is layer.weight for each in owners) > 1:
                raise OptionError(f"{name!r} of block {number} shares its weight with another layer; give it its own.")
            size = layer.out_features if name in parts else layer.in_features
            count = ranks * parts.get(name, 1)
            if size % count:
                side = "outputs" if name in parts else "inputs"
                raise OptionError(
                    f"{name!r} of block {number} has {size} {side}, which {ranks} ranks do not divide "
                    f"into {count} equal shares; use fewer ranks."
                )
        if core not in (ATTENTION, None) and core not in modules:
            raise OptionError(f"core={core!r} is no module of block {number}, nor {ATTENTION!r}.")


def _replace(block: nn.Module, name: str, make: Callable[[Any], nn.Module]) -> None:
    parent, _, last = name.rpartition(".")
    setattr(block.get_submodule(parent), last, make(block.get_submodule(name)))


def _mesh(group: dist.ProcessGroup | None, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group or dist.group.WORLD, device)


def _columns(layer: nn.Linear, parts: int, mesh: Any, shared: Shared, is_inner: bool) -> Columns:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    place = Shard(0) if parts == 1 else _StridedShard(0, split_factor=parts)
    bias = None if layer.bias is None else _split(layer.bias, mesh, place)
    return Columns(_split(layer.weight, mesh, place), bias, shared, gathers=not is_inner)


def _rows(layer: nn.Linear, mesh: Any, place: Place) -> Rows:
    from torch.distributed.tensor import Shard

    return Rows(_split(layer.weight, mesh, Shard(1)), layer.bias, place)


def _split(weight: nn.Parameter, mesh: Any, place: Any) -> nn.Parameter:
    from torch.distributed.tensor import distribute_tensor

    return nn.Parameter(distribute_tensor(weight.detach(), mesh, [place]), requires_grad=weight.requires_grad)


def _recomputed(module: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)


def _add_gradients(parameters: Sequence[Any], place: Place) -> None:
    """Of what all ranks have alike, each has an addend of the gradient: its positions', or its heads'."""
    from torch.distributed.tensor import DTensor

    def add(grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=place.group)
        return total

    for each in dict.fromkeys(parameters):
        if not isinstance(each, DTensor):
            dist.broadcast(each.detach(), group=place.group, group_src=0)
            if each.requires_grad:
                each.register_hook(add)


def _gather_into(module: nn.Module, shared: Shared) -> None:
    """The module gets all positions of its input."""

    def before(_: nn.Module, args: Any, options: Any) -> Any:
        return _with_first(args, options, lambda part: shared.gather(part, hold=False))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda *_: shared.clear(), always_call=True)


def _with_first(args: tuple[Any, ...], options: dict[str, Any], change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments of which the first tensor is changed."""
    for index, each in enumerate(args):
        if isinstance(each, Tensor):
            return (*args[:index], change(each), *args[index + 1 :]), options
    for name, each in options.items():
        if isinstance(each, Tensor):
            return args, options | {name: change(each)}
    raise OptionError("A block got no tensor; its first one is to be (B, S, ...).")


def _tensors(args: Any, options: Any) -> Iterator[Tensor]:
    return (each for each in (*args, *options.values()) if isinstance(each, Tensor))


@dataclass(slots=True)
class _Stack:
    """Blocks that follow each other: the first one cuts, the last one gathers."""

    place: Place
    recomputes: bool
    lengths: set[int] = field(default_factory=set)  # that a part ever had

    def enclose(self, block: nn.Module, shared: Shared) -> None:
        """Draw what is this rank's own, and compute the attention again."""
        stacks: list[ExitStack] = []

        def before(_: nn.Module, args: Any, options: Any) -> None:
            x, *others = _tensors(args, options)
            self._check_block(x, others)
            stacks.append(ExitStack())
            if block.training:
                stacks[-1].enter_context(_own_draws(x.device, self.place.rank))
            if self.recomputes and torch.is_grad_enabled():
                stacks[-1].enter_context(_Recomputing())

        def after(*_: Any) -> None:
            stacks.pop().close()
            shared.clear()

        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after, always_call=True)

    def open_and_close(self, first: nn.Module, last: nn.Module) -> None:
        """Cut before the first block, gather after the last one."""
        first.register_forward_pre_hook(
            lambda _, args, options: _with_first(args, options, self._cut), with_kwargs=True, prepend=True
        )
        last.register_forward_hook(self._gather)

    def _cut(self, whole: Tensor) -> Tensor:
        self._check_alike(whole)
        part: Tensor = Part.apply(whole, self.place)  # type: ignore[no-untyped-call]
        self.lengths.add(part.shape[1])
        return part

    def _gather(self, _: nn.Module, args: Any, found: Any) -> Any:
        if isinstance(found, Tensor):
            return Whole.apply(found, self.place)  # type: ignore[no-untyped-call]
        return (Whole.apply(found[0], self.place), *found[1:])  # type: ignore[no-untyped-call]

    def _check_block(self, x: Tensor, others: list[Tensor]) -> None:
        if x.shape[1] not in self.lengths:
            raise OptionError(
                f"A block got {x.shape[1]} positions, and no rank's part has ever had as many; call all blocks, "
                "in the order in which they were given."
            )
        if torch.is_grad_enabled() and any(each.requires_grad for each in others):
            raise OptionError(
                "A block got a second tensor that needs a gradient, and only the first one's is added up over "
                "ranks; detach it, or leave this block whole."
            )

    def _check_alike(self, whole: Tensor) -> None:
        """On all ranks or on none, so that nobody waits for one that has stopped."""
        told = torch.zeros(3, dtype=torch.int64, device=whole.device)
        told[0], told[1] = whole.shape[1], whole.numel()
        told[2] = whole.detach().double().sum().view(torch.int64)
        rows = told.new_empty(self.place.ranks, 3)
        dist.all_gather_into_tensor(rows.view(-1), told, group=self.place.group)
        if (rows != told).any():
            raise OptionError(
                "Ranks got different inputs; give all of one group the same batch, the same weights before the "
                "blocks and the same random state."
            )
        if whole.shape[1] % self.place.ranks:
            raise OptionError(
                f"{self.place.ranks} ranks do not divide a sequence of {whole.shape[1]} positions; pad it."
            )


class _own_draws(ExitStack):  # noqa: N801
    """Random numbers of this rank's own, after which all ranks' generators are alike again."""

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__()
        seed = int(torch.randint(2**62, ()))
        self.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        torch.manual_seed(seed + rank)


class _Recomputing(TorchFunctionMode):
    """Attention that keeps its inputs alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return checkpoint(func, *args, use_reentrant=False, **options)
        return func(*args, **options)
