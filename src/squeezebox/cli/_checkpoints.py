"""The checkpoints of ``squeezebox pipeline train``: where training begins, and where its weights end up."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from squeezebox import pipeline
from squeezebox.schema import FormatError, OptionError, OutputError


class Checkpoints:
    """Those that a run finds in its directory and those that it writes there; all ranks call it alike.

    Args:
        runner: whose state they hold.
        directory: of all of them; None to write none.
        every: batches from one to the next; 0 for one at the end alone.
    """

    def __init__(self, runner: pipeline.Runner, directory: Path | None, every: int) -> None:
        self._runner, self._directory, self._every = runner, directory, every
        self._saved: int | None = None
        self._is_apart = False  # over disks

    @property
    def newest(self) -> Path | None:
        """The one that this run has written or begun with last."""
        if self._directory is None or self._saved is None:
            return None
        return self._directory / f"batch-{self._saved}"

    def begin(self, *, resume: bool) -> int:
        """How many batches are done: those of the newest checkpoint, or 0 where training begins.

        Raises:
            OutputError: a rank cannot write to the directory. All ranks raise it, as the others here.
            OptionError: checkpoints of an earlier run are there, which is not to be resumed.
            FormatError: it is to be resumed, and what is there is no checkpoint of all ranks.
        """
        if self._directory is None:
            return 0
        looks = self._runner.gather(_look(self._directory))
        refused = next((f"rank {rank}: {why}" for rank, (why, _) in enumerate(looks) if why), None)
        if refused:
            raise OutputError(f"{refused} Name another --checkpoint.")
        found = [names for _, names in looks]
        if not resume:
            _require_none(self._directory, found)
        elif any(found):
            _require_all(self._directory, found)
            self._saved = self._runner.load(self._directory)
            _say(f"resumed from {self.newest}")
            return self._saved
        else:
            _say(f"{self._directory} has no checkpoint yet: training begins at the first batch")
        return 0

    def after(self, done: int) -> None:
        """Write one if it is time to."""
        if self._every and done % self._every == 0:
            self._write(done)

    def finish(self, done: int) -> None:
        """Write one of the end, and find out whose disks it is on."""
        self._write(done)
        if self.newest is not None:
            self._is_apart = not all(self._runner.gather((self.newest / "rank-0").exists()))

    def _write(self, done: int) -> None:
        """Write one, unless the newest has seen as much."""
        if self._directory is not None and done != (self._saved or 0):
            self._runner.save(self._directory)
            self._saved = done

    def summary(self) -> str:
        """In a line, where the weights are."""
        if self._directory is None:
            return "weights: not saved; give --checkpoint DIRECTORY to keep them"
        if self.newest is None:
            return "weights: not saved, as there was no batch to train on"
        first = " (first copy the other machines' rank-* folders into it)" if self._is_apart else ""
        convert = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        command = f"{convert} {shlex.quote(str(self.newest))} whole.pt"
        return f'weights: {self.newest}{first}; as "model" in one file: {command}'


def _say(line: str) -> None:
    if pipeline.is_first_process():
        print(line, flush=True)


def _look(directory: Path) -> tuple[str, list[str]]:
    """Why this rank cannot write here, or ""; and what is here, but hidden files as of a save cut off."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    except OSError as error:
        return f"{directory} cannot be a directory for checkpoints ({error}).", []
    is_writable = os.access(directory, os.W_OK | os.X_OK)
    return "" if is_writable else f"{directory} cannot be written to.", names


def _require_none(directory: Path, found: list[list[str]]) -> None:
    earlier = {name for names in found for name in names if name.startswith("batch-")}
    if earlier:
        raise OptionError(
            f"{directory} has checkpoints of an earlier run, such as {min(earlier)}. Give --resume to go on "
            "from the newest, or name another --checkpoint."
        )


def _require_all(directory: Path, found: list[list[str]]) -> None:
    """Where disks are not shared, one may have been lost or replaced."""
    empty = next((rank for rank, names in enumerate(found) if not names), None)
    full = next(rank for rank, names in enumerate(found) if names)
    if empty is not None:
        raise FormatError(
            f"{directory} is empty for rank {empty}, and rank {full} has {found[full][-1]} there. Bring "
            f"rank {empty}'s files back; to begin again, name a directory that is empty for all ranks."
        )
