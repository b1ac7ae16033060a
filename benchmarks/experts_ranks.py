"""Experts on two ranks: bytes moved in each mode, and the worst rank's peak against its prediction.

    python -m benchmarks.experts_ranks

Real processes over gloo on one machine, 2048 tokens of 64 a rank, 8 experts of 96, two for each token. Usual
routing is a random router's; with "one", every token's both choices are the same expert.
"""

import dataclasses

import torch

from benchmarks import _ranks, _report
from squeezebox import layers, memory

RANKS, TOKENS, DIM, HIDDEN, EXPERTS = 2, 2048, 64, 96, 8
MIB = 2**20
ARMS = [
    (kind, mode, budget)
    for kind in ("usual", "one")
    for mode, budget in (("tokens", None), ("weights", None), ("auto", None), ("auto", 5 * MIB))
]


def on_rank(rank: int, kind: str, mode: str, budget: int | None) -> tuple[list[int], dict]:
    torch.manual_seed(rank)
    layer = layers.Experts(EXPERTS, DIM, HIDDEN, mode=mode, budget_bytes=budget)
    x, above = torch.randn(TOKENS, DIM).requires_grad_(), torch.randn(TOKENS, DIM)
    gates, ids = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(2, -1)
    ids = torch.zeros_like(ids) if kind == "one" else ids
    gates.requires_grad_()
    peaks = []
    for step in range(6):
        for each in (x, gates, layer.first, layer.second):
            each.grad = None
        meter = memory.PeakMeter(torch.device("cpu"))
        assert meter.start()
        layer(x, ids, gates).backward(above)
        if step:  # the first one opens connections
            peaks.append(meter.stop(()).total_bytes)
        else:
            meter.stop(())
    return peaks, dataclasses.asdict(layer.last)


def table(results: list[dict]) -> str:
    rows = [
        "Peak is the worst rank's, with output and gradients, by the allocator's count; five steps each.",
        "",
        "| routing | mode | budget | moved | chunks | peak predicted | measured |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in results:
        budget = f"{each['budget'] / MIB:.0f} MiB" if each["budget"] else "none"
        peaks = [max(step) for step in zip(*each["peaks"], strict=True)]
        rows.append(
            f"| {each['kind']} | {each['mode']} | {budget} | {each['plan']['moved_bytes'] / MIB:.2f} MiB "
            f"| {each['plan']['chunks']} | {max(each['plan']['peak_bytes']) / MIB:.2f} MiB "
            f"| {min(peaks) / MIB:.2f} to {max(peaks) / MIB:.2f} MiB |"
        )
    return "\n".join(rows)


def main() -> None:
    results = []
    for kind, mode, budget in ARMS:
        found = _ranks.run(on_rank, RANKS, kind, mode, budget)
        peaks, plans = zip(*found, strict=True)
        results.append({"kind": kind, "mode": mode, "budget": budget, "peaks": peaks, "plan": plans[0]})
    text = table(results)
    print(text)
    _report.write("experts_ranks", results, text)


if __name__ == "__main__":
    main()
