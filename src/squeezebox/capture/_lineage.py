"""Which operator made each tensor from which others, so that it can be made again."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from squeezebox.schema import CaptureError, PlanError

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]

# Operators whose result depends on nothing but their arguments, by the name that a TorchFunctionMode sees.
_PURE = frozenset(
    "relu relu_ leaky_relu leaky_relu_ relu6 hardtanh hardtanh_ hardswish hardsigmoid elu softplus mish gelu "
    "silu sigmoid sigmoid_ tanh tanh_ softmax log_softmax layer_norm group_norm rms_norm batch_norm "
    "normalize add add_ __iadd__ __radd__ sub sub_ __isub__ __rsub__ mul mul_ __imul__ __rmul__ div div_ "
    "__itruediv__ __rdiv__ __rtruediv__ neg pow __rpow__ square sqrt rsqrt exp log abs clamp clamp_ where "
    "maximum minimum masked_fill masked_fill_ tril triu addcmul addcdiv "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul __matmul__ bmm "
    "baddbmm addmm mm einsum max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate pixel_shuffle pixel_unshuffle "
    "pad mean sum amax amin cat stack concat contiguous reshape flatten clone to float half bfloat16 double "
    "repeat repeat_interleave roll flip unfold index_select gather".split()
)
_RANDOM = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
    "scaled_dot_product_attention".split()
)


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
    random_state: torch.Tensor | None
    autocast: tuple[bool, torch.dtype]
    changed: list[Origin] = field(default_factory=list)  # inputs that it changes in place

    @property
    def inputs(self) -> list[Origin]:
        """Contents that it reads, apart from what somebody else holds."""
        return [leaf.origin for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, _Input)]

    @property
    def state_bytes(self) -> int:
        """Bytes of the random state that it started from."""
        return 0 if self.random_state is None else self.random_state.nbytes

    def is_current(self) -> bool:
        """Whether what others hold for it is as it was."""
        held = (leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, _Held))
        return all(leaf.tensor._version == leaf.version for leaf in held)


@dataclass(frozen=True, slots=True)
class _Input:
    origin: Origin
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class _Held:
    """A parameter, a buffer, the caller's input, or a small tensor: held anyway."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class _Ones:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


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
        name = getattr(function, "__name__", "")
        if name not in _PURE and name not in _RANDOM:
            return None
        args, kwargs = _stateless(function, args, kwargs or {})
        if not all(map(self._is_plain_or_held, _leaves((args, kwargs)))):
            return None
        return Call(
            number=next(self._numbers),
            function=function,
            args=_mapped(self._input, args),
            kwargs=_mapped(self._input, kwargs),
            random_state=torch.get_rng_state() if name in _RANDOM else None,
            autocast=(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        )

    def end(self, call: Call, args: Any, kwargs: Any, out: Any) -> None:
        """To be told after it: what it returned is its result, also what it changed in place."""
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs)) if self._is_plain(t)}
        before = {id(origin): origin for origin in call.inputs}
        for number, tensor in enumerate(_tensors(out)):
            if not self._is_plain(tensor):
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
        origin, original = self.origin(copy), call.changed[0]
        origin.call, origin.output = original.call, original.output

    def note_mask(self, mask: torch.Tensor, call: Call) -> None:
        """``mask`` is what dropout multiplied its input by: its result for ones."""
        first = call.args[0] if call.args else call.kwargs.get("input")
        if not isinstance(first, _Input) or first.geometry[:2] != (tuple(mask.shape), mask.stride()):
            return
        ones = _Ones(tuple(mask.shape), mask.stride(), mask.dtype, mask.device)
        args = (ones, *call.args[1:]) if call.args else ()
        kwargs = call.kwargs if call.args else {**call.kwargs, "input": ones}
        origin = self.origin(mask)
        origin.call, origin.output = replace(call, args=args, kwargs=kwargs, changed=[]), 0

    def _is_plain_or_held(self, leaf: Any) -> bool:
        if not isinstance(leaf, torch.Tensor) or self._is_held(leaf):
            return True
        return self._is_plain(leaf) and not (leaf.is_neg() or leaf.is_conj())

    def _input(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._is_held(leaf):
            return _Held(leaf.detach(), leaf._version)
        return _Input(self.origin(leaf), (tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset())))


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
                    "than the one that was planned. Make a new plan with squeezebox.plan()."
                )
            else:
                stack.extend(here.call.inputs)

    def follow(self, values: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The tensor's storage made again, flat; ``values(entry)`` gives an entry's, which stays as it is."""
        made: dict[int, list[torch.Tensor]] = {}
        with torch.no_grad():
            return _flat(self._make(self._origin, values, made))

    def _make(
        self, origin: Origin, values: Callable[[Any], torch.Tensor], made: dict[int, list[torch.Tensor]]
    ) -> torch.Tensor:
        entry = self._entries.get(id(origin))
        if entry is not None:
            return values(entry)
        call = origin.call
        if call is None:
            raise CaptureError("a recipe has no beginning: this is a bug in capture")
        if id(call) not in made:

            def given(leaf: Any) -> Any:
                if not isinstance(leaf, _Input):
                    return _literal(leaf)
                whole = self._make(leaf.origin, values, made)
                shared = id(leaf.origin) in self._entries or self._uses[id(leaf.origin)] > 1
                whole = _flat(whole).clone() if shared and leaf.origin in call.changed else whole
                return _seen(whole, leaf.geometry)

            made[id(call)] = _repeat(call, _mapped(given, call.args), _mapped(given, call.kwargs))
        return made[id(call)][origin.output]


def _repeat(call: Call, args: Any, kwargs: Any) -> list[torch.Tensor]:
    enabled, dtype = call.autocast
    with torch.autocast("cpu", dtype=dtype, enabled=enabled):
        if call.random_state is None:
            return list(_tensors(call.function(*args, **kwargs)))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(call.random_state)
            return list(_tensors(call.function(*args, **kwargs)))


def _literal(leaf: Any) -> Any:
    if isinstance(leaf, _Ones):
        empty = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)
        return empty.fill_(1)
    if not isinstance(leaf, _Held):
        return leaf
    if leaf.tensor._version != leaf.version:
        raise CaptureError(
            f"a tensor of shape {tuple(leaf.tensor.shape)} was changed in place between forward and "
            "backward, and the plan recomputes others from it. Step the optimizer after "
            "backward, or make a plan without this change."
        )
    return leaf.tensor


_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _stateless(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments for a repetition that leaves no trace: running statistics are not updated again."""
    if function is not F.batch_norm:
        return args, kwargs
    named = {**dict(zip(_BATCH_NORM, args, strict=False)), **kwargs}
    if named.get("training"):
        named["running_mean"] = named["running_var"] = None
    return (), named


def _seen(whole: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The storage of ``whole`` through a geometry."""
    shape, stride, offset = geometry
    view = torch.empty(0, dtype=whole.dtype, device=whole.device)
    return view.set_(whole.untyped_storage(), offset, shape, stride)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return _seen(tensor, ((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0))


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _mapped(function, value) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_mapped(function, value) for value in values)
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
