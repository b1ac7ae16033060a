"""Step times next to torch.distributed.pipelining's own schedules, and what each side refuses.

Goes in: nothing. Comes out: benchmarks/reports/pipeline_torch-<date>.json and .md.

Both train the same transformer on the same two gloo ranks, with AdamW, in turns: a step of one, then a step
of the other, between two barriers. Torch's side is its PipelineStage and schedule with optimizer.step() and
zero_grad(); ours is squeezebox.pipeline.Runner with its own loop. Torch's zero-bubble schedule takes two
stages a rank, ours one. Ratios are of medians; losses of each step are compared too.

The second table tries what users have, on both sides, and has "works" or the error's first line. "Works"
means that the losses of three steps equal one process's to 1e-5.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks import _ranks, _report
from squeezebox.pipeline import Runner
from squeezebox.schema import InputForm, PipelinePlan

GOAL = 1.05
RANKS, MICROBATCHES = 2, 8
TORCH: Mapping[str, tuple[str, int]] = {  # by our schedule: torch's, and its stages a rank
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2),
    "zb-h1": ("ScheduleInterleavedZeroBubble", 2),
}


class Block(nn.Module):
    """A transformer's, after or before the embedding or head if it is the first or last."""

    def __init__(self, width: int, words: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width) if is_first else nn.Identity()
        self.inner = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(width, words) if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x)))


def network(depth: int, width: int, words: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(Block(width, words, is_first=number == 0, is_last=number + 1 == depth) for number in range(depth))
    )


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--schedules", nargs="*", default=[*TORCH])
    arguments = parser.parse_args()
    rows = []
    for schedule in arguments.schedules:
        found = _ranks.run(timed, RANKS, schedule, arguments)
        rows.append(row(schedule, found))
        print(rows[-1], file=sys.stderr, flush=True)
    refusals = {
        name: {side: _ranks.run(tried, RANKS, name, side) for side in ("torch", "squeezebox")}
        for name in CASES
    }
    payload = {"settings": vars(arguments), "rows": rows, "refusals": refusals, "goal": GOAL}
    for path in _report.write("pipeline_torch", payload, table(rows, refusals)):
        print(path)


def timed(rank: int, schedule: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds and losses of both sides' steps."""
    step_torch = torch_side(rank, schedule, arguments)
    step_own = own_side(rank, schedule, arguments)
    seconds: dict[str, list[float]] = {"torch": [], "own": []}
    losses: dict[str, list[float]] = {"torch": [], "own": []}
    generator = torch.Generator().manual_seed(1)
    shape = 2 * MICROBATCHES, arguments.length
    for number in range(arguments.steps + 2):
        batch = tuple(torch.randint(0, 256, shape, generator=generator) for _ in range(2))
        for side, step in (("torch", step_torch), ("own", step_own))[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            loss = step(*batch)
            dist.barrier()
            if number >= 2:
                seconds[side].append(time.perf_counter() - begun)
            if loss is not None:
                losses[side].append(float(loss))
    return {"seconds": seconds, "losses": losses}


def own_side(rank: int, schedule: str, arguments: argparse.Namespace) -> Callable[[Tensor, Tensor], Any]:
    model = network(arguments.depth, arguments.width)
    loops = 2 if schedule == "interleaved-1f1b" else 1
    form = InputForm(shape=(arguments.length,), dtype="int64")
    plan = _ranks.plan(
        arguments.depth, RANKS, schedule, MICROBATCHES, loops=loops, microbatch=2, inputs=(form,)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Runner(model, plan, optimizer=optimizer, loss_fn=loss_of, engine="own").step


def torch_side(rank: int, schedule: str, arguments: argparse.Namespace) -> Callable[[Tensor, Tensor], Any]:
    model = network(arguments.depth, arguments.width)
    name, loops = TORCH[schedule]
    count = loops * RANKS
    size = arguments.depth // count
    numbers = [rank + loop * RANKS for loop in range(loops)]
    parts = [model[number * size : (number + 1) * size] for number in numbers]
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(part, number, count, device)
        for part, number in zip(parts, numbers, strict=True)
    ]
    made = getattr(pipelining, name)
    runtime = made(stages[0] if loops == 1 else stages, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([each for part in parts for each in part.parameters()], lr=1e-3)
    is_last = numbers[-1] == count - 1

    def step(inputs: Tensor, target: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": target, "losses": losses} if is_last else {}
        runtime.step(*((inputs,) if rank == 0 else ()), **options)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if is_last else None

    return step


def row(schedule: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each step the slower rank's seconds, and how far losses are apart."""
    times = {
        side: [max(each) for each in zip(*(rank["seconds"][side] for rank in found), strict=True)]
        for side in ("torch", "own")
    }
    medians = {side: statistics.median(each) for side, each in times.items()}
    losses = found[-1]["losses"]
    apart = max(abs(a - b) for a, b in zip(losses["torch"], losses["own"], strict=True))
    return {
        "schedule": schedule,
        "torch": TORCH[schedule][0],
        "seconds": medians,
        "spread": {side: (min(each), max(each)) for side, each in times.items()},
        "ratio": medians["own"] / medians["torch"],
        "losses_apart": apart,
    }


class Skip(nn.Module):
    """Its first layer's output is read again behind the last one, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Linear(8, 8), nn.Linear(8, 8)
        self.up, self.last = nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x).relu()
        return self.last(torch.cat([self.up(self.middle(first).relu()).relu(), first], 1))


class Tied(nn.Module):
    """Its last layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).relu()) @ self.first.weight


class Keywords(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        return self.second((self.first(left) + right).relu())


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


# By name: the model, the part of a batch that its second step has, torch's schedule and ours.
CASES: Mapping[str, tuple[Callable[[], nn.Module], int, str, str]] = {
    "a plain chain": (plain, 8, "Schedule1F1B", "1f1b"),
    "a skip from the first stage to the last": (Skip, 8, "Schedule1F1B", "1f1b"),
    "a weight that the first and last stage share": (Tied, 8, "Schedule1F1B", "1f1b"),
    "a second batch of 6 samples instead of 8": (plain, 6, "Schedule1F1B", "1f1b"),
    "a second batch of 5 samples instead of 8": (plain, 5, "Schedule1F1B", "1f1b"),
    "inputs by keyword": (Keywords, 8, "Schedule1F1B", "1f1b"),
    "no flush between batches": (plain, 8, "", "2bw"),
}


def data(name: str, step: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(step)
    samples = CASES[name][1] if step else 8
    inputs, target = (torch.randn(samples, 8, generator=generator) for _ in range(2))
    return ({"left": inputs, "right": inputs.flip(0)} if name == "inputs by keyword" else inputs), target


def tried(rank: int, name: str, side: str) -> str:
    """What comes of two steps."""
    torch.manual_seed(0)
    make, _, theirs, ours = CASES[name]
    try:
        losses = (_torch_steps if side == "torch" else _own_steps)(
            rank, name, make(), theirs if side == "torch" else ours
        )
    except Exception as error:  # noqa: BLE001  which error it is, is what is asked
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    if losses is None:
        return "works"
    torch.manual_seed(0)
    apart = max(abs(a - b) for a, b in zip(losses, _alone(name, make(), late=ours == "2bw"), strict=True))
    return "works" if apart < 1e-5 else f"another loss, off by {apart:.1g}"


def _alone(name: str, model: nn.Module, *, late: bool) -> list[float]:
    """Losses of one process: of two steps, and of a third batch afterwards."""
    optimizer, losses, gradients = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for step in range(3):
        inputs, target = data(name, step)
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = nn.functional.mse_loss(output, target)
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
        if step >= late:
            for parameter, gradient in zip(model.parameters(), gradients[step - late], strict=True):
                parameter.grad = gradient
            optimizer.step()
    return losses


def _own_steps(rank: int, name: str, model: nn.Module, schedule: str) -> list[float] | None:
    from squeezebox import plan_pipeline
    from squeezebox.schema import Link

    plan = plan_pipeline(
        model,
        sample=data(name, 0),
        loss_fn=nn.functional.mse_loss,
        ranks=RANKS,
        depths=[RANKS],
        memory_bytes=2**30,
        microbatches=[2],
        schedules=[schedule],
        policies=["keep"],
        link=Link(bytes_per_second=1e9),
    )[0]
    plan = _agreed(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, patience=20.0)
    losses = [runner.step(*data(name, step)) for step in range(3)]
    runner.drain()
    runner.close()
    return None if losses[0] is None else [float(each) for each in losses if each is not None]


def _agreed(plan: PipelinePlan) -> PipelinePlan:
    """The first rank's: cuts follow measured times."""
    plans = [plan]
    dist.broadcast_object_list(plans, src=0)
    return plans[0]


def _torch_steps(rank: int, name: str, model: nn.Module, schedule: str) -> list[float] | None:
    if schedule not in dir(pipelining):
        raise NotImplementedError("there is no schedule without a flush")
    inputs, _ = data(name, 0)
    part = {key: each[:2] for key, each in inputs.items()} if isinstance(inputs, dict) else (inputs[:2],)
    names = [each for each, _ in model.named_children()]
    spec = {names[len(names) // 2]: pipelining.SplitPoint.BEGINNING}
    by_name = isinstance(part, dict)
    pipe = pipelining.pipeline(
        model, mb_args=() if by_name else part, mb_kwargs=part if by_name else None, split_spec=spec
    )
    stage = pipe.build_stage(rank, torch.device("cpu"))
    runtime = getattr(pipelining, schedule)(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    found = []
    for step in range(3):
        inputs, target = data(name, step)
        losses: list[Tensor] = []
        if rank == 0:
            runtime.step(**inputs) if by_name else runtime.step(inputs)
        else:
            runtime.step(target=target, losses=losses)
            found.append(torch.stack(losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return found if rank else None


def table(rows: Sequence[Mapping[str, Any]], refusals: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    lines = [
        "| ours | torch's | ours, ms | torch's, ms | ratio | losses apart |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        shown = {
            side: f"{1e3 * each['seconds'][side]:.0f} ({1e3 * low:.0f}..{1e3 * high:.0f})"
            for side, (low, high) in each["spread"].items()
        }
        lines.append(
            f"| {each['schedule']} | {each['torch']} | {shown['own']} | {shown['torch']} | "
            f"{each['ratio']:.3f} | {each['losses_apart']:.1g} |"
        )
    most = max(each["ratio"] for each in rows)
    lines += ["", f"- The largest ratio: {most:.3f} (goal: at most {GOAL}).", ""]
    lines += ["| what is tried | squeezebox | torch.distributed.pipelining |", "|---|---|---|"]
    for name, sides in refusals.items():
        told = {side: _short(found) for side, found in sides.items()}
        lines.append(f"| {name} | {told['squeezebox']} | {told['torch']} |")
    return "\n".join(lines)


def _short(told: Sequence[str]) -> str:
    """What the ranks say: an error that is not of a lost connection, if one has it."""
    wrong = sorted((each for each in told if each != "works"), key=lambda each: "pair.cc" in each)
    return wrong[0].replace("|", "/")[:160] if wrong else "works"


if __name__ == "__main__":
    main()
