"""Schedules as the runner carries them out, against the simulator: stages that sleep, on gloo ranks.

Goes in: nothing. Comes out: benchmarks/reports/pipeline_schedules-<date>.json and .md.

Ranks are processes with squeezebox.pipeline.Runner and gloo messages between them. A block sleeps for its
forward, and twice as long for its backward: once for the gradient of its input, once for that of its weight.
So stages cost no processor, as on devices of their own; messages are tiny, so links are as fast as they get.
Looped schedules have two stages a rank of half the seconds. The simulator gets the seconds that are asked
for, and no transfers; what a sleep takes too long and what ranks do between sleeps count as our error.

Seconds a batch are between the first forwards of two batches at rank 0, the same in the simulator's
timeline; the first batch is left out. PipeDream's batches, of one microbatch each, count by as many as the
others have. Every case is run in several rounds, in processes of their own: medians, and the range, are of
all batches of all rounds.

A machine with other work only adds to them, so the error of the least batch is given too. "Alone" compares
with a simulator that is given what a block takes on its own, as a profile would say. "Waits" are seconds
between the end of what a rank waited for and its next sleep: after its own sleep, they are what block and
runner do there; after a message, they are the message's as well. "With waits" compares with a simulator that
is given the medians of those, and of the sleeps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import _ranks, _report
from squeezebox import schedules
from squeezebox.pipeline import Runner
from squeezebox.schedules import Action, Costs, Kind, Schedule, simulate
from squeezebox.schema import InputForm

GOAL = 0.05  # of the simulator
OVER_1F1B = 1.35  # times its throughput, that of 2BW with 8 ranks and 16 microbatches

Sleep = tuple[float, float]  # from when to when, on the clock that all processes share
Alone = tuple[float, float]  # seconds of a block's forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A schedule by its name in plans, on so many ranks; ``forward`` is seconds of one rank's microbatch."""

    schedule: str
    ranks: int
    microbatches: int
    forward: float
    batches: int
    clip: float | None = None

    @property
    def name(self) -> str:
        return self.schedule + (", clip" if self.clip else "")

    @property
    def loops(self) -> int:
        return 2 if schedules.PUBLISHED[self.schedule].loops else 1

    @property
    def of_batch(self) -> int:
        """Microbatches in a batch of the runner's."""
        return 1 if self.schedule == "pipedream" else self.microbatches

    @property
    def steps(self) -> int:
        return self.batches * self.microbatches // self.of_batch

    def order(self) -> Schedule:
        """All that is done, from the first batch to the last."""
        return schedules.make(self.schedule, self.ranks, self.of_batch, loops=self.loops, batches=self.steps)

    def costs(self) -> Costs:
        """The simulator's, of sleeps as asked for."""
        forward = self.forward / self.loops
        return self.costs_of(forward, 2 * forward, forward)

    def costs_with(self, own: float, late: float, transfer: float) -> Costs:
        """A sleep takes ``late`` longer, and ``own`` seconds come with every action."""
        forward = self.forward / self.loops + late
        return self.costs_of(forward + own, 2 * forward + own, forward + own, own, transfer)

    def costs_of(
        self, forward: float, backward: float, half: float, none: float = 0.0, transfer: float = 0.0
    ) -> Costs:
        """The first stage does all of backward when weights' turn comes: nobody waits for its input's."""
        stages = self.ranks * self.loops
        return Costs(
            forward=(forward,) * stages,
            backward=(backward,) * stages,
            input=(none, *(half,) * (stages - 1)),
            weight=(backward, *(half,) * (stages - 1)),
            transfer=transfer,
        )


class SleepingBlock(nn.Module):
    """Scales by one weight; sleeps for the forward, the input's gradient and the weight's gradient."""

    def __init__(self, seconds: float, spans: list[Sleep]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self._rest = seconds, spans

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # the first block's input has a gradient too, as inner blocks'
        x = _ForwardAndBack.apply(x, *self._rest)
        return x * _Back.apply(self.scale, *self._rest)


class _ForwardAndBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, spans: list[Sleep]) -> Tensor:
        ctx.rest = seconds, spans
        _sleep(seconds, spans)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _sleep(*ctx.rest)
        return gradient, None, None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, spans: list[Sleep]) -> Tensor:
        ctx.rest = seconds, spans
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _sleep(*ctx.rest)
        return gradient, None, None


def _sleep(seconds: float, spans: list[Sleep]) -> None:
    start = time.perf_counter()
    time.sleep(seconds)
    spans.append((start, time.perf_counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("schedules", nargs="*", help="their names in plans; default: all")
    parser.add_argument("--ranks", nargs="*", type=int, default=[4, 8])
    parser.add_argument("--microbatches", nargs="*", type=int, default=[8, 16])
    parser.add_argument("--forward", type=float, default=0.03, help="seconds; backward is twice that")
    parser.add_argument("--batches", type=int, default=5, help="of a round, the first and last not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="4 ranks, 8 microbatches, one round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.microbatches, arguments.rounds = [4], [8], 1
    traces: dict[Case, list[list[list[Sleep]]]] = {case: [] for case in cases(arguments)}
    blocks: dict[float, list[Alone]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for seconds in {case.forward / case.loops for case in traces}:
            blocks[seconds] += _ranks.run(alone, 1, seconds)
        for case, found in traces.items():
            found.append(_ranks.run(rank, case.ranks, case))
            print(row(case, found[-1:], blocks), file=sys.stderr, flush=True)
    rows = [row(case, found, blocks) for case, found in traces.items()]
    payload = {"settings": vars(arguments), "rows": rows, "goals": goals(rows)}
    for path in _report.write("pipeline_schedules", payload, table(rows)):
        print(path)


def cases(arguments: argparse.Namespace) -> list[Case]:
    wanted = arguments.schedules or [*schedules.FLOWS]
    return [
        Case(
            schedule=name,
            ranks=ranks,
            microbatches=microbatches,
            forward=arguments.forward,
            batches=arguments.batches,
            clip=clip,
        )
        for ranks in arguments.ranks
        for microbatches in arguments.microbatches
        for name in wanted
        for clip in ((None, 1.0) if name == "2bw" else (None,))
    ]


def rank(number: int, case: Case) -> list[Sleep]:
    """What one rank does: all its sleeps, in order."""
    spans: list[Sleep] = []
    stages = case.ranks * case.loops
    model = nn.Sequential(*(SleepingBlock(case.forward / case.loops, spans) for _ in range(stages)))
    plan = _ranks.plan(
        stages,
        case.ranks,
        case.schedule,
        case.of_batch,
        loops=case.loops,
        inputs=(InputForm(shape=(4,), dtype="float32"),),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=torch.mean, clip=case.clip)
    try:
        batch = torch.ones(case.of_batch, 4)
        for _ in range(case.steps):
            runner.step(batch if number == 0 else None)
        runner.drain()
    finally:
        runner.close()
    return spans


def alone(_: int, seconds: float, repeats: int = 20) -> Alone:
    """What a block takes without a pipeline."""
    block, times = SleepingBlock(seconds, []), []
    for _ in range(repeats):
        start = time.perf_counter()
        output = block(torch.ones(1, 4))
        between = time.perf_counter()
        output.mean().backward()
        times.append((between - start, time.perf_counter() - between))
    forward, backward = (statistics.median(each) for each in zip(*times, strict=True))
    return forward, backward


def row(
    case: Case, traces: Sequence[Sequence[Sequence[Sleep]]], blocks: Mapping[float, Sequence[Alone]]
) -> dict[str, Any]:
    """Medians of several rounds' sleeps, and what the simulator says."""
    order = case.order()
    expected = simulated(case, case.costs())
    forward, backward = (
        statistics.median(each) for each in zip(*blocks[case.forward / case.loops], strict=True)
    )
    runs = [placed(order, trace) for trace in traces]
    measured = [each for run in runs for each in periods(case, {key: span[0] for key, span in run.items()})]
    waits = delays(order, runs)
    late = [end - start for trace in traces for own in trace for start, end in own]
    late = [each - case.forward / case.loops for each in late]
    seconds = {name: statistics.median(found) for name, found in (waits | {"late": late}).items() if found}
    own = seconds["own"]
    transfer = max(0.0, seconds.get("message", own) - own)
    explained = simulated(case, case.costs_with(own, seconds["late"], transfer))
    median = statistics.median(measured)
    return {
        "schedule": case.name,
        "ranks": case.ranks,
        "microbatches": case.microbatches,
        "simulated": expected,
        "measured": median,
        "least": min(measured),
        "most": max(measured),
        "batches": len(measured),
        "error": median / expected - 1.0,
        "error_least": min(measured) / expected - 1.0,
        "alone": {"forward": forward, "backward": backward},
        "error_alone": median / simulated(case, case.costs_of(forward, backward, backward / 2)) - 1.0,
        "wait_own": own,
        "wait_message": seconds.get("message"),
        "sleep_late": seconds["late"],
        "mean": {name: statistics.fmean(found) for name, found in (waits | {"late": late}).items() if found},
        "error_explained": median / explained - 1.0,
    }


def simulated(case: Case, costs: Costs) -> float:
    """Seconds a batch, as they are measured."""
    return statistics.median(periods(case, starts(simulate(case.order(), costs).spans[0])))


def placed(order: Schedule, trace: Sequence[Sequence[Sleep]]) -> dict[Action, Sleep]:
    """From when to when each action slept; one that does not sleep is not there."""
    found: dict[Action, Sleep] = {}
    for own, actions in zip(trace, order.orders, strict=True):
        rest = iter(own)
        for action in actions:
            slept = [next(rest) for _ in range(_sleeps(action))]
            if slept:
                found[action] = slept[0][0], slept[-1][1]
        assert next(rest, None) is None, "a rank did more than its schedule says"
    return found


def _sleeps(action: Action) -> int:
    """How often a block sleeps; of the first one's input, which nobody waits for, only when all is done."""
    if action.kind is Kind.BACKWARD:
        return 2
    if action.stage == 0:
        return {Kind.FORWARD: 1, Kind.WEIGHT: 2}.get(action.kind, 0)
    return action.kind is not Kind.UPDATE


def starts(spans: Sequence[schedules.Span]) -> dict[Action, float]:
    return {span.action: span.start for span in spans}


def periods(case: Case, began: Mapping[Action, float]) -> list[float]:
    """Seconds between first forwards of batches at the first stage, without the first batch's."""
    first = {each.microbatch: began[each] for each in began if (each.kind, each.stage) == (Kind.FORWARD, 0)}
    times = [first[number] for number in range(0, len(first), case.microbatches)]
    return [after - before for before, after in zip(times[1:], times[2:], strict=False)]


def delays(order: Schedule, runs: Sequence[Mapping[Action, Sleep]]) -> dict[str, list[float]]:
    """Seconds from the end of what was waited for to the next sleep, by what that was."""
    found: dict[str, list[float]] = {"own": [], "message": []}
    for run in runs:
        ends = {_key(action): end for action, (_, end) in run.items()}
        for actions in order.orders:
            before = None
            for action in (each for each in actions if each in run):
                awaited = ends.get(_awaited(action, order.num_stages), 0.0)
                if before is not None:
                    own = run[before][1]
                    found["own" if own >= awaited else "message"].append(run[action][0] - max(own, awaited))
                before = action
    return found


def _key(action: Action) -> tuple[bool, int, int]:
    """What an action makes: an output or an input's gradient; weights' gradients nobody waits for."""
    stage = -1 if action.kind is Kind.WEIGHT else action.stage
    return action.kind is Kind.FORWARD, stage, action.microbatch


def _awaited(action: Action, stages: int) -> tuple[bool, int, int] | None:
    if action.kind is Kind.FORWARD:
        return (True, action.stage - 1, action.microbatch) if action.stage else None
    if (action.kind is Kind.WEIGHT and action.stage) or action.stage + 1 == stages:
        return None  # of the first stage, it comes with its input's gradient, which does not sleep
    return False, action.stage + 1, action.microbatch


def goals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was aimed at: the largest error, and 2BW's seconds over no bubble and over 1F1B's."""
    seconds = {(each["schedule"], each["ranks"], each["microbatches"]): each["measured"] for each in rows}
    ideal = {
        (each["ranks"], each["microbatches"]): each["simulated"] for each in rows if each["schedule"] == "2bw"
    }
    return {
        "missed": [
            f"{each['schedule']}, p = {each['ranks']}, m = {each['microbatches']}"
            for each in rows
            if abs(each["error"]) > GOAL
        ],
        "two_bw_over_bubble_free": {
            f"p = {ranks}, m = {microbatches}": seconds["2bw", ranks, microbatches] / least
            for (ranks, microbatches), least in ideal.items()
        },
        "two_bw_throughput_over_1f1b": {
            f"p = {ranks}, m = {microbatches}": flushed / seconds["2bw", ranks, microbatches]
            for (schedule, ranks, microbatches), flushed in seconds.items()
            if schedule == "1f1b" and ("2bw", ranks, microbatches) in seconds
        },
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| schedule | p | m | simulated ms | measured ms (least..most, batches) | error | error of the least "
        "| error, alone | wait after own ms | wait after message ms | sleep late ms | error, with waits |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        spread = f"{_ms(each['least'], 0)}..{_ms(each['most'], 0)}, {each['batches']}"
        lines.append(
            f"| {each['schedule']} | {each['ranks']} | {each['microbatches']} | {_ms(each['simulated'], 0)} "
            f"| {_ms(each['measured'], 0)} ({spread}) | {100 * each['error']:+.1f} % "
            f"| {100 * each['error_least']:+.1f} % | {100 * each['error_alone']:+.1f} % "
            f"| {_ms(each['wait_own'])} | {_ms(each['wait_message'])} | {_ms(each['sleep_late'])} "
            f"| {100 * each['error_explained']:+.1f} % |"
        )
    return "\n".join([*lines, "", *_verdicts(rows)])


def _ms(seconds: float | None, digits: int = 2) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.{digits}f}"


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = goals(rows)
    sizes: Counter[bool] = Counter(abs(each["error"]) <= GOAL for each in rows)
    missed = f"; not {'; '.join(found['missed'])}" if found["missed"] else ""
    lines = [f"Within {GOAL:.0%} of the simulator: {sizes[True]} of {len(rows)}{missed}."]
    for what, ratios in list(found.items())[1:]:
        if ratios:
            shown = ", ".join(f"{ratio:.3f} ({where})" for where, ratio in ratios.items())
            lines.append(f"{_TITLES[what]}: {shown}.")
    return ["\n".join(f"- {line}" for line in lines)]


_TITLES: Mapping[str, str] = {
    "two_bw_over_bubble_free": "2BW's seconds a batch over those without any wait, m (F + B)",
    "two_bw_throughput_over_1f1b": f"2BW's throughput over 1F1B's (goal: {OVER_1F1B} with p = 8, m = 16)",
}

if __name__ == "__main__":
    main()
