"""Arguments of ``squeezebox estimate``: the model's factory and the input's shape."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from squeezebox.schema import OptionError, SqueezeboxError, in_one_line

if TYPE_CHECKING:
    import torch


def load_factory(name: str, *, arguments: int = 0) -> Callable[..., Any]:
    """The callable named ``module:attribute``, with the current directory first on the path.

    It will be called with that many arguments.

    Raises:
        OptionError: the name has no colon, the module or attribute is missing, or it is not callable.
    """
    module_name, colon, attribute = name.partition(":")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace(os.sep, ".").strip(".")
        raise OptionError(
            f"'{name}' names a file; write its module, as in {dotted}:{attribute or 'callable'}, in the "
            "directory that holds it."
        )
    if not (module_name and colon and attribute):
        raise OptionError(f"'{name}' names no callable; write module:callable, as in my_models:resnet.")
    module = _import(module_name)
    factory = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise OptionError(
                f"module '{module_name}' ({getattr(module, '__file__', None)}) has no '{attribute}'; "
                "name a function or class in it."
            )
        factory = getattr(factory, part)
    if not callable(factory):
        raise OptionError(
            f"'{name}' is a {type(factory).__name__}, which cannot be called; name a function or class."
        )
    needed = needed_arguments(factory)
    if len(needed) > arguments:
        raise OptionError(
            f"'{name}' needs arguments ({', '.join(needed)}), but is called with {arguments}; name a "
            "function that needs no more."
        )
    return factory  # type: ignore[no-any-return]


def call_factory(name: str, factory: Callable[[], Any]) -> Any:
    """What the user's own callable returns; what it raises becomes one sentence that says where.

    So does its sys.exit().

    Raises:
        SqueezeboxError: it raised something. Where meta tensors are the reason, that is left to the caller.
    """
    try:
        return factory()
    except (Exception, SystemExit) as error:
        if isinstance(error, SqueezeboxError) or _is_of_meta(error):
            raise
        raise _explained(name, error) from None


def _is_of_meta(error: BaseException) -> bool:
    """Whether torch says that a tensor has no values, where an estimate makes models without them first."""
    import torch

    without = torch.get_default_device().type == "meta"
    said = isinstance(error, RuntimeError | TypeError) and re.search(r"\bmeta\b", str(error), re.IGNORECASE)
    return without and bool(said)


def _explained(name: str, error: BaseException, when: str = "") -> SqueezeboxError:
    frames = traceback.extract_tb(error.__traceback__)
    told = re.findall(r'File "(.+)", line (\d+)', getattr(error.__cause__, "tb", ""))  # of another process
    file, line = told[-1] if told else (frames[-1].filename, frames[-1].lineno)
    return SqueezeboxError(
        f"'{name}'{when} raised {in_one_line(error)} ({file}, line {line}). Mend it, or name another."
    )


def require_step(input: str | None, batch: int | None) -> None:
    """Look at shape and batch before anything is imported that takes long.

    Raises:
        OptionError: one is out of range.
    """
    if input is not None:
        parse_shape(input)
    if batch is not None and batch < 1:
        raise OptionError(f"--batch {batch} is below 1: a step needs at least one sample.")


def refuse_useless(given: Mapping[str, bool], why: str) -> None:
    """OptionError for the first of these options that is given."""
    for option, is_there in given.items():
        if is_there:
            raise OptionError(f"{option} is {why}.")


def load_loss(name: str) -> Callable[[Any, Any], torch.Tensor]:
    """The function of output and target called ``module:callable``; its sys.exit() is explained.

    Raises:
        OptionError: there is none, or it does not take two arguments.
    """
    found = load_call(name, "output", "target", option="--loss ")
    if not inspect.isfunction(found):
        return found

    @functools.wraps(found)
    def loss(output: Any, target: Any) -> torch.Tensor:
        try:
            return found(output, target)  # type: ignore[no-any-return]
        except SystemExit as error:
            raise _explained(name, error) from None

    return loss


def load_call(name: str, *given: str, option: str = "") -> Callable[..., Any]:
    """The callable named ``module:attribute``, which takes what is ``given``.

    Raises:
        OptionError: there is none, or it does not take these arguments.
    """
    found = load_factory(name, arguments=len(given))
    try:
        inspect.signature(found).bind(*given)
    except TypeError as error:
        raise OptionError(f"{option}{name} is called with {' and '.join(given)}, but: {error}.") from error
    except ValueError:  # written in C: only a call would tell
        pass
    return found


def needed_arguments(factory: Callable[..., Any]) -> list[str]:
    """Names of the arguments without a default."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # written in C: only a call would tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _import(name: str) -> Any:
    if name.startswith("."):
        raise OptionError(
            f"'{name}' begins with a dot; write the module's whole name, as in my_models:resnet."
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        raise OptionError(f"'{name}' is no Python: {error}. Correct it there.") from error
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise OptionError(
                f"module '{name}' was found but imports '{error.name}', which is missing; install that first."
            ) from error
        raise OptionError(
            f"no module '{name}' in {here} or among the installed packages; change to the directory that "
            f"holds it, or check the name."
        ) from error
    except (Exception, SystemExit) as error:
        if isinstance(error, SqueezeboxError):
            raise
        raise _explained(name, error, ", as it was imported,") from None


def parse_shape(text: str) -> tuple[int, ...]:
    """``3x224x224`` as ``(3, 224, 224)``.

    Raises:
        OptionError: a size is not a positive whole number.
    """
    sizes = text.lower().split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise OptionError(
            f"--input {text} is not a shape: sizes are whole numbers above 0, joined by x, without the "
            "batch. Write --input 3x224x224."
        )
    return tuple(int(size) for size in sizes)
