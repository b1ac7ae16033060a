"""How a sample's inputs go into a call of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def arguments(call: Callable[..., Any], inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those by place and those by keyword with which ``call`` takes a sample's inputs.

    A tuple's are by place, a dict's by keyword. A dict that the signature does not admit so is one value
    itself, like all that is neither. Of a module, its ``forward`` is asked.
    """
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs):
        try:
            inspect.signature(getattr(call, "forward", call)).bind(**inputs)
        except (TypeError, ValueError):  # not by these names; or it has no signature
            return (inputs,), {}
        return (), dict(inputs)
    return (inputs,), {}
