"""Transformer blocks whose activations are split over the sequence: bytes, seconds and gradients.

    python -m benchmarks.sequence [--rounds N]

Real processes over gloo on one machine, a thread each: two blocks of GPT in float32 with dropout 0.1, a
sequence of 512, batch 2, 1024 features, 16 heads. Rivals are torch's own plans of tensor parallelism for the
same blocks, alone and with its SequenceParallel for norms. Bytes are what forward leaves on a rank, for each
block. Next to them is the formula of arXiv:2205.05198 (table 2) in float32, where a mask of dropout takes 4
bytes as a value does. Units are of s b h bytes in bfloat16, measured, and as the paper has them: there a mask
takes a byte, and on a CPU 2, so that 34 is 36 here; and attention with dropout computes in float32. Losses
are of three steps with AdamW. Seconds are of forward and backward of the blocks; rounds start with different
ways.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import _ranks, _report
from squeezebox import layers, memory

RANKS, BLOCKS, LENGTH, BATCH, DIM, HEADS = 2, 2, 512, 2, 1024, 16
COLUMNS = ["attention.q", "attention.k", "attention.v", "mlp.0"]
ROWS = ["attention.out", "mlp.2"]
#: Units of B S D values of 4 bytes: kept whole and kept as a rank's part, and of B H S^2.
FORMULA = {
    "plain TP": (6, 12, 3),
    "TP, block recomputed": (1, 0, 0),
    "torch's SequenceParallel": (2, 16, 3),
    "split": (0, 18, 3),
    "split, core recomputed": (0, 18, 0),
}
#: The paper's bytes: of s b h whole, of s b h / t, and of a s^2 b / t.
PAPER = {
    "one process": (34, 0, 5),
    "plain TP": (10, 24, 5),
    "TP, block recomputed": (2, 0, 0),
    "split": (0, 34, 5),
    "split, core recomputed": (0, 34, 0),
}
MIB = 2**20


class Attention(nn.Module):
    """Causal attention that takes the number of heads from its products."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(2, (-1, DIM // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        found = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Norms first, as in GPT-2."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention(dropout)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.after, self.last = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after(self.attention(self.first(x)))
        return x + self.last(self.mlp(self.second(x)))


def blocks_of(dropout: float, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(BLOCKS))).to(dtype)


def by_torch(blocks: nn.Sequential, *, sequence: bool) -> nn.Sequential:
    """A plan of torch's own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    between = Shard(1) if sequence else Replicate()
    whole = tp.PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    plan = {name: tp.ColwiseParallel() for name in COLUMNS}
    plan |= {name: tp.RowwiseParallel(output_layouts=between, use_local_output=not sequence) for name in ROWS}
    if sequence:
        plan |= {name: tp.SequenceParallel() for name in ("first", "second", "after", "last")}
        plan |= {"attention": whole, "mlp": whole}
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in blocks:
        tp.parallelize_module(block, mesh, plan)
    if sequence:
        tp.parallelize_module(
            blocks,
            mesh,
            tp.PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
            ),
        )
    return blocks


def ways(dropout: float, dtype: torch.dtype = torch.float32) -> dict:
    """Blocks, and the function that runs them."""
    split, given = {"columns": COLUMNS, "rows": ROWS}, (dropout, dtype)
    plain, again, sequence = (by_torch(blocks_of(*given), sequence=each) for each in (False, False, True))
    alone = layers.split_sequence_(blocks_of(*given), core=None, **split)
    cored = layers.split_sequence_(blocks_of(*given), **split)

    def recomputed(x: Tensor) -> Tensor:
        for block in again:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    runs = {
        "plain TP": (plain, plain),
        "TP, block recomputed": (again, recomputed),
        "torch's SequenceParallel": (sequence, sequence),
        "split": (alone, alone),
        "split, core recomputed": (cored, cored),
    }
    return runs


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def held(run, x: Tensor) -> int:
    """Bytes that forward leaves, beyond its output."""
    meter = memory.PeakMeter(torch.device("cpu"))
    assert meter.start()
    out = whole_of(run(x))
    return meter.stop(()).left_bytes - out.nbytes


def peak(run, x: Tensor, above: Tensor) -> int:
    """Most bytes at one moment of forward and backward."""
    meter = memory.PeakMeter(torch.device("cpu"))
    assert meter.start()
    whole_of(run(x)).backward(above)
    return meter.stop(()).total_bytes


def losses(blocks, run, x: Tensor, goal: Tensor) -> Tensor:
    """Of three steps."""
    optimizer, found = torch.optim.AdamW(blocks.parameters(), foreach=False), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(whole_of(run(x)), goal)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def on_rank(_: int, rounds: int) -> dict:
    torch.manual_seed(1)
    x, above = torch.randn(BATCH, LENGTH, DIM), torch.randn(BATCH, LENGTH, DIM)
    x.requires_grad_()
    expected = blocks_of(0.0)
    expected(x).backward(above)
    goal, errors = torch.cat([each.grad.flatten() for each in expected.parameters()]), {}
    for name, (blocks, run) in ways(0.0).items():
        for each in (*blocks.parameters(), x):
            each.grad = None
        whole_of(run(x)).backward(above)
        found = torch.cat([whole_of(each.grad).flatten() for each in blocks.parameters()])
        errors[name] = float((found - goal).norm() / goal.norm())
    trained = blocks_of(0.0)
    plain, apart = losses(trained, trained, x, above), {}
    for name, (blocks, run) in ways(0.0).items():
        apart[name] = float((losses(blocks, run, x, above) / plain - 1.0).abs().max())
    runs, seconds = ways(0.1), {}
    for number in range(rounds + 1):
        first = number % len(runs)
        for name in [*runs][first:] + [*runs][:first]:
            torch.distributed.barrier()
            start = time.perf_counter()
            whole_of(runs[name][1](x)).backward(above)
            if number:
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    bytes_of = {name: (held(run, x), peak(run, x, above)) for name, (_, run) in runs.items()}
    half = {name: run for name, (_, run) in ways(0.1, torch.bfloat16).items()}
    half["one process"] = blocks_of(0.1, torch.bfloat16)
    units = {name: held(half[name], x.bfloat16()) / BLOCKS / (BATCH * LENGTH * DIM) for name in PAPER}
    return {"errors": errors, "losses": apart, "seconds": seconds, "bytes": bytes_of, "units": units}


def table(found: list[dict]) -> str:
    unit = 4 * BATCH * LENGTH * DIM
    core = 4 * BATCH * HEADS * LENGTH**2
    rows = [
        f"{RANKS} ranks; as/h is {HEADS * LENGTH / DIM:.0f}. Errors are of all gradients without dropout, "
        "next to one process. Ratios are medians of those within a round, and all that were seen.",
        "",
        "| way | held a block | formula | peak of both | seconds next to plain TP | error | of losses |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (whole, part, heads) in FORMULA.items():
        formula = whole * unit + (part * unit + heads * core) / RANKS
        nbytes, most = (max(each["bytes"][name][index] for each in found) for index in (0, 1))
        pairs = zip(found[0]["seconds"][name], found[0]["seconds"]["plain TP"], strict=True)
        ratios = [one / other for one, other in pairs]
        rows.append(
            f"| {name} | {nbytes / BLOCKS / MIB:.2f} MiB | {formula / MIB:.2f} MiB | {most / MIB:.1f} MiB "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {max(each['errors'][name] for each in found):.1e} "
            f"| {max(each['losses'][name] for each in found):.1e} |"
        )
    heads = HEADS * LENGTH / DIM
    rows += ["", "| way, bfloat16 | s b h bytes a block | the paper's |", "| --- | --- | --- |"]
    for name, (whole, part, times) in PAPER.items():
        measured = max(each["units"][name] for each in found)
        parts = 1 if name == "one process" else RANKS
        rows.append(f"| {name} | {measured:.1f} | {whole + (part + times * heads) / parts:.1f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    found = _ranks.run(on_rank, RANKS, parser.parse_args().rounds)
    text = table(found)
    print(text)
    _report.write("sequence", found, text)


if __name__ == "__main__":
    main()
