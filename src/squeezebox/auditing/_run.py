"""One training of an audit: what the training function is given, and what it gives back.

Every factor has random numbers of its own. Initialisation and data order draw from the run's generators;
everything else that draws from a global generator of torch, numpy or Python is augmentation.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import inspect
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from squeezebox.planning import attach
from squeezebox.reports import AuditRecord
from squeezebox.schema import OptionError
from squeezebox.session import Session

ATTACH = frozenset(inspect.signature(attach).parameters)
_EXACT_WEIGHTS = 65_536  # numbers kept of a model; of larger ones a sketch of as many
_AT_A_TIME = 2**20  # weights of a sketch, whose random numbers would else take several times their memory


class Factor(enum.Enum):
    """What may differ between two trainings of one arm."""

    INITIALISATION = "initialisation"
    ORDER = "order"
    AUGMENTATION = "augmentation"
    IMPLEMENTATION = "implementation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tooling:
    """How torch computes: what should not matter, and does in the last bits."""

    threads: int
    onednn: bool = True
    deterministic: bool = True


def tooling_variant(number: int, threads: int) -> Tooling:
    """Variant 0 is deterministic; the others have fewer threads, or no oneDNN: ``2 * threads`` in turn.

    More threads than asked for would wait for one another where cores are few or shared.
    """
    fewer, onednn = number // 2 % threads, number % 2 == 0
    return Tooling(threads=threads - fewer, onednn=onednn, deterministic=number == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKey:
    """Which training of an audit: its arm, its series, and the number by which that varies."""

    arm: str
    series: str
    seed: int

    def __str__(self) -> str:
        return f"{self.arm} {self.series} {self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What a training function returns; made by :meth:`AuditRun.finish`."""

    predictions: NDArray[np.int64]
    targets: NDArray[np.int64]
    groups: NDArray[np.str_]
    weights: NDArray[np.float32]
    score: float
    finite: bool
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortRun:
    """A training's first ``steps``, with random numbers of the squared norm ``noise`` added to its gradients.

    ``noise`` is in squared norms of each gradient itself, as a packed tensor's error would be.
    """

    steps: int
    noise: float = 0.0


class Enough(BaseException):
    """Ends a training of which only some steps are wanted; not an error, so that none catches it."""


@dataclass(kw_only=True, slots=True, eq=False)
class AuditRun:
    """One training: its arm's name, where its random numbers come from, and its compression.

    ``order`` is a generator for the order of the data, as ``DataLoader(shuffle=True, generator=run.order)``
    takes it. Make the model within :meth:`initialising`. Dropout, augmentation and anything else draws from
    torch's, numpy's and Python's global generators, which are seeded before the function is called.
    """

    arm: str
    order: torch.Generator
    _numbers: Mapping[Factor, int]
    _options: Mapping[str, Any] | None
    _knobs: Mapping[str, float] = field(default_factory=dict)
    _steps: int | None = None
    _short: ShortRun | None = None
    _session: Session | None = None
    _times: list[float] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)

    def knob(self, name: str) -> float | None:
        """The arm's value of a knob of your own; None in trainings that are plain."""
        self._asked.add(name)
        return self._knobs.get(name)

    @property
    def unread_knobs(self) -> list[str]:
        """Names of knobs that the training never asked for."""
        return sorted(self._knobs.keys() - self._asked)

    def seed(self, factor: str) -> int:
        """A seed for "initialisation", "order" or "augmentation", for generators of one's own.

        Raises:
            OptionError: there is no such factor.
        """
        known = [each.value for each in Factor if each is not Factor.IMPLEMENTATION]
        if factor not in known:
            raise OptionError(f"run.seed({factor!r}): there are {', '.join(known)}.")
        return _seed(Factor(factor), self._numbers[Factor(factor)])

    @contextlib.contextmanager
    def initialising(self) -> Iterator[None]:
        """Around making the model: global random numbers are those of the initialisation."""
        with _seeded(self.seed("initialisation")):
            yield

    @contextlib.contextmanager
    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sample: tuple[Any, Any] | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    ) -> Iterator[Session | None]:
        """Around the training: compress as the arm says, or do nothing; detached afterwards.

        Args:
            model: as for :func:`squeezebox.attach`, which gets the arm's options too.
            optimizer: the same; its steps are also timed and counted.
            sample: used where the arm has a budget.
            loss_fn: used where the arm has a budget.
        """
        hooks = [] if optimizer is None else [optimizer.register_step_post_hook(self._step_done)]
        if optimizer is not None and self._short is not None and self._short.noise:
            inject = _injector(self._short.noise, self.seed("augmentation"))
            hooks.append(optimizer.register_step_pre_hook(inject))
        outer, session = self._session, None
        try:
            if self._options is not None:
                options = dict(self._options)
                if "budget" in options:
                    options |= {"sample": sample, "loss_fn": loss_fn}
                session = self._session = attach(model, optimizer=optimizer, **options)
            self._times.append(time.perf_counter())
            yield session
        except Enough:  # what follows the training evaluates it
            if self._short is None:
                raise
        finally:
            for hook in hooks:
                hook.remove()
            self._session = outer
            if session is not None:
                session.detach()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around forward and a loss outside the model, as a session's ``step()``."""
        with contextlib.nullcontext() if self._session is None else self._session.step():
            yield

    def finish(
        self,
        model: torch.nn.Module,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        groups: Sequence[object] | torch.Tensor | None = None,
        score: float | None = None,
    ) -> Outcome:
        """What the training function returns.

        Args:
            model: as trained; its weights and buffers are compared.
            outputs: of n held-out samples, the same ones in the same order in every training: logits
                ``[n, classes]`` of two classes or more, or classes ``[n]`` as integers.
            targets: their true classes, ``[n]`` integers.
            groups: a name for each sample's group, to report each apart.
            score: the top line, if it is not the accuracy; a share, so that differences show in points.

        Raises:
            OptionError: shapes or dtypes are not these, or the score is NaN or infinite.
        """
        if score is not None and not math.isfinite(score):
            raise OptionError(
                f"run.finish(): score {score} is not finite, so no mean can be made of it; give 0 for a "
                "training that diverged."
            )
        predictions = _predictions(outputs, targets)
        told = groups.tolist() if isinstance(groups, torch.Tensor) else groups
        names = np.array([] if told is None else [str(group) for group in told], dtype=np.str_)
        if groups is not None and len(names) != len(targets):
            raise OptionError(f"run.finish(): {len(names)} groups for {len(targets)} samples; give each one.")
        expected = targets.detach().cpu().numpy().astype(np.int64)
        weights = _normalised(model)
        state = [each for each in model.state_dict().values() if isinstance(each, torch.Tensor)]
        return Outcome(
            predictions=predictions,
            targets=expected,
            groups=names,
            weights=weights,
            score=float((predictions == expected).mean()) if score is None else float(score),
            finite=bool(outputs.isfinite().all() and np.isfinite(weights).all()),
            digest=_digest([*state, outputs]),
        )

    def step_seconds(self) -> list[float]:
        """Of every step of the optimizer so far, the first one's from :meth:`attach` on."""
        return [later - earlier for earlier, later in itertools.pairwise(self._times)]

    def _step_done(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._times.append(time.perf_counter())
        if self._steps is not None and len(self._times) > self._steps:
            raise Enough


def _injector(noise: float, seed: int) -> Callable[..., None]:
    """A hook before an optimizer's step: it adds ``noise`` times each gradient's squared norm."""
    generators: dict[torch.device, torch.Generator] = {}

    def inject(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            values = parameter.grad.values() if parameter.grad.is_sparse else parameter.grad
            device = values.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            drawn = torch.empty_like(values).normal_(generator=generators[device])
            values.add_(drawn * (values.norm() * math.sqrt(noise / max(values.numel(), 1))))

    return inject


TrainFunction = Callable[[AuditRun], Outcome]


def begin(
    key: RunKey,
    options: Mapping[str, Any] | None,
    threads: int,
    steps: int | None = None,
    short: ShortRun | None = None,
) -> tuple[AuditRun, Tooling]:
    """The handle of a training and its tooling.

    ``steps`` ends it early, by raising :class:`Enough`; ``short`` ends what is within :meth:`AuditRun.attach`
    alone.
    """
    knobs = {name: value for name, value in (options or {}).items() if name not in ATTACH}
    if knobs:  # of attach's options there may be none, which is no wish for its defaults
        options = {name: value for name, value in (options or {}).items() if name in ATTACH} or None
    varies = {each for each in Factor if key.series in ("everything", each.value)}
    numbers = {each: key.seed if each in varies else 0 for each in Factor}
    order = torch.Generator().manual_seed(_seed(Factor.ORDER, numbers[Factor.ORDER]))
    run = AuditRun(
        arm=key.arm,
        order=order,
        _numbers=numbers,
        _options=options,
        _knobs=knobs,
        _steps=steps if short is None else short.steps,
        _short=short,
    )
    return run, tooling_variant(numbers[Factor.IMPLEMENTATION], threads)


def train_once(
    train: TrainFunction,
    key: RunKey,
    options: Mapping[str, Any] | None,
    threads: int,
    short: ShortRun | None = None,
) -> AuditRecord:
    """One training, whole or ``short``.

    Raises:
        OptionError: the function returns something else than ``run.finish(...)``, or never asks for a knob.
    """
    run, tooling = begin(key, options, threads, short=short)
    started = time.perf_counter()
    with _prepared(run, tooling):
        outcome = train(run)
    if not isinstance(outcome, Outcome):
        raise _without_outcome(outcome, short)
    for name in run.unread_knobs:
        raise OptionError(
            f"{name} is no option of squeezebox.attach, and the training never asked for run.knob({name!r}); "
            "let it, or correct the name."
        )
    return AuditRecord(
        arm=key.arm,
        series=key.series,
        seed=key.seed,
        predictions=outcome.predictions,
        targets=outcome.targets,
        groups=outcome.groups,
        weights=outcome.weights,
        score=outcome.score,
        finite=outcome.finite,
        digest=outcome.digest,
        steps=len(run.step_seconds()),
        seconds=time.perf_counter() - started,
    )


def _without_outcome(returned: object, short: ShortRun | None) -> OptionError:
    if short is None:
        return OptionError(
            f"the training function returned {type(returned).__name__}; let it return "
            "run.finish(model, outputs, targets)."
        )
    return OptionError(
        f"the training function returned {type(returned).__name__} after a short run, which ends within "
        "run.attach. Evaluate the model and return run.finish(...) after the with block, not within."
    )


def train_some(
    train: TrainFunction, key: RunKey, options: Mapping[str, Any] | None, tooling: Tooling, steps: int
) -> list[float]:
    """The first steps of a training; their seconds."""
    run, _ = begin(key, options, tooling.threads, steps)
    with _prepared(run, tooling), contextlib.suppress(Enough):
        train(run)
    return run.step_seconds()


@contextlib.contextmanager
def _prepared(run: AuditRun, tooling: Tooling) -> Iterator[None]:
    """As a training finds it. Deterministic mode warns of kernels without such a form; the control tells."""
    with warnings.catch_warnings(), computing(tooling), _seeded(run.seed("augmentation")):
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        yield


@contextlib.contextmanager
def computing(tooling: Tooling) -> Iterator[None]:
    """Torch computes so within, and as before afterwards."""
    threads, debug = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    benchmark, onednn = torch.backends.cudnn.benchmark, torch._C._get_mkldnn_enabled()
    try:
        torch.set_num_threads(tooling.threads)
        set_kernels(deterministic=tooling.deterministic)
        torch.backends.cudnn.benchmark = not tooling.deterministic
        torch._C._set_mkldnn_enabled(tooling.onednn)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(debug)
        torch.backends.cudnn.benchmark = benchmark
        torch._C._set_mkldnn_enabled(onednn)


def set_kernels(*, deterministic: bool) -> None:
    """Operators without a deterministic kernel do not raise: the control tells whether it matters."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Global generators begin at ``seed`` within, and go on as before afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def _seed(factor: Factor, number: int) -> int:
    """Streams of their own: number 3 of one factor has nothing to do with number 3 of another."""
    return int.from_bytes(hashlib.sha256(f"{factor.value} {number}".encode()).digest()[:6], "big")


def _predictions(outputs: torch.Tensor, targets: torch.Tensor) -> NDArray[np.int64]:
    for name, given in {"outputs": outputs, "targets": targets}.items():
        if not isinstance(given, torch.Tensor):
            raise OptionError(f"run.finish(): {name} is a {type(given).__name__}; give a tensor.")
    classes = outputs.detach().cpu()
    logits = classes.dim() == 2 and classes.is_floating_point()
    rows = [targets] if logits else [targets, classes]
    integers = all(each.dim() == 1 and not each.is_floating_point() for each in rows)
    one = logits and classes.shape[1] < 2
    if one or not integers or len(classes) != len(targets) or not len(targets):
        raise OptionError(
            f"run.finish(): outputs of shape {list(outputs.shape)} ({outputs.dtype}) with targets of shape "
            f"{list(targets.shape)} ({targets.dtype}); give logits [n, classes] or integer classes [n], and "
            "integer targets [n]; of one logit give (outputs > 0).long().flatten()."
        )
    return (classes.argmax(1) if logits else classes).numpy().astype(np.int64)


def _normalised(model: torch.nn.Module) -> NDArray[np.float32]:
    """All parameters in one row of length 1, or NaN where it has none; of many, their sketch."""
    parts = [each.detach().float().cpu().reshape(-1).numpy() for each in model.parameters()]
    count = sum(len(part) for part in parts)
    length = float(np.linalg.norm([np.linalg.norm(part) for part in parts]))
    if not math.isfinite(length):
        return np.full(min(count, _EXACT_WEIGHTS), np.nan, dtype=np.float32)
    row = np.concatenate([np.zeros(0), *parts]) if count <= _EXACT_WEIGHTS else _sketch(parts)
    return (row / max(length, 1e-30)).astype(np.float32)


def _sketch(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """A count sketch (Charikar et al. 2002): numbers added up, with random signs, in random buckets.

    Signs and buckets are the same ones in every training: squared distances keep their mean, with a relative
    deviation of sqrt(2 / buckets), 0.6 %.
    """
    generator, sums = np.random.default_rng(0), np.zeros(_EXACT_WEIGHTS)
    for part in parts:
        for start in range(0, len(part), _AT_A_TIME):
            weights = part[start : start + _AT_A_TIME]
            buckets = generator.integers(_EXACT_WEIGHTS, size=len(weights))
            signs = generator.integers(2, size=len(weights)) * 2.0 - 1.0
            sums += np.bincount(buckets, weights=weights * signs, minlength=_EXACT_WEIGHTS)
    return sums


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bits_of(tensor).cpu().numpy().tobytes())
    return found.hexdigest()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes in one row: NaN equals itself there, and 0.0 is not -0.0."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
