"""Networks in training on a device, and every way to train them in less memory.

Goes in: the name of a network, a dtype and a batch. Comes out: a training, and arms that make one their own.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import squeezebox
from benchmarks import checkpointing, compiled, models
from squeezebox.reports import StepPlan

BUDGETS = (0.75, 0.5, 0.25)
NOISES = (1e-2, 1e-3, 1e-1)
SETTLED = 40  # steps after which no more are measured for a while
_GPT = {"width": 1024, "depth": 24, "heads": 16, "context": 1024}
_VIT = {"width": 768, "depth": 12, "heads": 12}
# name -> (network, its sizes, batch)
NETWORKS: Mapping[str, tuple[str, Mapping[str, int], int]] = {
    "resnet50": ("resnet50", {}, 64),
    "vgg16": ("vgg16", {}, 64),
    "efficientnet_b0": ("efficientnet_b0", {}, 64),
    "vit_b16": ("vit", _VIT, 64),
    "gpt": ("gpt", _GPT, 8),
}
Step = Callable[[Tensor], Tensor]


class Clock:
    """Seconds for a row of trials, each of which is taken to last as long as the one before it."""

    def __init__(self, seconds: float) -> None:
        self._begun = time.monotonic()
        self._ends = self._begun + seconds

    def begin(self) -> None:
        """The row begins; what came until now was no trial."""
        self._begun = time.monotonic()

    def is_over(self) -> bool:
        """Whether no time is left at all."""
        return time.monotonic() > self._ends

    def allows(self) -> bool:
        """Whether another one would end in time; to be asked before each."""
        now = time.monotonic()
        last, self._begun = now - self._begun, now
        return now + last <= self._ends


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def free() -> None:
    """Give back what nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every picture, or of every character."""
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


@dataclass(eq=False)
class Training:
    """A network in training, and a batch of it. Measured with a rate of 0, so that its weights stay."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    bf16: bool
    lr: float = 0.0
    fixed_bytes: int = 0  # of the device, before an arm begins

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)
        self.forward: Step = self.model

    def cast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.inputs.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def backward(self) -> None:
        with self.cast():
            output = self.forward(self.inputs)
            loss = loss_of(output, self.labels)
        loss.backward()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.backward()
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        """On the batch, with the same random numbers each time."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        self.backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def copied(self) -> Training:
        return Training(copy.deepcopy(self.model), self.inputs, self.labels, self.bf16)

    def peak_bytes(self) -> int:
        """The allocator's, of one step, beyond what lived after :meth:`settle`."""
        if self.inputs.device.type != "cuda":
            return 0
        self.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.fixed_bytes

    def settle(self) -> None:
        """Have everything that stays between steps."""
        self.step()
        free()
        self.fixed_bytes = torch.cuda.memory_allocated() if self.inputs.device.type == "cuda" else 0

    def split_bytes(self) -> int:
        """The most that lay idle in parts of the allocator's blocks since the last :meth:`peak_bytes`."""
        if self.inputs.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats()["inactive_split_bytes.all.peak"])


def images(batch: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Photographs, or else clothes."""
    try:
        from benchmarks import photos

        yield from photos.batches(batch, size, seed=0)
    except ImportError:
        pass
    from squeezebox.cli import _data

    data = _data.fashion_mnist(subset=True)
    grey, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(grey), (batch,), generator=generator)
        pictures = (grey[chosen].float()[:, None] / 255 - 0.3) / 0.35
        sides = (size, size)
        yield (
            F.interpolate(pictures, sides, mode="bilinear").expand(-1, 3, -1, -1).contiguous(),
            labels[chosen],
        )


def training(name: str, dtype: str, batch: int, arguments: argparse.Namespace) -> Training:
    """The network after a few steps, on so few samples that plain ones fit wherever the batch does."""
    kind, sizes, _ = NETWORKS[name]
    size = 32 if arguments.quick else 224
    if arguments.quick:
        sizes = {key: 32 if key in ("width", "context") else 2 for key in sizes}
    if kind == "gpt":
        model = models.build(kind, 256, **sizes)
        batches = compiled.text(batch, sizes["context"])
    else:
        model = models.build(kind, 1000, **sizes, **({"image": size} if kind == "vit" else {}))
        batches = images(batch, size)
    model = model.to(device())
    if kind not in ("gpt", "vit"):
        model = model.to(memory_format=torch.channels_last)
    inputs, labels = (part.to(device()) for part in next(batches))
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    few = max(1, NETWORKS[name][2] // 8)
    made = Training(model, inputs[:few], labels[:few], dtype == "bf16", lr=1e-3)
    for _ in range(1 if arguments.quick else arguments.train_steps):
        made.step()
    made.inputs, made.labels = inputs, labels
    return made.copied()


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """TF32 or full float32 in matrix products and convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype != "fp32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def compiled_whole(model: nn.Module) -> Step:
    """By torch; on a CPU only as far as shows that it runs."""
    backend = "inductor" if device().type == "cuda" else "aot_eager"
    return torch.compile(model, dynamic=False, backend=backend)


Arm = Callable[[Training], AbstractContextManager[Any]]


def arms() -> dict[str, Arm]:
    """Each makes a copy of a training its own for as long as the context lasts; the most telling first."""
    noises = {f"noise {noise:g}": _attached(noise) for noise in NOISES}
    plans = {f"plan {share:.0%}": _planned(share) for share in BUDGETS}
    bits = {
        f"{bits} bit compiled": _forward(lambda model, bits=bits: squeezebox.compile(model, bits=bits))
        for bits in (4, 8)
    }
    return {
        "plain": lambda own: nullcontext(),
        "compiled": _forward(compiled_whole),
        **noises,
        "checkpointed": lambda own: checkpointing.checkpointed(own.model),
        **plans,
        **bits,
        **{f"budget {share}": _forward(compiled.budgeted(share)) for share in BUDGETS},
        "fp8 e4m3": _forward(compiled.fp8(compiled.FP8["e4m3"])),
    }


def _forward(made: Callable[[nn.Module], Step]) -> Arm:
    @contextmanager
    def arm(own: Training) -> Iterator[None]:
        own.forward = made(own.model)
        try:
            yield
        finally:
            own.forward = own.model

    return arm


def _attached(noise: float) -> Arm:
    @contextmanager
    def arm(own: Training) -> Iterator[Any]:
        session = squeezebox.attach(own.model, optimizer=own.optimizer, noise=noise)
        try:
            for _ in range(SETTLED if device().type == "cuda" else 1):
                own.step()
            yield session
        finally:
            session.detach()

    return arm


def _planned(share: float) -> Arm:
    """Within a share of the plain step's peak, at noise 1e-2."""

    @contextmanager
    def arm(own: Training) -> Iterator[Any]:
        with own.cast():
            session = squeezebox.attach(
                own.model,
                optimizer=own.optimizer,
                budget=f"{share:.0%}",
                noise=1e-2,
                sample=(own.inputs, own.labels),
                loss_fn=loss_of,
            )
        try:
            yield session
        finally:
            session.detach()

    return arm


def attached_to(plan: StepPlan) -> Arm:
    """A plan that was made before."""

    @contextmanager
    def arm(own: Training) -> Iterator[Any]:
        session = squeezebox.attach(own.model, optimizer=own.optimizer, plan=plan)
        try:
            yield session
        finally:
            session.detach()

    return arm
