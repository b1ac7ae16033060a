"""A training step on fake tensors: every allocation and its end, without the memory."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from squeezebox.memory import parts_of
from squeezebox.profiling._load import Followed, loads_named, remembered
from squeezebox.profiling._optimizer import MakeOptimizer, optimizer_named, wraps_another
from squeezebox.profiling._record import record_step, states_of, step_counts, tensors_of
from squeezebox.profiling._work import WorkCount
from squeezebox.schema import OptionError, StepTrace, Work, in_one_line

Watch = Callable[[torch.nn.Module, list[torch.Tensor]], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """One training step from the second on, when optimizer state is there and gradients are not.

    Sizes are bytes; ``gradient_bytes`` those of all gradients together. ``optimizer`` names its class.
    ``watched`` is what the context gave that was asked to watch. ``load`` says how routers were taken to
    choose, "" where no size follows from that. ``work`` is what the operators compute and move.
    """

    optimizer: str

    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    input_bytes: int
    input_shapes: tuple[tuple[int, ...], ...]
    trace: StepTrace
    watched: Any
    work: tuple[Work, ...]
    load: str = ""


class _NotOnFakes(OptionError):
    """Fake tensors cannot take this step; real ones may."""


def simulate(
    model: torch.nn.Module | Callable[[], Any],
    *,
    sample: Callable[[torch.nn.Module], tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    optimizer: str | torch.optim.Optimizer | MakeOptimizer,
    dtype: torch.dtype | None,
    watch: Watch,
    values: Callable[[], tuple[Any, Any] | None],
    load: str,
    trains: bool = True,
) -> tuple[Simulation, str]:
    """Run forward, loss, backward and the optimizer's step on fake tensors, or else on copies of real ones.

    Args:
        model: a module, which is left alone, or what makes one; that is built on the
            meta device where it can be, so that it uses no memory either.
        sample: makes inputs (a tensor, a tuple, or a dict of them) and target of fake tensors, from the fake
            model.
        loss_fn: of output and target; None: the sum of all outputs.
        optimizer: a name of :func:`optimizer_named`; one of the model's own; or what
            makes one of parameters.
        dtype: of parameters and buffers; None leaves them as they are.
        watch: gives the context in which forward and loss run, from the copied model and its inputs.
        values: gives inputs and target with their values, if there are any: where fake tensors fail, the
            step is taken on these by a copy of the model.
        load: how routers are taken to choose where sizes follow from that, "balanced" or "worst".
        trains: without, there are only forward and ``loss_fn``, in evaluation mode and without autograd.

    Returns:
        The step, and why it was taken on real tensors ("" if it was not).

    Raises:
        OptionError: an argument is out of range, or the model does not take such an input.
    """
    wanted = optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer
    original = _made(model)

    def on_fakes(followed: AbstractContextManager[object]) -> Simulation:
        with FakeTensorMode(allow_non_fake_inputs=True), followed:
            fake, twins = _fake_copy(original, dtype)
            return _taken(fake, twins, sample(fake), loss_fn, wanted, watch, fake=True, trains=trains)

    with contextlib.suppress(_NotOnFakes):
        return on_fakes(contextlib.nullcontext()), ""
    with torch.random.fork_rng(devices=[]):
        try:
            return _at_load(on_fakes, load), ""
        except _NotOnFakes as error:
            given = values()
            if given is None:
                raise
            real, twins = _real_copy(model, dtype)
            taken = _taken(real, twins, given, loss_fn, wanted, watch, fake=False, trains=trains)
            return taken, str(error.__cause__)


def _at_load(on_fakes: Callable[[AbstractContextManager[object]], Simulation], load: str) -> Simulation:
    """The step of the highest peak among those that may be meant."""
    found = []
    for each in loads_named(load):
        followed = Followed(each)
        simulation = on_fakes(followed)
        found.append(replace(simulation, load=load if followed.assumed else ""))
        if not followed.assumed:
            break
    return max(found, key=lambda each: each.trace.peak().nbytes)


def _taken(
    model: torch.nn.Module,
    twins: Mapping[int, torch.nn.Parameter],
    sample: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    optimizer: torch.optim.Optimizer | MakeOptimizer,
    watch: Watch,
    *,
    fake: bool,
    trains: bool,
) -> Simulation:
    """One step of a copied model."""
    inputs, _ = sample
    taken = _optimizer(optimizer, model, twins) if trains else None
    model.train(trains)
    if taken is not None:
        _make_state(taken, fake=fake)

    watched: list[Any] = []

    @contextmanager
    def around() -> Iterator[None]:
        with _quiet(), _explained(inputs, fake), watch(model, tensors_of(inputs)) as seen:
            watched.append(seen)
            yield

    with WorkCount() as count:
        trace = record_step(
            model,
            sample=sample,
            loss_fn=loss_fn or (_sum if trains else _nothing),
            optimizer=taken,
            around=around,
            trains=trains,
        )
    return Simulation(
        optimizer=type(taken).__name__ if taken is not None else "none",
        parameter_bytes=_nbytes(model.parameters()),
        buffer_bytes=_nbytes(model.buffers()),
        input_bytes=_nbytes(tensors_of(sample)),
        input_shapes=tuple(tuple(tensor.shape) for tensor in tensors_of(inputs)),
        optimizer_bytes=_nbytes(states_of(taken)),
        gradient_bytes=_nbytes(p.grad for p in model.parameters() if p.grad is not None),
        trace=trace,
        watched=watched[0],
        work=count.work(),
    )


def _made(model: torch.nn.Module | Callable[[], Any]) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        return model
    if not callable(model):
        raise OptionError(
            f"model {model!r} is neither a torch.nn.Module nor what makes one; give one of these."
        )
    try:
        with torch.device("meta"):
            made = model()
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise
        made = None  # it reads values while it is built
    if made is None:
        made = model()
    if isinstance(made, torch.nn.Module):
        return made
    name = getattr(model, "__name__", repr(model))
    raise OptionError(
        f"'{name}' returned a {type(made).__name__}, not a torch.nn.Module; name a function or class that "
        "returns the model."
    )


def _fake_copy(
    model: torch.nn.Module, dtype: torch.dtype | None
) -> tuple[torch.nn.Module, dict[int, torch.nn.Parameter]]:
    """The model with every tensor replaced by a fake one, and its parameters by the original's identity."""
    twins: dict[int, torch.nn.Parameter] = {}
    for parameter in model.parameters():
        twins[id(parameter)] = torch.nn.Parameter(_fake(parameter, dtype), parameter.requires_grad)
    fakes: dict[int, Any] = {id(tensor): _fake(tensor, dtype) for tensor in _tensors_of(model, set(twins))}
    return copy.deepcopy(model, {**twins, **fakes}), twins


def _tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Those that a copy would copy: of modules, in containers, and in objects such as distributions."""
    if id(value) in seen or isinstance(value, (type, ModuleType)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from _tensors_of(part, seen)


def _real_copy(
    model: torch.nn.Module | Callable[[], Any], dtype: torch.dtype | None
) -> tuple[torch.nn.Module, dict[int, torch.nn.Parameter]]:
    """As ``_fake_copy``, with values."""
    original = model if isinstance(model, torch.nn.Module) else model()
    results = (tensor for tensor in _tensors_of(original, set()) if not tensor.is_leaf)  # of an earlier step
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in results}
    copied = copy.deepcopy(original, memo)
    twins = {id(parameter): memo[id(parameter)] for parameter in original.parameters()}
    return (copied if dtype is None else copied.to(dtype)), twins


def fake_like(values: Any, dtype: torch.dtype | None) -> Any:
    """The same with fake tensors, those of floating point in ``dtype``; within a fake mode."""

    def like(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # of a kind that torch's trees take for one value
            return fake_like(dict(leaf), dtype)
        return _fake(leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(like, values)


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The same without values, on the CPU if it is on no device yet; within a fake mode."""
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise _NotOnFakes(
            f"a tensor of shape {tuple(tensor.shape)} is {layout}: without values it has no size. Give "
            "sample=(inputs, target) with values, on which a copy of the model takes the step."
        ) from TypeError(f"{layout} tensors have no size without values")
    device = "cpu" if tensor.is_meta else tensor.device
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
    made.requires_grad_(tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter))
    return remembered(made, tensor)


def _optimizer(
    wanted: torch.optim.Optimizer | MakeOptimizer,
    model: torch.nn.Module,
    twins: Mapping[int, torch.nn.Parameter],
) -> torch.optim.Optimizer | None:
    """The one that is wanted, for the fake model; none where nothing is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return None
    if not isinstance(wanted, torch.optim.Optimizer):
        return wanted(trained)
    inner = getattr(wanted, "optimizer", wanted)  # as accelerate's wraps one
    groups = [
        {**group, "params": [twins[id(parameter)] for parameter in group["params"] if id(parameter) in twins]}
        for group in inner.param_groups
    ]
    made = copy.copy(inner)
    made.__dict__.update(state=defaultdict(dict), param_groups=groups)
    if wraps_another(made):
        raise OptionError(
            f"{type(wanted).__name__} has parameters and state of another optimizer, which an estimate would "
            "step. Give that one, or name one of as much state, such as 'adam'."
        )
    return made


def _make_state(optimizer: torch.optim.Optimizer, *, fake: bool) -> None:
    """As a first step does."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        with step_counts() if fake else nullcontext():
            optimizer.step()
    except (RuntimeError, TypeError, ValueError, ArithmeticError, AssertionError, AttributeError) as error:
        raise OptionError(
            f"{type(optimizer).__name__} cannot step gradients of zeros without a closure, which an "
            f"estimate needs: {in_one_line(error)}. Leave it out, or name one of as much state, "
            "such as 'adam'."
        ) from error
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def _explained(inputs: Any, fake: bool) -> Iterator[None]:
    try:
        yield
    except OptionError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        found = [f"shape {tuple(tensor.shape)} and dtype {tensor.dtype}" for tensor in tensors_of(inputs)]
        what = f"the model's forward fails on an input of {', '.join(found)}: {in_one_line(error)}."
        if not fake:
            raise OptionError(f"{what} Check the input's shape and dtype.") from error
        raise _NotOnFakes(
            f"{what} Check the input's shape and dtype; where sizes follow from tensors' values, give "
            "sample=(inputs, target) with values, on which a copy of the model takes the step."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of failures on fake tensors: they are raised as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _sum(outputs: Any, target: Any) -> torch.Tensor:
    """The sum of every output that a gradient can flow from."""
    values = outputs.values() if isinstance(outputs, dict) else tree_leaves(outputs)
    found = [leaf for leaf in tensors_of(list(values)) if leaf.requires_grad]
    if not found:
        raise OptionError(
            f"the model's output ({type(outputs).__name__}) has no tensor that requires gradients, so there "
            "is no backward to estimate; unfreeze a parameter."
        )
    return torch.stack([leaf.sum() for leaf in found]).sum() if len(found) > 1 else found[0].sum()


def _nothing(outputs: Any, target: Any) -> torch.Tensor:
    """Where neither loss nor backward follow."""
    return torch.zeros(())


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = (part.untyped_storage() for tensor in tensors for part in parts_of(tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
