"""Which operator made each tensor from which others, so that it can be recomputed."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from squeezebox.capture._repeatable import (
    Blank,
    RandomState,
    Stream,
    draws,
    fills,
    is_repeatable,
    reads_shape,
)
from squeezebox.schema import CaptureError, PlanError

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(slots=True, eq=False)
class Origin:
    """What a storage held at one version: the call that made it, and who holds it."""

    storage: StorageWeakRef
    version: int
    call: Call | None = None  # None: nobody knows
    output: int = 0  # which of the call's tensors
    row: Any = None  # of the entry that was made of it
    entry: weakref.ref[Any] | None = None


@dataclass(slots=True, eq=False)
class Call:
    """One operator with its arguments; tensors among them are an :class:`_Input`, :class:`_Held` or ones."""

    number: int
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    device: torch.device
    random_state: RandomState | None  # that device's, where it draws from that
    autocast: tuple[bool, torch.dtype]
    changed: list[Origin] = field(default_factory=list)  # inputs that it changes in place

    @property
    def inputs(self) -> list[Origin]:
        """Contents that it reads, apart from what somebody else holds."""
        return [leaf.origin for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, _Input)]

    @property
    def state_bytes(self) -> int:
        """Bytes of the random state that it started from, the device's or that of a generator."""
        streams = (leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Stream))
        states = [self.random_state, *(stream.state for stream in streams)]
        return sum(state.nbytes for state in states if state is not None)

    def is_current(self) -> bool:
        """Whether what others hold for it is as it was."""
        held = (leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, _Held))
        return all(leaf.tensor._version == leaf.version for leaf in held)


@dataclass(frozen=True, slots=True)
class _Input:
    """A tensor by where its storage came from. Kernels may differ by whether it wants a gradient."""

    origin: Origin
    geometry: Geometry
    dtype: torch.dtype
    requires_grad: bool
    nbytes: int  # of the storage


@dataclass(frozen=True, slots=True)
class _Held:
    """A parameter, a buffer, the caller's input, or a small tensor: held anyway."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Derivation:
    """How one tensor comes from others: the calls to do again, and the keys of the rows they start from."""

    calls: tuple[Call, ...]
    sources: tuple[str, ...]


class Lineage:
    """The operators of one forward pass that can be repeated.

    It holds no tensors of its own beyond small ones: a call's inputs are named by the storage and version
    they came from.
    """

    def __init__(self, is_held: Callable[[torch.Tensor], bool], is_plain: Callable[[Any], bool]) -> None:
        self._is_held, self._is_plain = is_held, is_plain
        self._origins: dict[int, Origin] = {}
        self._numbers = itertools.count()
        self._switches = _switches()
        self._before: torch.Tensor | None = None  # the random state as the running call began

    def clear(self) -> None:
        """Forget every call, and number them from 0 again; recipes that are bound live on."""
        self._origins.clear()
        self._numbers = itertools.count()

    def origin(self, tensor: torch.Tensor) -> Origin:
        """Where the tensor's storage, as it is now, came from."""
        storage = tensor.untyped_storage()
        found = self._origins.get(storage._cdata)
        if found is None or found.storage.expired() or found.version != tensor._version:
            found = self._origins[storage._cdata] = Origin(StorageWeakRef(storage), tensor._version)
        return found

    def begin(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Call | None:
        """To be asked before a call; None where it cannot be repeated."""
        if _switches() != self._switches or _is_transformed():
            return None
        device = _device_of(args, kwargs or {})
        if not is_repeatable(function, device):
            return None
        args, kwargs = self._unread(function, *_stateless(function, args, kwargs or {}))
        if not all(map(self._is_plain_or_held, _leaves((args, kwargs)))):
            return None
        own = any(isinstance(leaf, torch.Generator) for leaf in _leaves(kwargs))
        self._before = _random_state(device) if draws(function) and not own else None
        return Call(
            number=next(self._numbers),
            function=function,
            args=_mapped(self._input, args),
            kwargs=_mapped(self._input, kwargs),
            device=device,
            random_state=None,
            autocast=(torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)),
        )

    def end(self, call: Call, args: Any, kwargs: Any, out: Any) -> None:
        """To be called after it: what it returned is its result, also what it changed in place."""
        if self._before is not None and not torch.equal(self._before, _random_state(call.device)):
            call.random_state = RandomState(self._before)
        self._before = None
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs)) if self._is_plain(t)}
        if isinstance(out, torch.Tensor) and next(_tensors((args, kwargs)), None) is None:
            call.kwargs = {**call.kwargs, "dtype": out.dtype, "device": out.device}
        if fills(call.function) and isinstance(call.args[0], Blank):
            given.clear()
        before = {id(origin): origin for origin in call.inputs}
        for number, tensor in enumerate(_tensors(out)):
            if not self._is_plain(tensor) or tensor.is_inference():
                continue
            storage = tensor.untyped_storage()
            old = self._origins.get(storage._cdata) if storage._cdata in given else None
            if storage._cdata in given and (old is None or old.version == tensor._version):
                continue  # a view, or what somebody else holds
            if old is not None and id(old) in before:
                call.changed.append(old)
            self._origins[storage._cdata] = Origin(StorageWeakRef(storage), tensor._version, call, number)

    def note_original(self, copy: torch.Tensor, call: Call) -> None:
        """``copy`` is what an operator kept of its input before it changed that in place."""
        original = call.changed[0]
        inputs = (leaf for leaf in _leaves((call.args, call.kwargs)) if isinstance(leaf, _Input))
        whole = ((tuple(copy.shape), copy.stride(), 0), copy.untyped_storage().nbytes())
        if any(leaf.origin is original and (leaf.geometry, leaf.nbytes) == whole for leaf in inputs):
            origin = self.origin(copy)
            origin.call, origin.output = original.call, original.output

    def note_mask(self, mask: torch.Tensor, call: Call) -> None:
        """``mask`` is what dropout multiplied its input by: its result for ones; or where that is not 0."""
        first = call.args[0] if call.args else call.kwargs.get("input")
        if "alpha" in getattr(call.function, "__name__", ""):  # which adds to what it multiplies
            return
        if not isinstance(first, _Input) or first.geometry[:2] != (tuple(mask.shape), mask.stride()):
            return
        ones = Blank(tuple(mask.shape), mask.stride(), first.dtype, mask.device, 1.0)
        args = (ones, *call.args[1:]) if call.args else ()
        kwargs = call.kwargs if call.args else {**call.kwargs, "input": ones}
        origin = self.origin(mask)
        whole = mask.dtype != torch.bool
        function = call.function if whole else functools.partial(_is_nonzero, call.function)
        origin.call = replace(call, function=function, args=args, kwargs=kwargs, changed=[])
        origin.output = 0

    def _is_plain_or_held(self, leaf: Any) -> bool:
        if not isinstance(leaf, torch.Tensor):
            return True
        if leaf.is_inference():
            return False
        if self._is_held(leaf):
            return True
        return self._is_plain(leaf) and not (leaf.is_neg() or leaf.is_conj())

    def _unread(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments without a tensor of which only shape and dtype count, or that is overwritten."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not self._is_plain(first.data):
            return args, kwargs
        if reads_shape(function):
            device = kwargs.get("device") or first.device
            return (Blank.like(first, torch.device("meta")), *args[1:]), {**kwargs, "device": device}
        whole = first.numel() * first.element_size() == first.untyped_storage().nbytes()
        if fills(function) and whole and not self._is_held(first):
            return (Blank.like(first), *args[1:]), kwargs
        return args, kwargs

    def _input(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return Stream(RandomState(leaf.get_state()), leaf.device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._is_held(leaf):
            return _Held(leaf.detach(), leaf._version, leaf.requires_grad)
        return _Input(
            origin=self.origin(leaf),
            geometry=(tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset())),
            dtype=leaf.dtype,
            requires_grad=leaf.requires_grad,
            nbytes=leaf.untyped_storage().nbytes(),
        )


def derivation(origin: Origin) -> Derivation | None:
    """The calls back to the nearest rows whose values are held; None if one on the way cannot be repeated."""
    calls: dict[int, Call] = {}
    sources: dict[str, None] = {}
    stack = [origin]
    while stack:
        here = stack.pop()
        if here is not origin and here.row is not None and (here.row.reads_values or here.call is None):
            sources[here.row.key] = None
        elif here.call is None or not here.call.is_current():
            return None
        elif id(here.call) not in calls:
            calls[id(here.call)] = here.call
            stack.extend(here.call.inputs)
    return Derivation(tuple(calls.values()), tuple(sources))


class Recipe:
    """One tensor's derivation from entries, which it keeps alive.

    Args:
        origin: of the tensor.
        sources: keys of the entries to start from.

    Raises:
        PlanError: the forward pass made the tensor in another way than the plan says.
    """

    def __init__(self, origin: Origin, sources: Container[str]) -> None:
        self._origin = origin
        self._entries: dict[int, Any] = {}
        self._makers: dict[int, int] = {}  # ids of calls by those of their results
        calls: dict[int, Call] = {}
        self._uses: Counter[int] = Counter()
        stack = [origin]
        while stack:
            here = stack.pop()
            self._uses[id(here)] += 1
            if self._uses[id(here)] > 1:
                continue
            entry = here.entry() if here.entry is not None and here is not origin else None
            if entry is not None and entry.row.key in sources:
                self._entries[id(here)] = entry
            elif here.call is None:
                raise PlanError(
                    f"the plan recomputes '{origin.row.key}', and this forward pass made it in another way "
                    "than the one that was planned. Make a new plan with squeezebox.plan(), with inputs and "
                    "settings as in training: Hugging Face's Trainer sets model.config.use_cache = False."
                )
            else:
                self._makers[id(here)] = id(here.call)
                if id(here.call) not in calls:
                    calls[id(here.call)] = here.call
                    stack.extend(here.call.inputs)
        self._calls = sorted(calls.values(), key=lambda call: call.number)

    def follow(self, values: Callable[[Any], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The tensor's storage recomputed, flat; ``values(entry)`` gives an entry's, which stays as it is."""
        made: dict[int, list[torch.Tensor]] = {}

        def whole(origin: Origin) -> torch.Tensor:
            entry = self._entries.get(id(origin))
            return values(entry) if entry is not None else made[self._makers[id(origin)]][origin.output]

        def given(leaf: Any) -> Any:
            if not isinstance(leaf, _Input):
                return _literal(leaf)
            found = whole(leaf.origin)
            shared = id(leaf.origin) in self._entries or self._uses[id(leaf.origin)] > 1
            if shared and id(leaf.origin) in self._changed:
                found = _flat(found, found.dtype).clone()
            return _seen(found, leaf.geometry, leaf.dtype).requires_grad_(leaf.requires_grad)

        with torch.no_grad():
            for call in self._calls:
                self._changed = {id(origin) for origin in call.changed}
                made[id(call)] = _repeat(call, _mapped(given, call.args), _mapped(given, call.kwargs))
            return _flat(whole(self._origin), dtype)


def _repeat(call: Call, args: Any, kwargs: Any) -> list[torch.Tensor]:
    enabled, dtype = call.autocast
    with torch.autocast(call.device.type, dtype=dtype, enabled=enabled):
        if call.random_state is None:
            return list(_tensors(call.function(*args, **kwargs)))
        on_device = call.device.type == "cuda"
        with torch.random.fork_rng(devices=[call.device] if on_device else []):
            if on_device:
                torch.cuda.set_rng_state(call.random_state.whole(), call.device)
            else:
                torch.set_rng_state(call.random_state.whole())
            return list(_tensors(call.function(*args, **kwargs)))


def _is_nonzero(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return function(*args, **kwargs) != 0


def _device_of(args: Any, kwargs: Mapping[str, Any]) -> torch.device:
    """Where the call's result is made, and drawn."""
    named = kwargs.get("device")
    if named is not None:
        return torch.empty(0, device=named).device
    return next((tensor.device for tensor in _tensors((args, kwargs))), torch.get_default_device())


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _literal(leaf: Any) -> Any:
    if isinstance(leaf, Blank | Stream):
        return leaf.make()
    if not isinstance(leaf, _Held):
        return leaf
    if leaf.tensor._version != leaf.version:
        raise CaptureError(
            f"a tensor of shape {tuple(leaf.tensor.shape)} was changed in place between forward and "
            "backward, and the plan recomputes others from it. Step the optimizer after "
            "backward, or make a plan without this change."
        )
    return leaf.tensor.detach().requires_grad_(leaf.requires_grad)


def _switches() -> tuple[bool, ...]:
    """The settings that choose kernels, in addition to the arguments."""
    attention = (torch._C._get_flash_sdp_enabled(), torch._C._get_math_sdp_enabled())
    return (*attention, torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_mkldnn_enabled())


def _is_transformed() -> bool:
    """Whether the call is one of vmap, grad and their like, whose tensors have no storage."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _stateless(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments for a repetition that leaves no trace: running statistics are not updated again."""
    if function is not F.batch_norm:
        return args, kwargs
    named = {**dict(zip(_BATCH_NORM, args, strict=False)), **kwargs}
    for name in ("running_mean", "running_var"):
        known = None if named.get("training") else named.get(name)
        # a copy: training in between would change them
        named[name] = None if known is None else _Held(known.detach().clone(), 0)
    return (), named


def _seen(whole: torch.Tensor, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
    """The storage of ``whole`` through a geometry."""
    shape, stride, offset = geometry
    view = torch.empty(0, dtype=dtype, device=whole.device)
    return view.set_(whole.untyped_storage(), offset, shape, stride)


def _flat(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _seen(tensor, ((tensor.untyped_storage().nbytes() // dtype.itemsize,), (1,), 0), dtype)


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _mapped(function, value) for name, value in values.items()}
    if isinstance(values, (tuple, list)):
        mapped = [_mapped(function, value) for value in values]
        return mapped if isinstance(values, list) else tuple(mapped)
    return function(values)


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(values) if isinstance(leaf, torch.Tensor))
