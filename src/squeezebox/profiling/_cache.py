"""Profiles on disk and options of earlier profiles, each under what it depends on."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import numbers
import os
import platform
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import torch

from squeezebox.memory import parts_of
from squeezebox.profiling._timeline import Life
from squeezebox.schema import Action, Option, StepProfile, TensorProfile, decoded, plain, write_whole

_VERSION = 9


def profile_key(
    model: torch.nn.Module, sample: Iterable[torch.Tensor], code: Callable[..., Any], *settings: object
) -> str:
    """A digest of what a profile depends on: equal keys, equal profiles up to timing.

    It covers the weights' and the sample's very bytes: bounds, packed sizes and noise follow from them, and a
    profile of older weights would promise a noise that no longer holds.

    Args:
        model: modules by type, settings (``extra_repr`` and attributes), forward's code and hooks; parameters
            and buffers. An attribute that changes with every forward makes every key another one.
        sample: tensors of the step's inputs and target.
        code: the loss, with its defaults, what it closes over and its own attributes; what it calls is not
            looked into.
        settings: anything else that :func:`_plainly` knows.
    """
    digest = hashlib.blake2b(digest_size=16)
    for line in _lines(model, code, settings):
        digest.update(line.encode() + b"\n")
    named = (*model.named_parameters(), *model.named_buffers(), *(("", tensor) for tensor in sample))
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}\n".encode())
        for part in parts_of(tensor.detach()):
            digest.update(f"{part.stride()}\n".encode())
            digest.update(_bytes(part))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data


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
    yield f"{_VERSION} {torch.__version__} {_processor()} {torch.get_num_threads()} {_allocator()}"
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    yield from sorted(map(torch.cuda.get_device_name, devices))
    yield _plainly(code, _DEEP)
    yield from (_plainly(each, _DEEP) for each in settings)
    yield from _modules(model, _DEEP)


_DEEP = 8  # levels of functions, containers and objects
_LESS = 4  # of attributes, which may lead anywhere; of their tensors no values: an earlier step's, maybe
_OF_HOOKS = 3  # their code and what they close over: they may lead to the model, from each of its modules
_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}
_ALLOCATES = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES")  # variables of the environment
_PLAIN = (type(None), str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device, PurePath)


def _plainly(value: object, depth: int) -> str:
    """A value in every process's words: a plain one as it is, others by type and what is within."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}" + (_values(value) if depth > _LESS else "")
    kind = _named(type(value))
    if depth == 0:
        return kind
    if isinstance(value, type):
        return _named(value)
    if isinstance(value, torch.nn.Module):
        return "; ".join(_modules(value, depth - 1))
    return f"{kind} {_within(value, depth - 1)}"


def _modules(model: torch.nn.Module, depth: int) -> Iterator[str]:
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        settings = f"{module.extra_repr()} {module.training} {_plainly(own, min(depth, _LESS))}"
        settings += _plainly(hooks, min(depth, _OF_HOOKS))
        yield f"{name} {_named(type(module))} {_plainly(type(module).forward, depth)} {settings}"


def _within(value: object, depth: int) -> str:
    """Of containers and functions what is in them, of other objects their attributes."""
    if isinstance(value, (list, tuple)):
        return str([_plainly(each, depth) for each in value])
    if isinstance(value, (set, frozenset)):
        return str(sorted(_plainly(each, depth) for each in value))
    if isinstance(value, Mapping):
        return str([(_plainly(key, depth), _plainly(each, depth)) for key, each in value.items()])
    if isinstance(value, functools.partial):
        return _plainly((value.func, value.args, value.keywords), depth)
    if isinstance(value, types.MethodType):
        return _plainly((value.__func__, value.__self__), depth)
    if isinstance(value, types.FunctionType):
        cells = [_of_cell(cell, depth) for cell in value.__closure__ or ()]
        given = _plainly((value.__defaults__, value.__kwdefaults__), depth)
        return f"{_named(value)} {_code(value.__code__)} {given} {cells}"
    if isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
        return str(getattr(value, "__name__", ""))
    called = type(value).__call__ if callable(value) else None
    return f"{_plainly(called, depth)} {_plainly(getattr(value, '__dict__', {}), min(depth, _LESS))}"


def _named(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _code(code: types.CodeType) -> str:
    """Byte code, names and constants, of functions within too."""
    constants = [_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _of_cell(cell: types.CellType, depth: int) -> str:
    try:
        return _plainly(cell.cell_contents, depth)
    except ValueError:  # it is empty yet
        return ""


def _values(tensor: torch.Tensor) -> str:
    return " ".join(hashlib.blake2b(_bytes(part), digest_size=16).hexdigest() for part in parts_of(tensor))


def _allocator() -> list[tuple[str, str]]:
    """What says how the process allocates, on which a step's seconds depend."""
    return sorted(each for each in os.environ.items() if each[0].startswith(_ALLOCATES))


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
