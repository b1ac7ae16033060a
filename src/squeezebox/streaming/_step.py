"""A training step on an image that may be larger than memory, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from squeezebox.memory import (
    Ceiling,
    DiskFolder,
    Peak,
    PeakMeter,
    ProcessMeter,
    require_imports,
    return_all,
    usual_folder,
    within_room,
)
from squeezebox.reports import parse_size
from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming._files import from_file
from squeezebox.streaming._graph import Streamed, analyse
from squeezebox.streaming._outputs import Onto, Outputs, writable
from squeezebox.streaming._plan import StreamPlan, StripPlan, fitting_height, require_rowless
from squeezebox.streaming._prepared import Prepared, Scaled, form_of
from squeezebox.streaming._progress import Clock, Progress
from squeezebox.streaming._resume import Position, fingerprint, load, position_of, restore, save
from squeezebox.streaming._rows import refusal
from squeezebox.streaming._run import Context, Run
from squeezebox.streaming._spool import Blank, Layout, Spool, Store, layout
from squeezebox.streaming._stages import Stage, stages_of
from squeezebox.streaming._trace import Aim, Whole, trace

Metric = Callable[[Any, Any], Any]
_OWN_BYTES = 4 << 20  # of the process that are not a strip's: what the system counts late, compiled kernels


class StreamedStep:
    """Loss and gradients of whole images, computed strip by strip.

    ``step(image, target)`` adds to the parameters' gradients what ``loss_fn(model(image),
    target).backward()`` would, up to the order of summation (1e-12 of themselves in float64), returns the
    loss, and updates batch normalisation's running values once. Model and loss are traced once for each
    shape, as one graph; every strip reads the rows around that the graph makes it depend on. Sums, means,
    moments and extremes over the image, in the model or in the loss, take a pass over the image first
    wherever later operators need them.

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
        height: rows of a strip, instead of ``memory``.
        recompute: keep fewer tensors within a strip, and recompute the others in its backward, so that strips
            can be higher.
        context: makes a context around each strip's forward, such as ``session.step`` of :func:`attach`,
            which then packs what the strip saves. Strips that are measured for ``memory`` run in it, too.
        progress: called with a :class:`Progress` after every strip.
        checkpoint: a file in which an interrupted step is kept; the same call then goes on where it was, and
            the file is removed when the step is complete.
        checkpoint_seconds: how often it is written, at most.
        spool: where what crosses from one pass to the next, and its gradient, is kept whole. Each pass then
            begins there and not at the image, so that batch normalisation costs little more than without
            strips. By default that is in memory, if half of ``memory`` is enough and there is no checkpoint;
            False keeps nothing. A folder, or True for the system's temporary one, takes it in a nameless
            file: the folder must be on a disk. Where the temporary one is in memory, as on some systems, True
            takes another. ``plan`` says how many bytes.

    Raises:
        OptionError: neither or both of memory and height are given, one is out of range, both spool and
            checkpoint are given, or spool names a folder in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        memory: int | str | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        axis: int | None = None,
        height: int | None = None,
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
        if height is not None and height < 1:
            raise OptionError(f"height {height} is below one row.")
        if spool and checkpoint is not None:
            raise OptionError(
                "what spool= stores goes with the process, so checkpoint= could not resume; give one of them."
            )
        self._folder = Path(usual_folder().path) if spool is True else Path(spool) if spool else None
        if spool not in (None, True, False) and DiskFolder(str(self._folder), "").is_in_memory:
            raise OptionError(
                f"spool={str(spool)!r} is in memory itself, so nothing would be saved. Name one on a disk, "
                "or give spool=True."
            )
        self._memory_bytes = None if memory is None else parse_size("memory", memory)
        is_free = spool is None and checkpoint is None
        self._keepable_bytes = (self._memory_bytes or 0) // 2 if is_free else 0
        self._model, self._loss_fn, self._prepare = model, loss_fn, prepare
        self._axis, self._height, self._recompute = axis, height, recompute
        self._context, self._progress = context, progress
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._checkpoint_seconds = checkpoint_seconds
        self._known: dict[Any, tuple[Streamed, list[Stage], Layout]] = {}
        self._plans: dict[Any, StreamPlan] = {}

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
            OptionError: gradient is no such array, or the image has integers that ``prepare`` takes.
            UnsupportedModelError: model or loss cannot be streamed exactly; names the module and why.
            BudgetError: the smallest strip, or what has no rows, needs more memory; or the process has less.
            FormatError: the checkpoint belongs to another step.
            OutputError: the checkpoint cannot be written, or spool's folder has no room.
        """
        by_image = gradient is not None
        if by_image and self._checkpoint is not None:
            raise OptionError(
                "gradient= is not in a checkpoint, so checkpoint= could not resume; leave one out."
            )
        aim = Aim(function=self._loss_fn, derives=True, by_image=by_image)
        prepared = self._prepared(
            _derivable(image, self._model, self._prepare) if by_image else image, target, aim
        )
        node = prepared.streamed.program.image
        added = {node: writable("gradient", gradient, node.meta["val"])} if by_image else {}
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
            OptionError: out is of another form, shape or type; nothing has been computed.
            UnsupportedModelError, BudgetError, OutputError: as in a step.
        """
        prepared = self._prepared(image, None, Aim(function=_output, derives=False))
        outputs = Outputs(prepared.streamed, out, self._device)
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
            UnsupportedModelError: the metric, or the model, cannot be streamed exactly.
            BudgetError, OutputError: as in a step.
        """
        aim, found = Aim(function=metric or self._loss_fn, derives=False), []
        for image, target in images:
            prepared = self._prepared(image, target, aim)
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
        with self._opened(prepared) as store:
            onto = Onto(store, prepared.layout, prepared.streamed, maps, gradients, files)
            return self._step(prepared, onto)

    def _opened(self, prepared: Prepared) -> Spool | nullcontext[Blank]:
        if not prepared.layout.nbytes:
            return nullcontext(prepared.blank)
        return Spool(prepared.layout, prepared.streamed, self._folder, self._device)

    def _step(self, prepared: Prepared, store: Store) -> Run:
        stages = prepared.stages
        checkpoint = self._checkpoint if prepared.streamed.program.loss is not None else None
        if checkpoint and prepared.streamed.draws:
            raise OptionError(
                "the model draws dropout behind its pooling, which checkpoint= could not draw again. Put "
                "that module into eval(), or leave checkpoint= out."
            )
        mark = fingerprint(prepared.streamed, prepared.read) if checkpoint else ""
        found = load(checkpoint, mark) if checkpoint else None
        ceiling = None if self._memory_bytes is None or self._is_elsewhere else Ceiling(self._memory_bytes)
        run = prepared.run(self._context, store)
        if found is None:
            plan = self._planned(prepared).stages
            position = Position(stage=0, strip=0, heights=tuple(stage.height for stage in plan))
            strip_bytes = [stage.strip_bytes or 0 for stage in plan]
        else:
            position = position_of(found)
            strip_bytes = [self._memory_bytes or 0] * len(stages)
            restore(found, run, stages, position)
        if ceiling is not None:
            run.room = lambda stage: ceiling.make_room(strip_bytes[stages.index(stage)])
        written = time.monotonic()
        for done in self._strips(run, stages, position, prepared.rows):
            if checkpoint and time.monotonic() - written >= self._checkpoint_seconds:
                save(checkpoint, mark, done, run)
                written = time.monotonic()
        run.values.finish()
        if checkpoint:
            checkpoint.unlink(missing_ok=True)
        return run

    @within_room("measuring strips")
    def plan(self, image: Any, target: Any) -> StreamPlan:
        """The passes and strips that a step on images of these shapes takes.

        Runs some strips of this one for each pass where the heights follow from ``memory``.

        Raises:
            As :meth:`__call__`.
        """
        return self._planned(self._prepared(image, target, Aim(function=self._loss_fn, derives=True)))

    @property
    def _device(self) -> torch.device:
        parameters = self._model.parameters()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    @property
    def _is_elsewhere(self) -> bool:
        """Whether strips take memory of a device and not of this process."""
        return self._device.type != "cpu"

    def _whole(self, aim: Aim) -> Whole:
        prepare = self._prepare or (lambda image: _scaled(image, self._model))
        return Whole(self._model, aim.function, prepare)

    def _prepared(self, image: Any, target: Any, aim: Aim) -> Prepared:
        _require_modes(self._device)
        _require_image(image)
        image, target = pytree.tree_map(from_file, (image, target))
        forms = pytree.tree_map(form_of, (image, target))
        longer = -1 if image.shape[-1] > image.shape[-2] else -2
        axis = longer if self._axis is None else self._axis
        key = pytree.tree_map_only(Tensor, lambda form: (tuple(form.shape), form.dtype), forms)
        whole = self._whole(aim)
        key = aim, repr((repr(key), axis, *_state(whole)))
        if key not in self._known:
            require_imports("torch._dynamo")
            # A session leaves forwards without gradient alone, and whatever is within them.
            with torch.no_grad(), self._context() if self._context else nullcontext(), torch.enable_grad():
                program = trace(whole, aim, forms[0], forms[1], self._device)
            streamed = analyse(program, axis)
            content = layout(streamed, streamed.crossing())
            if self._folder is None and content.nbytes > self._keepable_bytes:
                content = layout(streamed, frozenset())
            stages = stages_of(streamed, frozenset(content.tensors), self._context is not None)
            self._known[key] = streamed, stages, content
        streamed, stages, content = self._known[key]
        leaves = pytree.tree_leaves(target)
        given = {streamed.program.image: image}
        given |= {node: leaves[number] for node, number in streamed.program.targets.items()}
        return Prepared(
            key=key,
            axis=axis,
            streamed=streamed,
            stages=stages,
            layout=content,
            given=given,
            device=self._device,
        )

    def _planned(self, prepared: Prepared) -> StreamPlan:
        if prepared.key not in self._plans:
            nbytes, on_disk = prepared.layout.nbytes, self._folder is not None
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                rowless = self._rehearsed(prepared)
                held = 0 if rowless is None else rowless.left_bytes + (0 if on_disk else nbytes)
                stages = tuple(self._stage_plan(prepared, stage, held) for stage in prepared.stages)
            self._plans[prepared.key] = StreamPlan(
                axis=prepared.axis,
                rows=prepared.rows,
                disk_bytes=nbytes if on_disk else 0,
                kept_bytes=0 if on_disk else nbytes,
                rowless_bytes=None if rowless is None else rowless.total_bytes,
                stages=stages,
            )
        return self._plans[prepared.key]

    def _rehearsed(self, prepared: Prepared) -> Peak | None:
        """What has no rows, at its highest moment and while strips run; None where the height is given.

        Raises:
            BudgetError: it needs more than the memory.
        """
        if self._memory_bytes is None:
            return None
        meter = self._meter()
        try:
            run = prepared.run(self._context, prepared.blank)
            run.values.rehearse(prepared.stages)
        finally:
            peak = meter.stop(())
        kept = 0 if self._folder else prepared.layout.nbytes
        require_rowless(peak.total_bytes + kept, self._memory_bytes)
        return peak

    def _stage_plan(self, prepared: Prepared, stage: Stage, held_bytes: int) -> StripPlan:
        rows, strip_bytes = prepared.rows, None
        if self._memory_bytes is None:
            assert self._height is not None
            height = min(self._height, rows)
        else:
            self._peak_at(prepared, stage, 0, 1)  # what libraries take once is not a strip's
            height, strip_bytes = fitting_height(
                lambda height: self._measured(prepared, stage, height),
                rows,
                prepared.unit,
                self._memory_bytes,
                held_bytes,
            )
        return StripPlan(
            reduces=stage.reduces,
            derives=stage.derives,
            height=height,
            strips=-(-rows // height),
            halo=prepared.halo(stage, height),
            strip_bytes=strip_bytes,
            peak_bytes=None if strip_bytes is None else strip_bytes + held_bytes,
        )

    def _measured(self, prepared: Prepared, stage: Stage, height: int) -> int:
        """The peak of a strip in the image's middle, or of the first, which is copied where it is padded."""
        return max(self._peak_at(prepared, stage, at, height) for at in {prepared.middle(stage, height), 0})

    def _peak_at(self, prepared: Prepared, stage: Stage, start: int, height: int) -> int:
        """The peak of one strip, with values made up where they are not known yet.

        It is that of its tensors, or what the process grows by, where that is more: the C library keeps what
        is freed in between, and operators have memory that torch does not see.
        """
        return_all()
        run = prepared.run(self._context, prepared.blank)
        run.pretend(stage, start, start + height)
        process, meter = ProcessMeter(), self._meter()
        process.start()
        try:
            run.strip(stage, start, start + height, self._recompute)
        finally:
            grown, peak = process.stop(), meter.stop(())
        return max(peak.total_bytes, 0 if self._is_elsewhere else (grown or 0) - _OWN_BYTES)

    def _meter(self) -> PeakMeter:
        """A running one."""
        meter = PeakMeter(self._device)
        if not meter.start():
            raise OptionError(
                "torch's profiler is active, so strips cannot be measured; give height= instead of memory=."
            )
        return meter

    def _strips(self, run: Run, stages: Sequence[Stage], position: Position, rows: int) -> Iterator[Position]:
        """Take every strip from a position on; yields the position after each."""
        clock = Clock(
            [(stage.weight, height) for stage, height in zip(stages, position.heights, strict=True)], rows
        )
        clock.start(position)
        last_ahead = max((number for number, stage in enumerate(stages) if stage.reduces), default=-1)
        if last_ahead < 0:
            run.values.turn()
        for number, stage in enumerate(stages):
            if number < position.stage:
                continue
            height = position.heights[number]
            first = position.strip if number == position.stage else 0
            if first == 0:
                run.begin(stage)
            for strip in range(first, -(-rows // height)):
                run.strip(stage, strip * height, min((strip + 1) * height, rows), self._recompute)
                if self._progress is not None:
                    self._progress(clock.tick(stage.weight, min(height, rows - strip * height)))
                yield Position(stage=number, strip=strip + 1, heights=position.heights)
            run.end(stage, number == last_ahead)


def _state(whole: Whole) -> tuple[object, ...]:
    """What of the model a graph is made for: modes, and which tensors of which form it holds."""
    held = [*whole.parameters(), *whole.buffers()]
    tensors = [(id(each), each.requires_grad, each.dtype, each.device, tuple(each.shape)) for each in held]
    return [module.training for module in whole.modules()], tensors


def _output(output: Any, target: None) -> Any:
    """The function of a prediction."""
    return output


def _require_modes(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type):
        raise OptionError(
            "a streamed step runs in the model's own precision; leave torch.autocast out, or give "
            "model.bfloat16()."
        )
    if torch.is_inference_mode_enabled():
        raise OptionError("a streamed step computes gradients; leave torch.inference_mode out.")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedModelError("a streamed step computes gradients; call it outside torch.func.")


def _require_image(image: Any) -> None:
    shape = tuple(getattr(image, "shape", ()))
    if len(shape) < 3 or 0 in shape:
        raise OptionError(
            f"the image is a {type(image).__name__} of shape {shape}; give a tensor or an array of "
            "[N, C, H, W] or [C, H, W], none of them zero."
        )


def _scaled(image: Tensor, model: nn.Module) -> Tensor:
    """Bytes between 0 and 1 in the model's precision; others as they are."""
    return image.to(_precision(model)) / 255 if image.dtype == torch.uint8 else image


def _precision(model: nn.Module) -> torch.dtype:
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(floating, torch.float32)


def _derivable(image: Any, model: nn.Module, prepare: object) -> Any:
    """The image as floating point numbers, by which there is a gradient.

    Raises:
        OptionError: it has integers, and what ``prepare`` makes of them has no derivative by them.
    """
    _require_image(image)
    dtype = form_of(image).dtype
    if dtype.is_floating_point:
        return image
    if dtype == torch.uint8 and prepare is None:
        return Scaled(image, _precision(model))
    raise OptionError(f"the image is of {dtype}, by which there is no gradient; give floating point numbers.")
