"""Where experts that lie on several ranks compute, decided from exact counts before anything moves.

For a rank's tokens of an expert on another rank, either the tokens move or the expert's weights do, whichever
is fewer bytes (Tutel, MLSys'23, arXiv:2206.03382, switches all experts at once between the two).
"""

from __future__ import annotations

from dataclasses import dataclass

from squeezebox.schema import BudgetError

Counts = tuple[tuple[int, ...], ...]  # [rank][expert]
MODES = ("auto", "tokens", "weights")
_INDEX_BYTES = 8
_LARGEST = 1 << 16  # chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of a layer: tokens of ``dim``, experts of ``hidden``, ``choices`` a token, bytes of an element."""

    dim: int
    hidden: int
    choices: int
    itemsize: int

    @property
    def weight(self) -> int:
        """Elements of an expert: a first product of 2 hidden rows, and a second one."""
        return 3 * self.dim * self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """What one step does.

    Attributes:
        counts: pairs of token and choice, by rank and expert.
        borrowed: whether the expert's weights move to the rank, and not its tokens to the expert.
        chunks: parts in which every rank's tokens go.
        moved_bytes: between ranks, in forward and backward, of all ranks.
        peak_bytes: of each rank: what forward and backward allocate, with the output and all gradients.
    """

    counts: Counts
    borrowed: tuple[tuple[bool, ...], ...]
    chunks: int
    moved_bytes: int
    peak_bytes: tuple[int, ...]

    def part(self, rank: int, expert: int, chunk: int) -> tuple[int, int]:
        """Which of a rank's tokens of an expert a chunk has: first and last + 1."""
        count = self.counts[rank][expert]
        return count * chunk // self.chunks, count * (chunk + 1) // self.chunks

    def sent(self, rank: int, expert: int, chunk: int) -> int:
        """Tokens that move to the expert's rank in a chunk."""
        first, last = self.part(rank, expert, chunk)
        return 0 if self.borrowed[rank][expert] else last - first


def dispatch(counts: Counts, sizes: Sizes, mode: str, budget_bytes: int | None) -> Dispatch:
    """Move the fewest bytes, in as few chunks as the budget allows on every rank.

    Raises:
        BudgetError: one token a chunk would still pass the budget on some rank.
    """
    ranks, experts = len(counts), len(counts[0])
    here = experts // ranks
    pair, weight = pair_elements(sizes), 3 * sizes.weight
    borrowed = tuple(
        tuple(
            expert // here != rank and count > 0 and _borrows(mode, count * pair, weight)
            for expert, count in enumerate(row)
        )
        for rank, row in enumerate(counts)
    )
    moved = sum(
        weight if borrowed[rank][expert] else count * pair
        for rank, row in enumerate(counts)
        for expert, count in enumerate(row)
        if expert // here != rank
    )
    chunks, most = 1, max(1, max(max(row) for row in counts))
    while True:
        found = Dispatch(
            counts=counts, borrowed=borrowed, chunks=chunks, moved_bytes=moved * sizes.itemsize, peak_bytes=()
        )
        peaks = tuple(peak(found, sizes, rank) for rank in range(ranks))
        if budget_bytes is None or max(peaks) <= budget_bytes:
            return Dispatch(
                counts=counts,
                borrowed=borrowed,
                chunks=chunks,
                moved_bytes=found.moved_bytes,
                peak_bytes=peaks,
            )
        if chunks >= min(most, _LARGEST):
            raise BudgetError(
                f"Experts need {max(peaks)} bytes on rank {peaks.index(max(peaks))} with their tokens in "
                f"{chunks} chunks, and the budget is {budget_bytes}; give more, or fewer tokens."
            )
        chunks = min(most, _LARGEST, chunks * 2)


def _borrows(mode: str, of_tokens: int, of_weights: int) -> bool:
    return mode == "weights" or (mode == "auto" and of_weights < of_tokens)


def pair_elements(sizes: Sizes) -> int:
    """What moves for one token of an expert elsewhere: there and back, in forward and in backward."""
    return (sizes.dim + 1) + sizes.dim + (2 * sizes.dim + 1) + (sizes.dim + 1)


def peak(found: Dispatch, sizes: Sizes, rank: int) -> int:
    """Bytes that forward and backward allocate on a rank, at most at once."""
    counts, dim = found.counts[rank], sizes.dim
    here = len(counts) // len(found.counts)
    pairs = sum(counts)
    held = 2 * (pairs // sizes.choices) * dim + pairs + here * sizes.weight  # output and gradients
    most = max(_chunk(found, sizes, rank, chunk) for chunk in range(found.chunks))
    for expert, borrowed in enumerate(found.borrowed[rank]):
        if borrowed:
            rows = -(-counts[expert] // found.chunks)
            own = 2 * sizes.weight + rows * (2 * dim + 1) + _expert(sizes, rows)
            most = max(most, own)
    lends = any(row[expert] for row in found.borrowed for expert in _own(rank, here))
    most = max(most, sizes.weight if lends else 0)
    given = max(
        sum(found.sent(rank, expert, chunk) for expert in range(len(counts))) for chunk in range(found.chunks)
    )
    return (held + most) * sizes.itemsize + (pairs + given) * _INDEX_BYTES


def _own(rank: int, here: int) -> range:
    return range(rank * here, (rank + 1) * here)


def _chunk(found: Dispatch, sizes: Sizes, rank: int, chunk: int) -> int:
    """Elements that a chunk's backward allocates."""
    dim, experts = sizes.dim, len(found.counts[0])
    here = experts // len(found.counts)
    given = sum(found.sent(rank, expert, chunk) for expert in range(experts))
    loads = [
        sum(found.sent(other, expert, chunk) for other in range(len(found.counts)))
        for expert in _own(rank, here)
    ]
    got = sum(loads)
    exchange = (given + got) * (2 * dim + 1)
    compute = got * (3 * dim + 2) + max(load * (2 * dim + 1) + _expert(sizes, load) for load in loads)
    back = (got + given) * (dim + 1)
    return max(exchange, compute, back)


def _expert(sizes: Sizes, rows: int) -> int:
    """Elements that an expert's backward allocates besides its rows."""
    dim, hidden = sizes.dim, sizes.hidden
    return rows * (dim + 1 + max(5 * hidden + dim, 8 * hidden, 6 * hidden + dim))
