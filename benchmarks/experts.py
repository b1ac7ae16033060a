"""Mixtures of experts of transformers, plain and lean: bytes that autograd holds, the peak, and seconds.

    python benchmarks/experts.py

One layer of Mixtral's experts, 2048 tokens of 256, 16 experts of 512, two for each token. Recomputed keeps
the input alone.
"""

import copy
import dataclasses

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.mixtral import modeling_mixtral

from benchmarks._report import interleaved, write
from squeezebox import layers, memory

TOKENS, DIM, HIDDEN, EXPERTS, CHOICES = 2048, 256, 512, 16, 2
MIB = 2**20


def make(form):
    config = modeling_mixtral.MixtralConfig(
        hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=EXPERTS
    )
    config._experts_implementation = form
    torch.manual_seed(0)
    module = modeling_mixtral.MixtralExperts(config)
    for each in module.parameters():
        nn.init.normal_(each, std=each.shape[-1] ** -0.5)
    plain = nn.Sequential(module)
    return {
        "plain": module,
        "lean": layers.lean_experts_(copy.deepcopy(plain))[0],
        "recomputed": layers.lean_experts_(copy.deepcopy(plain), recompute=True)[0],
    }


def inputs():
    x = torch.randn(TOKENS, DIM).requires_grad_()
    gates, ids = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(CHOICES, -1)
    return x, ids, gates.requires_grad_()


def step(module, given):
    for each in (given[0], given[2], *module.parameters()):
        each.grad = None
    out = module(*given)
    out.backward(torch.ones_like(out))
    return out.detach(), [each.grad for each in (given[0], given[2], *module.parameters())]


def held(module, given):
    seen, own = {}, {each.untyped_storage().data_ptr() for each in (*given, *module.parameters())}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*given)
    return sum(nbytes for nbytes, _ in seen.values())


def peak(module, given):
    step(module, given)
    meter = memory.PeakMeter(torch.device("cpu"))
    assert meter.start(each.grad for each in module.parameters())
    step(module, given)
    return meter.stop(()).total_bytes


def compare(form):
    arms, given = make(form), inputs()
    out, gradients = step(arms["plain"], given)
    gradients = [each.clone() for each in gradients]
    errors = {}
    for name, module in arms.items():
        found, own = step(module, given)
        assert torch.equal(found, out)
        pairs = zip(own, gradients, strict=True)
        errors[name] = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    timed = interleaved({name: lambda m=module: step(m, given) for name, module in arms.items()}, 15, 2)
    return {
        "held": {name: held(module, given) for name, module in arms.items()},
        "peak": {name: peak(module, given) for name, module in arms.items()},
        "errors": errors,
        "time": dataclasses.asdict(timed),
    }


def table(results):
    rows = [
        "Outputs are equal to the bit. Error is the largest of a gradient's, relative to its norm. Time is",
        "of rounds, against plain.",
        "",
        "| form | experts | held by autograd | peak | error | time |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for form, each in results.items():
        for name, nbytes in each["held"].items():
            ratio = each["time"]["ratios"].get(f"{name}/plain")
            time = "{median:.2f} ({minimum:.2f} to {maximum:.2f})".format(**ratio) if ratio else "1"
            rows.append(
                f"| {form} | {name} | {nbytes / MIB:.1f} MiB | {each['peak'][name] / MIB:.1f} MiB "
                f"| {each['errors'][name]:.1e} | {time} |"
            )
    return "\n".join(rows)


def main():
    torch.manual_seed(0)
    results = {form: compare(form) for form in ("eager", "grouped_mm")}
    text = table(results)
    print(text)
    write("experts", results, text)


if __name__ == "__main__":
    main()
