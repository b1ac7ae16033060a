"""Bayesian networks: bytes of noise held, seconds of a step, and whose rho-gradients are right.

    python benchmarks/bayesian.py

Stored is torch's autograd with noise of torch.randn in tensors, sample by sample in one graph. Gradients of
bayesian-torch and blitz are compared where PYTHONPATH has a folder into which pip installed them without what
they depend on (`--no-deps --target FOLDER bayesian-torch blitz-bayesian-pytorch`).
"""

import dataclasses
import sys
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks._report import interleaved, write
from squeezebox import layers, memory

SAMPLES = 8
KEY_BYTES = 4 * 8  # of a call: seed, module, draw and first sample
MIB = 2**20


class Stored(nn.Module):
    """A Bayesian layer as one writes it: the noise is a tensor, and autograd keeps it."""

    def __init__(self, layer, apply):
        super().__init__()
        self.mu, self.rho, self.bias_mu, self.bias_rho = layer.mu, layer.rho, layer.bias_mu, layer.bias_rho
        self.apply_weight = apply

    def forward(self, x):
        weight = self.mu + F.softplus(self.rho) * torch.randn_like(self.mu)
        bias = self.bias_mu + F.softplus(self.bias_rho) * torch.randn_like(self.bias_mu)
        return self.apply_weight(x, weight, bias)


class Fanned(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return torch.stack([self.net(x) for _ in range(SAMPLES)])


def mlp():
    sizes = [256, 512, 512, 512, 10]
    parts = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1]), torch.randn(64, 256)


def conv():
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    return net, torch.randn(16, 3, 32, 32)


def stored(net):
    """The same parameters, with noise in tensors."""
    parts = []
    for each in net:
        if isinstance(each, layers.BayesLinear):
            each = Stored(each, F.linear)
        elif isinstance(each, layers.BayesConv2d):
            each = Stored(each, lambda x, w, b: F.conv2d(x, w, b, padding=1))
        parts.append(each)
    return Fanned(nn.Sequential(*parts))


def step(model, x, y):
    model.zero_grad()
    out = model(x)
    F.cross_entropy(out.flatten(0, 1), y.repeat(SAMPLES)).backward()


def held(model, x, y):
    """(bytes that autograd holds besides parameters, of them shaped as a weight or bias)."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    shapes = {tuple(each.shape) for each in model.parameters()}
    shapes |= {tuple(reversed(shape)) for shape in shapes if len(shape) == 2}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes(), tuple(tensor.shape) in shapes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    total = sum(nbytes for nbytes, _ in seen.values())
    F.cross_entropy(out.flatten(0, 1), y.repeat(SAMPLES)).backward()
    return total, sum(nbytes for nbytes, is_weight in seen.values() if is_weight)


def peak(model, x, y):
    step(model, x, y)
    meter = memory.PeakMeter(torch.device("cpu"))
    assert meter.start(each.grad for each in model.parameters())
    step(model, x, y)
    return meter.stop(()).total_bytes


def compare(make):
    torch.manual_seed(0)
    net, x = make()
    y = torch.randint(10, (len(x),))
    plain = stored(layers.bayesian_(net, seed=1))
    ours = layers.bayesian_(make()[0], samples=SAMPLES, seed=1)
    looped = Fanned(layers.bayesian_(make()[0], seed=1))
    arms = {"folded": ours, "looped": looped, "stored": plain}
    timed = interleaved({name: lambda m=model: step(m, x, y) for name, model in arms.items()}, 21, 3)
    numel = sum(each.numel() for name, each in ours.named_parameters() if "mu" in name)
    keys = KEY_BYTES * sum(isinstance(each, layers.BayesLayer) for each in ours.modules())
    return {
        "noise": {"folded": keys, "looped": keys * SAMPLES, "stored": numel * 4 * SAMPLES},
        "held": {name: held(model, x, y) for name, model in arms.items()},
        "peak": {name: peak(model, x, y) for name, model in arms.items()},
        "time": dataclasses.asdict(timed),
    }


def rho_errors():
    """Relative error of rho's gradient with two samples in one graph, for each library, by differences."""
    torch.manual_seed(0)
    found = {"squeezebox": rho_error(layers.BayesLinear(8, 6, dtype=torch.float64), "rho")}
    try:
        from bayesian_torch.layers import LinearReparameterization

        layer = LinearReparameterization(8, 6).double()
        found["bayesian-torch"] = rho_error(layer, "rho_weight", lambda out: out[0])
    except ImportError as error:
        found["bayesian-torch"] = str(error)
    try:
        sys.modules.setdefault("torchvision", types.ModuleType("torchvision"))
        from blitz.modules import BayesianLinear

        found["blitz"] = rho_error(BayesianLinear(8, 6).double(), "weight_sampler.rho")
    except ImportError as error:
        found["blitz"] = str(error)
    return found


def rho_error(layer, name, read=lambda out: out):
    """|gradient - central difference| / |difference|, the noise of each evaluation put back."""
    x = torch.randn(5, 8, dtype=torch.float64)
    rho = dict(layer.named_parameters())[name]
    state = layer.get_extra_state() if isinstance(layer, layers.BayesLinear) else None

    def loss():
        torch.manual_seed(7)
        if state is not None:
            layer.set_extra_state(state)
        return sum(read(layer(x)).square().sum() for _ in range(2))

    (gradient,) = torch.autograd.grad(loss(), rho)
    exact = torch.empty_like(rho)
    for index in range(rho.numel()):
        flat = rho.data.view(-1)
        here = flat[index].item()
        values = []
        for value in (here + 1e-5, here - 1e-5):
            flat[index] = value
            values.append(loss().item())
        flat[index] = here
        exact.view(-1)[index] = (values[0] - values[1]) / 2e-5
    return ((gradient - exact).norm() / exact.norm()).item()


def table(results):
    rows = [
        f"{SAMPLES} samples; stored has its noise in tensors, folded has all samples in one call",
        "(`bayesian_(model, samples=8)`), looped calls the model for each. Ratios are of rounds.",
        "",
        "| net | way | noise held | held by autograd | peak | step / stored |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for net, each in results["nets"].items():
        ratios = each["time"]["ratios"]
        for way, (nbytes, _) in each["held"].items():
            ratio = ratios.get(f"{way}/stored")
            time = "{median:.2f} ({minimum:.2f} to {maximum:.2f})".format(**ratio) if ratio else "1"
            rows.append(
                f"| {net} | {way} | {each['noise'][way]:,} bytes | {nbytes / MIB:.1f} MiB "
                f"| {each['peak'][way] / MIB:.1f} MiB | {time} |"
            )
    rows += ["", "| library | relative error of rho's gradient, two samples in one graph |", "| --- | --- |"]
    for name, error in results["rho_errors"].items():
        rows.append(f"| {name} | {error if isinstance(error, str) else f'{error:.1e}'} |")
    return "\n".join(rows)


def main():
    results = {"nets": {"MLP 512": compare(mlp), "conv": compare(conv)}, "rho_errors": rho_errors()}
    text = table(results)
    print(text)
    write("bayesian", results, text)


if __name__ == "__main__":
    main()
