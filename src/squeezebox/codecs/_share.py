"""A tensor as one message, packed within a share of its root mean square: what two ranks hand to each other.

A message is a count (int64) and that number of bytes of ``dumps``; the count is 0 where the tensor itself
follows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from squeezebox.codecs._codec import Codec
from squeezebox.codecs._hints import Hints
from squeezebox.codecs._packed import Packed
from squeezebox.codecs._registry import get
from squeezebox.codecs._wire import dumps, loads
from squeezebox.schema import CodecError

COUNT = 8  # bytes of the count


def root_mean_square(tensor: Tensor) -> float:
    """Of all elements, summed in float64; NaN or infinite where one of them is, 0 of an empty tensor."""
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    return norm / math.sqrt(max(tensor.numel(), 1))


def pack_share(codec: Codec, tensor: Tensor, share: float, lag: int = -1) -> tuple[Packed, bytes] | None:
    """Pack within ``share`` times the root mean square; the packed tensor and its bytes.

    None where the tensor has NaN or infinity, where a codec of fixed size cannot hold it within that bound,
    or where it would take no fewer bytes than the tensor.
    """
    bound = share * root_mean_square(tensor)
    if not math.isfinite(bound):
        return None
    try:
        packed = codec.pack(tensor, bound, Hints(lag=lag))
    except CodecError:
        if not codec.fixed_size:
            raise
        return None
    data = dumps(packed)
    return (packed, data) if len(data) < tensor.nbytes else None


def to_message(data: bytes, tensor: Tensor) -> Tensor:
    """The message of packed bytes, or of the contiguous tensor if there are none; flat, uint8."""
    message = torch.empty(COUNT + (len(data) or tensor.nbytes), dtype=torch.uint8, device="cpu")
    message[:COUNT].view(torch.int64).fill_(len(data))
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else tensor.view(-1).view(torch.uint8)
    message[COUNT:].copy_(body)
    return message


def from_message(message: Tensor, out: Tensor) -> None:
    """The tensor of a message, into a contiguous one; bytes after it are not read.

    Raises:
        FormatError: the message is damaged.
    """
    nbytes = int(message[:COUNT].view(torch.int64))
    flat = out.view(-1)
    if not nbytes:
        flat.copy_(message[COUNT : COUNT + flat.nbytes].view(out.dtype))
        return
    packed = loads(message[COUNT : COUNT + nbytes].numpy().tobytes(), max_bytes=flat.nbytes)
    get(packed.codec).unpack(packed, flat)
