"""A training step on an image that may be larger than memory, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from squeezebox.memory import (
    Ceiling,
    DiskFolder,
    free_bytes,
    freed_kept,
    nameless_file,
    require_imports,
    usual_folder,
    within_room,
)
from squeezebox.reports import parse_size
from squeezebox.schema import OptionError, OutputError, UnsupportedModelError
from squeezebox.streaming._choice import NOTHING
from squeezebox.streaming._files import from_file
from squeezebox.streaming._fitting import OWN_BYTES
from squeezebox.streaming._given import derivable, require_image, require_modes, scaled, uncast
from squeezebox.streaming._graph import Streamed, analyse, require_gathered, with_across
from squeezebox.streaming._held import Graphs, held_by, modules_of, steady
from squeezebox.streaming._journal import kept_file
from squeezebox.streaming._outputs import Onto, Outputs, require_apart, writable
from squeezebox.streaming._plan import StreamPlan
from squeezebox.streaming._planner import Planner
from squeezebox.streaming._prepared import Prepared, Ways, form_of
from squeezebox.streaming._progress import Clock, Progress
from squeezebox.streaming._resume import Position, filed_in, fingerprint, load, position_of, restore, save
from squeezebox.streaming._rows import refusal
from squeezebox.streaming._run import Context, Run
from squeezebox.streaming._spool import Blank, Spool
from squeezebox.streaming._trace import Aim, Whole, autocast_on, trace

Metric = Callable[[Any, Any], Any]


class StreamedStep:
    """Loss and gradients of whole images, computed strip by strip.

    ``step(image, target)`` adds to the parameters' gradients what ``loss_fn(model(image),
    target).backward()`` would, up to the order of summation (1e-12 of themselves in float64), returns the
    loss, and updates batch normalisation's running values once. Parameters that the loss reads have gradients
    too, also where it is a function that calls their module. Every strip reads the rows around that the graph
    of model and loss makes it depend on. Sums, means, moments and extremes over the image, in the model or in
    the loss, take a pass over the image first wherever later operators need them. What needs all pixels at
    once, such as self-attention or sorting, gets the whole map that it reads, if that takes at most half of
    ``memory``. Under ``torch.autocast`` casts are as in plain PyTorch.

    Model and loss are traced once for each shape, and again where numbers have changed that modules have as
    attributes, or that ``loss_fn`` or a function it calls reads. What is read further off stays as it was.

    Gradients are added when the step is complete: an exception leaves parameters and buffers as they were.
    Hooks on parameters are not called, and those on modules only while they are traced. The gradient by the
    image is added to an array, if you give one; there is none by the target.

    :meth:`predict` gives the model's output, and :meth:`evaluate` metrics, in strips as well. Both run the
    model in its mode (call ``model.eval()`` before) and without gradients.

    Args:
        model: any module that torch.export can trace, in the mode in which it is to be run.
        loss_fn: ``loss_fn(output, target)``, a module or a function, gives one number.
        memory: bytes that a step may take in addition to the image, the target and the model, such as "1GiB".
            Strips are as high as fits, by the measured peaks of some. On Linux the process grows by about
            that, files included (docs/streaming.md has by how much more); elsewhere these are tensors' bytes.
            Where a first step imports torch.export, some 200 MiB are added that stay.
        prepare: what the model is given in the image's place, computed strip by strip. By default uint8
            images are scaled to 0..1 in the parameters' precision, and others left as they are.
        axis: the image's dimension that is streamed, -2 or -1; the longer one by default.
        height: rows of a strip, or rows and columns of a tile, instead of ``memory``.
        recompute: keep fewer tensors within a strip, and recompute the others in its backward, so that strips
            can be higher.
        context: makes a context around each strip's forward, such as ``session.step`` of :func:`attach`,
            which then packs what the strip saves. Strips that are measured for ``memory`` run in it, too.
        progress: called with a :class:`Progress` after every strip.
        checkpoint: a file in which an interrupted step is kept; the same call then goes on where it was, and
            the file is removed when the step is complete.
        checkpoint_seconds: how often it is written, at most.
        spool: whether what crosses from one pass to the next lies in a file, with its gradient. By default
            the plan says of each tensor whether it is kept in memory, laid in a file, or recomputed: what
            takes the least time within ``memory``. With True, or a folder, all of it lies in a nameless file;
            False forbids files. The folder must be on a disk. Where the system's temporary one is in memory,
            True takes another. With a checkpoint nothing is kept in memory, and the file stays next to it
            until the step is complete, named like it and ".spool". With ``height`` there is no plan, and all
            is recomputed by default.

    Raises:
        OptionError: neither or both of memory and height are given, one is out of range, or spool names a
            folder in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        memory: int | str | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        axis: int | None = None,
        height: int | tuple[int, int] | None = None,
        recompute: bool = False,
        context: Context | None = None,
        progress: Callable[[Progress], object] | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_seconds: float = 60.0,
        spool: bool | str | Path | None = None,
    ) -> None:
        if (memory is None) == (height is None):
            raise OptionError("give memory= (such as '1GiB') or height= (rows of a strip), one of them.")
        if axis not in (None, -2, -1):
            raise OptionError(f"axis {axis} is neither -2 (rows) nor -1 (columns).")
        self._size = None if height is None else _size_of(height)
        self._memory_bytes = None if memory is None else parse_size("memory", memory)
        self._folder = _folder_of(spool, checkpoint)
        self._model, self._loss_fn, self._prepare = model, loss_fn, prepare
        self._axis, self._recompute = axis, recompute
        self._context, self._progress = context, progress
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._planner = Planner(
            size=self._size,
            memory_bytes=self._memory_bytes,
            recompute=recompute,
            context=context,
            folder=None if spool is False else self._folder,
            is_forced=bool(spool),
            is_journalled=checkpoint is not None,
        )
        self._checkpoint_seconds = checkpoint_seconds
        self._graphs = Graphs()
        self._plans: dict[Streamed, tuple[Ways, StreamPlan]] = {}

    @within_room("a step in strips")
    def __call__(self, image: Any, target: Any, *, gradient: Any = None) -> Tensor:
        """One step.

        Args:
            image: what the model takes, ``[..., height, width]``: a tensor, or anything with shape and
                dtype that can be sliced, such as a numpy.memmap (of H x W x C:
                ``image.transpose(2, 0, 1)[None]``).
            target: what the loss takes, in any structure of tensors, arrays and plain values. Those whose
                last two dimensions are the image's, or a feature map's of the model, are read strip by strip
                as well; others, such as labels of whole images, are read whole.
            gradient: a tensor or numpy array, to which the loss's gradient by the image is added while strips
                are made, also where the step fails. It has the image's shape and type. Of a uint8 image that
                is scaled to 0..1, it is the gradient by that, in the parameters' type.

        Returns:
            The loss, without a graph.

        Raises:
            OptionError: gradient is no such array, or shares memory with the image or the target, or the
                image has integers that ``prepare`` takes.
            UnsupportedModelError: model or loss cannot be streamed exactly; names the module and why.
            BudgetError: the smallest strip, or what has no rows, needs more memory; or the process has less.
            FormatError: the checkpoint belongs to another step, or the file of its spool is not as it was.
            OutputError: the checkpoint cannot be written, or spool's folder has no room.
        """
        by_image = gradient is not None
        if by_image and self._checkpoint is not None:
            raise OptionError(
                "gradient= is not in a checkpoint, so checkpoint= could not resume; leave one out."
            )
        aim = Aim(function=self._loss_fn, derives=True, by_image=by_image)
        prepared = self._prepared(
            derivable(image, self._model, self._prepare) if by_image else image, target, aim
        )
        node = prepared.streamed.program.image
        added = {node: writable("gradient", gradient, node.meta["val"])} if by_image else {}
        if by_image:
            require_apart("gradient", gradient, [image, *pytree.tree_leaves(target)])
        return self._done(prepared, [], added, [gradient]).values.loss.detach()

    @within_room("a prediction in strips")
    @torch.inference_mode(False)
    def predict(self, image: Any, out: Any = None) -> Any:
        """The model's output for an image of any size.

        Args:
            image: as in a step.
            out: where the output goes as strips make it: a tensor or a numpy array of its shape and type,
                such as a numpy.memmap with mode "w+"; several in the form of several outputs. By default new
                tensors, which take memory in addition to ``memory``.

        Returns:
            What the model gives: in ``out`` where that was given, else in tensors.

        Raises:
            OptionError: out is of another form, shape or type, or shares memory with the image; nothing has
                been computed.
            UnsupportedModelError, BudgetError, OutputError: as in a step.
        """
        prepared = self._prepared(image, None, Aim(function=_output, derives=False))
        outputs = Outputs(prepared.streamed, out, self._device)
        for each in outputs.given:
            require_apart("out", each, [image])
        return outputs.values(self._done(prepared, outputs.arrays, {}, outputs.given).values.known)

    @within_room("a metric in strips")
    @torch.inference_mode(False)
    def evaluate(self, images: Iterable[tuple[Any, Any]], metric: Metric | None = None) -> list[Any]:
        """A metric of each image, without gradients.

        Args:
            images: pairs of image and target, as in a step.
            metric: ``metric(output, target)`` gives what has no rows, such as sums over pixels, in any
                structure. The loss by default.

        Returns:
            What the metric gives for each image.

        Raises:
            OptionError: what came is no pair.
            UnsupportedModelError: the metric, or the model, cannot be streamed exactly.
            BudgetError, OutputError: as in a step.
        """
        aim, found = Aim(function=metric or self._loss_fn, derives=False), []
        for pair in images:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise OptionError(f"evaluate takes pairs of image and target, not a {type(pair).__name__}.")
            prepared = self._prepared(*pair, aim)
            for node in prepared.streamed.maps:
                raise refusal(node, "it has a value for every row; take its sum or mean")
            outputs = Outputs(prepared.streamed, None, self._device)
            found.append(outputs.values(self._done(prepared, [], {}, []).values.known))
        return found

    def _done(
        self,
        prepared: Prepared,
        maps: list[tuple[Node, Tensor]],
        gradients: dict[Node, Tensor],
        files: Sequence[Any],
    ) -> Run:
        """A finished run over an image, whose maps and gradients are in these arrays, given as ``files``."""
        checkpoint = self._checkpoint if prepared.streamed.program.loss is not None else None
        if checkpoint and prepared.streamed.draws:
            raise OptionError(
                "the model draws dropout behind its pooling, which checkpoint= could not draw again. Put "
                "that module into eval(), or leave checkpoint= out."
            )
        mark = fingerprint(prepared.streamed, prepared.read, prepared.whole) if checkpoint else ""
        found = load(checkpoint, mark, self._device) if checkpoint else None
        if found is None:
            prepared, position, needs, store = self._begun(prepared, checkpoint)
        else:
            ways = self._planner.ways(prepared, filed_in(found, prepared.streamed))
            prepared, position = replace(prepared, ways=ways), position_of(found)
            memory_bytes = self._memory_bytes or 0
            needs = [(memory_bytes, memory_bytes // 4)] * len(ways.stages)  # nothing is measured again
            store = self._opened(prepared, position, checkpoint, found)
        stages = prepared.stages
        limit = self._memory_bytes if self._device.type == "cpu" else None
        keeping = nullcontext() if limit is None else freed_kept()
        with store, keeping, uncast(self._device):
            onto = Onto(store, prepared.layout, prepared.streamed, maps, gradients, files)
            run = prepared.run(self._context, onto)
            if found is not None:
                restore(found, run, stages, position)
            if limit is not None:
                # What is kept is there already. Strips were measured less OWN_BYTES, which stay after them.
                spare_bytes = max(spare for _, spare in needs)
                ceiling = Ceiling(limit - prepared.layout.kept_bytes + OWN_BYTES - spare_bytes)
                run.room = lambda stage, sizes: ceiling.make_room(
                    needs[stages.index(stage)][0] + OWN_BYTES, stages.index(stage), sizes
                )
                run.keep_room = ceiling.keep
            written = time.monotonic()
            for done in self._strips(run, prepared, position):
                if checkpoint and time.monotonic() - written >= self._checkpoint_seconds:
                    save(checkpoint, mark, done, run, store.mark())
                    store.settle()
                    written = time.monotonic()
            run.values.finish()
            if checkpoint:
                checkpoint.unlink(missing_ok=True)
                store.remove()
        return run

    def _begun(
        self, prepared: Prepared, checkpoint: Path | None
    ) -> tuple[Prepared, Position, list[tuple[int, int]], Spool | Blank]:
        """A step's plan, its position, the bytes of its strips and those to stay free, and its store.

        Where the plan wants a file that nobody asked for, and none can be made by now, there is another plan.
        """
        try:
            return self._begin(prepared, checkpoint)
        except OutputError:
            if self._planner.is_forced:
                raise
            self._plans[prepared.streamed] = self._planner.plan(prepared, files=False)
            return self._begin(prepared, checkpoint)

    def _begin(
        self, prepared: Prepared, checkpoint: Path | None
    ) -> tuple[Prepared, Position, list[tuple[int, int]], Spool | Blank]:
        ways, plan = self._planned(prepared)
        prepared = replace(prepared, ways=ways)
        sizes = tuple((stage.height, stage.width) for stage in plan.stages)
        position = Position(stage=0, strip=0, sizes=sizes)
        store = self._opened(prepared, position, checkpoint, None)
        needs = [(stage.strip_bytes or 0, stage.spare_bytes) for stage in plan.stages]
        return prepared, position, needs, store

    def _opened(
        self, prepared: Prepared, position: Position, checkpoint: Path | None, found: dict[str, Any] | None
    ) -> Spool | Blank:
        content, file, journal = prepared.layout, None, None
        if not content.tensors:
            return prepared.blank
        if content.filed and checkpoint is not None:
            path = Path(self._folder.path, f"{checkpoint.name}.spool")
            file, journal = kept_file(path, content.disk_bytes, found and found["stored"])
        elif content.filed:
            folder = Path(self._folder.path)
            file = nameless_file(folder, content.disk_bytes, "what passes hand on", "spool=")
        is_tiled = any(width < prepared.columns for _, width in position.sizes)
        spool = Spool(content, prepared.streamed, self._device, file, journal, is_tiled)
        if found is not None:
            spool.restore(found["stored"])
        return spool

    @within_room("measuring strips")
    def plan(self, image: Any, target: Any) -> StreamPlan:
        """The passes and strips that a step on images of these shapes takes.

        Runs some strips of this one for each pass where the heights follow from ``memory``.

        Raises:
            As :meth:`__call__`.
        """
        return self._planned(self._prepared(image, target, Aim(function=self._loss_fn, derives=True)))[1]

    @property
    def _device(self) -> torch.device:
        parameters = self._model.parameters()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def _whole(self, aim: Aim, end: Callable[[], None]) -> Whole:
        prepare = self._prepare or (lambda image: scaled(image, self._model))
        return Whole(self._model, aim.function, prepare, end)

    def _prepared(self, image: Any, target: Any, aim: Aim) -> Prepared:
        require_modes()
        require_image(image)
        image, target = pytree.tree_map(from_file, (image, target))
        forms = pytree.tree_map(form_of, (image, target))
        longer = -1 if image.shape[-1] > image.shape[-2] else -2
        axis = longer if self._axis is None else self._axis
        functions = [aim.function, self._prepare]
        modules = [self._model, *(module for each in functions for module in modules_of(each))]

        def made() -> tuple[Streamed, set[str]]:
            require_imports("torch._dynamo")
            # A session leaves forwards without gradient alone, and whatever is within them.
            with torch.no_grad(), self._context() if self._context else nullcontext(), torch.enable_grad():
                program, moving = steady(
                    lambda end: trace(self._whole(aim, end), aim, forms[0], forms[1], self._device),
                    modules,
                    functions,
                )
            streamed = analyse(program, axis)
            self._require_gathered(streamed)
            return self._with_across(streamed, axis), moving

        shapes = pytree.tree_map_only(Tensor, lambda form: (tuple(form.shape), form.dtype), forms)
        state = repr((repr(shapes), axis, autocast_on(self._device), *_state(modules)))
        form = aim.derives, aim.by_image, state
        streamed = self._graphs.get(aim.function, form, lambda: held_by(modules, functions), made)
        leaves = pytree.tree_leaves(target)
        given = {streamed.program.image: image}
        given |= {node: leaves[number] for node, number in streamed.program.targets.items()}
        return Prepared(
            axis=axis,
            streamed=streamed,
            ways=Ways.of(streamed, *NOTHING, self._context is not None),
            given=given,
            device=self._device,
        )

    def _require_gathered(self, streamed: Streamed) -> None:
        if self._memory_bytes is not None:
            require_gathered(streamed, self._memory_bytes // 2, "memory=")
        else:
            require_gathered(streamed, free_bytes(self._device) // 2, "the memory that is free")

    def _with_across(self, streamed: Streamed, axis: int) -> Streamed:
        """With the other axis too, where tiles are wanted, or may be of use and are possible."""
        if self._size is not None and self._size[1] is None:
            return streamed
        filed = streamed.crossing() if self._planner.is_forced else frozenset[Node]()
        try:
            return with_across(streamed, -3 - axis, filed)
        except UnsupportedModelError:
            if self._size is not None:
                raise
            return streamed

    def _planned(self, prepared: Prepared) -> tuple[Ways, StreamPlan]:
        if prepared.streamed not in self._plans:
            self._plans = {each: plan for each, plan in self._plans.items() if each in self._graphs}
            self._plans[prepared.streamed] = self._planner.plan(prepared)
        return self._plans[prepared.streamed]

    def _strips(self, run: Run, prepared: Prepared, position: Position) -> Iterator[Position]:
        """Take every strip from a position on; yields the position after each."""
        stages = prepared.stages
        counts = [prepared.tiles(*size) for size in position.sizes]
        clock = Clock([(stage.weight, count) for stage, count in zip(stages, counts, strict=True)])
        clock.start(position)
        last_ahead = max((number for number, stage in enumerate(stages) if stage.reduces), default=-1)
        if last_ahead < 0:
            run.values.turn()
        for number, stage in enumerate(stages):
            if number < position.stage:
                continue
            first = position.strip if number == position.stage else 0
            if first == 0:
                run.begin(stage)
            for strip in range(first, counts[number]):
                start, stop, band = prepared.tile(stage, *position.sizes[number], strip)
                run.strip(stage, start, stop, self._recompute, band)
                if self._progress is not None:
                    self._progress(clock.tick(number))
                yield Position(stage=number, strip=strip + 1, sizes=position.sizes)
            run.end(stage, number == last_ahead)


def _folder_of(spool: bool | str | Path | None, checkpoint: str | Path | None) -> DiskFolder:
    """Where a file is made, if there is one: as named, next to the checkpoint, or where temporary ones are.

    Raises:
        OptionError: the named one is in memory.
    """
    if isinstance(spool, str | Path):
        folder = DiskFolder(str(spool), "")
        if not folder.frees_memory:
            raise OptionError(
                f"a file in spool={str(spool)!r} would free no memory. Name a folder on a disk, or give "
                "spool=True."
            )
        return folder
    return usual_folder() if checkpoint is None else DiskFolder(str(Path(checkpoint).absolute().parent), "")


def _state(modules: Sequence[nn.Module]) -> tuple[object, ...]:
    """What of modules a graph is made for: modes, and which tensors of which form they hold."""
    held = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    tensors = [(id(each), each.requires_grad, each.dtype, each.device, tuple(each.shape)) for each in held]
    return [each.training for module in modules for each in module.modules()], tensors


def _output(output: Any, target: None) -> Any:
    """The function of a prediction."""
    return output


def _size_of(height: Any) -> tuple[int, int | None]:
    """Rows, and columns where they are limited too."""
    sizes = height if isinstance(height, tuple | list) and len(height) == 2 else (height,)
    if not all(isinstance(each, Integral) and int(each) >= 1 for each in sizes):
        raise OptionError(
            f"height is {height!r}; give rows of a strip, or rows and columns of a tile, such as (64, 128)."
        )
    return int(sizes[0]), int(sizes[1]) if len(sizes) == 2 else None
