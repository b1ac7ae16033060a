"""Profiles on disk and options of earlier profiles, each under what it depends on."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from squeezebox.profiling._timeline import Life
from squeezebox.schema import Action, Option, StepProfile, TensorProfile, decoded, plain, write_whole

_VERSION = 7


def profile_key(
    model: torch.nn.Module, sample: Iterable[torch.Tensor], code: Callable[..., Any], *settings: object
) -> str:
    """A digest of what a profile depends on: equal keys, equal profiles up to timing.

    It covers the weights' and the sample's very bytes: bounds, packed sizes and noise follow from them, and a
    profile of older weights would promise a noise that no longer holds.

    Args:
        model: modules by type, settings (``extra_repr``) and forward's code; parameters and buffers.
        sample: tensors of the step's inputs and target.
        code: the loss; what it calls is not looked into.
        settings: anything else with a faithful ``str()``.
    """
    digest = hashlib.blake2b(digest_size=16)
    for line in _lines(model, code, settings):
        digest.update(line.encode() + b"\n")
    named = (*model.named_parameters(), *model.named_buffers(), *(("", tensor) for tensor in sample))
    for name, tensor in named:
        shape = f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.requires_grad}\n"
        digest.update(shape.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def load_profile(folder: Path, key: str) -> StepProfile | None:
    """The profile written under ``key``; None if there is none, or a damaged one."""
    try:
        values = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        text = values["step"]
        whole = values["checksum"] == _checksum(text)
        seen: StepProfile | None = decoded(StepProfile, json.loads(text)) if whole else None
        return seen
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # FormatError is a ValueError
        return None


def store_profile(folder: Path, key: str, seen: StepProfile) -> None:
    """Write the profile whole or not at all.

    Raises:
        OutputError: the folder cannot be written.
    """
    text = json.dumps(plain(seen))
    write_whole(folder / f"{key}.json", json.dumps({"checksum": _checksum(text), "step": text}))


def _lines(model: torch.nn.Module, code: Callable[..., Any], settings: Iterable[object]) -> Iterator[str]:
    yield f"{_VERSION} {torch.__version__} {_processor()} {torch.get_num_threads()}"
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    yield from sorted(map(torch.cuda.get_device_name, devices))
    yield f"{_code(code)} {code if isinstance(code, torch.nn.Module) else ''}"
    yield from map(str, settings)
    for name, module in model.named_modules():
        kind = type(module)
        settings_of = f"{module.extra_repr()} {module.training}"
        yield f"{name} {kind.__module__}.{kind.__qualname__} {settings_of} {_code(kind.forward)}"


def _code(function: Callable[..., Any]) -> str:
    """A function's name, and its byte code and plain constants where it is written in Python."""
    code = getattr(function, "__code__", None)
    name = (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )
    if code is None:
        return name
    plain = [value for value in code.co_consts if isinstance(value, (int, float, str, bytes))]
    return f"{name} {code.co_code.hex()} {code.co_names} {plain}"


def _processor() -> str:
    """The processor's model, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def as_known(key: str, lives: Mapping[str, Life], known: Sequence[Option]) -> TensorProfile:
    """The tensor with its known options, but those made from tensors that are not there for as long."""
    own = lives[key]
    options = (option for option in known if outlived(own, option.sources, lives))
    return TensorProfile(
        key=key,
        saved_at=own.saved_at,
        dropped_at=own.dropped_at,
        first_use=own.first_use,
        last_use=own.last_use,
        idle_until=own.idle_until,
        gaps=tuple(own.gaps),
        options=tuple(
            replace(option, packing_bytes=own.packing_bytes) if option.action is Action.COMPRESS else option
            for option in options
        ),
    )


def outlived(own: Life, sources: Sequence[str], lives: Mapping[str, Life]) -> bool:
    """Whether all sources are saved before a tensor, and used as late as it is."""
    return all(
        source in lives and lives[source].saved_at <= own.saved_at and own.last_use <= lives[source].last_use
        for source in sources
    )
