"""Does training on squeezed activations reach the same test accuracy? An equivalence test over seeds.

Goes in: full Fashion-MNIST. Comes out: benchmarks/reports/accuracy-<date>.json and .md.
May touch: that folder, and .partial/ within it, which gets one line for every finished training.

Every seed trains each arm from the same initial weights on the same batches in the same order. The
question is put as two one-sided t tests (Schuirmann 1987) on the paired differences of final test
accuracy, squeezed minus plain: equivalent, at the 5 % level, if the 90 % interval of the mean
difference lies within the margin. The margin is the sample standard deviation (n - 1) of plain's own
test accuracies over the seeds. Two trainings that differ anywhere drift apart, so the differences are
about as wide as that margin times sqrt(2), and few seeds can fail to show what many would; the report
gives the test's power beside its verdict.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import squeezebox
from benchmarks import _report
from squeezebox.cli._data import fashion_mnist
from squeezebox.reports import LEVEL, equivalence
from squeezebox.session import Session

PARTIAL = _report.REPORTS / ".partial"
CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Normalised float32 (n, 1, 28, 28) with int64 labels (n,), of both splits."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a training depends on besides its seed and its arm."""

    epochs: int
    batch: int
    lr: float
    limit: int | None
    threads: int
    source: str


def main() -> None:
    arguments = parse()
    images, source = load(arguments.limit)
    settings = Settings(
        epochs=arguments.epochs,
        batch=min(arguments.batch, len(images.train)),
        lr=arguments.lr,
        limit=arguments.limit,
        threads=torch.get_num_threads(),
        source=source,
    )
    arms = {"plain": None} | {f"squeezed {noise:.0e}": noise for noise in arguments.noise}
    rows = train_all(settings, images, arms, arguments.seeds, arguments.resume)
    results = summarise(settings, rows, arms)
    for path in _report.write("accuracy", results, table(results)):
        print(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="trainings of every arm, at least 2")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05, help="rate before its decay to zero")
    parser.add_argument("--noise", type=float, nargs="+", default=[1e-3], help="one squeezed arm for each")
    parser.add_argument("--limit", type=int, help="use so many training and test images only")
    parser.add_argument("--resume", action="store_true", help="keep the trainings an earlier run finished")
    arguments = parser.parse_args()
    if arguments.seeds < 2 or arguments.epochs < 1:
        parser.error("--seeds must be at least 2 (one run has no spread) and --epochs at least 1")
    return arguments


def load(limit: int | None) -> tuple[Images, str]:
    """The full set, normalised by its training images' mean and deviation; and where it came from."""
    data = fashion_mnist(subset=False)
    train, test = (
        torch.from_numpy(part[:limit]).unsqueeze(1) / 255.0 for part in (data.train_images, data.test_images)
    )
    mean, deviation = train.mean(), train.std()
    images = Images(
        train=(train - mean) / deviation,
        train_labels=torch.from_numpy(data.train_labels[:limit]).long(),
        test=(test - mean) / deviation,
        test_labels=torch.from_numpy(data.test_labels[:limit]).long(),
    )
    return images, data.source


def network() -> nn.Module:
    """Four times convolution, BatchNorm, ReLU; 28x28 to 7x7; one linear layer."""
    layers: list[nn.Module] = []
    channels = 1
    for width, pooled in ((16, True), (32, True), (64, False), (64, False)):
        conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if pooled else []
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, len(CLASSES)))


# --- training ------------------------------------------------------------------------------------------


def train_all(
    settings: Settings, images: Images, arms: Mapping[str, float | None], seeds: int, resume: bool
) -> list[Row]:
    """Every arm of every seed; the finished ones are kept in a file at once."""
    path = partial_file(settings)
    known = {(row["seed"], row["arm"]): row for row in read_rows(path)} if resume else {}
    if not resume:
        path.unlink(missing_ok=True)
    for seed in range(seeds):
        # who goes first alternates, so that a machine that slows down favours no arm
        order = list(arms)[:: -1 if seed % 2 else 1]
        for arm in (arm for arm in order if (seed, arm) not in known):
            row = {"seed": seed, "arm": arm, **train(settings, images, arms[arm], seed)}
            known[seed, arm] = row
            append_row(path, row)
            _say(f"seed {seed}, {arm}: {100 * row['accuracy']:.2f} % in {row['seconds']:.0f} s")
    return [known[seed, arm] for seed in range(seeds) for arm in arms]


def train(settings: Settings, images: Images, noise: float | None, seed: int) -> Row:
    """One training from its start; what it reached and what it held."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9, weight_decay=5e-4)
    steps = settings.epochs * (len(images.train) // settings.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    session = None if noise is None else squeezebox.attach(model, optimizer=optimizer, noise=noise)
    losses: list[float] = []
    started = time.perf_counter()
    for step, (inputs, labels) in enumerate(shuffled(images, settings, seed)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0:
            _say(f"  seed {seed}, noise {noise}, step {step} of {steps}, loss {losses[-1]:.3f}")
    row: Row = {"seconds": time.perf_counter() - started}
    row["train_loss"] = statistics.fmean(losses[-(steps // settings.epochs) :])
    row["commit"] = _report.header()["commit"]
    if session is not None:
        row |= held(session, model, images, settings.batch)
        session.detach()
    return row | accuracies(model, images)


def shuffled(images: Images, settings: Settings, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All epochs' batches; an epoch's incomplete last one is left out. Same seed, same batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        order = torch.randperm(len(images.train), generator=generator)
        for chosen in order.split(settings.batch):
            if len(chosen) == settings.batch:
                yield images.train[chosen], images.train_labels[chosen]


def held(session: Session, model: nn.Module, images: Images, batch: int) -> Row:
    """Bytes of the last step, and the gradient noise on one batch after training."""
    report = session.report()
    inputs, labels = images.train[:batch], images.train_labels[:batch]
    measured = session.measure_noise(lambda: F.cross_entropy(model(inputs), labels).backward())
    return {
        "saved_bytes": report.saved_bytes,
        "packed_bytes": report.packed_bytes,
        "noise": measured,
        "predicted_noise": report.predicted_noise,
    }


@torch.no_grad()
def accuracies(model: nn.Module, images: Images) -> Row:
    """Share of test images, and of every class's, that the model names rightly."""
    model.eval()
    named = torch.cat([model(part).argmax(1) for part in images.test.split(1000)])
    right = (named == images.test_labels).double()
    per_class = [float(right[images.test_labels == label].mean()) for label in range(len(CLASSES))]
    return {"accuracy": float(right.mean()), "per_class": per_class}


def partial_file(settings: Settings) -> Path:
    """The file of these settings; the folder hides itself from git."""
    PARTIAL.mkdir(parents=True, exist_ok=True)
    (PARTIAL / ".gitignore").write_text("*\n", encoding="utf-8")
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()
    return PARTIAL / f"accuracy-{digest[:12]}.jsonl"


def read_rows(path: Path) -> list[Row]:
    """The trainings kept so far; a line cut off by a kill is dropped."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append_row(path: Path, row: Row) -> None:
    """One more line, on a line of its own whatever was cut off before it."""
    kept = "".join(json.dumps(each) + "\n" for each in [*read_rows(path), row])
    fresh = path.with_suffix(".new")
    fresh.write_text(kept, encoding="utf-8")
    fresh.replace(path)


# --- report --------------------------------------------------------------------------------------------


def summarise(settings: Settings, rows: Sequence[Row], arms: Mapping[str, float | None]) -> dict[str, Any]:
    """Everything that the report states."""
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in arms}
    plain = _column(by_arm["plain"], "accuracy")
    margin = statistics.stdev(plain)
    tests: dict[str, Any] = {}
    for arm in list(arms)[1:]:
        differences = [a - b for a, b in zip(_column(by_arm[arm], "accuracy"), plain, strict=True)]
        tests[arm] = asdict(equivalence(differences, margin)) | {
            "differences": differences,
            "within_plain_range": max(plain) - min(plain),
            "per_class": per_class(by_arm[arm], by_arm["plain"]),
        }
    return {
        "settings": asdict(settings),
        "arms": {arm: totals(found) for arm, found in by_arm.items()},
        "margin": margin,
        "plain_range": max(plain) - min(plain),
        "tests": tests,
        "commits": sorted({row["commit"] for row in rows}),
        "rows": list(rows),
    }


def totals(rows: Sequence[Row]) -> dict[str, float]:
    """Means over the seeds, and the spread of accuracy."""
    accuracy = _column(rows, "accuracy")
    result = {"accuracy": statistics.fmean(accuracy), "accuracy_deviation": statistics.stdev(accuracy)}
    result |= {"lowest": min(accuracy), "highest": max(accuracy)}
    for name in ("train_loss", "seconds", "saved_bytes", "packed_bytes", "noise", "predicted_noise"):
        if name in rows[0]:
            result[name] = statistics.fmean(_column(rows, name))
    return result


def per_class(squeezed: Sequence[Row], plain: Sequence[Row]) -> list[dict[str, Any]]:
    """Mean accuracy of every class in both arms, and plain's deviation over the seeds."""
    result: list[dict[str, Any]] = []
    for label, name in enumerate(CLASSES):
        mine, theirs = ([row["per_class"][label] for row in rows] for rows in (squeezed, plain))
        found = {"plain": statistics.fmean(theirs), "squeezed": statistics.fmean(mine)}
        difference = found["squeezed"] - found["plain"]
        spread = statistics.stdev(theirs)
        result.append({"class": name, **found, "difference": difference, "plain_deviation": spread})
    return result


def table(results: dict[str, Any]) -> str:
    """The Markdown of the report."""
    settings = results["settings"]
    lines = [
        f"{settings['epochs']} epochs of batch {settings['batch']} on the {settings['source']}"
        + (f", first {settings['limit']} images only" if settings["limit"] else "")
        + f"; trained at commits {', '.join(commit[:12] for commit in results['commits'])}.",
        "",
        "| arm | test accuracy | deviation over seeds | lowest to highest | train loss, last epoch "
        "| saved MiB | packed MiB | ratio | measured noise after training | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_arm_line(arm, row) for arm, row in results["arms"].items()),
    ]
    for arm, test in results["tests"].items():
        lines += ["", f"## {arm} against plain", "", verdict(test), "", *_class_lines(test["per_class"])]
    return "\n".join(lines)


def _arm_line(arm: str, row: Mapping[str, float]) -> str:
    held = "| | | | "
    if "saved_bytes" in row:
        saved, packed = row["saved_bytes"], row["packed_bytes"]
        held = f"| {saved / 2**20:.1f} | {packed / 2**20:.2f} | {saved / packed:.1f}x | {row['noise']:.1e} "
    return (
        f"| {arm} | {_percent(row['accuracy'])} | {_points(row['accuracy_deviation'])} "
        f"| {_percent(row['lowest'])} to {_percent(row['highest'])} | {row['train_loss']:.4f} "
        f"{held}| {row['seconds']:.0f} |"
    )


def verdict(test: Mapping[str, Any]) -> str:
    """The test in words: what was found, and what it could not see."""
    found = "equivalent" if test["equivalent"] else "equivalence not shown"
    in_range = "lies" if test["least_margin"] < test["within_plain_range"] else "does not lie"
    return (
        f"**{found}** (p = {test['p_value']:.3f} for the larger of two one-sided t tests, level {LEVEL}). "
        f"Mean of {test['count']} paired differences, squeezed minus plain: {_points(test['mean'])} "
        f"percentage points, 90 % interval {_points(test['low'])} to {_points(test['high'])}; their "
        f"deviation {_points(test['deviation'])}. Margin, the standard deviation of plain's accuracies over "
        f"the seeds: {_points(test['margin'])}. The interval {in_range} within plain's range (highest minus "
        f"lowest), {_points(test['within_plain_range'])}.\n\n"
        f"What it could not see: with no true difference this test finds equivalence in "
        f"{100 * test['power']:.0f} % of repetitions, taking margin and deviation as known; the data pass "
        f"any margin above {_points(test['least_margin'])}; a mean difference below "
        f"{_points(test['least_visible'])} would not have been significant (two-sided, 5 %). The margin is "
        f"itself an estimate from {test['count']} seeds."
    )


def _class_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    largest = max(rows, key=lambda row: abs(row["difference"]))
    return [
        "| class | plain | squeezed | difference | deviation of plain over seeds |",
        "|---|---|---|---|---|",
        *(
            f"| {row['class']} | {_percent(row['plain'])} | {_percent(row['squeezed'])} "
            f"| {_points(row['difference'])} | {_points(row['plain_deviation'])} |"
            for row in rows
        ),
        "",
        f"Largest difference of one class: {largest['class']}, {_points(largest['difference'])} percentage "
        f"points, where plain's deviation over seeds is {_points(largest['plain_deviation'])}.",
    ]


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _points(share: float) -> str:
    return f"{100 * share:.3f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
