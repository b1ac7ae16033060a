"""A model whose forward runs a program: it becomes an instance of a class derived from its own."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch.utils import checkpoint

from squeezebox.rewriting._deferred import saving_hooks
from squeezebox.rewriting._program import Program, Rewriting
from squeezebox.schema import AttachError, UnsupportedModelError

_set_class = object.__dict__["__class__"].__set__


class _Framed:
    """First base of a rewritten model's class: deriving it is no business of the model's own."""

    squeezebox_program: Program
    squeezebox_own: type[torch.nn.Module]

    def __init_subclass__(cls) -> None:
        pass


def install(model: torch.nn.Module, program: Program) -> None:
    """Have the model's forward run the program; nothing is put into the model's ``__dict__``.

    A deep copy is rewritten too; a pickled model is as it was before.

    Raises:
        AttachError: it has a program already.
        UnsupportedModelError: its forward was replaced on the instance, whose class then does not matter.
    """
    if program_of(model) is not None:
        raise AttachError("the model is rewritten already; undo() that first.")
    if "forward" in vars(model):
        raise UnsupportedModelError(
            "somebody has replaced the forward of this very model (accelerate and Lightning do), which would "
            "pass a rewrite by. Rewrite the model before it is prepared."
        )
    own = type(model)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    kind: Any = type(own)
    ours = {"squeezebox_program": program, "squeezebox_own": own}
    derived = kind(own.__name__, (_Framed, own), {**names, **_methods(own), **ours})
    _set_class(model, derived)


def uninstall(model: torch.nn.Module) -> None:
    """The model is as it was before; safe to call twice.

    Raises:
        AttachError: something else was attached to it since.
    """
    if program_of(model) is None:
        return
    kind: Any = type(model)
    if "squeezebox_program" not in vars(kind):
        raise AttachError("a session was attached to the rewritten model; detach() that first.")
    _set_class(model, kind.squeezebox_own)


def program_of(model: torch.nn.Module) -> Program | None:
    """Of a rewritten model."""
    return getattr(type(model), "squeezebox_program", None) if isinstance(model, _Framed) else None


def _methods(own: type[torch.nn.Module]) -> dict[str, Any]:
    @functools.wraps(own.forward)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_left_alone():
            return own.forward(module, *args, **kwargs)
        program = type(module).squeezebox_program
        path = program.path(module)
        mode = Rewriting(program, path)
        with path, mode:
            output = own.forward(module, *args, **kwargs)
        return mode.ended(output)

    def deep_copy(module: Any, memo: dict[int, Any]) -> Any:
        derived = type(module)
        copied = _without(module, derived.squeezebox_own, lambda: copy.deepcopy(module, memo))
        _set_class(copied, derived)
        return copied

    def reduced(module: Any, protocol: Any) -> Any:
        return _without(module, type(module).squeezebox_own, lambda: module.__reduce_ex__(protocol))

    def become(module: Any, kind: type[torch.nn.Module]) -> None:
        """Somebody changes the class, as fully_shard does."""
        program = type(module).squeezebox_program
        _set_class(module, kind)
        install(module, program)

    return {
        "__class__": property(lambda _: own, become),
        "forward": forward,
        "__deepcopy__": deep_copy,
        "__reduce_ex__": reduced,
    }


def _without(module: torch.nn.Module, own: type[torch.nn.Module], do: Any) -> Any:
    derived = type(module)
    _set_class(module, own)
    try:
        return do()
    finally:
        _set_class(module, derived)


def _is_left_alone() -> bool:
    """Whether the forward is transformed, traced, compiled or checkpointed: the model is to be as it was.

    torch.utils.checkpoint pairs what a forward saves with what its repetition saves, in order.
    """
    hooks = saving_hooks()
    if hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__:
        return True
    modes = torch._C._TorchDispatchModeKey
    traced = torch._C._is_tracing() or torch._C._get_dispatch_mode(modes.PROXY) is not None
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return bool(traced or transformed or torch.compiler.is_compiling() or torch.compiler.is_exporting())
