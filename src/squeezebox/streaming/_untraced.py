"""What an error of tracing says: whose fault it is, for what image and target, and what to do."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from squeezebox.schema import in_one_line

_BY_VALUES = ("GuardOnDataDependentSymNode", "DataDependentOutputException")
_OF_OPERATORS = (RuntimeError, ValueError, TypeError, IndexError)
_SIZES = ("size mismatch", "batch_size", "target size", "spatial targets", "Size does not match")


def untraced(name: str, image: Tensor, target: Any, error: Exception) -> str:
    """The message for a model, or a model and its loss, called ``name``.

    An operator that refuses what it is given mostly does so in plain PyTorch too, and says why.
    """
    given = _given(image, target)
    if type(error) not in _OF_OPERATORS:
        return f"torch.export cannot trace {name} for {given}, so it cannot be streamed: {_said(error)}"
    said = in_one_line(error)
    return f"cannot trace {name} for {given}: {said}. {_advice(image, target, said)}"


def _given(image: Tensor, target: Any) -> str:
    leaves = [each for each in pytree.tree_leaves(target) if each is not None]
    named = [_form(each) if isinstance(each, Tensor) else repr(each)[:40] for each in leaves[:3]]
    targets = f" and a target of {', '.join(named)}{' ...' * (len(leaves) > 3)}" if named else ""
    return f"an image of {_form(image)}{targets}"


def _form(x: Tensor) -> str:
    return f"{tuple(x.shape)} in {str(x.dtype).removeprefix('torch.')}"


def _advice(image: Tensor, target: Any, said: str) -> str:
    leaves = pytree.tree_leaves(target)
    dtypes = {each.dtype for each in leaves if isinstance(each, Tensor)}
    if "must be Tensor" in said and len(dtypes) < len(leaves):
        return "Give a label as a tensor, such as torch.tensor([1])."
    if dtypes & {torch.uint8, torch.int8, torch.int16, torch.int32} and ("int64" in said or "Long" in said):
        return (
            "Classes are int64: write the loss as lambda output, target: cross_entropy(output, "
            "target.long()), and leave the file as it is."
        )
    if image.dim() == 3:
        return (
            "Most models take N x C x H x W: give image[None], and an array of H x W x C as "
            "array.transpose(2, 0, 1)[None]."
        )
    if any(words in said for words in _SIZES):
        return "A mask of classes is N x H x W, of the output's height and width; give that, or resize one."
    return "Try model and loss in plain PyTorch on a small image, and mend what fails there too."


def _said(error: Exception) -> str:
    """What torch.export says; in fewer words where the model's code needs values that are not known."""
    if type(error).__name__ not in _BY_VALUES:
        return in_one_line(error)
    libraries = str(Path(torch.__file__).parent), str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    last = own[-1] if own else traceback.FrameSummary("", 0, "the model or the loss", line="")
    where = (
        f"{Path(last.filename).name}, line {last.lineno}, in {last.name}: {last.line}" if own else last.name
    )
    return (
        f"how it goes on depends on values of the image or the target ({where}). Write `if` as torch.where, "
        "make each mask once (inside = mask > 0, then output[inside] and mask[inside]), and take a fixed "
        "number of steps, not one for each value that is found."
    )
