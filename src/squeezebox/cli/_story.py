"""The lead story, measured: the largest batch that squeezed training holds in plain training's peak."""

from __future__ import annotations

from typing import Any

import torch

from squeezebox.cli._arms import Arm, layout
from squeezebox.cli._progress import progress
from squeezebox.profiling import Peak

_TRIALS = 8


def largest_batch(
    arm: Arm, images: torch.Tensor, labels: torch.Tensor, batch: int, plain: Peak, squeezed: Peak
) -> dict[str, Any]:
    """Search multiples of half the batch: each trial is true training steps with BatchNorm over all of it.

    A trial refreshes the bounds at that batch, then measures a regular step. ``plain`` and ``squeezed``
    are the peaks at ``batch``; where the search starts follows from them, what fits is measured only.
    """
    stride, most = max(1, batch // 2), len(images)
    fits: dict[int, dict[str, int]] = {}
    too_large: dict[int, dict[str, int]] = {}
    candidate = _clamp(4 * batch, stride, most)
    with progress("searching the largest batch in plain's peak") as show:
        for number in range(_TRIALS):
            x, y = layout(images[:candidate]), labels[:candidate].clone()
            refresh = arm.peak(x, y, refresh=True).total_bytes
            peak = arm.peak(x, y, refresh=False).total_bytes
            fitting = peak <= plain.total_bytes
            (fits if fitting else too_large)[candidate] = {"peak_bytes": peak, "refresh_peak_bytes": refresh}
            show(number + 1, _TRIALS, f"batch {candidate} {'fits' if fitting else 'is too large'}")
            guess = _guess(candidate, peak, batch, squeezed.total_bytes, plain.total_bytes)
            limits = max(fits, default=0), min(too_large, default=most + 1)
            candidate = _next(_clamp(guess, stride, most), stride, *limits)
            if candidate in fits:
                break
    best = max(fits, default=batch)
    figures = fits.get(best, {"peak_bytes": squeezed.total_bytes, "refresh_peak_bytes": None})
    return {"limit_bytes": plain.total_bytes, "plain_batch": batch, "squeezed_batch": best, **figures}


def _guess(batch: int, peak: int, small: int, small_peak: int, limit: int) -> int:
    """The batch whose peak would be ``limit`` if peaks grew along a line."""
    if batch == small or peak <= small_peak:
        return 2 * batch
    return small + int((limit - small_peak) * (batch - small) / (peak - small_peak))


def _clamp(batch: int, stride: int, most: int) -> int:
    return max(stride, min(batch, most) // stride * stride)


def _next(guess: int, stride: int, fitting: int, too_large: int) -> int:
    """The next trial strictly between what fits and what does not; what fits if nothing is between."""
    if too_large - fitting <= stride:
        return fitting
    return min(max(guess, fitting + stride), max(too_large - 1, 0) // stride * stride)
