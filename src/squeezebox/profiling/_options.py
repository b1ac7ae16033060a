"""What each saved tensor could be held as: bytes, seconds and noise, measured where it is saved."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from squeezebox import codecs
from squeezebox.memory import Elsewhere
from squeezebox.profiling._cache import as_known, outlived
from squeezebox.profiling._gains import Gain
from squeezebox.profiling._ledgers import now
from squeezebox.profiling._timeline import Life, Timeline, Trace
from squeezebox.profiling._transfer import Transfer, transfer_of
from squeezebox.schema import Action, Moment, Option, Profile, TensorProfile

# Bounds in the unit of the tensor's rms (its deviation, where zeros carry no meaning) that are tried, and how
# many are put between two of them; of a tensor of so few bytes every other one is tried, in planes
# alone: there may be thousands, and what a call of the other codec costs is not paid back.
_TRIED = (1.0, 0.35, 0.12, 0.03)
_BETWEEN = 3
_FEW_BYTES = 1 << 14
_BLOCK_BYTES = 1 << 12  # of 1024 elements, to which the last ones of a tensor are filled up
_STEADY = 0.7  # of the highest bound: in other batches it may be lower
_CHEAP = 0.5  # of the time to pack a tensor: recomputed from a packed one only in less
_MARGIN = 1.05  # other batches, and bounds between the tried ones, pack a little worse

_Tries = list[tuple[Option, float]]  # of one codec, each with the seconds of unpacking


class Row(Protocol):
    """What is read of a saved tensor's row."""

    key: str
    saved_bytes: int
    reads_values: bool
    packed: dict[str, int]

    @property
    def dense(self) -> bool:
        """Whether zeros carry no meaning."""

    @property
    def reads_sign(self) -> bool:
        """Whether backward asks which elements are positive."""

    @property
    def packed_bytes(self) -> int:
        """Bytes held instead."""


class Call(Protocol):
    """What is read of an operator that can be repeated."""

    number: int

    @property
    def state_bytes(self) -> int:
        """Bytes held for repeating it, beyond its inputs."""


class Derivation(Protocol):
    """How a tensor can be recomputed."""

    @property
    def calls(self) -> Sequence[Call]:
        """The operators to repeat."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Keys of the tensors to start from."""


@dataclass(slots=True)
class _Seen:
    """One saved tensor in the profiled step."""

    row: Row
    derive: Callable[[], Derivation | None]
    seconds: float = 0.0  # of packing and unpacking as it was done in this step
    apart: float = 0.0  # of trials, which are no part of packing
    tried: list[_Tries] = field(default_factory=list)  # codec by codec
    decodes: bool = False
    is_derived: bool = False  # read by a gradient with create_graph, which saves it once more


class StepProfiler:
    """Looks on at one step and turns it into a Profile.

    Values are packed at a few bounds around the one in force; what lies between is interpolated, bytes
    and seconds linearly in the bound's logarithm. Plain steps that it sees before :meth:`start` time
    operators once more each. With the ``gains`` of tensors that can be recomputed, they may be so from
    packed ones too. On the CPU tensors may be moved to ``folder``, unless that is in memory itself. Where
    options are ``known`` from another profile, only the tensors' lives are seen.
    """

    def __init__(
        self,
        device: torch.device,
        gains: Mapping[str, Gain] | None = None,
        folder: Elsewhere | None = None,
        known: Mapping[str, tuple[Option, ...]] | None = None,
    ) -> None:
        self._gains, self._known = gains or {}, known or {}
        self._folder = folder
        self._device = device
        self.peak_bytes = 0  # of the step, all trials included
        self._timeline = Timeline(device)
        self._seen: dict[int, _Seen] = {}
        self._numbers: dict[int, int] = {}
        self._trained: dict[str, int] = {}  # name -> number
        self._frozen: dict[str, int] = {}
        self._calls: dict[int, float] = {}  # seconds, the least seen
        self._started = 0.0
        self._arena: codecs.Arena | None = None  # of trials that pack blocks,
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # and what they are unpacked to

    def start(self, largest_bytes: int = 0) -> None:
        """Begin; OptionError if another profiler is active.

        ``largest_bytes``: of the tensors whose blocks go to an arena in other steps.
        """
        if largest_bytes:
            self._arena = codecs.Arena(largest_bytes + _BLOCK_BYTES, self._device)
            self._buffer = torch.empty(largest_bytes, dtype=torch.uint8, device=self._device)
        self._timeline.start()

    def loss(self) -> None:
        """The model has returned and the loss begins."""
        self._timeline.loss()

    def stop(
        self,
        held: int,
        sensitivities: Mapping[str, float],
        final_bytes: int,
        gradients: Sequence[torch.Tensor] = (),
        seconds: float = 0.0,
    ) -> Profile:
        """End, and put together what was seen.

        Args:
            held: bytes that lived before the step and go on living: parameters, state, inputs.
            sensitivities: key -> relative gradient noise for a unit bound; tensors without keep their values.
            final_bytes: held by the optimizer's step on top of ``held``.
            gradients: what the step has left.
            seconds: of a plain step, during which a disk works too.
        """
        trace = self._timeline.stop(held, gradients)
        self.peak_bytes = trace.peak_bytes + self._buffer.nbytes + (self._arena.nbytes if self._arena else 0)
        lives = {seen.row.key: trace.lives[number] for number, seen in self._seen.items()}
        tensors = self._tensors(lives, trace.call_bytes, sensitivities, seconds)
        left = sum(gradient.nbytes for gradient in gradients)
        return Profile(
            base_bytes=(*trace.base_bytes, held + final_bytes),
            tensors=tensors,
            moments=(*self._moments(trace), Moment(phase="optimizer", gradient_bytes=left)),
            gradients_at={
                name: trace.gradients_at[number]
                for name, number in self._trained.items()
                if number in trace.gradients_at
            },
            weights_at={
                name: tuple(sorted(trace.loans[number]))
                for name, number in self._frozen.items()
                if number in trace.loans
            },
        )

    def _tensors(
        self,
        lives: Mapping[str, Life],
        call_bytes: Mapping[int, int],
        sensitivities: Mapping[str, float],
        seconds: float,
    ) -> tuple[TensorProfile, ...]:
        """Every tensor's life and options, known ones or as measured."""
        if self._known:
            return tuple(
                as_known(key, lives, self._known.get(key) or (_kept(seen.row),))
                for key, seen in ((seen.row.key, seen) for seen in self._seen.values())
            )
        moved = [seen.row.saved_bytes for seen in self._seen.values() if _moves(seen)]
        transfer = transfer_of(self._device, self._folder, moved, seconds)
        again = {
            seen.row.key: self._recomputed(seen, lives, call_bytes, sensitivities)
            for seen in self._seen.values()
        }
        spreads: dict[str, float] = {}
        for key, options in again.items():
            for option in options:
                if option.tolerates:
                    (source,) = option.sources
                    spread = self._gains[key].square * sensitivities[key]
                    spreads[source] = spreads.get(source, 0.0) + spread
        return tuple(
            _profile(
                seen,
                lives[seen.row.key],
                sensitivities,
                transfer,
                again[seen.row.key],
                spreads.get(seen.row.key),
            )
            for seen in self._seen.values()
        )

    def _moments(self, trace: Trace) -> Iterator[Moment]:
        for (phase, event, number), nbytes in zip(trace.moments, trace.gradient_bytes, strict=True):
            key = self._seen[number].row.key if number >= 0 else ""
            yield Moment(phase=phase, event=event, key=key, gradient_bytes=nbytes)

    def gradient(self, name: str) -> None:
        """Backward has all of this parameter's gradient."""
        self._timeline.gradient(self._trained.setdefault(name, len(self._trained)))

    @contextlib.contextmanager
    def lending(self, name: str) -> Iterator[None]:
        """Around bringing a frozen weight into memory, in one block."""
        number = self._frozen.setdefault(name, len(self._frozen))
        self._timeline.lend(number)
        yield
        self._timeline.lent(number)

    def close(self) -> None:
        """End without a result; nothing happens after :meth:`stop`."""
        self._timeline.close()

    def calling(self, call: Call) -> None:
        """For capture's Onlooker."""
        self._timeline.call(call.number)
        self._started = now(self._device)

    def called(self, call: Call) -> None:
        """For capture's Onlooker."""
        seconds = now(self._device) - self._started
        self._calls[call.number] = min(seconds, self._calls.get(call.number, seconds))
        self._timeline.called(call.number)

    def saving(self, row: Row, tensor: torch.Tensor, derive: Callable[[], Derivation | None]) -> None:
        """For capture's Onlooker."""
        number = self._numbers.setdefault(id(row), len(self._numbers))
        self._seen.setdefault(number, _Seen(row, derive))
        self._timeline.save(number, tensor)
        self._started = now(self._device)

    def offered(
        self,
        row: Row,
        codec: str,
        flat: torch.Tensor,
        scale: object | None,
        highest: float,
        trial: Callable[..., codecs.Packed],
        again: Callable[[], torch.Tensor],
    ) -> None:
        """For capture's Onlooker: pack at a few bounds."""
        if row.key in self._known:
            return
        begun = now(self._device)
        unit = min(1.0 if scale is not None else codecs.unit(flat, dense=row.dense), _STEADY * highest)
        seen = self._seen[self._numbers[id(row)]]
        few = row.saved_bytes <= _FEW_BYTES
        bounds = [share * unit for share in (_TRIED[::2] if few else _TRIED)] if unit > 0.0 else []
        ways = _ways(codec)[-1:] if few else _ways(codec)
        seen.tried = [[self._try(each, bound, trial) for bound in bounds] for each in ways if bounds]
        seen.apart = now(self._device) - begun

    def _try(self, codec: str, bound: float, trial: Callable[..., codecs.Packed]) -> tuple[Option, float]:
        """Packed and unpacked once, and the seconds of unpacking."""
        if self._arena is None or codec != "blocks":
            return self._timed(codec, bound, functools.partial(trial, codec, bound))
        self._arena.reset()
        option, seconds = self._timed(codec, bound, functools.partial(trial, codec, bound, arena=self._arena))
        taken = codecs.ArenaUse.of(self._arena.counters).nbytes
        return replace(option, held_bytes=option.held_bytes - self._arena.nbytes + taken), seconds

    def _timed(self, codec: str, bound: float, pack: Callable[[], codecs.Packed]) -> tuple[Option, float]:
        begun = now(self._device)
        packed = pack()
        done = now(self._device)
        nbytes = packed.numel * packed.dtype.itemsize
        out = self._buffer[:nbytes].view(packed.dtype) if nbytes <= len(self._buffer) else None
        codecs.get(codec).unpack(packed, out=out)
        seconds = now(self._device) - begun
        option = Option(
            action=Action.COMPRESS, codec=codec, bound=bound, held_bytes=packed.nbytes, seconds=seconds
        )
        return option, begun + seconds - done

    def saved(self, row: Row) -> None:
        """For capture's Onlooker."""
        seen = self._seen[self._numbers[id(row)]]
        seen.seconds += now(self._device) - self._started - seen.apart
        seen.apart = 0.0
        self._timeline.saved(self._numbers[id(row)])

    def using(self, row: Row) -> None:
        """For capture's Onlooker."""
        self._seen[self._numbers[id(row)]].is_derived |= torch.is_grad_enabled()
        self._timeline.use(self._numbers[id(row)])
        self._started = now(self._device)

    def used(self, row: Row, unpacked: Sequence[Row]) -> None:
        """For capture's Onlooker."""
        seen = self._seen[self._numbers[id(row)]]
        seen.seconds += now(self._device) - self._started
        seen.decodes = True
        self._timeline.used(self._numbers[id(row)], [self._numbers[id(other)] for other in unpacked])

    def released(self, row: Row) -> None:
        """For capture's Onlooker."""
        self._timeline.release(self._numbers[id(row)])

    def _recomputed(
        self,
        seen: _Seen,
        lives: Mapping[str, Life],
        call_bytes: Mapping[int, int],
        sensitivities: Mapping[str, float],
    ) -> list[Option]:
        """Making the tensor again, if those it comes from outlive it: from all their values, or nearly so."""
        found = seen.derive() if seen.decodes else None
        own = lives[seen.row.key]
        if found is None or not outlived(own, found.sources, lives):
            return []
        held = sum(call.state_bytes for call in found.calls)
        working = sum(call_bytes.get(call.number, 0) for call in found.calls)
        exact = Option(
            action=Action.REGENERATE if held and not found.sources else Action.RECOMPUTE,
            held_bytes=held,
            working_bytes=seen.row.saved_bytes,
            making_bytes=max(working - seen.row.saved_bytes, 0),
            seconds=sum(self._calls[call.number] for call in found.calls),
            sources=found.sources,
            serves=True,
        )
        gain = self._gains.get(seen.row.key)
        known = gain is not None and (gain.source,) == found.sources and seen.row.key in sensitivities
        if gain is None or not known or not seen.tried:
            return [exact]
        near = replace(exact, serves=False, tolerates=True)
        if seen.row.reads_sign:
            near = replace(
                near,
                codec="sign",
                held_bytes=near.held_bytes + gain.sign_bytes,
                seconds=near.seconds + gain.sign_seconds,
            )
        cheap = near.seconds < _CHEAP * min(option.seconds for tried in seen.tried for option, _ in tried)
        return [exact, near] if cheap else [exact]


def _profile(
    seen: _Seen,
    life: Life,
    sensitivities: Mapping[str, float],
    transfer: Transfer | None,
    recomputed: list[Option],
    spread: float | None,
) -> TensorProfile:
    """The options of one tensor: itself, packed as it was or at other bounds, moved, or recomputed.

    Packed, it approximates others at the noise that its error makes in them: ``spread`` for a unit bound.
    """
    row = seen.row
    decoded = (row.saved_bytes if row.packed else life.decoded_bytes) if seen.decodes else 0
    keep = _kept(row)
    cost = sensitivities.get(row.key)
    options = [keep]
    again = len(life.gaps)
    packed: list[Option] = []
    if seen.tried and cost is not None:
        for tries in seen.tried:
            tried = [replace(option, seconds=option.seconds + again * seconds) for option, seconds in tries]
            packed += [_costed(option, cost, decoded) for option in _interpolated(tried)]
        options += packed
        if spread is not None:
            options += [_approximating(option, spread) for option in packed]
    elif not seen.tried and not {"keep", "offload"} & set(row.packed):
        codec = "+".join(row.packed) or "none"
        exact = _exact(codec, _reserved(row.packed), decoded, seen.seconds, row.reads_values)
        options = [*([keep] if row.packed else []), exact]
    if transfer is not None and _moves(seen):
        options.append(
            Option(
                action=Action.OFFLOAD,
                codec=transfer.place,
                held_bytes=0,
                working_bytes=row.saved_bytes,
                seconds=row.saved_bytes * (transfer.leaving + (1 + again) * transfer.returning),
                serves=True,
            )
        )
    options = [
        replace(option, packing_bytes=life.packing_bytes) if option.action is Action.COMPRESS else option
        for option in options
    ]
    options += recomputed
    if seen.is_derived:  # of anything but the tensor itself, the gradient would save another copy
        options = [keep]
    return TensorProfile(
        key=row.key,
        saved_at=life.saved_at,
        dropped_at=life.dropped_at,
        first_use=life.first_use,
        last_use=life.last_use,
        idle_until=life.idle_until,
        gaps=tuple(life.gaps),
        options=tuple(options),
    )


def _ways(codec: str) -> tuple[str, ...]:
    """The codecs that could hold what this one does: entropy coding is small, planes are quick."""
    if codec.startswith("entropy"):
        return codec, codec.replace("entropy", "planes")
    return (codec,) if codec == "blocks" else ()


def _moves(seen: _Seen) -> bool:
    """Whether the tensor could be moved elsewhere."""
    return seen.decodes and bool(seen.row.packed) and "keep" not in seen.row.packed


def _kept(row: Row) -> Option:
    return Option(action=Action.KEEP, codec="keep", held_bytes=row.saved_bytes, serves=True)


def _reserved(packed: Mapping[str, int]) -> int:
    """Bytes by codec, together, with a margin for those that vary."""
    fixed = sum(nbytes for name, nbytes in packed.items() if codecs.get(name).fixed_size)
    return fixed + math.ceil(_MARGIN * (sum(packed.values()) - fixed))


def _exact(codec: str, nbytes: int, decoded: int, seconds: float, serves: bool) -> Option:
    return Option(
        action=Action.COMPRESS,
        codec=codec,
        held_bytes=nbytes,
        working_bytes=decoded,
        seconds=seconds,
        serves=serves,
    )


def _costed(option: Option, cost: float, decoded: int) -> Option:
    return Option(
        action=option.action,
        codec=option.codec,
        bound=option.bound,
        held_bytes=math.ceil(_MARGIN * option.held_bytes),
        lasting=option.codec == "blocks",
        working_bytes=decoded,
        seconds=option.seconds,
        noise=cost * option.bound**2,
    )


def _approximating(option: Option, spread: float) -> Option:
    """The option, and that of others recomputed from what it holds."""
    return replace(option, noise=option.noise + spread * option.bound**2, approximates=True)


def _interpolated(tried: list[Option]) -> list[Option]:
    """The tried options and some between each two of them."""
    result = [tried[0]]
    for wide, fine in zip(tried, tried[1:], strict=False):
        for part in range(1, _BETWEEN + 1):
            share = part / _BETWEEN
            result.append(_between(wide, fine, share))
    return result


def _between(wide: Option, fine: Option, share: float) -> Option:
    def mixed(first: float, second: float) -> float:
        return first + share * (second - first)

    return Option(
        action=wide.action,
        codec=wide.codec,
        bound=math.exp(mixed(math.log(wide.bound), math.log(fine.bound))),
        held_bytes=math.ceil(mixed(wide.held_bytes, fine.held_bytes)),
        seconds=mixed(wide.seconds, fine.seconds),
    )
