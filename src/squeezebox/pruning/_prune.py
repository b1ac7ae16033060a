"""Importance gathered over some steps of training, and the least important channels gone after them."""

from __future__ import annotations

import collections
import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from squeezebox.pruning._channels import Channels
from squeezebox.pruning._narrow import Narrowing, save_with
from squeezebox.pruning._trace import free_channels, traced
from squeezebox.reports import PruningReport
from squeezebox.schema import OptionError, PrunedChannels, PruningFigures, UnsupportedModelError, in_one_line

_AGREEMENT = 1e-4
"""Above it, the narrowed model computes something else than the masked one; below it is rounding."""
Free = Mapping[Channels, list[tuple[str, int]]]
"""Sets of channels that may go, with the dimensions that they are along."""
_TINY = torch.finfo(torch.float64).tiny


def prune(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    inputs: Any,
    channels: float = 0.3,
    start: int = 0,
    end: int,
) -> Pruning:
    """Take the least important channels away in the middle of training, with their optimizer state.

    From the optimizer's step ``start`` on, the importance of each channel is summed: (weight * gradient)^2 of
    all its weights, in every layer that has it. After step ``end`` the least important ones are gone:
    parameters, gradients, buffers and optimizer state are narrower, and training goes on with them. What
    backward saves gets smaller with them. Channels that a residual sum ties together go together. Parameters
    remain the same objects, so schedulers and your own references stay good; their gradients are None until
    the next backward.

    Args:
        model: an eager module that torch.export can follow, in training.
        optimizer: has all parameters that are trained, and state of their shapes or of none. Channels that
            only frozen weights have are not judged, and stay.
        inputs: what the model is called with, a tensor or a tuple, of a batch as in training. By it channels
            are followed now, and the narrowed model is checked: now with any channels, and at ``end``.
        channels: the share of each set of channels that goes, rounded down; at least one channel stays.
        start: optimizer steps from now before importance is gathered.
        end: optimizer steps from now after which the channels go.

    Returns:
        What waits for these steps: ``done``, ``report()`` and ``cancel()``.

    Raises:
        OptionError: an argument is out of range, or the optimizer lacks parameters that are trained.
        UnsupportedModelError: the model is compiled, wrapped for several ranks or cannot be exported, no
            channel of it can go, without some it computes something else, or its optimizer state does not
            have the parameters' shapes. Nothing is changed then.

    After ClickTrain (Zhang et al., "ClickTrain: efficient and accurate end-to-end deep learning training via
    fine-grained architecture-preserving pruning", ICS 2021): its importance and stages, with whole channels.
    """
    if not 0.0 < channels < 1.0:
        raise OptionError(f"channels {channels} is not between 0 and 1; give 0.3 for 30 % of each layer's.")
    if not 0 <= start < end:
        raise OptionError(f"start {start} and end {end} leave no step between them; give start=0, end=100.")
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    return Pruning(model, optimizer, given, channels, start, end)


class Pruning:
    """Waits for the steps in which channels are judged, and for the one after which they go."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: tuple[Any, ...],
        share: float,
        start: int,
        end: int,
    ) -> None:
        self._model, self._optimizer, self._inputs = model, optimizer, inputs
        self._share, self._start, self._end = share, start, end
        self._steps = 0
        self._figures: PruningFigures | None = None
        self._placements = traced(model, inputs)
        self._free = _judged(model, free_channels(self._placements))
        self._importance = {root: torch.zeros(root.count, dtype=torch.float64) for root in self._free}
        _check_optimizer(model, optimizer, {name for places in self._free.values() for name, _ in places})
        _check_state(model, optimizer)
        _check_new_state(model, optimizer)
        self._narrowed()[1]()  # tried with any channels: what cannot be done is refused now
        hooks = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)
        self._hooks = [hook.remove for hook in hooks]

    @property
    def done(self) -> bool:
        """Whether the channels are gone."""
        return self._figures is not None

    def report(self) -> PruningReport:
        """What went.

        Raises:
            OptionError: nothing did yet.
        """
        if self._figures is None:
            raise OptionError(
                f"{self._steps} of {self._end} steps are taken, and channels go after the last."
            )
        return PruningReport(self._figures)

    def cancel(self) -> None:
        """Take the hooks away; channels that are there stay."""
        while self._hooks:
            self._hooks.pop()()

    def _before(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Judge by this step's gradients, which a closure makes."""
        if self._steps < self._start:
            return None
        is_placed = len(args) > 1
        closure = args[1] if is_placed else kwargs.get("closure")
        if closure is None:
            self._judge()
            return None

        def judged() -> Any:
            loss = closure()
            self._judge()
            return loss

        return ((args[0], judged, *args[2:]), kwargs) if is_placed else (args, kwargs | {"closure": judged})

    def _after(self, *_: Any) -> None:
        if self._is_skipped():
            return
        self._steps += 1
        if self._steps == self._end:
            self.cancel()
            self._narrow()

    def _is_skipped(self) -> bool:
        """Whether a GradScaler has found gradients that are not finite; a fused optimizer leaves them out."""
        return bool(getattr(self._optimizer, "found_inf", False))

    @torch.no_grad()
    def _judge(self) -> None:
        """Add this step's (weight * gradient)^2 of every channel."""
        if self._is_skipped():
            return
        scale = float(getattr(self._optimizer, "grad_scale", None) or 1.0)  # a fused one divides by it later
        parameters = dict(self._model.named_parameters())
        squares: dict[str, Tensor] = {}
        for (name, dim), axis in self._placements.axes.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.grad is None or axis is None:
                continue
            if name not in squares:
                squares[name] = (parameter * (parameter.grad / scale)).square()
            sums = squares[name].movedim(dim, 0).reshape(parameter.shape[dim], -1).sum(1).double().cpu()
            begin = 0
            for segment in axis:
                if segment.channels.root() in self._importance:
                    mine = sums[begin : begin + segment.size].view(-1, segment.inner).sum(1)
                    self._importance[segment.channels.root()] += mine
                begin += segment.size

    def _narrow(self) -> None:
        _check_state(self._model, self._optimizer)
        self._importance = {root: sums for root, sums in self._importance.items() if sums.any()}
        if not self._importance:
            raise UnsupportedModelError(_unjudged(f"no weight had a gradient up to step {self._end}"))
        before = sum(parameter.numel() for parameter in self._model.parameters())
        narrowing, _, difference = self._narrowed()
        narrowing.narrow_state(self._optimizer)
        save_with(self._model, narrowing.indices)
        self._figures = PruningFigures(
            step=self._end,
            groups=tuple(
                PrunedChannels(
                    places=tuple(dict.fromkeys(name for name, _ in self._free[root])),
                    channels=root.count,
                    kept=tuple(stay.tolist()),
                )
                for root, stay in narrowing.kept.items()
            ),
            parameters_before=before,
            parameters_after=sum(parameter.numel() for parameter in self._model.parameters()),
            difference=difference,
        )
        self._inputs = ()

    def _narrowed(self) -> tuple[Narrowing, Callable[[], None], float]:
        """Take channels away; also what gives them back, and how far outputs are from masked ones."""
        stays = {root: _kept(sums, self._share) for root, sums in self._importance.items()}
        kept = {root: stay for root, stay in stays.items() if len(stay) < root.count}
        if not kept:
            raise OptionError(
                f"a share of {self._share} is less than one channel of each layer, of which the widest has "
                f"{max(root.count for root in stays)}; give a larger one."
            )
        narrowing = Narrowing(self._model, self._placements, kept)
        with narrowing.masked():
            expected = self._outputs()
        undo = narrowing.apply()
        try:
            difference = _difference(expected, self._outputs())
        except BaseException as error:
            undo()
            if not isinstance(error, Exception):
                raise
            raise UnsupportedModelError(_unlike(in_one_line(error))) from error
        if not difference <= _AGREEMENT:  # which is so of NaN, too
            undo()
            raise UnsupportedModelError(_unlike(f"its output is off by {difference:.1e}"))
        return narrowing, undo, difference

    @torch.no_grad()
    def _outputs(self) -> list[Tensor]:
        """Of the model in evaluation; modes and random states stay as they are."""
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            with torch.random.fork_rng():
                found = self._model(*copy.deepcopy(self._inputs))
        finally:
            for module, mode in modes.items():
                module.training = mode
        return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _kept(importance: Tensor, share: float) -> Tensor:
    """Numbers of the most important channels, in order."""
    count = len(importance)
    stay = max(1, count - math.floor(share * count + 1e-9))  # 0.29 of 100 is 29
    return importance.argsort(descending=True, stable=True)[:stay].sort().values


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest max |a - b| / max |a| of a tensor; infinite where shapes are unlike.

    It is NaN where one tensor has some. Infinities that both have do not count.
    """
    if [each.shape for each in expected] != [each.shape for each in found]:
        return math.inf
    shares = [torch.zeros((), dtype=torch.float64)]
    for a, b in zip(expected, found, strict=True):
        if a.numel():
            one, other = a.cpu().double(), b.cpu().double()
            most = one.masked_fill(one.isinf(), 0.0).abs().max().clamp_min(_TINY)
            shares.append((one - other).masked_fill(one == other, 0.0).abs().max() / most)
    return float(torch.stack(shares).max())


def _unlike(why: str) -> str:
    return (
        f"without some channels the model does not compute what it does with them masked: {why}. All "
        "channels are there; a number of channels that is written into forward is a usual reason."
    )


def _unjudged(why: str) -> str:
    return f"{why}, so that no channel is less important than others; prune while these weights are trained."


def _judged(model: torch.nn.Module, free: Free) -> Free:
    """Sets with a weight that is trained: nothing tells which channels of the others matter least.

    Raises:
        UnsupportedModelError: there are none.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {root: places for root, places in free.items() if any(name in trained for name, _ in places)}
    if not found:
        raise UnsupportedModelError(_unjudged(f"all weights of {len(free)} sets of channels are frozen"))
    return found


def _check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, narrowed: set[str]) -> None:
    """Refuse an optimizer of another model, or of a part of what gets narrower."""
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise OptionError("the optimizer has no parameter of this model; give the one that trains it.")
    missing = [
        name
        for name, parameter in model.named_parameters()
        if name in narrowed and parameter.requires_grad and id(parameter) not in held
    ]
    if missing:
        raise OptionError(
            f"{missing[0]} is trained and would get narrower, but is not in the optimizer ({len(missing)} "
            "such parameters), so its state cannot follow; give one optimizer of all, or freeze the others."
        )


def _check_new_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that will make state nobody knows how to narrow: a step apart shows it."""
    mine = set(map(id, model.parameters()))
    kind: Any = type(optimizer)
    for group in optimizer.param_groups:
        held = [each for each in group["params"] if id(each) in mine]
        if not held:
            continue
        like = max(held, key=Tensor.dim)
        weight = torch.nn.Parameter(like.detach().new_ones([*range(2, 2 + like.dim())]))
        weight.grad = torch.ones_like(weight)
        apart = kind.__new__(kind)
        with contextlib.suppress(Exception), torch.random.fork_rng(), torch.no_grad():
            # not every optimizer can be made so; then its state tells at the end
            apart.__setstate__(
                {
                    "defaults": dict(optimizer.defaults),
                    "state": collections.defaultdict(dict),
                    "param_groups": [{**group, "params": [weight]}],
                }
            )
            apart.step()
        for key, value in vars(apart).get("state", {}).get(weight, {}).items():
            _check_shape(key, value, weight, "a parameter")


def _check_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that nobody knows how to narrow."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedModelError(
                f"{name} is updated within backward, as under a plan with states=True, and its state is held "
                "elsewhere; attach that plan once pruning.done."
            )
        for key, value in optimizer.state.get(parameter, {}).items():
            _check_shape(key, value, parameter, name)


def _check_shape(key: str, value: Any, parameter: Tensor, name: str) -> None:
    if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
        raise UnsupportedModelError(
            f"the optimizer's '{key}' of {name} has shape {list(value.shape)} and the parameter "
            f"{list(parameter.shape)}, so what of it belongs to a channel is not known; use an "
            "optimizer such as SGD or AdamW."
        )
