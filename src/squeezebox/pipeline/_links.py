"""What crosses between the stages of a rank and their neighbours."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from squeezebox.pipeline._health import Health
from squeezebox.pipeline._packing import PackedReceiver, PackedSender, Packer, Wire
from squeezebox.pipeline._setup import Groups, Line, Place
from squeezebox.pipeline._store import PatientStore
from squeezebox.pipeline._wire import Form, Peer, Receiver, Sender, Traffic, Turns
from squeezebox.schedules import Kind, Schedule, at_once
from squeezebox.schema import OptionError

End = tuple[int, int]  # of a wire: a stage of this rank, and the rank at the other end
_TAGS = 64  # of a line: one for each tensor of a message


class Wires:
    """Makes the ends of wires between a rank and its neighbours.

    ``wire``: how what crosses is packed, if it is. Wires of another ``purpose`` never meet.
    """

    def __init__(
        self,
        place: Place,
        schedule: Schedule,
        groups: Groups,
        health: Health,
        patience: float,
        device: torch.device,
        wire: Wire | None = None,
        purpose: str = "training",
    ) -> None:
        self._place, self._schedule, self._groups = place, schedule, groups
        self._health, self._patience, self._device = health, patience, device
        self._wire, self.purpose = wire, purpose
        self._packers: dict[tuple[int, bool], Packer] = {}
        self._turns: dict[Line, Turns] = {}

    def plain(self, purpose: str) -> Wires:
        """The like, over which all goes as it is."""
        options = self._groups, self._health, self._patience, self._device, None, purpose
        wires = Wires(self._place, self._schedule, *options)
        wires._turns = self._turns
        return wires

    def sender(
        self, boundary: int, other: int, forms: Sequence[Form], most: int, *, back: bool
    ) -> Sender | PackedSender:
        """To rank ``other`` of this pipeline, with at most ``most`` messages on their way."""
        sender = Sender(self._peer(self._line(boundary, other, back, sends=True), other), most)
        packer = self._packer(boundary, back=back)
        return sender if packer is None else PackedSender(sender, packer, forms)

    def receiver(
        self, boundary: int, other: int, forms: Sequence[Form], slots: int, *, back: bool
    ) -> Receiver | PackedReceiver:
        """From rank ``other`` of this pipeline, with room for that number of messages."""
        is_plain = self._wire is None or self._wire.error(back=back) is None
        made = Receiver if is_plain else PackedReceiver
        line = self._line(boundary, other, back, sends=False)
        return made(self._peer(line, other), forms, slots, self._turns.setdefault(line, deque()))

    def _line(self, boundary: int, other: int, back: bool, *, sends: bool) -> Line:
        """The line to or from rank ``other``: activations go from the rank before to the one after."""
        own = self._place.rank
        before, after = (own, other) if sends != back else (other, own)
        return Line(boundary, before, after, back)

    def _peer(self, line: Line, other: int) -> Peer:
        """Rank ``other`` of this pipeline at the end of a line."""
        return Peer(
            rank=self._place.of(other),
            tag=_TAGS * (self.purpose != "training"),
            group=self._groups.lines[line],
            device=self._device,
            patience=self._patience,
            waiting=self._health.waits,
            resumed=self._health.resumes,
        )

    def peers(self, *, is_reading: bool) -> list[Peer]:
        """The other ranks of this pipeline for one that reads batches, else the one that does."""
        group = self._groups.words
        ranks = range(1, self._place.ranks) if is_reading else [0]
        return [
            Peer(
                rank=self._place.of(rank),
                tag=0,
                group=group,
                device=torch.device("cpu"),
                patience=self._patience,
                waiting=self._health.waits,
                resumed=self._health.resumes,
            )
            for rank in ranks
            if group is not None
        ]

    def state(self) -> dict[tuple[int, bool], dict[str, Any]]:
        """What a resume needs of this rank's packers, by boundary and direction."""
        return {key: packer.state() for key, packer in self._packers.items()}

    def restore(self, state: Mapping[tuple[int, bool], Mapping[str, Any]]) -> None:
        """Go on where :meth:`state` was taken, as far as this wire packs."""
        for boundary, back in {*state, *self._packers}:
            packer = self._packer(boundary, back=back)
            if packer is not None:
                packer.restore(state.get((boundary, back), {}))

    def _packer(self, boundary: int, *, back: bool) -> Packer | None:
        """The one of a boundary and direction: it may owe something before the first message."""
        key, wire = (boundary, back), self._wire
        error = None if wire is None else wire.error(back=back)
        if wire is None or error is None:
            return None
        if key not in self._packers:
            self._packers[key] = Packer(error, wire.codec, wire.feedback and back)
        return self._packers[key]


class Links:
    """A rank's connections: between stages of two ranks over the wire, within a rank by hand.

    Boundary b lies between the stages b and b + 1. What crosses it has the same form for every microbatch;
    the sender puts that into the store when it sends the first one. The ends of wires are by stage and by the
    rank at the other end, of which replicas of the next stage make several.
    """

    def __init__(
        self, store: PatientStore, place: Place, schedule: Schedule, health: Health, wires: Wires
    ) -> None:
        self._store, self._place, self._schedule, self._health = store, place, schedule, health
        self.wires = wires
        self._in_flight = at_once(schedule, Kind.FORWARD)
        self._returned = at_once(schedule, Kind.INPUT)
        self._senders: dict[End, Sender | PackedSender] = {}
        self._receivers: dict[End, Receiver | PackedReceiver] = {}
        self._forms: dict[int, list[Form]] = {}  # of a stage's inputs
        self._told: dict[int, list[Form]] = {}  # of its outputs
        self._gradient_senders: dict[End, Sender | PackedSender] = {}
        self._gradient_receivers: dict[End, Receiver | PackedReceiver] = {}
        self._expected: Counter[End] = Counter()
        self._awaited: Counter[End] = Counter()  # gradients
        self._by_hand: dict[tuple[bool, int, int], list[Tensor]] = {}
        self._others: list[Links] = []

    def plain(self, purpose: str) -> Links:
        """Connections of their own between the same ranks, over which all goes as it is."""
        wires = self.wires.plain(purpose)
        self._others.append(Links(self._store, self._place, self._schedule, self._health, wires))
        return self._others[-1]

    def expect(self, microbatches: Iterable[int]) -> None:
        """These will come to each of this rank's stages, as far as it takes them there."""
        for microbatch in microbatches:
            for stage in self._schedule.stages_of(self._place.rank):
                if stage and self._schedule.rank_of(stage, microbatch) == self._place.rank:
                    self.expect_at(stage, microbatch)

    def expect_at(self, stage: int, microbatch: int) -> None:
        """This one will come to this stage."""
        if self._is_own(stage - 1):
            return
        end = self._end(stage, stage - 1, microbatch)
        if end in self._receivers:
            self._receivers[end].expect(1)
        else:
            self._expected[end] += 1

    def send(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Hand a stage's outputs to the next one."""
        if self._is_own(stage + 1):
            self._by_hand[True, stage + 1, microbatch] = list(outputs)
            return
        end = self._end(stage, stage + 1, microbatch)
        if end not in self._senders:
            self._open(end, outputs)
        self._require_same(stage, outputs)
        self._senders[end].send(outputs)
        self._gradient_receivers[end].expect(1)
        self._awaited[end] += 1

    def _require_same(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Refuse what the other end has no room for, or would take for something else."""
        found = [Form(tuple(each.shape), each.dtype, each.requires_grad) for each in outputs]
        if found != self._told[stage]:
            raise OptionError(
                f"stage {stage} returns {found}, and its first microbatch gave {self._told[stage]}: all "
                "microbatches must have one form. Pad them, or leave out those that differ."
            )

    def receive(self, stage: int, microbatch: int) -> tuple[list[Tensor], list[Tensor]]:
        """A stage's inputs: the buffers to give back, and the leaves to call it with."""
        if self._is_own(stage - 1):
            given = self._by_hand.pop((True, stage, microbatch))
            return [], [each.detach().requires_grad_(each.requires_grad) for each in given]
        end = self._end(stage, stage - 1, microbatch)
        if end not in self._receivers:
            self._await(end)
        buffers = self._receivers[end].receive()
        forms = self._forms[stage]
        return buffers, [
            each.detach().requires_grad_(form.requires_grad)
            for each, form in zip(buffers, forms, strict=True)
        ]

    def release(
        self, stage: int, microbatch: int, inputs: list[Tensor], gradients: list[Tensor] | None
    ) -> None:
        """Give a microbatch's buffers back."""
        if inputs:
            self._receivers[self._end(stage, stage - 1, microbatch)].release(inputs)
        if gradients is not None and not self._is_own(stage + 1):
            self._gradient_receivers[self._end(stage, stage + 1, microbatch)].release(gradients)

    def send_gradients(self, stage: int, microbatch: int, gradients: list[Tensor]) -> None:
        """Hand the gradients of a stage's inputs to the stage before."""
        if self._is_own(stage - 1):
            self._by_hand[False, stage - 1, microbatch] = gradients
        else:
            self._gradient_senders[self._end(stage, stage - 1, microbatch)].send(gradients)

    def receive_gradients(self, stage: int, microbatch: int) -> list[Tensor]:
        """The gradients of a stage's outputs."""
        if self._is_own(stage + 1):
            return self._by_hand.pop((False, stage, microbatch))
        end = self._end(stage, stage + 1, microbatch)
        gradients = self._gradient_receivers[end].receive()
        self._awaited[end] -= 1
        self._senders[end].settle(keep=self._awaited[end])  # what this is the gradient of has arrived
        return gradients

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for sender in [*self._senders.values(), *self._gradient_senders.values()]:
            sender.settle()
        for other in self._others:
            other.settle()

    def close(self) -> None:
        """Wait until all that was sent has arrived, or the other end is gone."""
        with contextlib.suppress(RuntimeError):
            self.settle()

    def traffic(self) -> tuple[Traffic, ...]:
        """What was sent so far, to each rank that it went to."""
        forward = [sender.traffic(stage, back=False) for (stage, _), sender in sorted(self._senders.items())]
        back = [
            sender.traffic(stage - 1, back=True)
            for (stage, _), sender in sorted(self._gradient_senders.items())
        ]
        return (*forward, *back)

    def _is_own(self, stage: int) -> bool:
        return self._place.rank in self._schedule.ranks_of(stage)

    def _end(self, stage: int, other: int, microbatch: int) -> End:
        return stage, self._schedule.rank_of(other, microbatch)

    def _of_those(self, in_flight: int, stage: int, other: int) -> int:
        """How many of a stage's microbatches in flight are of one replica of the other stage."""
        own, others = (len(self._schedule.ranks_of(each)) for each in (stage, other))
        return -(-in_flight * math.gcd(own, others) // others)

    def _open(self, end: End, outputs: Sequence[Tensor]) -> None:
        """Tell the next stage what will come, and make this end of the wires."""
        stage, other = end
        forms = [Form(tuple(each.shape), each.dtype, each.requires_grad) for each in outputs]
        self._told.setdefault(stage, forms)
        self._store.set(self._key(stage), pickle.dumps(forms))
        most = self._of_those(self._in_flight[stage], stage, stage + 1)
        self._senders[end] = self.wires.sender(stage, other, forms, most, back=False)
        returned = [form for form in forms if form.requires_grad]
        slots = self._returned[stage] + 1
        self._gradient_receivers[end] = self.wires.receiver(stage, other, returned, slots, back=True)

    def _await(self, end: End) -> None:
        """Learn what will come from the stage before, and make this end of the wires."""
        stage, other = end
        process = self._place.of(other)
        told = self._health.await_key(self._key(stage - 1), f"waits for rank {process} to send", process)
        self._forms[stage] = forms = pickle.loads(told)
        slots = self._of_those(self._in_flight[stage], stage, stage - 1) + 1
        receiver = self.wires.receiver(stage - 1, other, forms, slots, back=False)
        receiver.expect(self._expected.pop(end, 0))
        self._receivers[end] = receiver
        returned = [form for form in forms if form.requires_grad]
        self._gradient_senders[end] = self.wires.sender(
            stage - 1, other, returned, self._most_returned(stage), back=True
        )

    def _most_returned(self, stage: int) -> int:
        """How many gradients of its inputs a stage may have sent that have not arrived.

        One, where ranks have a stage each: the one before takes them in turn and waits for nothing else from
        here. A rank with several stages may be at another one for long.
        """
        looped = self._schedule.num_stages > self._schedule.num_ranks
        return self._in_flight[stage - 1] if looped else 1

    def _key(self, boundary: int) -> str:
        return f"form/{self.wires.purpose}/{self._place.replica}/{boundary}"
