"""Dated benchmark reports, and clocks that compare several arms fairly.

Goes in: a benchmark's numbers and its table. Comes out: one JSON and one Markdown file
under benchmarks/reports/, each headed by what is needed to repeat the run.
May touch: that folder, .partial within it, `git`, and what the system tells of its processor and memory.
"""

import json
import multiprocessing
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from benchmarks import _figures

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "benchmarks" / "reports"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Several measurements of one quantity."""

    median: float
    minimum: float
    maximum: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Arms timed side by side: `seconds[arm]` and `ratios["arm/other"]`.

    A ratio is taken within each round, so a machine that slows down for a while moves
    both its sides; `dataclasses.asdict` gives the form for a report's payload.
    """

    seconds: Mapping[str, Spread]
    ratios: Mapping[str, Spread]


def timed(fn: Callable[[], object], repeats: int, warmup: int = 1) -> Spread:
    """Seconds per call of `fn` over `repeats` calls, after `warmup` unmeasured ones."""
    return interleaved({"fn": fn}, repeats, warmup).seconds["fn"]


def interleaved(
    fns: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    before: Callable[[], object] | None = None,
) -> Comparison:
    """Time several arms in alternation, each round starting with the next arm.

    Args:
        fns: what to call, by the arm's name.
        repeats: measured rounds, at least 1; each calls every arm once.
        warmup: unmeasured rounds before them.
        before: called before each call of an arm, and not timed.

    Returns:
        Seconds per arm, and the per-round ratio of every ordered pair of arms.

    Raises:
        ValueError: there is no arm, or repeats is below 1.
    """
    if not fns or repeats < 1:
        raise ValueError(f"{len(fns)} arms and {repeats} repeats leave nothing to time.")
    arms = list(fns)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for round_index in range(-warmup, repeats):
        first = round_index % len(arms)
        for arm in arms[first:] + arms[:first]:
            if before is not None:
                before()
            elapsed = _seconds(fns[arm])
            if round_index >= 0:
                seconds[arm].append(elapsed)
    ratios = {
        f"{arm}/{other}": _spread(
            [mine / theirs for mine, theirs in zip(seconds[arm], seconds[other], strict=True)]
        )
        for arm, other in permutations(arms, 2)
    }
    spreads = {arm: _spread(values) for arm, values in seconds.items()}
    return Comparison(seconds=spreads, ratios=ratios)


def write(
    name: str, payload: Mapping[str, object], table_md: str, directory: Path = REPORTS
) -> tuple[Path, Path]:
    """Write `<name>-<YYYY-MM-DD>.json` and `.md`, each whole or not at all.

    Args:
        name: the benchmark's name, as in its file name.
        payload: JSON-ready numbers; stored under "results", beside "header".
        table_md: the Markdown that follows the header.
        directory: where to write; created when missing.

    Returns:
        The paths of the JSON and the Markdown file; one of the same day is replaced.

    Raises:
        TypeError, ValueError: the payload is not JSON (NaN and infinity are not).
        OSError: the directory cannot be written; earlier reports are untouched.
    """
    facts = header()
    as_json = json.dumps({"header": facts, "results": payload}, indent=2, allow_nan=False)
    rows = "\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in facts.items())
    as_markdown = f"# {name}\n\n{rows}\n\n{table_md.strip()}"
    stem = f"{name}-{facts['date']}"
    paths = directory / f"{stem}.json", directory / f"{stem}.md"
    directory.mkdir(parents=True, exist_ok=True)
    _replace_all(dict(zip(paths, (as_json + "\n", as_markdown + "\n"), strict=True)))
    return paths


def today(name: str, directory: Path = REPORTS) -> Mapping[str, object]:
    """The payload of the report that `write` would replace, if it tells of the same code and machine.

    Returns:
        What `write` was given; nothing where there is no such report, or its header differs in more than
        the command.

    Raises:
        OSError, ValueError: the report is there and cannot be read.
    """
    facts = header()
    path = directory / f"{name}-{facts['date']}.json"
    if not path.exists():
        return {}
    written = json.loads(path.read_text(encoding="utf-8"))
    payload: Mapping[str, object] = written["results"]
    return payload if written["header"] | {"command": facts["command"]} == facts else {}


def newest_rows(name: str) -> list[dict[str, Any]]:
    """Of a benchmark's newest report, the rows that tell of the code that is here; none if there is none."""
    paths = sorted(REPORTS.glob(f"{name}-*-*-*.json"))
    if not paths:
        return []
    report = json.loads(paths[-1].read_text(encoding="utf-8"))
    rows = report["results"]["rows"]
    current = {row["commit"]: _figures.is_current(report["header"] | row) for row in rows}
    return [row for row in rows if current[row["commit"]]]


def partial(name: str) -> Path:
    """The folder of what a benchmark finished before it was interrupted; empty where the code is another."""
    folder, facts = _figures.PARTIAL / name, header()
    mark = folder.with_suffix(".commit")
    made = {"command": facts["command"], "commit": mark.read_text(encoding="utf-8") if mark.exists() else ""}
    if not _figures.is_current(made):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(str(facts["commit"]) if _figures.is_current(facts) else "", encoding="utf-8")
    return folder


def header() -> dict[str, object]:
    """What a reader needs to repeat the run: command, machine, versions, commit."""
    facts: dict[str, object] = {
        "date": date.today().isoformat(),
        "command": _command(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "commit": _git("rev-parse", "HEAD") or "unknown",
        # earlier reports do not change what the code computes
        "dirty": bool(_git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/reports")),
    }
    if os.environ.get("LD_PRELOAD"):
        facts["preloaded"] = Path(os.environ["LD_PRELOAD"]).name  # an allocator, say
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _replace_all(contents: Mapping[Path, str]) -> None:
    """Write every text to a temporary file first, then move all of them into place."""
    written: dict[Path, Path] = {}
    try:
        for path, text in contents.items():
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
            written[path] = Path(temporary)
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            written[path].chmod(0o644)
        for path, source in written.items():
            os.replace(source, path)
    finally:
        for source in written.values():
            source.unlink(missing_ok=True)


def _seconds(fn: Callable[[], object]) -> float:
    _wait_for_device()
    start = time.perf_counter()
    fn()
    _wait_for_device()
    return time.perf_counter() - start


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _spread(values: Sequence[float]) -> Spread:
    return Spread(
        median=statistics.median(values),
        minimum=min(values),
        maximum=max(values),
        count=len(values),
    )


def _command() -> str:
    """As typed; a rank's or worker's own command line is multiprocessing's, and has this machine's paths."""
    if multiprocessing.parent_process() is None:
        return shlex.join(["python", *sys.orig_argv[1:]])
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _git(*arguments: str) -> str:
    """The command's output, or nothing where there is no git or no commit."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
