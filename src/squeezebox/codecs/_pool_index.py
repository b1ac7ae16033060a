"""`pool-index`: where inside its window each maximum of a 2-D max-pool was found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs._codec import Codec, expect_parts, make_packed, require_own
from squeezebox.codecs._hints import NO_HINTS, Hints
from squeezebox.codecs._layout import buffer_for, flatten, restore
from squeezebox.codecs._packed import Packed
from squeezebox.schema import CodecError, FormatError, OptionError

Pair = int | tuple[int, ...] | list[int]


def _pair(name: str, value: Pair) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) == 1:
        pair = (pair[0], pair[0])
    if len(pair) != 2:
        raise OptionError(f"codec 'pool-index' needs {name} as one or two integers, got {value!r}.")
    return int(pair[0]), int(pair[1])


def _bits(places: int) -> int:
    return 2 if places <= 4 else 4 if places <= 16 else 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolIndex(Codec):
    """Exact for the int64 indices of ``max_pool2d``: 2, 4 or 8 bits for windows of up to 4, 16, 256 places.

    Verified while packing: CodecError where an index lies outside its window.
    """

    def pack(
        self,
        tensor: Tensor,
        bound: float | None = None,
        hints: Hints = NO_HINTS,
        *,
        kernel_size: Pair = 2,
        stride: Pair | None = None,
        padding: Pair = 0,
        dilation: Pair = 1,
        input_shape: tuple[int, ...] | torch.Size | None = None,
        trusted: bool = False,
    ) -> Packed:
        """Pack max-pool indices; the options are those of the pooling, ``input_shape`` its input's.

        ``trusted``: the options are known to belong to the indices, and nothing waits for a device.
        """
        if tensor.dtype != torch.int64 or tensor.dim() not in (3, 4) or input_shape is None:
            raise CodecError(
                f"codec 'pool-index' packs the int64 indices of a 2-D max-pool with input_shape=, got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}; use 'narrow'."
            )
        window = {"width": int(input_shape[-1])}
        options = (("kernel", kernel_size), ("stride", stride or kernel_size))
        for name, value in (*options, ("padding", padding), ("dilation", dilation)):
            window[name + "_y"], window[name + "_x"] = _pair(name, value)
        packed = make_packed(self, tensor, 0.0, (), window)
        codes = _codes(packed, flatten(tensor), _places(packed), trusted)
        return make_packed(self, tensor, 0.0, (codes,), window)

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        if packed.numel == 0:  # a plane may be large all the same
            return restore(flat, packed)
        places, (base, inner) = _places(packed), _positions(packed)
        bits = _bits(len(places))
        codes = torch.ops.squeezebox.unpack_codes(packed.payload[0], bits, packed.numel)
        # damaged codes may name places beyond the last: they must stay inside the table
        places = torch.nn.functional.pad(places, (0, (1 << bits) - len(places)))
        torch.ops.squeezebox.unpack_offsets(codes, base, places, inner, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        places = int(packed.meta["kernel_y"]) * int(packed.meta["kernel_x"])
        if len(packed.shape) not in (3, 4) or places > 256:
            raise FormatError("packed by 'pool-index': not the indices of a 2-D max-pool; damaged.")
        expect_parts(packed, (torch.uint8, -(-packed.numel // 256) * 32 * _bits(places)))


def _places(packed: Packed) -> Tensor:
    """Distance in the input plane from the window's corner to each of its places."""
    meta = {name: int(value) for name, value in packed.meta.items()}
    if not 1 <= meta["kernel_y"] * meta["kernel_x"] <= 256:
        raise CodecError(
            f"codec 'pool-index' holds windows of 1 to 256 places, not {meta['kernel_y']} x "
            f"{meta['kernel_x']}; use 'narrow'."
        )
    down = torch.arange(meta["kernel_y"], device=packed.device) * (meta["dilation_y"] * meta["width"])
    across = torch.arange(meta["kernel_x"], device=packed.device) * meta["dilation_x"]
    return (down[:, None] + across).reshape(-1)


def _positions(packed: Packed) -> tuple[Tensor, int]:
    """Index of each window's corner in the order the planes are stored, and the elements they share it."""
    meta = {name: int(value) for name, value in packed.meta.items()}
    rows, columns = packed.shape[-2:]
    top = torch.arange(rows, device=packed.device) * meta["stride_y"] - meta["padding_y"]
    left = torch.arange(columns, device=packed.device) * meta["stride_x"] - meta["padding_x"]
    base = (top[:, None] * meta["width"] + left).reshape(-1)
    channels = packed.shape[-3]
    last = channels > 1 and rows * columns > 1 and packed.stride[-3] == 1
    return base, channels if last else 1


def _codes(packed: Packed, flat: Tensor, places: Tensor, trusted: bool) -> Tensor:
    """Packed codes of indices, row-major or channels-last; verified unless ``trusted``."""
    base, inner = _positions(packed)
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=flat.device)
    codes, found = torch.ops.squeezebox.pack_offsets(flat, base, places, inner)
    if not trusted and not bool(found):
        raise CodecError(
            "codec 'pool-index': an index lies outside its pooling window, so the window options do not "
            "belong to these indices (or their memory order is neither row-major nor channels-last); "
            "use 'narrow'."
        )
    packed_codes: Tensor = torch.ops.squeezebox.pack_codes(codes, _bits(len(places)))
    return packed_codes
