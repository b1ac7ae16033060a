"""Transformer blocks changed in place, so that several ranks share their activations and products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

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

    Between products a rank has its own positions, with all features. Within them it has all positions, with
    its own heads or hidden units. A block keeps 1/W of what it keeps on one rank, and of the attention its
    inputs alone (sequence parallelism with selective recomputation, arXiv:2205.05198). All ranks give
    the same batch and have the same random state. The blocks' input and output are whole. Weights become
    those of the group's first rank. Make the optimizer afterwards.

    Args:
        blocks: in the order in which the model calls them, each with (B, S, ...) as the first tensor among
            its arguments and its outputs.
        columns: names, within a block, of the ``nn.Linear`` whose outputs are split: queries, keys, values
            and the MLP's first ones. With {name: n}, each of n equal parts of its outputs is split, such as
            3 for one layer of queries, keys and values. A module that holds such a layer gets all
            positions, and must take the number of heads from the layer's output.
        rows: names of the ``nn.Linear`` that follow, whose inputs are split.
        core: what backward computes again: calls of this function, or a module within each block; or None.
        group: the ranks; all of them if not given.

    Returns:
        The blocks. Split weights are DTensors.

    Raises:
        OptionError: before anything is changed, if a name is of no ``nn.Linear``, or the ranks do not divide
            its size. In forward, on all ranks, if their inputs differ or they do not divide S, or a block has
            another parameter than before.
    """
    place = Place.of(group)
    parts = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, 1)
    _check(blocks, parts, rows, core, place.ranks)
    stack = _Stack(place)
    mesh = _mesh(group, next(blocks[0].parameters()).device.type)
    for block in blocks:
        shared = Shared(place)
        for name, count in parts.items():
            layer = _columns(block.get_submodule(name), count, mesh, shared, gathers="." not in name)
            block.set_submodule(name, layer)
        for name in rows:
            block.set_submodule(name, _rows(block.get_submodule(name), mesh, place))
        if core not in (ATTENTION, None):
            block.set_submodule(core, _recomputed(block.get_submodule(core)))
        for name in {name.rpartition(".")[0] for name in parts} - {""}:
            _gather_into(block.get_submodule(name), shared)
        if core == ATTENTION:
            for module in _callers(block, parts):
                _during(module, lambda *_: _Recomputing() if torch.is_grad_enabled() else nullcontext())
        stack.enclose(block, shared)
    stack.open_and_close(blocks[0], blocks[-1])
    _add_gradients(blocks, place)
    return blocks


def _check(blocks: Any, parts: Mapping[str, int], rows: Sequence[str], core: str | None, ranks: int) -> None:
    if not blocks or not parts or not rows:
        raise OptionError(
            "There is nothing to split: give blocks, and names of columns and rows within a block."
        )
    owners = [each for block in blocks for module in block.modules() for each in module._parameters.values()]
    for number, block in enumerate(blocks):
        modules = dict(block.named_modules())
        for name in [*parts, *rows]:
            layer = modules.get(name)
            if type(layer) is not nn.Linear:
                found = "has no such module" if layer is None else f"has {type(layer).__name__} there"
                raise OptionError(
                    f"{name!r} is to be an nn.Linear, but block {number} {found}; give other names."
                )
            if sum(each is layer.weight for each in owners) > 1:
                raise OptionError(
                    f"{name!r} of block {number} shares its weight with another layer; give it its own."
                )
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


def _mesh(group: dist.ProcessGroup | None, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(cast("dist.ProcessGroup", group or dist.group.WORLD), device)


def _columns(layer: Any, parts: int, mesh: Any, shared: Shared, *, gathers: bool) -> Columns:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    place = Shard(0) if parts == 1 else _StridedShard(0, split_factor=parts)
    bias = None if layer.bias is None else _split(layer.bias, mesh, place)
    return Columns(_split(layer.weight, mesh, place), bias, shared, gathers=gathers)


def _rows(layer: Any, mesh: Any, place: Place) -> Rows:
    from torch.distributed.tensor import Shard

    return Rows(_split(layer.weight, mesh, Shard(1)), layer.bias, place)


def _split(weight: nn.Parameter, mesh: Any, place: Any) -> nn.Parameter:
    from torch.distributed.tensor import distribute_tensor

    return nn.Parameter(distribute_tensor(weight.detach(), mesh, [place]), requires_grad=weight.requires_grad)


def _recomputed(module: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)


def _add_gradients(blocks: Iterable[nn.Module], place: Place) -> None:
    """Of what all ranks have alike, each has an addend of the gradient: its positions', or its heads'.

    What is unfrozen later is added up from then on, and what is put there later is refused.
    """
    from torch.distributed.tensor import DTensor

    parameters = [each for block in blocks for each in block.parameters() if not isinstance(each, DTensor)]
    known = {id(each): each for each in parameters}
    silent = dict(known)

    def add(grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=place.group)
        return total

    def listen(block: nn.Module, _: object = None) -> None:
        for name, each in block.named_parameters():
            if isinstance(each, DTensor) or not each.requires_grad:
                continue
            if id(each) not in known:
                raise OptionError(
                    f"'{name}' was put into a block after split_sequence_(), and its gradient would be of "
                    "one rank's positions alone. Change modules before, and load without assign=True."
                )
            if silent.pop(id(each), None) is not None:
                each.register_hook(add)

    for parameter in known.values():
        dist.broadcast(parameter.detach(), group=place.group, group_src=0)
    for block in blocks:
        listen(block)
        block.register_forward_pre_hook(listen)


def _gather_into(module: nn.Module, shared: Shared) -> None:
    """The module gets all positions of its input."""

    def before(_: nn.Module, args: Any, options: Any) -> Any:
        return _with_first(args, options, lambda part: shared.gather(part, hold=False))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda *_: shared.clear(), always_call=True)


def _callers(block: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Modules of the block that call its attention: checkpointing may leave the block's own hooks out."""
    if all("." in name for name in names):
        return [block.get_submodule(name) for name in dict.fromkeys(name.partition(".")[0] for name in names)]
    return [block]


def _during(module: nn.Module, enter: Callable[[Any, Any], AbstractContextManager[Any]]) -> None:
    """Each call of the module is within what ``enter`` gives for its arguments."""
    stack: list[ExitStack] = []

    def before(_: nn.Module, args: Any, options: Any) -> None:
        entered = ExitStack()
        entered.enter_context(enter(args, options))
        stack.append(entered)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda *_: stack.pop().close() if stack else None, always_call=True)


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
    lengths: set[int] = field(default_factory=set)  # that a part ever had

    def enclose(self, block: nn.Module, shared: Shared) -> None:
        """Check what comes in, draw what is this rank's own, and let go of what was gathered."""

        def enter(args: Any, options: Any) -> AbstractContextManager[Any]:
            x, *others = _tensors(args, options)
            self._check_block(x, others)
            return _own_draws(x.device, self.place.rank) if block.training else nullcontext()

        _during(block, enter)
        block.register_forward_hook(lambda *_: shared.clear(), always_call=True)

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
                f"A block got {x.shape[1]} positions, and no rank ever had as many; call all blocks in "
                "the order in which they were given."
            )
        if torch.is_grad_enabled() and any(each.requires_grad for each in others):
            raise OptionError(
                "A block got a second tensor that needs a gradient, and only the first one's is added up "
                "over ranks; detach it, or leave this block whole."
            )

    def _check_alike(self, whole: Tensor) -> None:
        """On all ranks or on none, so that nobody waits for one that has stopped."""
        if whole.dim() < 3:
            raise OptionError(
                f"The first tensor of a block is {tuple(whole.shape)}; it is to be (B, S, ...)."
            )
        sums = whole.detach().flatten(2).sum(2, dtype=torch.float64).flatten()
        sums *= torch.arange(1, len(sums) + 1, device=sums.device)  # their order tells
        told = torch.zeros(3, dtype=torch.int64, device=whole.device)
        told[0], told[1], told[2] = whole.shape[1], whole.numel(), sums.sum().view(torch.int64)
        rows = told.new_empty(self.place.ranks, 3)
        dist.all_gather(list(rows), told, group=self.place.group)
        if (rows != told).any():
            raise OptionError(
                "Ranks got different inputs; give all of one group the same batch, the same weights before "
                "the blocks and the same random state."
            )
        if whole.shape[1] % self.place.ranks:
            raise OptionError(
                f"{self.place.ranks} ranks do not divide a sequence of {whole.shape[1]} positions; pad it."
            )


@contextmanager
def _own_draws(device: torch.device, rank: int) -> Iterator[None]:
    """Random numbers of this rank's own, after which all ranks' generators are alike again."""
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + rank)
        yield


class _Recomputing(TorchFunctionMode):
    """Attention that keeps its inputs alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return checkpoint(func, *args, use_reentrant=False, **options)
        return func(*args, **options)
