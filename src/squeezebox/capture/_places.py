"""Packing into a place of the session's arena."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from squeezebox import codecs
from squeezebox.memory import Reserve, Room


def pack_into(
    reserve: Reserve,
    key: str,
    owner: object,
    codec: codecs.Codec,
    tensor: torch.Tensor,
    bound: float | None,
    hints: codecs.Hints,
    **options: Any,
) -> codecs.Packed:
    """As ``codec.pack``, with all parts in the arena where they fit.

    What a codec makes that takes no room is copied, and is there twice for that moment. The place is free
    again when nobody refers to the parts; they live as long as ``owner``.
    """
    room = reserve.claim(key)
    if room is not None:
        hints = replace(hints, room=room.free)
    packed = codec.pack(tensor, bound, hints, **options)
    placed = None if room is None else _placed(packed, room)
    reserve.note(key, [part.nbytes for part in packed.payload], owner, placed=placed is not None)
    return placed or packed


def _placed(packed: codecs.Packed, room: Room) -> codecs.Packed | None:
    parts = [room.put(part) for part in packed.payload]
    kept = tuple(part for part in parts if part is not None)
    return replace(packed, payload=kept) if len(kept) == len(parts) else None
