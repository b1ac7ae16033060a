"""Around the model's forward: where a pass starts and ends, and what somebody else has put there."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack

from squeezebox.capture._overwrites import Overwrites
from squeezebox.capture._recorder import COMPILED, Recorder
from squeezebox.schema import UnsupportedModelError


def foreign_hooks() -> bool:
    """Whether saved-tensor hooks of somebody else are active on this thread."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), Overwrites)


def why_left_alone() -> str:
    """Why a forward's saved tensors are not ours to hold; '' where they are."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func transformed it"
    if forward_ad._current_level >= 0:
        return "forward-mode AD ran through it"
    if foreign_hooks():
        return "other saved-tensor hooks were active around it"
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return "" if enabled else "saved-tensor hooks were disabled around it"


def refuse_transforms() -> None:
    """UnsupportedModelError where no step of training can be run.

    Raises:
        UnsupportedModelError: inside torch.func's transforms, or where saved-tensor hooks are disabled.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedModelError(
            "this was called inside a transform of torch.func (grad, vmap, jvp or their kin), in which no "
            "backward can be run; call it outside."
        )
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        raise UnsupportedModelError(
            "this was called where saved-tensor hooks are disabled, without which nobody sees what a step "
            "saves; call it outside torch.autograd.graph.disable_saved_tensors_hooks."
        )


def is_traced() -> bool:
    """Whether a tracer records the forward, for which the model is to be as it is without a session."""
    modes = torch._C._TorchDispatchModeKey
    return bool(torch._C._is_tracing() or torch._C._get_dispatch_mode(modes.PROXY) is not None)


Start = Callable[[Any], None]
Finish = Callable[[bool], None]

_set_class = object.__dict__["__class__"].__set__


class _Framed:
    """First base of a framed model's class: deriving it is no business of the model's own."""

    def __init_subclass__(cls) -> None:
        pass


class Installation:
    """A frame around a model's forward; :meth:`remove` leaves nothing behind.

    ``start(inputs)`` is called before the model's own forward, ``finish(failed)`` after it, also when
    it raises anything: torch's own forward hooks would not be called on KeyboardInterrupt. The model is of a
    class derived from its own, as after fully_shard, and has nothing of the frame in its ``__dict__`` (but
    where a forward was put there before, as plain copies share that too). So what copies, pickles or scripts
    the model gets one of its own class, that computes by itself.
    """

    def __init__(self, model: torch.nn.Module, start: Start, finish: Finish) -> None:
        self._of = weakref.ref(model)
        self._start, self._finish = start, finish
        self._installed = True
        self._forward = self._frame(model)
        self._previous: Any = None
        self._own = type(model)
        self._put_on(model)

    def remove(self) -> None:
        """Take the frame off; safe to call twice."""
        model = self._of()
        if model is not None and self._start is not _nothing:
            self._take_off(model)
        self._installed = False
        self._start = self._finish = _nothing

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In here the model's forward runs bare."""
        self._installed = False
        try:
            yield
        finally:
            self._installed = True

    def _put_on(self, model: torch.nn.Module) -> None:
        own = self._own
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        methods = self._methods()
        self._previous = model.__dict__.get("forward")
        if self._previous is not None:  # which comes before the class's, and may call that
            model.__dict__["forward"] = MethodType(methods.pop("forward"), model)
        kind: Any = type(own)
        _set_class(model, kind(own.__name__, (_Framed, own), names | methods))

    def _take_off(self, model: torch.nn.Module) -> None:
        _set_class(model, self._own)
        held = model.__dict__
        if getattr(held.get("forward"), "__func__", None) is not self._forward:
            return
        del held["forward"]  # Lightning puts it there, too
        if self._previous is not None:
            held["forward"] = self._previous

    def _become(self, module: torch.nn.Module, own: type[torch.nn.Module]) -> None:
        """Somebody changes the class, as fully_shard does: the frame stays on a model that has it."""
        if module is not self._of():
            _set_class(module, own)
            return
        self._take_off(module)
        self._own = own
        self._put_on(module)

    def bare(self, do: Callable[..., Any], module: torch.nn.Module, *arguments: Any) -> Any:
        """Do it to the module without the frame, which a copy of its ``__dict__`` need not have back."""
        if module is not self._of():
            _set_class(module, self._own)
            return do(module, *arguments)
        self._take_off(module)
        try:
            return do(module, *arguments)
        finally:
            self._put_on(module)

    def _methods(self) -> dict[str, Any]:
        """Under the names by which Python and torch look for them."""
        return {
            "__class__": property(lambda _: self._own, self._become),
            "forward": self._forward,
            "__copy__": _swapped(self, copy.copy),
            "__deepcopy__": _swapped(self, copy.deepcopy),
            "__reduce_ex__": _swapped(self, _reduced),
            "__prepare_scriptable__": _swapped(self, copy.copy),
            "_replicate_for_data_parallel": _swapped(self, _replica),
        }

    def _frame(self, model: torch.nn.Module) -> Callable[..., Any]:
        """The model's forward between start and finish; that of a copy of the model runs bare."""

        @functools.wraps(type(model).forward)
        def forward(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            bare = functools.partial(self._own.forward, module)
            if module is not self._of():
                return bare(*args, **kwargs)
            bare = self._previous or bare
            if not self._installed or not torch.is_grad_enabled() or torch.compiler.is_exporting():
                return bare(*args, **kwargs)
            if torch.compiler.is_compiling():
                _refuse_compiling()
            if is_traced():
                return bare(*args, **kwargs)
            finish, failed = self._finish, True  # a new frame may take the place of this one
            try:
                self._start((args, kwargs))
                out = bare(*args, **kwargs)
                failed = False
            except RuntimeError as error:
                if _TRANSFORMS not in str(error):
                    raise
                raise UnsupportedModelError(_TRANSFORMING) from error
            finally:
                finish(failed)
            return out

        return forward


def _swapped(installation: Installation, do: Callable[..., Any]) -> Callable[..., Any]:
    def method(module: torch.nn.Module, *arguments: Any) -> Any:
        return installation.bare(do, module, *arguments)

    return method


def _reduced(model: torch.nn.Module, protocol: Any) -> Any:
    """For pickle, which comes for the state when the frame is back."""
    parts = model.__reduce_ex__(protocol)
    if isinstance(parts, str):
        return parts
    return tuple(dict(part) if part is model.__dict__ else part for part in parts)


def _replica(model: torch.nn.Module) -> Any:
    return model._replicate_for_data_parallel()


def _nothing(_: object) -> None:
    """Of a frame that was taken off."""


_TRANSFORMS = "don't yet support saved tensor hooks"  # as torch says it
_TRANSFORMING = (
    "the model's forward takes gradients with torch.func, which torch refuses inside saved-tensor hooks, and "
    "a session's are such. Attach to the parts that do not, or take them with torch.autograd.grad."
)


def _refuse_compiling() -> None:
    raise UnsupportedModelError(COMPILED)


_refuse_compiling._torchdynamo_disable = True  # type: ignore[attr-defined]  # called, and not traced


def check_supported(model: torch.nn.Module) -> None:
    """Refuse models whose capture would do harm.

    Raises:
        UnsupportedModelError: parameters on two devices, or a part compiled by torch.compile or torch.jit.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            "the model is compiled by torch.jit, and runs without Python's operators, which a session "
            "watches. Attach to the module that it was made of."
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"the model's parameters are on {len(devices)} devices ({', '.join(devices)}); one model is "
            "captured on one device. Move it with model.to(device), or attach to each part by itself."
        )
    part = compiled_part(model)
    if part is not None:
        raise UnsupportedModelError(
            f"module '{part}' is compiled by torch.compile: saved-tensor hooks written in Python would "
            "unpack everything before its backward starts and raise the peak. Attach to the eager model "
            "instead, or compile it with squeezebox.compile()."
        )


def compiled_part(model: torch.nn.Module) -> str | None:
    """Name of the first module that torch.compile has compiled."""
    for name, module in model.named_modules():
        if is_compiled(module):
            return name or type(module).__name__
    return None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile has compiled its call, by ``torch.compile(module)`` or ``module.compile()``."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or type(module).__name__ == "OptimizedModule"


def is_innermost(recorder: Recorder) -> bool:
    """Whether nobody has entered a function mode or saved-tensor hooks since the recorder was entered."""
    mode = _get_current_function_mode_stack()[-1:]
    return bool(mode == [recorder] and recorder.hooks.innermost)
