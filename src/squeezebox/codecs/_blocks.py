"""Variable size within an error bound, a width for each block: `blocks`, made for devices, and `planes`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs._codec import (
    NO_HINTS,
    Codec,
    Hints,
    Packed,
    buffer_for,
    flatten,
    make_packed,
    require_bound,
    require_float,
    require_own,
    require_scale,
    restore,
)
from squeezebox.codecs._reference import _planes
from squeezebox.codecs._reference._blocks import BLOCK, COUNTERS, UNIT, block_count, is_sound
from squeezebox.schema import FormatError, OptionError

_LARGEST = 1e38  # of a bound, so that a step is finite


class Arena:
    """Memory that blocks are put into one after another, sizes and all on the device.

    Args:
        nbytes: of the memory.
        device: where it lies.
        spill_bytes: of pinned memory of the host, for blocks that find no room there.
        tensors: how many may be packed until :meth:`reset`; the last slot is shared by all beyond.

    Raises:
        OptionError: one of both memories would be larger than a table's numbers can say.
    """

    MOST_BYTES = 4 * UNIT << 31  # a table's int32 counts units of words

    def __init__(self, nbytes: int, device: torch.device, spill_bytes: int = 0, tensors: int = 1) -> None:
        if max(nbytes, spill_bytes) > self.MOST_BYTES:
            raise OptionError(
                f"an arena of {nbytes} bytes, {spill_bytes} of them elsewhere, has more than the "
                f"{self.MOST_BYTES} bytes in which blocks find their places; use two."
            )
        self.words = torch.empty(-(-nbytes // 4), dtype=torch.int32, device=device)
        pinned = spill_bytes > 0 and device.type == "cuda"
        self.spill = torch.empty(-(-spill_bytes // 4), dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.counters = torch.zeros(COUNTERS + tensors, dtype=torch.int64, device=device)
        self._tensors = 0
        self._witness = torch.empty(int(pinned), dtype=torch.int32, device=device)
        self._streams: set[torch.cuda.Stream] = set()

    @property
    def nbytes(self) -> int:
        """Of the memory on the device."""
        return self.words.nbytes

    def next_slot(self) -> int:
        """The slot of one more tensor."""
        self._tensors += 1
        return min(self._tensors, self.counters.numel() - COUNTERS) - 1

    def note_stream(self) -> None:
        """Have neither memory go to others, once it is let go, before the current stream is done with it.

        Torch's cache of pinned memory knows the streams that a block was copied on and nothing of kernels, so
        one number of it is copied.
        """
        if self.words.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.words.device)
        if stream not in self._streams:
            self._streams.add(stream)
            self.words.record_stream(stream)
            self.counters.record_stream(stream)
            self._witness.copy_(self.spill[: self._witness.numel()], non_blocking=True)

    def reset(self) -> None:
        """Forget all blocks; what was packed before can no longer be unpacked. Waits for nothing."""
        self.counters.zero_()
        self._tensors = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaUse:
    """What an arena's counters say.

    ``nbytes``: all that blocks took or would have taken; ``spilled_bytes``: of these, what found no room on
    the device; ``lost``: blocks that found none in the host's memory either and come back as NaN;
    ``tensors``: bytes slot by slot.
    """

    nbytes: int
    spilled_bytes: int
    lost: int
    tensors: tuple[int, ...]

    @staticmethod
    def of(counters: Tensor) -> ArenaUse:
        """From the counters, wherever they are; waits for a device."""
        words, spilled, lost, *tensors = counters.tolist()
        return ArenaUse(
            nbytes=4 * words,
            spilled_bytes=4 * spilled,
            lost=lost,
            tensors=tuple(4 * each for each in tensors),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks(Codec):
    """``|x - unpack(pack(x, bound))| <= bound`` for every element, zeros and signs kept.

    1024 elements in memory order share a width, and zeros cost one bit where there are many. What no code
    holds within the bound, NaN and infinity among it, is kept exactly, a block at a time. One kernel each
    way; with an arena nothing waits for the device.
    """

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        """Pack; a scale for all dtypes but float64.

        With an arena the blocks go there and stay there, and where it is full they are lost and counted;
        nothing is checked that would wait for the device, and the bound given back is in units of the scale.
        """
        require_float(self.name, tensor)
        scale, inner, dither, arena = hints.scale, hints.inner, hints.dither, hints.arena
        limit = require_bound(self.name, bound)
        flat = flatten(tensor)
        if scale is not None and arena is None:
            require_scale(self.name, scale, inner)
            scale = scale.detach().clone()  # the packed object's own
        if arena is not None:
            arena.note_stream()
        own = arena or Arena(_most_bytes(flat), flat.device)
        options = (min(limit, _LARGEST), scale, inner, dither)
        places = (own.words, own.spill, own.counters, own.next_slot())
        table = torch.ops.squeezebox.pack_blocks(flat, *options, *places)
        words = own.words if arena is not None else own.words[: int(own.counters[0])].clone()
        payload = (words, own.spill, table) if scale is None else (words, own.spill, table, scale)
        reached = limit if scale is None or arena is not None else limit * float(scale.max())
        meta = {"inner": inner, "dither": dither, "unit": limit, "slot": places[-1]}
        return make_packed(self, tensor, reached, payload, meta)

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        words, spill, table, *rest = packed.payload
        meta = packed.meta
        limit, inner, dither = float(meta["unit"]), int(meta["inner"]), int(meta["dither"])
        options = (min(limit, _LARGEST), rest[0] if rest else None, inner, dither)
        torch.ops.squeezebox.unpack_blocks(words, spill, table, *options, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        found = [(part.dtype, part.numel()) for part in packed.payload]
        rows = 2 * block_count(packed.numel)
        wanted = [(torch.int32, 0), (torch.int32, rows)]
        if len(found) not in (3, 4) or found[0][0] != torch.int32 or found[1:3] != wanted:
            raise FormatError(f"packed by 'blocks': no table of {rows} numbers in {found}; damaged.")
        if len(found) == 4 and (found[3][0] != torch.float32 or found[3][1] == 0):
            raise FormatError(f"packed by 'blocks': the last part is no scale, {found}; damaged.")
        if not is_sound(packed.payload[0], packed.payload[2], packed.dtype.itemsize):
            raise FormatError("packed by 'blocks': blocks beyond the arena's end, or too full; damaged.")


def _most_bytes(flat: Tensor) -> int:
    """Of all blocks if none can be packed."""
    return block_count(flat.numel()) * BLOCK * flat.element_size()


@dataclass(frozen=True, kw_only=True, slots=True)
class Planes(Codec):
    """``|x - unpack(pack(x, bound))| <= bound`` for every element, without entropy coding.

    256 elements in memory order share a number of bits, which their range needs. What no code below 2^11
    holds within the bound, NaN and infinity among it, is kept exactly, 256 elements at a time. Zeros stay
    zero. With ``keep_sign`` no other value becomes zero or changes its sign.
    """

    keep_sign: bool

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        require_float(self.name, tensor)
        scale, inner = hints.scale, hints.inner
        limit = require_bound(self.name, bound)
        flat = flatten(tensor)
        reached = limit
        if scale is not None:
            reached *= require_scale(self.name, scale, inner)
            scale = scale.detach().clone()  # the packed object's own
        heads, data = torch.ops.squeezebox.pack_planes(flat, limit, self.keep_sign, scale, inner)
        payload = (heads, data) if scale is None else (heads, data, scale)
        return make_packed(self, tensor, reached, payload, {"inner": inner, "unit": limit})

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        heads, data, *rest = packed.payload
        unit, inner = float(packed.meta["unit"]), int(packed.meta["inner"])
        scale = rest[0] if rest else None
        torch.ops.squeezebox.unpack_planes(heads, data, unit, self.keep_sign, scale, inner, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        found = [(part.dtype, part.numel()) for part in packed.payload]
        rows = -(-packed.numel // _planes.BLOCK)
        if len(found) not in (2, 3) or found[0] != (torch.int16, rows) or found[1][0] != torch.uint8:
            raise FormatError(f"packed by '{self.name}': no {rows} heads and bytes in {found}; damaged.")
        if len(found) == 3 and (found[2][0] != torch.float32 or found[2][1] == 0):
            raise FormatError(f"packed by '{self.name}': the last part is no scale, {found}; damaged.")
        heads = packed.payload[0]
        widths = heads.int() & _planes.RAW
        size = int(_planes.data_bytes(heads, packed.dtype.itemsize).sum())
        if bool(((widths > 12) & (widths < _planes.RAW)).any()) or size != found[1][1]:
            raise FormatError(f"packed by '{self.name}': its blocks are not {found[1][1]} bytes; damaged.")
