"""Networks and losses that others have published, in strips: equal to the whole image's, or refused and why.

Goes in: nothing; a random image in float64. Needs timm, segmentation_models_pytorch and monai in addition
(pip install timm segmentation-models-pytorch monai). Comes out:
benchmarks/reports/streaming_models-<date>.json and .md.

Every network takes one step whole and one in strips of a quarter of the image, with dropout set to 0: the
errors are those of loss and gradients, each by its largest. With --autocast both are under autocast, from
float32 to bfloat16; the errors are those of gradients against the step in float64, by the norm of its own.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import _report, _timm
from squeezebox.schema import SqueezeboxError
from squeezebox.streaming import StreamedStep

HEIGHT, WIDTH, CLASSES = 256, 64, 3
ENCODERS = (
    *("resnet18", "efficientnet_b0", "mobilenetv3_small_100", "convnext_atto", "convnextv2_atto"),
    *("regnety_002", "densenet121", "ghostnet_100", "vgg11", "inception_next_atto", "vit_tiny_patch16_224"),
)
SEGMENTERS = (
    *("Unet", "UnetPlusPlus", "FPN", "Linknet", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "UPerNet"),
    *("Segformer", "MAnet"),
)
IN_TRAINING = ("Unet", "FPN", "Linknet")  # batch normalisation by the image's own moments

Case = tuple[str, nn.Module, Callable[[Any, Any], Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="streaming_models", help="of the report")
    parser.add_argument("--autocast", action="store_true", help="to bfloat16")
    arguments = parser.parse_args()
    _timm.declare_torchvision()
    torch.set_num_threads(1)
    take = under_autocast if arguments.autocast else measure
    rows = [take(*case) for cases in (encoders, segmenters, losses) for case in cases()]
    table = render_errors(rows) if arguments.autocast else render(rows)
    print(*_report.write(arguments.name, {"rows": rows}, table), file=sys.stderr)


def encoders() -> Iterator[Case]:
    """Classifiers of timm, in eval mode."""
    import timm

    for name in ENCODERS:
        options = {"img_size": (HEIGHT, WIDTH)} if name.startswith("vit") else {}
        model = timm.create_model(name, num_classes=CLASSES, **options).eval()
        yield f"timm {name}", model, functional.cross_entropy, torch.tensor([1])


def segmenters() -> Iterator[Case]:
    """Networks of segmentation_models_pytorch, in eval mode, and some of them in training."""
    import segmentation_models_pytorch as smp

    mask = torch.randint(CLASSES, (1, HEIGHT, WIDTH))
    for name in SEGMENTERS:
        model = getattr(smp, name)("resnet18", encoder_weights=None, classes=CLASSES)
        yield f"smp {name}", copy.deepcopy(model).eval(), functional.cross_entropy, mask
        if name in IN_TRAINING:
            yield f"smp {name}, in training", model.train(), functional.cross_entropy, mask


def losses() -> Iterator[Case]:
    """Losses of segmentation_models_pytorch and MONAI, after a small network."""
    import monai.losses as monai
    from segmentation_models_pytorch import losses as smp

    whole = torch.randint(CLASSES, (1, HEIGHT, WIDTH))

    def one_hot(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda found, mask: loss(
            found, functional.one_hot(mask, CLASSES).movedim(-1, 1).to(found.dtype)
        )

    def binary(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda found, mask: loss(found[:, :1], (mask == 1)[:, None].to(found.dtype))

    found: dict[str, Callable[[Any, Any], Tensor]] = {
        "smp DiceLoss": smp.DiceLoss("multiclass"),
        "smp DiceLoss, a class ignored": smp.DiceLoss("multiclass", ignore_index=2),
        "smp JaccardLoss": smp.JaccardLoss("multiclass"),
        "smp TverskyLoss": smp.TverskyLoss("multiclass"),
        "smp FocalLoss": smp.FocalLoss("multiclass"),
        "smp LovaszLoss": lambda found, mask: smp.LovaszLoss("multiclass")(found.float(), mask),
        "smp LovaszLoss, binary": binary(lambda found, mask: smp.LovaszLoss("binary")(found.float(), mask)),
        "smp SoftCrossEntropyLoss": smp.SoftCrossEntropyLoss(smooth_factor=0.1),
        "smp MCCLoss": binary(lambda found, mask: smp.MCCLoss()(found.sigmoid(), mask)),
        "smp SoftBCEWithLogitsLoss": binary(smp.SoftBCEWithLogitsLoss()),
        "monai DiceLoss": one_hot(monai.DiceLoss(softmax=True)),
        "monai DiceLoss, squared": one_hot(monai.DiceLoss(softmax=True, squared_pred=True, jaccard=True)),
        "monai GeneralizedDiceLoss": one_hot(monai.GeneralizedDiceLoss(softmax=True)),
        "monai DiceCELoss": one_hot(monai.DiceCELoss(softmax=True)),
        "monai DiceFocalLoss": one_hot(monai.DiceFocalLoss(softmax=True)),
        "monai TverskyLoss": one_hot(monai.TverskyLoss(softmax=True)),
        "monai FocalLoss": one_hot(monai.FocalLoss(use_softmax=True)),
    }
    for name, loss in found.items():
        network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1))
        yield name, network, loss, whole


def measure(
    name: str, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], target: Tensor
) -> dict[str, Any]:
    """One case."""
    image, model = made(model)
    streamed, row = copy.deepcopy(model), {"case": name}
    whole = loss_fn(model(image), target)
    whole.backward()
    step = StreamedStep(streamed, loss_fn, height=HEIGHT // 4)
    try:
        loss = step(image, target)
    except SqueezeboxError as error:
        row["refused"] = str(error).splitlines()[0]
    else:
        pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), streamed.parameters(), strict=True)]
        known = [(first, second) for first, second in pairs if first is not None and second is not None]
        scale = max(float(first.abs().max()) for first, _ in known)
        row["loss_error"] = abs(float((loss - whole) / whole))
        row["gradient_error"] = max(float((first - second).abs().max()) for first, second in known) / scale
        row["passes"] = len(step.plan(image, target).stages)
    print(*row.values(), file=sys.stderr, flush=True)
    return row


def made(model: nn.Module) -> tuple[Tensor, nn.Module]:
    """A random image, and the model without dropout, in float64."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
    return torch.rand(1, 3, HEIGHT, WIDTH, dtype=torch.float64), model.double()


def under_autocast(
    name: str, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], target: Tensor
) -> dict[str, Any]:
    """One case, under autocast."""
    image, model = made(model)
    plain, streamed = copy.deepcopy(model).float(), copy.deepcopy(model).float()
    loss_fn(model(image), target).backward()
    row: dict[str, Any] = {"case": name}
    with torch.autocast("cpu", torch.bfloat16):
        loss_fn(plain(image.float()), target).backward()
        try:
            StreamedStep(streamed, loss_fn, height=HEIGHT // 4)(image.float(), target)
        except SqueezeboxError as error:
            row["refused"] = str(error).splitlines()[0]
            return row
    row["plain_error"], row["error"] = (error_of(each, model) for each in (plain, streamed))
    print(*row.values(), file=sys.stderr, flush=True)
    return row


def error_of(model: nn.Module, exact: nn.Module) -> float:
    """The norm of the gradients' error, by that of the exact gradients."""
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
    known = [(mine.double(), theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    squares = [(float((mine - right).square().sum()), float(right.square().sum())) for mine, right in known]
    errors, wholes = zip(*squares, strict=True)
    return float((sum(errors) / sum(wholes)) ** 0.5)


def render_errors(rows: list[dict[str, Any]]) -> str:
    """The table of steps under autocast in Markdown."""
    lines = ["| case | plain | in strips | ratio |", "| --- | --- | --- | --- |"]
    run = [row for row in rows if "refused" not in row]
    ratios = [row["error"] / row["plain_error"] for row in run]
    for row, ratio in zip(run, ratios, strict=True):
        lines.append(f"| {row['case']} | {row['plain_error']:.4f} | {row['error']:.4f} | {ratio:.2f} |")
    lines += [f"| {row['case']} | refused: {row['refused']} | | |" for row in rows if "refused" in row]
    said = f"{len(run)} of {len(rows)} run; ratios are {min(ratios):.2f} to {max(ratios):.2f}."
    return "\n".join([*lines, "", said])


def render(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = ["| case | passes | loss | gradients |", "| --- | --- | --- | --- |"]
    for row in rows:
        if "refused" in row:
            lines.append(f"| {row['case']} | refused: {row['refused']} | | |")
        else:
            errors = f"{row['loss_error']:.0e} | {row['gradient_error']:.0e}"
            lines.append(f"| {row['case']} | {row['passes']} | {errors} |")
    equal = [row for row in rows if "refused" not in row]
    worst = max(row["gradient_error"] for row in equal)
    said = f"{len(equal)} of {len(rows)} run; the largest error of a gradient is {worst:.0e}."
    return "\n".join([*lines, "", said, "MONAI's focal losses and the Lovasz losses are in float32."])


if __name__ == "__main__":
    main()
