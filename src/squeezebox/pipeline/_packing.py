"""What crosses a boundary in fewer bytes: packed within a bound by the sender, unpacked by the receiver.

Messages are those of ``codecs.to_message``. Receives have room for a whole tensor and are posted ahead: gloo
takes a shorter message.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from squeezebox import codecs
from squeezebox.pipeline._wire import Form, Peer, Receiver, Sender, Traffic, Turns
from squeezebox.schema import OptionError

CODECS = (
    "entropy",
    "entropy-sign",
    "zero8",
    "zero4",
    "minmax8",
    "minmax4",
    "bf16",
    "fp8-e4m3",
    "fp8-e5m2",
)
_COUNT = 8  # bytes of the count
_EVERY = 16  # tensors of which one is unpacked again by the sender, to measure the noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """How tensors are packed on their way between the stages of two ranks.

    Every element arrives within the error times the root mean square of its tensor, which the sender takes
    for each message; zeros arrive as zeros. (With feedback, this is said of the sum that is packed.)

    Packed are floating-point activations that have a gradient, and these gradients. All else goes as it is:
    integers, booleans, masks, what evaluation sends, weights; also a tensor with NaN or infinity, and one
    that the codec cannot hold within its bound, or in fewer bytes.

    Activations are packed by themselves. AQ-SGD (arXiv:2206.01299) sends their changes since the sample was
    last seen instead, and needs memory for each sample of the data; that is not done here. Nothing is random.

    Args:
        activation_error: bound of what goes forward, over its root mean square; None sends it as it is.
        gradient_error: the same of what comes back.
        feedback: the sender adds what packing a gradient lost to the next microbatch's. All that is sent then
            sums up to the true gradients, less one residual; it takes a tensor of memory for each boundary.
            Microbatches differ, so each one's own gradient gets noisier by it.
        codec: one of ``squeezebox.codecs``. Of the fixed-size ones, most need an error of 0.1 or more.

    Raises:
        OptionError: an error that is not positive and finite, or no such codec.
    """

    activation_error: float | None = 1e-2
    gradient_error: float | None = 1e-2
    feedback: bool = True
    codec: str = "entropy"

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name in ("activation_error", "gradient_error"):
            error = getattr(self, name)
            if error is not None and not (math.isfinite(error) and error > 0):
                raise OptionError(
                    f"{name}={error!r}: it is a share of a tensor's root mean square, positive and finite. "
                    "Take about 1e-2, or None to send that way as it is."
                )
        if self.codec not in CODECS:
            raise OptionError(f"no codec '{self.codec}' for the wire; there are {', '.join(CODECS)}.")

    def error(self, *, back: bool) -> float | None:
        """Of gradients if ``back``, else of activations."""
        return self.gradient_error if back else self.activation_error


class Packer:
    """The tensors of one boundary and direction to bytes; it knows what it has left out.

    A tensor goes by its place in its message: what one has lost, the next one there gets on top.
    """

    def __init__(self, error: float, codec: str, feedback: bool) -> None:
        self._error, self._codec, self._feedback = error, codecs.get(codec), feedback
        self._lags: dict[int, int] = {}  # chosen at the first tensor
        self._residuals: dict[int, Tensor] = {}
        self._count = 0
        self._squares = [0.0, 0.0]  # of errors, and of what they are errors of
        self.left_whole = 0

    @property
    def noise(self) -> float:
        """Sum of squared errors over that of squares, of what was measured."""
        return self._squares[0] / self._squares[1] if self._squares[1] else 0.0

    def state(self) -> dict[str, Any]:
        """What decides on the bytes to come, in addition to the tensors."""
        return {"residuals": dict(self._residuals), "lags": dict(self._lags)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken; from nothing, begin afresh."""
        self._residuals = dict(state.get("residuals", {})) if self._feedback else {}
        self._lags = dict(state.get("lags", {}))

    def pack(self, place: int, tensor: Tensor) -> Tensor:
        """A tensor's message."""
        owed = self._residuals.get(place)
        wanted = (tensor if owed is None else tensor + owed).detach().contiguous()
        found = codecs.pack_share(self._codec, wanted, self._error, self._lags.get(place, -1))
        if found is not None:
            packed, data = found
            self._lags[place] = int(packed.meta.get("lag", 0))
            self._account(place, wanted, packed)
            return codecs.to_message(data, wanted)
        self.left_whole += 1
        if not math.isfinite(codecs.root_mean_square(wanted)):  # what is owed stays owed
            return codecs.to_message(b"", tensor.detach().contiguous())
        self._residuals.pop(place, None)
        return codecs.to_message(b"", wanted)

    def _account(self, place: int, wanted: Tensor, packed: codecs.Packed) -> None:
        """Keep what packing lost, and now and then measure it."""
        is_due = self._count % _EVERY == 0
        self._count += 1
        if not (self._feedback or is_due):
            return
        lost = wanted - self._codec.unpack(packed)
        if self._feedback:
            self._residuals[place] = lost
        if is_due:
            for which, each in enumerate((lost, wanted)):
                self._squares[which] += codecs.root_mean_square(each) ** 2 * each.numel()


class PackedSender:
    """A sender of packed tensors."""

    def __init__(self, sender: Sender, packer: Packer, forms: Sequence[Form]) -> None:
        self._sender, self._packer = sender, packer
        self._is_packed = [is_packed(form) for form in forms]
        self._plain_bytes = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send them as one message."""
        self._plain_bytes += sum(tensor.nbytes for tensor in tensors)
        parts = enumerate(zip(tensors, self._is_packed, strict=True))
        self._sender.send(
            [self._packer.pack(place, tensor) if packed else tensor for place, (tensor, packed) in parts]
        )

    def settle(self, keep: int = 0) -> None:
        """Wait until all has arrived but for the last few messages."""
        self._sender.settle(keep)

    def traffic(self, boundary: int, *, back: bool) -> Traffic:
        """What has been sent."""
        sent, packer = self._sender.traffic(boundary, back=back), self._packer
        return dataclasses.replace(
            sent, plain_bytes=self._plain_bytes, noise=packer.noise, left_whole=packer.left_whole
        )


class PackedReceiver:
    """The other end: messages are received ahead into a ring of buffers, and unpacked into tensors."""

    def __init__(self, peer: Peer, forms: Sequence[Form], slots: int, turns: Turns) -> None:
        self._forms, self._device = forms, peer.device
        self._free: list[list[Tensor]] = []
        messages = [_message_form(form) if is_packed(form) else form for form in forms]
        self._receiver = Receiver(peer, messages, slots, turns)

    def expect(self, messages: int) -> None:
        """``messages`` more will come."""
        self._receiver.expect(messages)

    def receive(self) -> list[Tensor]:
        """The next message's tensors; their buffers are the caller's until :meth:`release`."""
        messages = self._receiver.receive()
        tensors = self._free.pop() if self._free else [form.empty(self._device) for form in self._forms]
        for message, tensor, form in zip(messages, tensors, self._forms, strict=True):
            if is_packed(form):
                codecs.from_message(message, tensor)
            else:
                tensor.copy_(message)
        self._receiver.release(messages)
        return tensors

    def release(self, buffers: list[Tensor]) -> None:
        """Give buffers back, for a later message."""
        self._free.append(buffers)


def is_packed(form: Form) -> bool:
    """Whether such a tensor may arrive with an error: it has a gradient, or is one."""
    return form.requires_grad and form.dtype.is_floating_point


def _message_form(form: Form) -> Form:
    nbytes = math.prod(form.shape) * form.dtype.itemsize
    return Form((_COUNT + nbytes,), torch.uint8, requires_grad=False)
