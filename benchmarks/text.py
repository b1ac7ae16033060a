"""Real text as an endless language-modelling task: which character comes next?

Goes in: batch, length and seed. Comes out: ASCII codes and, for each, the one that follows it.
May touch: source files of Python's standard library, which every installation has; no network.
"""

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

NUM_CHARACTERS = 128  # ASCII
MODULES = ("argparse", "calendar", "datetime", "difflib", "doctest", "inspect", "pickletools", "typing")
HELD_OUT = ("ast", "shutil", "tarfile", "uuid")  # for validation


def batches(
    batch: int, length: int, seed: int, modules: tuple[str, ...] = MODULES
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random passages without end; same seed and same Python, same passages.

    Args:
        batch: passages in each batch, at least 1.
        length: characters of a passage, at least 1.
        seed: seed of this iterator's own generator.
        modules: of the standard library, whose sources are the text.

    Returns:
        An iterator of (characters, next characters): both int64 (batch, length) below `NUM_CHARACTERS`.

    Raises:
        ValueError: batch or length is below 1.
        FileNotFoundError: the standard library's sources are not there.
    """
    if batch < 1 or length < 1:
        raise ValueError(f"batch={batch} and length={length} must both be at least 1.")
    return _batches(_characters(modules=modules), batch, length, torch.Generator().manual_seed(seed))


def _batches(
    characters: Tensor, batch: int, length: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    passage = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(characters) - length, (batch, 1), generator=generator)
        read = characters[starts + passage]
        yield read[:, :-1].contiguous(), read[:, 1:].contiguous()


@cache
def _characters(folder: Path | None = None, modules: tuple[str, ...] = MODULES) -> Tensor:
    folder = folder or Path(sysconfig.get_path("stdlib"))
    try:
        text = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in modules)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error.filename} is not there: the benchmark's text is the source of Python's standard "
            "library, and this Python comes without it. Use one that has its .py files."
        ) from error
    return torch.tensor(list(text.encode("ascii", errors="replace")))
