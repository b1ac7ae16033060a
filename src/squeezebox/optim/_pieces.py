"""A parameter's update in pieces, each as large as a buffer of the file that its state is in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from squeezebox.memory import CHUNK_BYTES, StoredTensor
from squeezebox.optim._groups import step_apart
from squeezebox.optim._homes import CodedTensor, Homes, pack, unpacked
from squeezebox.optim._products import can_be_cut

_ALIGNED = 1 << 10  # elements
PIECE_BYTES = 1 << 20  # of packed state: what its update takes stays in the cache, and few calls are made
MakeState = Callable[[str], torch.Tensor]  # of the parameter's shape, for what the first update makes


def is_divisible(parameter: torch.Tensor, state: Mapping[str, Any], *, packed: bool = False) -> bool:
    """Whether parameter, gradient and state are ranges of memory in one order, to be cut alike.

    Where the state is ``packed``, no two ways to round are the same anyway.
    """
    gradient = parameter.grad
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    alike = [value for value in (gradient, *tensors) if value is not None and value.shape == parameter.shape]
    return (
        (packed or can_be_cut(parameter))
        and parameter.numel() > 1
        and all(each.layout is torch.strided for each in (parameter, *alike))
        and all(each.dtype == parameter.dtype and _strides(each) == _strides(parameter) for each in alike)
        and _is_range(parameter)
    )


def _strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """With sizes; along a dimension of size 1 there is no step, whatever the tensor says."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, length) for stride, length in pairs if length != 1]


def _is_range(tensor: torch.Tensor) -> bool:
    size = 1
    for stride, length in sorted(_strides(tensor)):
        if stride != size:
            return False
        size *= length
    return True


def update_in_pieces(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, group: dict[str, Any], make: MakeState
) -> None:
    """As a step of all of it to the bit, for an optimizer that treats every element by itself.

    Gradient and state may be in a file: then a piece is worked in the file's own buffer.
    """
    gradient, state = parameter.grad, optimizer.state.get(parameter, {})
    assert gradient is not None
    whole = {key: value for key, value in state.items() if _is_whole(value, parameter)}
    others = {key: value for key, value in state.items() if key not in whole}
    numel, size = parameter.numel(), CHUNK_BYTES // parameter.element_size()
    left: dict[str, Any] = {}
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        with contextlib.ExitStack() as lent:
            piece = lent.enter_context(_lent(parameter.detach(), start, stop))
            piece.grad = lent.enter_context(_lent(gradient, start, stop, changed=False))
            if state:
                own = {key: lent.enter_context(_lent(value, start, stop)) for key, value in whole.items()}
                own = {key: _copied(value) for key, value in others.items()} | own
                left = step_apart(optimizer, piece, group, own)
                continue
            for begin, left in _first(optimizer, piece, group):
                for key in [key for key, value in left.items() if _is_flat(value)]:
                    if key not in whole:
                        whole[key] = make(key)
                    with _lent(whole[key], start, stop, filled=begin > 0) as room:
                        room[begin : begin + len(left[key])] = left[key]
                    left[key] = whole[key]  # the quarter's own is gone before the next one's is made
    if left:
        _settle(optimizer, parameter, left, others, whole)


def update_packed(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, group: dict[str, Any], homes: Homes
) -> None:
    """The same for state in codes, which is unpacked for a piece and packed again; its error is sampled."""
    gradient, state = parameter.grad, optimizer.state.get(parameter, {})
    assert gradient is not None
    packed = {key: value for key, value in state.items() if isinstance(value, CodedTensor)}
    others = {key: value for key, value in state.items() if key not in packed}
    numel, sample = parameter.numel(), homes.sample(parameter)
    chunk, part = (nbytes // parameter.element_size() for nbytes in (CHUNK_BYTES, PIECE_BYTES))
    left: dict[str, Any] = {}
    rooms: dict[str, torch.Tensor] = {}

    def update(piece: torch.Tensor, begin: int) -> dict[str, torch.Tensor]:
        nonlocal left
        own: dict[str, Any] = {}
        if state:
            own = unpacked(packed, begin, begin + len(piece), piece.dtype, rooms)
            own = {key: _copied(value) for key, value in others.items()} | own
        left = step_apart(optimizer, piece, group, own)
        return {key: left.pop(key) for key, value in [*left.items()] if _is_flat(value)}

    for start in range(0, numel, chunk):
        stop = min(start + chunk, numel)
        lending = _lent(gradient, start, stop, changed=False), _lent(parameter.detach(), start, stop)
        with lending[0] as lent, lending[1] as elements:
            sample.take(start, elements, lent)
            for begin in range(0, stop - start, part):
                piece = elements[begin : begin + part]
                piece.grad = lent[begin : begin + part]
                made = update(piece, start + begin)
                packed = packed or homes.new_codes(parameter, [*made])
                pack(packed, start + begin, made)
                made.clear()  # before the next piece's is there
            sample.see(start, elements)
    homes.noise.add(*sample.compare(optimizer, group))
    if packed or left:
        _settle(optimizer, parameter, {**left, **packed}, others, packed)


def _settle(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    left: dict[str, Any],
    others: dict[str, Any],
    whole: Mapping[str, torch.Tensor],
) -> None:
    """What the last piece left is the parameter's state, with all pieces of what it has whole."""
    kept = optimizer.state[parameter]  # this and its tensors stay the same objects, as in a plain step
    for key, value in left.items():
        if isinstance(others.get(key), torch.Tensor):
            others[key].copy_(value)
        else:
            kept[key] = whole.get(key, value)


def _first(
    optimizer: torch.optim.Optimizer, piece: torch.Tensor, group: dict[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """A piece's first update: where each part of it begins, and the state that it has made.

    Together with that, an update of a quarter takes no more than one of all of it does later.
    """
    part = -(-len(piece) // 4 // _ALIGNED) * _ALIGNED  # no loop ends in another place than for all
    assert piece.grad is not None
    for begin in range(0, len(piece), part):
        own = piece[begin : begin + part]
        own.grad = piece.grad[begin : begin + part]
        yield begin, step_apart(optimizer, own, group, {})


def _is_whole(value: object, parameter: torch.Tensor) -> bool:
    """Whether it has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _is_flat(value: object) -> bool:
    """Whether it is a piece's, and not a number."""
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _lent(
    tensor: torch.Tensor, start: int, stop: int, *, changed: bool = True, filled: bool = True
) -> AbstractContextManager[torch.Tensor]:
    """Some elements of a tensor, in memory or elsewhere, to be worked in place."""
    if isinstance(tensor, StoredTensor):
        return tensor.lent(start, stop, changed=changed, filled=filled)
    return contextlib.nullcontext(_flat(tensor)[start:stop])
