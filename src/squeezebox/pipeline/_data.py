"""What a pipeline is fed: one rank reads batches, and all others hear what it has read.

The first rank of a pipeline reads. Before anything is computed, it tells the others whether the batch is
good, and tells the last rank its target. So inputs and targets are of the same samples, whatever random
numbers a rank draws, and all ranks refuse a bad batch.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Generator, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from squeezebox.pipeline._health import Health
from squeezebox.pipeline._wire import Form, Peer, Sender
from squeezebox.schema import OptionError, PipelinePlan

_BATCH, _REFUSED, _END = "batch", "refused", "end"
_MOST = 8  # messages to a rank that may be on their way
_TEXT = 1024  # bytes of what readers tell each other
Word = tuple[str, str, Any]  # what it is, why it is refused, and the target


class Channel:
    """From the rank that reads to the others of its pipeline, in order; over a group of the CPU's own.

    ``peers`` are the others on the rank that reads, or this one alone; the last one gets targets. ``readers``
    are all pipelines' reading ranks, on these.
    """

    def __init__(
        self,
        peers: list[Peer],
        readers: dist.ProcessGroup | None,
        health: Health,
        patience: float,
    ) -> None:
        self._peers, self._readers = peers, readers
        self._health, self._patience = health, patience
        self._senders = [Sender(peer, _MOST) for peer in peers]
        self._heard: Word | None = None

    def tell(self, what: str, why: str = "", target: Any = None) -> Word:
        """Say what has been read; with several pipelines, once all have read, and nothing if they differ.

        Returns:
            What all pipelines get to know.
        """
        what, why = self._agreed(what, why)
        for peer, sender in zip(self._peers, self._senders, strict=True):
            file = io.BytesIO()
            torch.save((what, why, target if peer is self._peers[-1] and what == _BATCH else None), file)
            data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
            sender.send([torch.tensor([len(data)])])
            sender.send([data])
        if what != _BATCH:
            self.settle()  # the runner may be gone before anybody computes again
        return what, why, target

    def hear(self) -> Word:
        """What was read, if :meth:`listen` has not heard it already."""
        word, self._heard = self._heard or self._received(), None
        return word

    def listen(self) -> bool:
        """Whether the next thing that was read is a batch, good or bad."""
        self._heard = self._received()
        if self._heard[0] != _END:
            return True
        self._heard = None
        return False

    def settle(self) -> None:
        """Wait until all has been heard."""
        for sender in self._senders:
            sender.settle()

    def _received(self) -> Word:
        peer = self._peers[0]
        length = self._message(peer, Form((1,), torch.int64, False))
        data = self._message(peer, Form((int(length),), torch.uint8, False))
        word: Word = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
        return word

    def _message(self, peer: Peer, form: Form) -> Tensor:
        buffer = form.empty(peer.device)
        work = dist.irecv(buffer, peer.rank, group=peer.group, tag=peer.tag)
        assert work is not None
        peer.finish([work], f"waits for rank {peer.rank} to read a batch")
        return buffer

    def _agreed(self, what: str, why: str) -> tuple[str, str]:
        """The first refusal of any pipeline; refused too if one has ended and another has not."""
        if self._readers is None:
            return what, why
        mine = f"{what} {why}".encode()[:_TEXT]
        told = [torch.zeros(_TEXT, dtype=torch.uint8, device="cpu") for _ in range(self._readers.size())]
        told[self._readers.rank()][: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._health.waits("waits for the other pipelines to read a batch", dist.get_rank())
        work = dist.all_gather(told, told[self._readers.rank()].clone(), self._readers, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self._patience))
        self._health.resumes()
        words = [bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore").partition(" ") for each in told]
        for number, (theirs, _, reason) in enumerate(words):
            if theirs == _REFUSED:
                return _REFUSED, f"replica {number}: {reason}"
        ended = [str(number) for number, (theirs, _, _) in enumerate(words) if theirs == _END]
        if ended and len(ended) < len(words):
            return _REFUSED, (
                f"replica {', '.join(ended)} of {len(words)} has no further batch, and others have. Give all "
                "replicas the same number of batches."
            )
        return what, why


class Feed:
    """Inputs where a rank has the first stage, targets where it has the last, by microbatch."""

    def __init__(
        self,
        plan: PipelinePlan,
        channel: Channel,
        device: torch.device,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        self._plan, self._channel, self._device = plan, channel, device
        self._is_first, self._is_last = is_first, is_last
        self.inputs: dict[int, tuple[Tensor, ...]] = {}
        self.targets: dict[int, Any] = {}

    def take(self, batch: int, inputs: Any, target: Any) -> str:
        """Part batch number ``batch``, of which the first rank's inputs and target count.

        Returns:
            Why all ranks refuse it; "" if they do not.

        Raises:
            OptionError: this rank, the last one, was given another target than the first.
        """
        what, why, told = self._read(inputs, target) if self._is_first else self._channel.hear()
        if what == _END:
            return "the first rank has no further batch. Let all ranks go over read(), and they end together."
        if what == _REFUSED:
            return why
        first = batch * self._plan.microbatches
        if self._is_first:
            parts = zip(*(self._parted(tensor, "inputs") for tensor in _tuple(inputs)), strict=True)
            self.inputs.update(enumerate(parts, first))
        if self._is_last:
            if target is not None and not _equal(target, told):
                raise OptionError(
                    f"batch {batch}: the last rank was given another target than the first, so inputs and "
                    "targets are of different samples. Let the first rank alone read: runner.read(batches)."
                )
            there = None if told is None else pytree.tree_map(lambda tensor: tensor.to(self._device), told)
            self.targets.update(enumerate(self._targets(there), first))
        return ""

    def _read(self, inputs: Any, target: Any) -> Word:
        """Tell the others what this rank has read."""
        try:
            self._check(_tuple(inputs))
            for tensor in _tuple(inputs):
                self._parted(tensor, "inputs")
            self._targets(target)
        except OptionError as error:
            return self._channel.tell(_REFUSED, str(error))
        return self._channel.tell(_BATCH, target=target)

    def _targets(self, target: Any) -> list[Any]:
        """Each microbatch's part of a tensor, or of a tuple or dict of tensors."""
        if target is None:
            return [None] * self._plan.microbatches
        leaves, spec = pytree.tree_flatten(target)
        parts = zip(*(self._parted(leaf, "target") for leaf in leaves), strict=True)
        return [pytree.tree_unflatten(list(part), spec) for part in parts]

    def _check(self, inputs: tuple[Any, ...]) -> None:
        """Refuse inputs of other forms than the plan's, if it names any."""
        wanted = [(form.shape, form.dtype) for form in self._plan.inputs]
        found = [
            (tuple(each.shape[1:]), str(each.dtype).removeprefix("torch."))
            for each in inputs
            if isinstance(each, Tensor)
        ]
        if wanted and found != wanted:
            raise OptionError(
                f"inputs: samples are {found}, and the plan is for {wanted}. Pass such, or make a plan for "
                "these."
            )

    def _parted(self, tensor: Any, what: str) -> tuple[Tensor, ...]:
        plan = self._plan
        size = plan.microbatch * plan.microbatches
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != size:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise OptionError(
                f"{what}: {shape}, and the plan's batch is {plan.microbatches} microbatches of "
                f"{plan.microbatch} samples, {size} along the first dimension, in each pipeline. Pass that "
                "number (leave out a last, smaller batch), or make a plan for this batch."
            )
        return tuple(tensor.split(plan.microbatch))


def _tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _equal(one: Any, other: Any) -> bool:
    """Whether two targets have the same structure and values."""
    (mine, spec), (theirs, wanted) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return spec == wanted and all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b.to(a.device))
        for a, b in zip(mine, theirs, strict=True)
    )


# What random numbers come from that no tensor holds: torch's generator of the host, Python's, and numpy's.
RandomState = dict[str, Any]


def random_state() -> RandomState:
    """The states of the host's generators, in plain values and tensors."""
    name, keys, *rest = np.random.get_state()
    numpy = [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go on where :func:`random_state` was called."""
    torch.set_rng_state(state["torch"].cpu())
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.cpu().numpy().astype(np.uint32), *rest))


class Reader:
    """Reads batches with random numbers of their own, which neither dropout nor anything else draws.

    So the order of samples depends on the seed alone. :meth:`state` tells where to go on: how a pass over the
    batches began, and how many of it have been taken. Generators of a DataLoader or its sampler count too.
    """

    def __init__(self) -> None:
        self._now = random_state()
        self._began: RandomState = self._now
        self._generators: list[Tensor] | None = None  # their states when the pass began
        self._taken = 0
        self._resumes = False

    def read(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of a pass; after :meth:`restore`, those that are left of it."""
        generators = _generators_of(batches)
        skipped = self._begin(generators)
        with self._own():
            iterator = iter(batches)
        missing = object()
        while True:
            with self._own():
                batch = next(iterator, missing)
            if batch is missing:
                self._began, self._taken, self._generators = self._now, 0, None
                return
            self._taken += 1
            if self._taken > skipped:
                yield batch

    def state(self) -> dict[str, Any]:
        """Where reading is."""
        return {"began": self._began, "taken": self._taken, "generators": self._generators}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the next :meth:`read` go on where :meth:`state` was called."""
        self._began = self._now = dict(state["began"])
        self._taken, self._generators, self._resumes = state["taken"], state["generators"], True

    def _begin(self, generators: list[torch.Generator]) -> int:
        """Prepare a pass: how many of its batches have been taken before."""
        skipped = self._taken if self._resumes else 0
        if self._resumes and self._generators is not None:
            for generator, state in zip(generators, self._generators, strict=True):
                generator.set_state(state.cpu())
        self._began, self._taken, self._resumes = self._now, 0, False
        self._generators = [generator.get_state() for generator in generators]
        return skipped

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """A context in which the host's generators are at this reader's state."""
        others = random_state()
        restore_random_state(self._now)
        try:
            yield
        finally:
            self._now = random_state()
            restore_random_state(others)


def _generators_of(batches: Any) -> list[torch.Generator]:
    """Those that a DataLoader and its samplers were given."""
    samplers = [getattr(batches, name, None) for name in ("sampler", "batch_sampler")]
    owners = [batches, *samplers, getattr(samplers[1], "sampler", None)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def batches_of(
    reader: Reader, channel: Channel, batches: Iterable[Any] | None, *, reads: bool
) -> Generator[Any, None, str]:
    """What the rank that reads has read, and on all others ``()`` for each of its batches.

    Returns:
        Why the end is refused; "" if it is not.
    """
    if not reads:
        while channel.listen():
            yield ()
        return ""
    if batches is None:
        raise OptionError("the first rank was given no batches to read; pass them to its read().")
    yield from reader.read(batches)
    return channel.tell(_END)[1]
