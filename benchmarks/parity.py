"""Whether `squeezebox.parity` names the layer with a planted fault, and is silent where there is none.

Goes in: small networks and pipelines, also of timm if that is installed, with random weights; faults of eight
kinds, each in a place drawn by a seed. Comes out: benchmarks/reports/parity-<date>.json and .md.
May touch: that folder.

A fault counts as named where the first place that differs is of the layer, the stage or the module whose
code was changed. A fault that leaves the output equal to the bit is drawn again: on these inputs it is none.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import squeezebox
from benchmarks import _report, models, photos
from squeezebox.reports import Parity, wilson

FAULTS, BATCH, CLASSES = 25, 4, 10
Stages = dict[str, Callable[..., Any]]


class Decoder(nn.Module):
    """A small network for pixels: pools of odd sizes, and interpolation in its own code."""

    def __init__(self, mode: str = "bilinear") -> None:
        super().__init__()
        self.mode = mode
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.pool = nn.MaxPool2d(2)
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.mean = nn.AvgPool2d(3, stride=2, padding=1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.last = nn.Conv2d(48, CLASSES, 3, padding=1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        fine = self.first(x_NCHW)
        coarse = self.up(self.mean(self.second(self.pool(fine))))
        align = None if self.mode.startswith("nearest") else False
        coarse = F.interpolate(coarse, fine.shape[-2:], mode=self.mode, align_corners=align)
        logits: Tensor = self.last(torch.cat((fine, coarse), 1))
        return logits


def pixels(side: int, seed: int) -> Tensor:
    """Crops of photographs, as bytes."""
    images, _ = next(photos.batches(BATCH, side, seed))
    low, high = images.amin(), images.amax()
    return ((images - low) / (high - low) * 255).round().to(torch.uint8)


def pipeline(net: nn.Module, side: int) -> Stages:
    """From bytes to logits, as a deployment has it."""
    return {
        "decode": lambda x: x.float() / 255,
        "colour": grey_weighted,
        "resize": functools.partial(resized, side=side),
        "normalise": lambda x: (x - 0.45) / 0.225,
        "net": net,
    }


def grey_weighted(x: Tensor, weights: tuple[float, float, float] = (0.299, 0.587, 0.114)) -> Tensor:
    """Colours with their distance to grey doubled."""
    grey = (x * torch.tensor(weights).view(3, 1, 1)).sum(1, keepdim=True)
    return 2 * x - grey


def resized(x: Tensor, side: int, mode: str = "bilinear", antialias: bool = True) -> Tensor:
    options = {} if mode.startswith("nearest") else {"antialias": antialias, "align_corners": False}
    return F.interpolate(x, (side, side), mode=mode, **options)


# --- faults: each changes b, and gives the name of what it changed, or None where it finds no place -------


def named(b: Stages, kind: Any, wanted: Callable[[Any], bool], draw: random.Random) -> tuple[str, Any] | None:
    found = [
        (stage if not name else f"{stage}.{name}", module)
        for stage, net in b.items()
        if isinstance(net, nn.Module)
        for name, module in net.named_modules()
        if isinstance(module, kind) and wanted(module)
    ]
    return draw.choice(found) if found else None


def epsilon(b: Stages, draw: random.Random) -> str | None:
    place = named(b, NORMS, lambda m: getattr(m, "eps", None) is not None, draw)
    if place is not None:
        place[1].eps = draw.choice([1e-3, 1e-4, 1e-2])
    return place and place[0]


def padding(b: Stages, draw: random.Random) -> str | None:
    place = named(
        b, nn.Conv2d, lambda m: m.padding not in ((0, 0), 0, "valid") and m.padding_mode == "zeros", draw
    )
    if place is not None:
        conv = place[1]
        conv.padding_mode = draw.choice(["replicate", "circular", "reflect"])
    return place and place[0]


def ceil_mode(b: Stages, draw: random.Random) -> str | None:
    place = named(b, (nn.MaxPool2d, nn.AvgPool2d), lambda m: True, draw)
    if place is not None:
        place[1].ceil_mode = not place[1].ceil_mode
    return place and place[0]


def interpolation(b: Stages, draw: random.Random) -> str | None:
    place = named(b, (nn.Upsample, Decoder), lambda m: True, draw)
    if place is not None:
        module = place[1]
        module.mode = draw.choice(["nearest", "nearest-exact", "bicubic"])
        if isinstance(module, nn.Upsample):
            module.align_corners = None if module.mode.startswith("nearest") else False
    return place and place[0]


def colour(b: Stages, draw: random.Random) -> str | None:
    if "colour" not in b:
        return None
    kind = draw.randrange(3)
    if kind == 0:  # the weights of another standard
        b["colour"] = functools.partial(grey_weighted, weights=(0.2126, 0.7152, 0.0722))
    elif kind == 1:  # blue first
        b["colour"] = lambda x: grey_weighted(x.flip(1))
    else:  # the range of television
        b["decode"] = lambda x: (x.float() - 16) / 219
        return "decode"
    return "colour"


def resize(b: Stages, draw: random.Random) -> str | None:
    if "resize" not in b:
        return None
    side = b["resize"].keywords["side"]
    choices = [{"antialias": False}, {"mode": "bicubic"}, {"mode": "nearest"}, {"mode": "nearest-exact"}]
    b["resize"] = functools.partial(resized, side=side, **draw.choice(choices))
    return "resize"


def dtype(b: Stages, draw: random.Random) -> str | None:
    place = named(b, (nn.Conv2d, nn.Linear, *NORMS), lambda m: m.weight is not None, draw)
    if place is not None:
        kind = draw.choice([torch.bfloat16, torch.float16])
        if draw.random() < 0.5:
            place[1].weight.data = place[1].weight.data.to(kind).float()
        else:
            place[1].register_forward_hook(lambda module, args, output: output.to(kind).float())
    return place and place[0]


def one_weight(b: Stages, draw: random.Random) -> str | None:
    place = named(b, (nn.Conv2d, nn.Linear, nn.Embedding), lambda m: True, draw)
    if place is not None:
        weight = place[1].weight.data
        flat = weight.view(-1)
        flat[draw.randrange(len(flat))] += 0.1 * float(weight.std())
    return place and place[0]


KINDS = {
    each.__name__: each
    for each in (epsilon, padding, ceil_mode, interpolation, colour, resize, dtype, one_weight)
}
NORMS: tuple[type, ...] = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)


# --- networks --------------------------------------------------------------------------------------------


def own_networks() -> Iterator[tuple[str, Stages, Tensor]]:
    image = functools.partial(torch.randn, BATCH, 3)
    yield "ResNet-18", {"net": models.build("resnet18", num_classes=CLASSES)}, image(64, 64)
    yield "EfficientNet-B0", {"net": models.build("efficientnet_b0", num_classes=CLASSES)}, image(64, 64)
    yield "U-Net", {"net": models.build("unet", num_classes=CLASSES, width=8, depth=3)}, image(48, 48)
    vit = models.build("vit", num_classes=CLASSES, image=64, width=96, depth=4, heads=4)
    yield "ViT", {"net": vit}, image(64, 64)
    gpt = models.build("gpt", num_classes=50, width=64, depth=4, heads=4, context=32)
    yield "GPT", {"net": gpt}, torch.randint(50, (BATCH, 32))
    yield "decoder", {"net": Decoder()}, image(45, 45)
    yield "decoder in a pipeline", pipeline(Decoder(), 45), pixels(100, 0)
    yield (
        "ResNet-18 in a pipeline",
        pipeline(models.build("resnet18", num_classes=CLASSES), 64),
        pixels(150, 1),
    )


def timm_networks() -> Iterator[tuple[str, Stages, Tensor]]:
    from benchmarks import _timm

    _timm.declare_torchvision()
    import timm

    for name, side in (
        ("resnet26d", 64),
        ("mobilenetv3_small_050", 64),
        ("convnext_atto", 64),
    ):
        yield (
            f"timm {name}",
            {"net": timm.create_model(name, num_classes=CLASSES)},
            torch.randn(BATCH, 3, side, side),
        )


def networks() -> dict[str, tuple[Stages, Tensor]]:
    """In evaluation, as what is deployed, with BatchNorm's statistics of a few batches."""
    torch.manual_seed(0)
    found = {name: (stages, batch) for name, stages, batch in own_networks()}
    try:
        found |= {name: (stages, batch) for name, stages, batch in timm_networks()}
    except ImportError:
        print("timm is not installed: own networks only")
    for stages, batch in found.values():
        net = stages["net"].train()
        with torch.no_grad():
            for _ in range(3):
                output(stages, batch)
        net.eval()
    return found


def output(stages: Stages, value: Any) -> Any:
    for stage in stages.values():
        value = stage(value)
    return value


def copied(stages: Stages) -> Stages:
    return {
        name: copy.deepcopy(stage) if isinstance(stage, nn.Module) else stage
        for name, stage in stages.items()
    }


# --- what is measured ------------------------------------------------------------------------------------


def is_none(a: Stages, b: Stages, batch: Tensor) -> bool:
    """Whether the output is the same to the bit."""
    with torch.no_grad():
        try:
            return torch.equal(output(a, batch), output(b, batch))
        except RuntimeError:  # a shape that no longer fits
            return False


def layer_of(found: Parity, stages: Stages) -> str:
    """As the planted one is called: with its stage in front, where there is one alone."""
    assert found.first is not None
    name = found.first.layer
    return name if len(stages) > 1 or name == "net" else f"net.{name}"


def planted(kind: str, seed: int, found: dict[str, tuple[Stages, Tensor]]) -> dict[str, Any]:
    """One fault in one network, both drawn by the seed, and what was named."""
    draw = random.Random(f"{kind} {seed}")
    while True:
        network = draw.choice(sorted(found))
        stages, batch = found[network]
        b = copied(stages)
        where = KINDS[kind](b, draw)
        if where is not None and not is_none(stages, b, batch):
            break
    began = time.perf_counter()
    told = squeezebox.parity(stages, b, [batch], backward=seed % 4 == 0)
    first = None if told.agrees else layer_of(told, stages)
    return {
        "kind": kind,
        "network": network,
        "where": where,
        "named": first,
        "right": first == where,
        "own": None if told.first is None else told.first.own,
        "output": told.figures.output,
        "share": told.figures.share,
        "others": len({each.layer for each in told.differing}) - 1,
        "seconds": time.perf_counter() - began,
    }


def clean(stages: Stages, batch: Tensor) -> dict[str, float | None]:
    """Pairs without a fault: largest own difference, None where something was named."""
    other = copied(stages)
    channels_last = copied(stages)
    channels_last["net"].to(memory_format=torch.channels_last)
    train = copied(stages)
    train["net"].train()
    pairs = {
        "copy": (stages, other),
        "channels last": (stages, channels_last),
        "training": (train, copied(train)),
    }
    found = {}
    for name, (a, b) in pairs.items():
        told = squeezebox.parity(a, b, [batch])
        found[name] = max(each.own or 0.0 for each in told.figures.places) if told.agrees else None
        if not told.agrees:
            print(name, told)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=FAULTS, help="of each kind")
    faults = parser.parse_args().faults
    found = networks()
    silent = {name: clean(*network) for name, network in found.items()}
    rows = []
    for kind in KINDS:
        for seed in range(faults):
            rows.append(planted(kind, seed, found))
            if not rows[-1]["right"]:
                print(rows[-1])
    right = sum(row["right"] for row in rows)
    low, high = wilson(right / len(rows), len(rows))
    table = [
        f"Networks: {', '.join(found)}.",
        "",
        f"## Named right: {right} of {len(rows)} (95 % interval {100 * low:.1f} to {100 * high:.1f} %)",
        "",
        "| fault | planted | named right | least own difference | least change of the output | median s |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        sizes = [row["own"] for row in mine if row["own"] is not None]
        least = f"{min(sizes):.1e}" if sizes else "other shapes"
        outputs = [row["output"] for row in mine if row["output"] is not None]
        table.append(
            f"| {kind} | {len(mine)} | {sum(row['right'] for row in mine)} | {least} | "
            f"{min(outputs, default=0.0):.1e} | {statistics.median(row['seconds'] for row in mine):.1f} |"
        )
    wrong = [row for row in rows if not row["right"]]
    table += ["", "Named wrong:" if wrong else "None was named wrong.", ""]
    table += [f"- {row['kind']} in {row['network']}, {row['where']}: {row['named']}" for row in wrong]
    table += [
        "",
        "## Pairs without a fault",
        "",
        "| network | copy | channels last | training |",
        "|---|---|---|---|",
    ]
    for name, pairs in silent.items():
        cells = ["named" if each is None else f"{each:.1e}" for each in pairs.values()]
        table.append(f"| {name} | {' | '.join(cells)} |")
    table += ["", "The largest own difference of each; the tolerance is 1e-05."]
    _report.write("parity", {"faults": rows, "clean": silent}, "\n".join(table))


if __name__ == "__main__":
    main()
