"""What a pipeline is fed: one rank reads batches, and all others hear what it has read.

The first rank of a pipeline reads. Before anything is computed, it tells the others whether the batch is
good, and tells the last rank its target. So inputs and targets are of the same samples, whatever random
numbers a rank draws, and all ranks refuse a bad batch.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections import OrderedDict
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from squeezebox.pipeline._health import Health
from squeezebox.pipeline._setup import Place
from squeezebox.pipeline._wire import Form, Peer, Sender
from squeezebox.schedules import Schedule, published
from squeezebox.schema import OptionError, PipelinePlan

_BATCH, _REFUSED, _END = "batch", "refused", "end"
_MOST = 8  # messages to a rank that may be on their way
_TEXT = 1024  # bytes of what readers tell each other


class Word(NamedTuple):
    """What has been read: why it is refused, or the target and samples, and all pipelines' numbers of these.

    ``inputs`` are those of the microbatches that the rank which hears it takes in, by place in the batch.
    """

    what: str
    why: str
    target: Any = None
    samples: int = 0
    counts: tuple[int, ...] = ()
    inputs: Any = None


class Channel:
    """From the rank that reads to the others of its pipeline, in order; over a group of the CPU's own.

    ``peers`` are the others on the rank that reads, or this one alone; those of ``targeted`` ranks get
    targets. ``readers`` are all pipelines' reading ranks, on these.
    """

    def __init__(
        self,
        peers: list[Peer],
        readers: dist.ProcessGroup | None,
        health: Health,
        patience: float,
        targeted: Container[int] = (),
    ) -> None:
        self._peers, self._readers, self._targeted = peers, readers, targeted
        self._health, self._patience = health, patience
        self._senders = [Sender(peer, _MOST) for peer in peers]
        self._heard: Word | None = None

    def tell(
        self,
        what: str,
        why: str = "",
        target: Any = None,
        samples: int = 0,
        inputs: Mapping[int, Any] = MappingProxyType({}),
    ) -> Word:
        """Say what has been read; with several pipelines, once all have read, and nothing if they differ.

        ``inputs`` has those that go to another rank, by its number among all.

        Returns:
            What all pipelines get to know.
        """
        what, why, counts = self._agreed(what, why, samples)
        word = Word(what, why, target if what == _BATCH else None, samples, counts)
        for peer, sender in zip(self._peers, self._senders, strict=True):
            theirs = word if peer.rank in self._targeted else word._replace(target=None)
            if word.what == _BATCH:
                theirs = theirs._replace(inputs=inputs.get(peer.rank))
            file = io.BytesIO()
            torch.save(tuple(theirs), file)
            data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
            sender.send([torch.tensor([len(data)], device="cpu")])
            sender.send([data])
        if what != _BATCH:
            self.settle()  # the runner may be gone before anybody computes again
        return word

    def hear(self) -> Word:
        """What was read, if :meth:`listen` has not heard it already."""
        word, self._heard = self._heard or self._received(), None
        return word

    def listen(self) -> bool:
        """Whether the next thing that was read, and not taken yet, is a batch, good or bad."""
        self._heard = self._heard or self._received()
        if self._heard.what != _END:
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
        return Word(*torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True))

    def _message(self, peer: Peer, form: Form) -> Tensor:
        buffer = form.empty(peer.device)
        work = dist.irecv(buffer, peer.rank, group=peer.group, tag=peer.tag)
        assert work is not None
        peer.finish([work], f"waits for rank {peer.rank} to read a batch")
        return buffer

    def _agreed(self, what: str, why: str, samples: int) -> tuple[str, str, tuple[int, ...]]:
        """The first refusal of any pipeline; refused too if one has ended and another has not.

        Else also how many samples each has.
        """
        if self._readers is None:
            return what, why, (samples,)
        mine = f"{what} {samples} {why}".encode()[:_TEXT]
        told = [torch.zeros(_TEXT, dtype=torch.uint8, device="cpu") for _ in range(self._readers.size())]
        told[self._readers.rank()][: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._health.waits("waits for the other pipelines to read a batch", dist.get_rank())
        work = dist.all_gather(told, told[self._readers.rank()].clone(), self._readers, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self._patience))
        self._health.resumes()
        words = [bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore").split(" ", 2) for each in told]
        for number, (theirs, _, reason) in enumerate(words):
            if theirs == _REFUSED:
                return _REFUSED, f"replica {number}: {reason}", ()
        ended = [str(number) for number, (theirs, _, _) in enumerate(words) if theirs == _END]
        if ended and len(ended) < len(words):
            reason = (
                f"replica {', '.join(ended)} of {len(words)} has no further batch, and others have. Give all "
                "replicas the same number of batches."
            )
            return _REFUSED, reason, ()
        return what, why, tuple(int(count) for _, count, _ in words)


class Feed:
    """Inputs where a rank has the first stage, targets where it has the last, by microbatch.

    Of several replicas of these stages, each has those of its own microbatches. A batch may have fewer
    samples than the plan's, if ``takes_less``. Then its last microbatches are smaller or missing.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        channel: Channel,
        device: torch.device,
        schedule: Schedule,
        place: Place,
        *,
        takes_less: bool,
    ) -> None:
        self._plan, self._channel, self._device = plan, channel, device
        self._schedule, self._place, self._takes_less = schedule, place, takes_less
        # PipeDream's microbatches each have an update of their own.
        self._parts = plan.microbatches if plan.schedule == "pipedream" else 1
        self._flushes = published(plan.schedule).flushes
        self.inputs: dict[int, tuple[Tensor, ...]] = {}
        self.targets: dict[int, Any] = {}
        self._samples: dict[int, tuple[int, tuple[int, ...]]] = {}  # by batch: here, and in all pipelines

    def take(self, batch: int, inputs: Any, target: Any) -> str:
        """Part batch number ``batch``, of which the first rank's inputs and target count.

        Returns:
            Why all ranks refuse it; "" if they do not.

        Raises:
            OptionError: this rank, the last one, was given another target than the first.
        """
        word = self._read(batch, inputs, target) if self._place.rank == 0 else self._channel.hear()
        if word.what == _END:
            return "the first rank has no further batch. Let all ranks go over read(), and they end together."
        if word.what == _REFUSED:
            return word.why
        self._samples = {each: own for each, own in self._samples.items() if each >= batch - self._plan.ranks}
        self._samples[batch] = word.samples, word.counts
        first = batch * self._plan.microbatches
        for place, part in (word.inputs or {}).items():
            self.inputs[first + place] = tuple(each.to(self._device) for each in part)
        last = self._schedule.num_stages - 1
        if self._place.rank in self._schedule.ranks_of(last):
            if target is not None and self._place.rank and not _equal(target, word.target):
                raise OptionError(
                    f"batch {batch}: the last rank was given another target than the first, so inputs and "
                    "targets are of different samples. Let the first rank alone read: runner.read(batches)."
                )
            self.targets.update(
                (number, part)
                for number, part in enumerate(self._targets(word), first)
                if self.takes(last, number)
            )
        return ""

    def takes(self, stage: int, number: int) -> bool:
        """Whether this rank takes a microbatch at a stage."""
        return self._schedule.rank_of(stage, number) == self._place.rank

    def size(self, number: int) -> int:
        """Samples of a microbatch: 0 if its batch has too few."""
        batch, place = divmod(number, self._plan.microbatches)
        left = self._samples[batch][0] - place * self._plan.microbatch
        return min(max(left, 0), self._plan.microbatch)

    def sizes(self, batch: int) -> list[int]:
        """Samples of a batch's microbatches, but for those that it has not."""
        first = batch * self._plan.microbatches
        found = [self.size(number) for number in range(first, first + self._plan.microbatches)]
        return [size for size in found if size]

    def smaller(self, batch: int) -> set[int]:
        """Samples of all pipelines' microbatches of a batch that have fewer than the plan's."""
        _, counts = self._samples[batch]
        return {count % self._plan.microbatch for count in counts} - {0}

    def _mean(self, batch: int) -> float:
        """A batch's samples in the mean pipeline."""
        _, counts = self._samples[batch]
        return sum(counts) / len(counts)

    def parts(self, number: int) -> float:
        """Into how many parts an update goes of which a microbatch is one, by samples of all pipelines."""
        mean = self._mean(number // self._plan.microbatches)
        return mean / self.size(number) / self._parts

    def share(self, batch: int) -> float:
        """What this rank's samples of a batch at the last stage are of those of the mean pipeline."""
        mean = self._mean(batch)
        first, last = batch * self._plan.microbatches, self._schedule.num_stages - 1
        numbers = range(first, first + self._plan.microbatches)
        samples = sum(self.size(number) for number in numbers if self.takes(last, number))
        return samples * self._parts / mean

    def _read(self, batch: int, inputs: Any, target: Any) -> Word:
        """Tell the others what this rank has read."""
        try:
            given = self._given(inputs)
            self._check(given)
            samples = self._counted(given, "inputs")
            of_target = samples
            if target is not None:
                of_target = self._counted(pytree.tree_leaves(target), "target")
                self._require_sent(target)
            if of_target != samples:
                raise OptionError(
                    f"inputs have {samples} samples, and the target {of_target}. Pass both of the same."
                )
        except OptionError as error:
            return self._channel.tell(_REFUSED, str(error))
        parts = self._shared(given, batch * self._plan.microbatches)
        target = pytree.tree_map_only(Tensor, self._apart, target)
        word = self._channel.tell(_BATCH, target=target, samples=samples, inputs=parts)
        return word._replace(inputs=parts[self._place.number]) if word.what == _BATCH else word

    def _shared(self, given: Sequence[Tensor], first: int) -> dict[int, dict[int, tuple[Tensor, ...]]]:
        """Microbatches' inputs by their place in the batch, for each process that takes some of them in."""
        shared: dict[int, dict[int, tuple[Tensor, ...]]] = {}
        size = self._plan.microbatch
        for place, part in enumerate(zip(*(tensor.split(size) for tensor in given), strict=True)):
            owner = self._place.of(self._schedule.rank_of(0, first + place))
            if owner != self._place.number:  # what is sent has no more than its own memory
                part = tuple(each.cpu().clone() for each in part)
            elif not self._flushes:  # the caller may write into it before it is read
                part = tuple(each.clone() for each in part)
            shared.setdefault(owner, {})[place] = part
        return shared

    def _apart(self, target: Tensor) -> Tensor:
        """A target without memory that is not its own, or that the caller may change while it is needed."""
        target = target.detach()
        is_view = target.untyped_storage().nbytes() > target.nbytes
        return target.clone() if is_view or not self._flushes else target

    def _require_sent(self, target: Any) -> None:
        """Refuse structures that another rank would not make out of a message."""
        if {*self._schedule.ranks_of(self._schedule.num_stages - 1)} == {0} or isinstance(target, Tensor):
            return
        if type(target) not in (dict, OrderedDict, list, tuple):
            raise OptionError(
                f"target: a {type(target).__name__} does not travel to the last rank. Pass a tensor, or a "
                "plain tuple, list or dict of them."
            )
        for each in target.values() if isinstance(target, dict) else target:
            self._require_sent(each)

    def _targets(self, word: Word) -> list[Any]:
        """Each microbatch's part of a tensor, or of a tuple or dict of tensors."""
        size = self._plan.microbatch
        if word.target is None:
            return [None] * -(-word.samples // size)
        leaves, spec = pytree.tree_flatten(word.target)
        parts = zip(*(leaf.to(self._device).split(size) for leaf in leaves), strict=True)
        return [pytree.tree_unflatten(list(part), spec) for part in parts]

    def _given(self, inputs: Any) -> tuple[Any, ...]:
        """Inputs in the order of the plan, which has those of a dict by name."""
        wanted = [form.name for form in self._plan.inputs if form.name]
        found = [*inputs] if isinstance(inputs, Mapping) else []
        if sorted(wanted) != sorted(found):
            raise OptionError(
                f"inputs come {_by(found)}, and the plan has them {_by(wanted)}. Pass a tensor, a tuple, or "
                "a dict, as for the plan."
            )
        if wanted:
            return tuple(inputs[name] for name in wanted)
        return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)

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

    def _counted(self, tensors: Sequence[Any], what: str) -> int:
        """How many samples all tensors have."""
        plan = self._plan
        size, samples = plan.microbatch * plan.microbatches, set[int]()
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise OptionError(f"{what}: {shape} has no samples. Pass tensors, batch first.")
            samples.add(len(tensor))
        least = 1 if self._takes_less else size
        if len(samples) != 1 or not least <= max(samples) <= size:
            advice = "or fewer" if self._takes_less else "(engine='own' takes fewer too)"
            raise OptionError(
                f"{what}: {sorted(samples)} samples, and the plan has {plan.microbatches} microbatches "
                f"of {plan.microbatch}, {size} samples in each pipeline. Pass that number {advice}, or make "
                "a plan for this batch."
            )
        return max(samples)


def _by(names: Sequence[str]) -> str:
    return f"by the names {', '.join(names)}" if names else "by place"


def _equal(one: Any, other: Any) -> bool:
    """Whether two targets have the same structure and values, NaN too."""
    (mine, spec), (theirs, wanted) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return spec == wanted and all(
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        and torch.allclose(a, b.to(a.device), rtol=0.0, atol=0.0, equal_nan=True)
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
        self._generators: list[Tensor] = []  # their states when the pass began, or after one when it ended
        self._taken = 0
        self._resumes = False

    def read(self, batches: Iterable[Any], *, last: bool = False) -> Iterator[Any]:
        """The batches of a pass; after :meth:`restore`, those that are left of it.

        At its end :meth:`state` is before the next pass. After the ``last`` one it is at that pass's end.
        """
        generators, before = _generators_of(batches), [] if self._taken else self._generators
        skipped = self._begin(generators)
        with self._own():
            iterator = iter(batches)
        missing = object()
        while True:
            with self._own():
                batch = next(iterator, missing)
            if batch is missing:
                if last:
                    return
                self._began, self._taken = self._now, 0
                self._generators = [generator.get_state() for generator in generators] or before
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
        self._taken, self._generators, self._resumes = state["taken"], state["generators"] or [], True

    def _begin(self, generators: list[torch.Generator]) -> int:
        """Prepare a pass: how many of its batches have been taken before."""
        skipped = self._taken if self._resumes else 0
        if self._resumes and len(generators) == len(self._generators):
            for generator, state in zip(generators, self._generators, strict=True):
                generator.set_state(state.cpu())
        elif skipped:
            raise OptionError(
                f"{skipped} batches of a pass were read with {len(self._generators)} generators, and these "
                f"batches have {len(generators)}, so their order is another one. Pass a DataLoader with the "
                "generators that it had."
            )
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
    reader: Reader, channel: Channel, batches: Iterable[Any] | None, *, reads: bool, last: bool
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
    yield from reader.read(batches, last=last)
    return channel.tell(_END).why
