"""How often does a calibration err, and how near does it come? Simulated searches whose truth is known.

Goes in: worlds, each with a loss for every level of noise, seeds' deviations, and short runs that tell
something of it or nothing. Comes out: benchmarks/reports/calibrate-<date>.json and .md.
May touch: that folder. Needs optuna for its arms, which are left out without it.

Losses are in margins. A search is wrongly loose if the level that it names loses the margin or more, and near
if its level is the loosest within the margin or the next tighter one.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import squeezebox
from benchmarks import _report
from examples.audit_digits import train
from squeezebox.auditing import search
from squeezebox.reports import LEVEL, AuditRecord, equivalence, paired_limit

KINDS = {
    "linear": "loss proportional to noise",
    "power": "loss a power of noise, 0.5 to 1.6",
    "heavy tails": "power, and Student's noise with 3 degrees of freedom",
    "outliers": "power, and one squeezed training in 20 with 5 times the deviation",
    "skewed": "power, and squeezed trainings with an exponential tail of bad results",
    "cliff": "next to no loss, then a broken training",
    "dip": "power, less a gain in the middle: noise that regularises",
    "ripple": "power, up to 60 % up and down: not monotone",
    "plateau": "every level from some on loses 1.02 margins: the hardest to refuse",
    "no loss": "every level is as good as plain",
    "blind": "power, and short runs that show nothing",
}
DEVIATIONS = (
    0.15,
    0.3,
    0.45,
    0.6,
)  # of a pair's loss, in margins; 0.6 if the margin is one deviation between seeds
TRAININGS = 14
SHORT = 0.1  # of a training
NEAR = 0.3  # least loss, in margins, of a level far enough within it for a point estimate of one training


class World:
    """One problem: ``train(level, pair)`` and ``screen(level)`` give losses, and count what they cost."""

    def __init__(self, kind: str, deviation: float, levels: int, generator: np.random.Generator) -> None:
        self._kind, self._deviation, self._generator = kind, deviation, generator
        ratio = 10 ** (3.477 * (np.arange(levels) - generator.uniform(-1, levels)) / (levels - 1))
        self.true = self._losses(ratio)
        self._power_of_short = 0.0 if kind == "blind" else math.exp(generator.normal(0, 0.7))
        self._short_deviation = deviation * generator.uniform(0.5, 1.5) / math.sqrt(2)
        self._plain: dict[int, float] = {}
        self._pairs: dict[tuple[int, int], float] = {}
        self._plain_short = generator.normal() * self._short_deviation
        self.spent = 0.0
        self.held: bool | None = None  # whether the upper limit of a shown level is above its loss

    def _losses(self, ratio: np.ndarray) -> np.ndarray:
        """By level; ``ratio`` is its noise over the boundary's."""
        steps = np.log(ratio)
        power = 1.0 if self._kind == "linear" else self._generator.uniform(0.5, 1.6)
        losses = np.minimum(ratio**power, 20.0)
        shifted = self._generator.uniform(0, 6)
        shapes = {
            "cliff": np.where(ratio < 1, 0.1 * ratio, 20.0),
            "dip": losses - 0.8 * np.exp(-((steps + math.log(3)) ** 2) / 2),
            "ripple": losses * (1 + 0.6 * np.sin(2.1 * np.arange(len(ratio)) + shifted)),
            "plateau": np.where(ratio < 1, 0.2, 1.02),
            "no loss": np.zeros(len(ratio)),
        }
        return shapes.get(self._kind, losses)

    @property
    def best(self) -> int:
        """The loosest level within the margin; -1 if there is none."""
        within = np.flatnonzero(self.true < 1)
        return int(within[-1]) if len(within) else -1

    def _noise(self) -> float:
        generator = self._generator
        if self._kind == "heavy tails":
            return float(generator.standard_t(3) / math.sqrt(3))
        if self._kind == "outliers":
            return float(generator.normal() * (5 if generator.random() < 0.05 else 1) / math.sqrt(2.2))
        return float(generator.exponential() - 1 if self._kind == "skewed" else generator.normal())

    def train(self, level: int, pair: int) -> float:
        """Plain's metric less the level's, of one seed; what they have in common is gone."""
        each = self._deviation / math.sqrt(2)
        if pair not in self._plain:
            self._plain[pair] = self._generator.normal() * each
            self.spent += 1
        if (level, pair) not in self._pairs:
            self._pairs[level, pair] = self.true[level] + self._plain[pair] + self._noise() * each
            self.spent += 1
        return float(self._pairs[level, pair])

    def screen(self, level: int) -> float:
        """The same of short runs, whose loss is larger or smaller."""
        self.spent += SHORT
        noise = self._noise() * self._short_deviation
        return float(self._power_of_short * self.true[level] + self._plain_short + noise)

    def costs(self, level: int, pair: int) -> int:
        """Trainings that a pair would take."""
        return (pair not in self._plain) + ((level, pair) not in self._pairs)


# --- searches: each names a level, -1 for none ------------------------------------------------------------


def squeezebox_search(world: World) -> int:
    world.spent += SHORT  # the plain short run
    found = search(len(world.true), TRAININGS, world.screen, world.train)
    assert abs(found.spent - world.spent) < 1e-6
    if found.level is None:
        return -1
    world.held = bool(world.true[found.level] <= paired_limit(found.pairs[found.level], LEVEL))
    return found.level


def bisection(world: World) -> int:
    """One training a level, as it comes out."""
    low, high = -1, len(world.true)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if world.train(middle, 0) < 1 else (low, middle)
    return low


def upwards(world: World, pairs: int = 3) -> int:
    """Level after level from the tightest, each shown by three pairs or more, until one is not."""
    shown = -1
    for level in range(len(world.true)):
        losses: list[float] = []
        while world.spent + world.costs(level, len(losses)) <= TRAININGS:
            losses.append(world.train(level, len(losses)))
            if len(losses) >= pairs and paired_limit(losses, LEVEL) < 1:
                shown = level
                break
        if shown != level:
            return shown
    return shown


def one_level(world: World) -> int:
    """Short runs of all levels, a straight line through them, and one level with all that is left."""
    levels = len(world.true)
    world.spent += SHORT
    short = np.array([world.screen(level) for level in range(levels)])
    shape = 10 ** (0.5 * np.arange(levels))
    shape = np.minimum(shape, 400.0 * shape[0])
    scale = max(float(shape @ short / (shape @ shape)), 1e-9)
    level = max(int((scale * shape < NEAR).sum()) - 1, 0)
    losses: list[float] = []
    while world.spent + world.costs(level, len(losses)) <= TRAININGS:
        losses.append(world.train(level, len(losses)))
    return level if paired_limit(losses, LEVEL) < 1 else -1


def told(world: World) -> int:
    """The floor: the truth is known, and the next tighter level is tested with six pairs."""
    level = max(world.best - 1, 0)
    losses = [world.train(level, pair) for pair in range(6)]
    return level if paired_limit(losses, LEVEL) < 1 else -1


def tuner(world: World, pairs: int, seed: int) -> int:
    """Optuna's TPE with its median pruner. A level's value is its place, or below 0 if it seems outside."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(n_startup_trials=3, seed=seed)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    measured: dict[int, list[float]] = {}

    def value(losses: list[float], level: int) -> float:
        mean = sum(losses) / len(losses)
        return float(level) if mean < 1 else -mean

    while True:
        trial = study.ask()
        level = trial.suggest_int("level", 0, len(world.true) - 1)
        losses = measured.setdefault(level, [])
        if world.spent + world.costs(level, len(losses)) > TRAININGS:
            break
        for pair in range(len(losses), len(losses) + pairs):
            if world.spent + world.costs(level, pair) > TRAININGS:
                break
            losses.append(world.train(level, pair))
            trial.report(value(losses, level), pair)
            if trial.should_prune():
                break
        study.tell(trial, value(losses, level))
    within = [level for level, losses in measured.items() if losses and sum(losses) / len(losses) < 1]
    return max(within, default=-1)


SEARCHES: dict[str, Callable[[World, int], int]] = {
    "squeezebox": lambda world, _: squeezebox_search(world),
    "short runs, then one level": lambda world, _: one_level(world),
    "level after level": lambda world, _: upwards(world),
    "bisection, one training a level": lambda world, _: bisection(world),
    "Optuna TPE, pruned, 1 pair a trial": lambda world, seed: tuner(world, 1, seed),
    "Optuna TPE, pruned, 3 pairs a trial": lambda world, seed: tuner(world, 3, seed),
    "told the truth (floor)": lambda world, _: told(world),
}


def cell(task: tuple[str, str, float, int, int]) -> dict[str, Any]:
    """One search in many worlds of one kind."""
    name, kind, deviation, levels, worlds = task
    generator = np.random.default_rng([list(KINDS).index(kind), int(100 * deviation), levels])
    loose = near = exact = 0
    spent, held = [], []
    for seed in range(worlds):
        world = World(kind, deviation, levels, generator)
        level = SEARCHES[name](world, seed)
        wrong = level >= 0 and world.true[level] >= 1
        loose += wrong
        near += not wrong and world.best - level <= 1
        exact += level == world.best
        spent.append(world.spent)
        held += [] if world.held is None else [world.held]
    return {
        "search": name,
        "kind": kind,
        "deviation": deviation,
        "levels": levels,
        "worlds": worlds,
        "loose": int(loose),
        "near": int(near),
        "exact": int(exact),
        "shown": len(held),
        "held": sum(held),
        "mean_spent": float(np.mean(spent)),
        "most_spent": float(max(spent)),
    }


# --- a real training ---------------------------------------------------------------------------------------


def digits(folder: Path, margin: float, others: int) -> dict[str, Any]:
    """A calibration of a small CNN, and the losses of its level and of looser ones with other seeds."""
    found = squeezebox.calibrate(train, margin=margin, trainings=TRAININGS, out=folder, threads=1)
    levels = [
        each for each in found.levels if found.noise is not None and each.options["noise"] >= found.noise
    ]
    arms: dict[str, Any] = {"plain": None, **{each.name: each.options for each in levels}}
    first = TRAININGS // 2 + 1  # a calibration has used those before at most
    seeds = first + others
    squeezebox.audit(train, out=folder, arms=arms, seeds=seeds, factors=(), threads=1, steps=0)
    records = [AuditRecord.load(path) for path in folder.glob("*-everything-*.npz")]
    scores = {(record.arm, record.seed): record.score for record in records}
    losses = {
        arm: [scores["plain", seed] - scores[arm, seed] for seed in range(first, seeds)] for arm in arms
    }
    tests = {arm: equivalence(values, margin) for arm, values in losses.items() if arm != "plain"}
    return {
        "calibration": found.to_dict(),
        "text": str(found),
        "others": {
            arm: {"mean": test.mean, "low": test.low, "high": test.high, "seeds": test.count}
            for arm, test in tests.items()
        },
    }


# --- the report --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worlds", type=int, default=300, help="of each kind and deviation")
    parser.add_argument("--margin", type=float, default=0.05, help="of the real training's accuracy")
    parser.add_argument("--others", type=int, default=6, help="seeds that check the real training's level")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    names = [
        name for name in SEARCHES if "Optuna" not in name or importlib.util.find_spec("optuna") is not None
    ]
    tasks = [
        (name, kind, deviation, levels, arguments.worlds)
        for name in names
        for levels in ((8, 10) if name in ("squeezebox", "told the truth (floor)") else (8,))
        for kind in KINDS
        for deviation in DEVIATIONS
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        cells = pool.map(cell, tasks, chunksize=4)
    with tempfile.TemporaryDirectory() as folder:
        real = digits(Path(folder), arguments.margin, arguments.others)
    results = {
        "settings": vars(arguments),
        "kinds": KINDS,
        "cells": cells,
        "digits": real,
    }
    for path in _report.write("calibrate", results, table(cells, real)):
        print(path)


def table(cells: list[dict[str, Any]], real: dict[str, Any]) -> str:
    parts = [
        f"{cells[0]['worlds']} worlds of each of {len(KINDS)} kinds and {len(DEVIATIONS)} deviations of a "
        f"pair's loss "
        f"(in margins), {TRAININGS} trainings. Boundaries lie anywhere in the range and a level beyond it. "
        f"Near: the "
        "loosest level within the margin, or the next tighter one.",
        "## All kinds and deviations",
        grid(cells, ("search", "levels")),
        "## Squeezebox by the deviation of a pair's loss",
        grid(of(cells, "squeezebox"), ("levels", "deviation")),
        "## The floor by the deviation",
        grid(of(cells, "told the truth (floor)"), ("levels", "deviation")),
        "## Squeezebox on the plateau",
        grid(
            [each for each in of(cells, "squeezebox") if each["kind"] == "plateau"], ("levels", "deviation")
        ),
        "## Squeezebox by kind of world, 8 levels",
        grid([each for each in of(cells, "squeezebox") if each["levels"] == 8], ("kind",)),
        upper_limits(of(cells, "squeezebox")),
        "\n".join(f"- {name}: {meaning}." for name, meaning in KINDS.items()),
        "## A small CNN on digits",
        f"```text\n{real['text']}\n```",
        "Losses of that level and of looser ones over other seeds, with 90 % intervals:",
        "| level | seeds | loss | interval |\n|---|---|---|---|\n"
        + "\n".join(
            f"| {arm} | {row['seeds']} | {row['mean']:+.4f} | {row['low']:+.4f} to {row['high']:+.4f} |"
            for arm, row in real["others"].items()
        ),
    ]
    return "\n\n".join(parts)


def upper_limits(cells: list[dict[str, Any]]) -> str:
    shown, held = (sum(each[name] for each in cells) for name in ("shown", "held"))
    return (
        f"Of {shown} levels shown, {held / shown:.1%} lose less than the upper end of their 90 % interval, "
        "which should hold in 95 %."
    )


def of(cells: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [each for each in cells if each["search"] == name]


def grid(cells: list[dict[str, Any]], by: tuple[str, ...]) -> str:
    """Rates of pooled cells; the wrongly loose with the upper end of their 95 % interval (Wilson)."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in cells:
        groups.setdefault(tuple(each[name] for name in by), []).append(each)
    names = ("wrongly loose", "at most (95 %)", "near", "exact", "trainings", "most")
    lines = [f"| {' | '.join((*by, *names))} |", "|" + "---|" * (len(by) + len(names))]
    for key, members in groups.items():
        count = sum(each["worlds"] for each in members)
        loose, near, exact = (sum(each[name] for each in members) for name in ("loose", "near", "exact"))
        spent = sum(each["mean_spent"] * each["worlds"] for each in members) / count
        most = max(each["most_spent"] for each in members)
        lines.append(
            f"| {' | '.join(map(str, key))} | {loose / count:.1%} | {wilson(loose, count):.1%} | "
            f"{near / count:.1%} | {exact / count:.1%} | {spent:.1f} | {most:.1f} |"
        )
    return "\n".join(lines)


def wilson(hits: int, count: int, quantile: float = 1.96) -> float:
    """The upper limit of a share."""
    share, part = hits / count, quantile**2 / count
    root = quantile * math.sqrt(share * (1 - share) / count + part / (4 * count))
    return (share + part / 2 + root) / (1 + part)


if __name__ == "__main__":
    main()
