"""Saved bytes, peak, time and gradient error of compiled training steps, plain and packed.

Goes in: nothing; a small GPT on text bytes and a ResNet-18 on crops of photographs, briefly trained. Comes
out: benchmarks/reports/compiled-<date>.json and .md.

The arms are copies of one network, compiled by torch.compile: as it is, with Inductor's own fp8 pass, with
activation_memory_budget, and with squeezebox.compile. A step is zero_grad, forward, loss and backward; it is
timed in turn with a plain one. Saved bytes are those of the tensors that autograd holds after forward and
that neither parameters, inputs nor results own. Gradient error is that of all parameter gradients on one
batch, relative to the eager ones (L2). Peaks are beyond what lives when the step starts; gradients count.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

import squeezebox
from benchmarks import _report, models, photos, training
from squeezebox.profiling import PeakMeter

NETWORKS = ("gpt", "resnet18")
BUDGETS = (0.75, 0.5, 0.25)
FP8 = {"e5m2": "torch.float8_e5m2", "e4m3": "torch.float8_e4m3fn"}
Step = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=112, help="of images")
    parser.add_argument("--length", type=int, default=128, help="of token sequences")
    parser.add_argument("--width", type=int, default=256, help="of the GPT")
    parser.add_argument("--depth", type=int, default=2, help="of the GPT")
    parser.add_argument("--noise", type=float, nargs="*", default=[1e-2, 1e-3])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--train-steps", type=int, default=40)
    parser.add_argument("--arms", nargs="*", help="only these")
    parser.add_argument("--dry", action="store_true", help="print the table, write no report")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # every arm is the same code
    results: dict[str, Any] = {}
    for name in arguments.networks:
        results[name] = measure(name, arguments)
        print(table(results), file=sys.stderr, flush=True)
    if not arguments.dry:
        for path in _report.write(
            "compiled", {"networks": results, "settings": vars(arguments)}, table(results)
        ):
            print(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A network and one batch."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor

    def loss(self, step: Step) -> Tensor:
        return training.classification_loss(step(self.inputs), self.labels)

    def run(self, step: Step) -> None:
        self.model.zero_grad(set_to_none=True)
        self.loss(step).backward()

    def gradients(self, step: Step) -> list[Tensor]:
        self.run(step)
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return found


def task(name: str, arguments: argparse.Namespace) -> Task:
    """The network, briefly trained, and a batch that it has not seen."""
    if name == "gpt":
        sizes = {"width": arguments.width, "depth": arguments.depth, "context": arguments.length}
        model = models.build("gpt", 256, **sizes)
        batches = text(arguments.batch, arguments.length)
    else:
        model = models.build(name, photos.num_classes()).to(memory_format=torch.channels_last)
        batches = photos.batches(arguments.batch, arguments.size, seed=0)
    training.train_briefly(model, batches, arguments.train_steps, training.LEARNING_RATES[name])
    inputs, labels = next(batches)
    if name != "gpt":
        inputs = inputs.to(memory_format=torch.channels_last)
    return Task(model=model, inputs=inputs, labels=labels)


def text(batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes of this package's own source, and the byte after each."""
    source = "\n".join(path.read_text() for path in sorted((_report.ROOT / "src").rglob("*.py")))
    data = torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - length - 1, (batch,), generator=generator)
        windows = torch.stack([data[start : start + length + 1] for start in starts])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def arms(given: Task, arguments: argparse.Namespace) -> dict[str, Callable[[nn.Module], Step]]:
    """How each arm compiles a copy of the network."""
    sample, loss_fn = (given.inputs, given.labels), training.classification_loss

    def planned(model: nn.Module) -> Step:
        plan = squeezebox.plan(model, sample=sample, loss_fn=loss_fn, noise=arguments.noise[0])
        return squeezebox.compile(model, plan=plan, fullgraph=True)

    def within(noise: float) -> Callable[[nn.Module], Step]:
        return lambda model: squeezebox.compile(
            model, noise=noise, sample=sample, loss_fn=loss_fn, fullgraph=True
        )

    return {
        "plain": lambda model: torch.compile(model, fullgraph=True, dynamic=False),
        **{f"fp8 {name}": fp8(dtype) for name, dtype in FP8.items()},
        **{f"budget {share}": budgeted(share) for share in BUDGETS},
        **{
            f"{bits} bit": lambda model, bits=bits: squeezebox.compile(model, bits=bits, fullgraph=True)
            for bits in (8, 4)
        },
        **{f"noise {noise:g}": within(noise) for noise in arguments.noise},
        "plan": planned,
    }


def fp8(dtype: str) -> Callable[[nn.Module], Step]:
    """Inductor's activation quantisation pass, for every tensor of 64 KiB or more."""
    settings = {
        "quant_type": dtype,
        "size_in_mb": 1 / 16,
        "allowed_dtypes": "torch.float32;torch.bfloat16",
        "use_scaling": True,
        "exclude_primals": True,
    }
    options = {"post_grad_fusion_options": {"activation_quantization_aten_pass": settings}}
    return lambda model: torch.compile(model, fullgraph=True, dynamic=False, options=options)


def budgeted(share: float) -> Callable[[nn.Module], Step]:
    """Inductor's own recomputation. A backend of its own, or the plain arm's code would be taken for it."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return compile_fx(graph, inputs)

    return lambda model: torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every arm against a plain copy of the network."""
    given = task(name, arguments)
    eager = copied(given)
    exact = eager.gradients(eager.model)
    plain = copied(given)
    builders = arms(given, arguments)
    plain_step = builders["plain"](plain.model)
    results: dict[str, Any] = {}
    for arm, build in builders.items():
        if arguments.arms is None or arm in arguments.arms or arm == "plain":
            own = copied(given)
            step = build(own.model) if arm != "plain" else plain_step
            results[arm] = compared(
                own if arm != "plain" else plain, step, plain, plain_step, exact, arguments
            )
            print(name, arm, results[arm], file=sys.stderr, flush=True)
    return results


def copied(given: Task) -> Task:
    return Task(model=copy.deepcopy(given.model), inputs=given.inputs, labels=given.labels)


def compared(
    own: Task, step: Step, plain: Task, plain_step: Step, exact: list[Tensor], arguments: argparse.Namespace
) -> dict[str, Any]:
    """One arm's figures; compiles it first."""
    begun = time.perf_counter()
    gradients = own.gradients(step)
    compiling = time.perf_counter() - begun
    error = noise(gradients, exact) ** 0.5
    del gradients
    steps = {"own": lambda: own.run(step), "plain": lambda: plain.run(plain_step)}
    timing = _report.interleaved(steps, arguments.repeats, warmup=2)
    return {
        "saved_bytes": saved_bytes(own, step),
        "peak_bytes": peak_bytes(own, step),
        "gradient_error": error,
        "ratio": asdict(timing.ratios["own/plain"]),
        "first_step_seconds": compiling,
    }


def noise(found: list[Tensor], exact: list[Tensor]) -> float:
    """Squared error of all gradients over their squared norm."""
    error = sum(float((a - b).double().square().sum()) for a, b in zip(found, exact, strict=True))
    return error / sum(float(b.double().square().sum()) for b in exact)


def saved_bytes(own: Task, step: Step) -> int:
    """What autograd holds between forward and backward for the compiled function, each storage once."""
    output = step(own.inputs)
    held: dict[int, int] = {}
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "saved_tensors"):  # compiled functions only: a loss is not compiled here
            storages = (tensor.untyped_storage() for tensor in node.saved_tensors if tensor is not None)
            held |= {storage.data_ptr(): storage.nbytes() for storage in storages}
        waiting.extend(follower for follower, _ in node.next_functions if follower is not None)
    for tensor in (*own.model.parameters(), *own.model.buffers(), own.inputs, output):
        held.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(held.values())


def peak_bytes(own: Task, step: Step) -> int:
    own.model.zero_grad(set_to_none=True)
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    own.run(step)
    return meter.stop([]).total_bytes


def table(results: dict[str, Any]) -> str:
    """The Markdown table of the report."""
    rows = [
        "| network | arm | saved MiB | x less | peak MiB | time / plain | gradient error | first step s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        for arm, row in found.items():
            ratio = row["ratio"]
            rows.append(
                f"| {name} | {arm} | {row['saved_bytes'] / 2**20:.2f} "
                f"| {found['plain']['saved_bytes'] / max(row['saved_bytes'], 1):.2f} "
                f"| {row['peak_bytes'] / 2**20:.1f} "
                f"| {ratio['median']:.2f} ({ratio['minimum']:.2f}..{ratio['maximum']:.2f}) "
                f"| {row['gradient_error']:.1e} | {row['first_step_seconds']:.0f} |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
