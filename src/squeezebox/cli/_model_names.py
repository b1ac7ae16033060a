"""Models by name: ``module:callable``, ``hf:CONFIG`` of transformers, ``timm:NAME``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from squeezebox.cli._estimate import call_factory, load_factory
from squeezebox.schema import OptionError, in_one_line


def load_model_factory(name: str) -> Callable[[], Any]:
    """What makes the model of that name, with random weights; what the user's own raises is explained.

    Raises:
        OptionError: there is none, or its package is not installed.
    """
    place, _, rest = name.partition(":")
    if place in _PLACES and rest:
        return _PLACES[place](rest)
    made = load_factory(name)
    return functools.wraps(made)(lambda: call_factory(name, made))


def _of_transformers(name: str) -> Callable[[], Any]:
    """A configuration's folder, file, or name on the hub; the class that it names, else the bare model."""
    transformers = _package("transformers", f"hf:{name}")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"'hf:{name}' names no configuration that transformers can read: {in_one_line(error)}."
        ) from error
    config.use_cache = False
    made = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    return _called(name, lambda: made(config) if made else transformers.AutoModel.from_config(config))


def _of_timm(name: str) -> Callable[[], Any]:
    timm = _package("timm", f"timm:{name}")
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name[:6]}*")[:5]) or "timm.list_models() has all"
        raise OptionError(f"timm {timm.__version__} has no model '{name}'; there are {near}.")
    return _called(name, functools.partial(timm.create_model, name))


_PLACES: dict[str, Callable[[str], Callable[[], Any]]] = {"hf": _of_transformers, "timm": _of_timm}


def _called(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
    make.__name__ = name
    return make


def _package(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise OptionError(
                f"'{name}' needs {package}, which imports '{error.name}', and that is missing."
            ) from error
        raise OptionError(
            f"'{name}' needs {package}, which is not installed; pip install {package}, or name "
            "module:callable."
        ) from error
    except (ImportError, RuntimeError, OSError) as error:
        raise OptionError(
            f"'{name}' needs {package}, which fails as it is imported: {in_one_line(error)}."
        ) from error
