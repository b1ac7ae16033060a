"""An optimizer's updates, one parameter at a time, with what they need held elsewhere."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from squeezebox.memory import Absent, DiskFolder, FileTensor, StoredTensor, TensorFile
from squeezebox.optim._groups import Groups, SpentGradient, refuse_unknown, step_apart, step_these
from squeezebox.optim._homes import Homes, is_movable
from squeezebox.optim._pieces import is_divisible, update_in_pieces, update_packed
from squeezebox.optim._products import Products
from squeezebox.optim._split_weight import SplitWeight, SplitWeights
from squeezebox.schema import AttachError, UnsupportedModelError

SMALL_BYTES = 1 << 16  # of a parameter that is updated together with others,
WAITING_BYTES = 1 << 18  # as soon as these are so large

_updated: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that have an Updates


class Updates:
    """Steps parameters one by one: in backward as soon as a gradient is there, or in ``optimizer.step()``.

    Results are the optimizer's own, to the bit where no state is packed. Its object, its ``state_dict()`` and
    schedulers stay as they are: states that are elsewhere are :class:`StoredTensor` there.

    Args:
        model: whose parameters' names are used in messages.
        optimizer: one that :func:`refuse_unknown` lets pass.
        in_backward: update each parameter in backward; its gradient is gone then.
        states: names of the parameters whose optimizer state lives in the file between two updates.
        packed: of others, and the bits (16 or 8) in which the elements of their state are held.
        gradients: names of those whose gradient goes to the file until the update; others' are kept.
        sliced: names of linear layers' weights whose gradient is made while they are updated in backward,
            some rows at a time.
        split: names of weights that are held as bfloat16 and a rest, which is where the optimizer state is.
        folder: where the file is made.

    Attributes:
        weights: those that are split.

    Raises:
        OptionError: the optimizer's step is not parameter by parameter.
        AttachError: the optimizer's updates are made by another one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        in_backward: bool,
        states: Collection[str],
        packed: Mapping[str, int],
        gradients: Collection[str],
        folder: DiskFolder | None,
        sliced: Collection[str] = (),
        split: Collection[str] = (),
    ) -> None:
        refuse_unknown(optimizer)
        if optimizer in _updated:
            raise AttachError(
                f"another session or compiled step makes the updates of this {type(optimizer).__name__} "
                "already. Call its detach() or close() first, or give each model an optimizer of its own."
            )
        self._optimizer, self._in_backward = optimizer, in_backward
        named = dict(model.named_parameters())
        self._groups = Groups(model, optimizer)
        self._gradients = {id(named[name]) for name in gradients}
        self._file = TensorFile(folder) if folder is not None and (states or gradients) else None
        bits = {id(named[name]): bits for name, bits in packed.items()}
        in_file = {id(named[name]) for name in states}
        self._homes = Homes(optimizer, self._file, in_file, bits)
        self.weights = SplitWeights({name: named[name] for name in split}, self._file, in_file)
        self._updated: set[int] = set()  # parameters, since the last step();
        self._used: dict[int, dict[str, Any]] = {}  # group -> the settings with which
        # small ones, to be updated together, and what tells their gradients from later ones
        self._waiting: dict[torch.nn.Parameter, tuple[torch.Tensor, int]] = {}
        self._known = 0  # states, when they were last put in order
        self._is_paused = self._is_stepping = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self.accumulated)
            for parameter in self._groups.parameters()
            if parameter.requires_grad and (in_backward or id(parameter) in self._gradients)
        ]
        self._products = Products(model, sliced, lambda: not self._is_paused)
        self._last = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(after.id, last=False)  # others see parameters again
        self._hooks += [after, optimizer.register_load_state_dict_post_hook(lambda _: self._move_all())]
        _updated.add(optimizer)
        with contextlib.ExitStack() as undone:  # by a full disk, say
            undone.callback(self.close)
            self._move_all()
            undone.pop_all()

    def noise(self) -> float | None:
        """Squared error of the last updates over their squared norm; None where no state is packed."""
        return self._homes.noise.value

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Around what would look at gradients that are used up, as a compiler does at its inputs'."""
        spent = [(each, each.grad) for each in self._groups.parameters() if _is_spent(each)]
        for parameter, _ in spent:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in spent:
                parameter.grad = gradient

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around a backward of which the gradients are looked at and no parameter is updated."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def check_forward(self) -> None:
        """Refuse what would be wrong before it is: gradients that somebody will scale back."""
        scaled = any(
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
            for kind in ("cpu", "cuda")
        )
        if self._file is not None:
            self._file.fetch()
        if not self._is_stepping:
            self._last.remove()  # what others do before a step comes before the updates
            self._last = self._optimizer.register_step_pre_hook(self._before_step)
        if self._in_backward and scaled and not self._is_paused:
            raise UnsupportedModelError(
                "torch.autocast to float16 goes with GradScaler, which divides gradients before the update; "
                "under this plan backward has updated by then. Make an eager plan with clip=True, which "
                "leaves gradients to optimizer.step(), or autocast to bfloat16, which needs no scaling."
            )

    def close(self) -> None:
        """Leave the optimizer as it would be without: states in memory, gradients too."""
        _updated.discard(self._optimizer)
        for hook in (*self._hooks, self._last):
            hook.remove()
        self._products.close()
        self._groups.show()
        for parameter in self._groups.parameters():
            self._homes.bring_back(parameter)
            if isinstance(parameter.grad, StoredTensor):
                parameter.grad = parameter.grad.load()
            elif isinstance(parameter.grad, SpentGradient):
                parameter.grad = None
        self._waiting.clear()
        self.weights.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def accumulated(self, parameter: torch.nn.Parameter) -> None:
        """Backward has all of a parameter's gradient; autograd says so once more where it had none itself."""
        if self._is_paused or parameter.grad is None or _is_spent(parameter):
            return
        self._groups.show()
        if not self._in_backward:
            self._file_gradient(parameter)
        elif parameter.grad.requires_grad:
            raise UnsupportedModelError(
                f"backward(create_graph=True) keeps the gradient of '{self._groups.name(parameter)}', which "
                "would be gone under this plan. Make an eager plan with clip=True, use torch.autograd.grad() "
                "or leave states=True out."
            )
        elif self._is_small(parameter):
            known, version = self._waiting.setdefault(parameter, (parameter.grad, parameter.grad._version))
            if known is not parameter.grad or version != known._version:  # it was added to
                raise _second(self._groups.name(parameter))
            if sum(each.nbytes for each in self._waiting) >= WAITING_BYTES:
                self._update_waiting()
        else:
            self._update_now(parameter)

    def _is_small(self, parameter: torch.nn.Parameter) -> bool:
        """Whether its update is not worth a call of its own."""
        return parameter.nbytes < SMALL_BYTES and parameter not in self._homes

    def _update_waiting(self) -> None:
        """The small parameters so far, together."""
        ready = [
            each for each in self._waiting if each.grad is not None and not isinstance(each.grad, Absent)
        ]
        self._waiting.clear()
        for number, group in enumerate(self._optimizer.param_groups):
            own = [each for each in ready if self._groups.of(each) == number]
            for each in own:
                self._check_first(each)
            if own:
                step_these(self._optimizer, own, group)
                self._used[number] = _settings(group)
            for each in own:
                self._spend(each)

    def _check_first(self, parameter: torch.nn.Parameter) -> None:
        if id(parameter) in self._updated:
            raise _second(self._groups.name(parameter))

    def _update_now(self, parameter: torch.nn.Parameter) -> None:
        self._check_first(parameter)
        number = self._groups.of(parameter)
        group = self._optimizer.param_groups[number]
        self._update(parameter, group)
        self._used[number] = _settings(group)
        self._spend(parameter)

    def _spend(self, parameter: torch.nn.Parameter) -> None:
        """It is updated, and has no gradient any more."""
        gradient = parameter.grad
        assert gradient is not None
        self._updated.add(id(parameter))
        dense = gradient.layout is torch.strided
        parameter.grad = SpentGradient(gradient, self._groups.name(parameter)) if dense else None

    def _update(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        if not isinstance(parameter, SplitWeight):
            self._update_elements(parameter, group)
            return
        parameter.check()
        with parameter.halves.changing():
            self._update_elements(parameter, group)
        parameter.updated()

    def _update_elements(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state = self._optimizer.state.get(parameter, {})
        if not is_divisible(parameter, state, packed=self._homes.packs(parameter)):
            self._update_whole(parameter, group)
        elif self._homes.packs(parameter):
            update_packed(self._optimizer, parameter, group, self._homes)
        else:
            update_in_pieces(self._optimizer, parameter, group, lambda _: self._homes.new(parameter))

    def _update_whole(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        """Of a parameter or a gradient that has no flat memory."""
        filed, states = parameter.grad, self._optimizer.state
        self._homes.bring_back(parameter)
        own = parameter.load() if isinstance(parameter, SplitWeight) else parameter
        own.grad = filed.load() if isinstance(filed, StoredTensor) else filed
        if isinstance(parameter, SplitWeight):
            state = step_apart(self._optimizer, own, group, states.get(parameter, {}))
            if state:
                states[parameter] = state
            parameter.store(own)
        else:
            step_these(self._optimizer, [own], group)
        parameter.grad = filed
        self._homes.put_away(parameter)

    def _file_gradient(self, parameter: torch.nn.Parameter) -> None:
        """A new tensor each time: somebody may still have the last one."""
        gradient = parameter.grad
        if self._file is None or gradient is None or not is_movable(gradient):
            return
        filed = FileTensor(gradient, self._file)
        filed.store(gradient, torch.linalg.vector_norm(gradient))
        parameter.grad = filed

    def _move_all(self) -> None:
        """States that are there already, or were loaded, perhaps after a backward that failed."""
        for each in (self._updated, self._used, self._waiting):
            each.clear()
        for parameter in self._groups.parameters():
            if parameter in self._homes and parameter in self._optimizer.state:
                self._homes.put_away(parameter)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Update what backward has not, and leave nothing for the optimizer's own step to do."""
        self._groups.show()  # a step that failed may have left them hidden
        own, *given = args  # the optimizer itself comes first
        closure = given[0] if given else kwargs.get("closure")
        if closure is not None:
            self._is_stepping = True
            try:
                with torch.enable_grad():
                    loss = closure()
            finally:
                self._is_stepping = False
            args = (own, lambda: loss, *given[1:])
            kwargs = {key: value for key, value in kwargs.items() if key != "closure"}
        self._check_settings()
        for group in optimizer.param_groups:
            left = [each for each in group["params"] if _is_left(each)]
            small = [each for each in left if self._is_small(each) and not isinstance(each.grad, Absent)]
            step_these(optimizer, small, group)
            done = set(map(id, small))
            for parameter in sorted(left, key=lambda each: -each.numel()):
                if id(parameter) not in done:
                    self._update(parameter, group)
        self._groups.hide()
        return args, kwargs

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._groups.show()
        self._updated.clear()
        self._used.clear()
        self._waiting.clear()
        if len(optimizer.state) != self._known:  # as a plain step would have made them
            parameters = [each for each in self._groups.parameters() if each in optimizer.state]
            for each in parameters:
                optimizer.state[each] = optimizer.state.pop(each)
            self._known = len(optimizer.state)
        self._homes.noise.end_step()
        if self._file is not None:
            self._file.end_round()

    def _check_settings(self) -> None:
        """The learning rate and its like must be those that backward has used."""
        for number, used in self._used.items():
            now = _settings(self._optimizer.param_groups[number])
            other = next((key for key in now if used.get(key) != now[key]), None)
            if other is not None:
                raise AttachError(
                    f"'{other}' was {used.get(other)} when backward updated parameters and is {now[other]} "
                    "at optimizer.step(): under this plan backward updates. Set it before backward, or make "
                    "an eager plan with clip=True, which updates in optimizer.step()."
                )


def _second(name: str) -> AttachError:
    return AttachError(
        f"backward has a second gradient of '{name}' and no optimizer.step() came after the first, which "
        "updates it. Call optimizer.step() after each backward, also after one that failed; or make the plan "
        "with accumulate= (several add up to one step; a discriminator has gradients of two losses), or "
        "without states=True."
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a group says apart from its parameters, as plain values."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _is_left(parameter: torch.nn.Parameter) -> bool:
    """Whether backward has left its update to optimizer.step()."""
    return parameter.grad is not None and not _is_spent(parameter)


def _is_spent(parameter: torch.nn.Parameter) -> bool:
    """Whether its gradient was used up."""
    return isinstance(parameter.grad, SpentGradient)
