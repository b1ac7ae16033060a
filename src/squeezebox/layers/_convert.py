"""A model's own layers made Bayesian in place, and the samples folded into its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from squeezebox.layers._bayes import (
    BayesConv1d,
    BayesConv2d,
    BayesConv3d,
    BayesLayer,
    BayesLinear,
    check_prior,
    check_samples,
)
from squeezebox.layers._draws import Draws
from squeezebox.schema import OptionError

Model = TypeVar("Model", bound=nn.Module)
_LAYERS: dict[type[nn.Module], type[BayesLayer]] = {
    nn.Linear: BayesLinear,
    nn.Conv1d: BayesConv1d,
    nn.Conv2d: BayesConv2d,
    nn.Conv3d: BayesConv3d,
}


def bayesian_(
    model: Model,
    *,
    prior: float = 1.0,
    samples: int = 1,
    seed: int | None = None,
    same_on_ranks: bool = False,
) -> Model:
    """Make every ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` within a model Bayesian.

    Weights become mu; rho begins at -3, a standard deviation of 0.049. Make the optimizer afterwards: rho is
    new to it. Layers of classes derived from these four stay as they are, such as the last one of
    ``nn.MultiheadAttention``.

    Args:
        model: changed in place; not itself one of the four classes.
        prior: standard deviation of the weights' prior, for :func:`kl`.
        samples: draws of all weights for one batch. With more than one, the model repeats each input of
            B rows ``samples`` times, and its outputs have shape (samples, B, ...).
        seed: of all noise, below 2^63; without it, one of torch's generator.
        same_on_ranks: ranks draw the same noise, given the same seed; otherwise a rank's samples follow on
            those of the rank before it.

    Returns:
        The model.

    Raises:
        OptionError: nothing can be converted, or a layer has hooks, a weight that another module shares, or
            one that torch reads itself, or ``prior`` or ``samples`` is out of range.
    """
    check_prior(prior)
    check_samples(samples)
    places = list(_places(model))  # before any changes
    if not places:
        raise OptionError(
            f"{type(model).__name__} holds no nn.Linear, Conv1d, Conv2d or Conv3d that could become "
            "Bayesian; use BayesLinear and its like within it."
        )
    _check(model, places)
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    made: dict[nn.Module, BayesLayer] = {}
    for parent, name, layer in places:
        if layer not in made:
            draws = Draws(seed, len(made), same_on_ranks=same_on_ranks)
            made[layer] = _LAYERS[type(layer)].of(layer, draws=draws, prior=prior, samples=samples)
        setattr(parent, name, made[layer])
    if samples > 1:
        model.register_forward_pre_hook(_Repeat(samples), with_kwargs=True)
        model.register_forward_hook(_Part(samples), with_kwargs=True)
    return model


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, layer) of what can be converted; a layer in two places comes twice."""
    for path, layer in model.named_modules(remove_duplicate=False):
        if path and type(layer) in _LAYERS:
            parent, _, name = path.rpartition(".")
            yield model.get_submodule(parent), name, layer


def _check(model: nn.Module, places: list[tuple[nn.Module, str, nn.Module]]) -> None:
    layers = {layer for *_, layer in places}
    owners: dict[Tensor, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    names = {layer: name for name, layer in model.named_modules()}
    for layer in layers:
        shared = [each for own in layer.parameters() for each in owners[own] if each is not layer]
        if shared:
            raise OptionError(
                f"{names[layer]} shares its weight with {names[shared[0]]}, which would no longer be so; "
                "give each a weight of its own first."
            )
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            raise OptionError(f"{names[layer]} has hooks, which would be lost; put them on afterwards.")
    for parent, _, layer in places:
        if _reads_weights(parent):
            raise OptionError(
                f"{names[layer]} is read by torch's fast {type(parent).__name__} in evaluation, where a "
                "Bayesian layer has no weight; call torch.backends.mha.set_fastpath_enabled(False) first, "
                "and leave it so."
            )


def _reads_weights(module: Any) -> bool:
    """Whether torch may take the weights of the module's layers in evaluation, and not call them."""
    if not (isinstance(module, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled()):
        return False
    attention: Any = module.self_attn
    fast = attention.batch_first and attention.in_proj_bias is not None and attention.num_heads % 2 == 0
    return bool(fast and module.activation_relu_or_gelu)


@dataclass(frozen=True)
class _Repeat:
    """Before a model's forward: its inputs, ``samples`` times one after the other."""

    samples: int

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        sizes = [len(each) for each in _tensors((args, kwargs)) if each.dim()]
        if not sizes:
            raise OptionError("The model was called without a tensor that has a batch to repeat.")

        def repeated(tensor: Tensor) -> Tensor:
            same = tensor.dim() and len(tensor) == sizes[0]
            return tensor.repeat(self.samples, *[1] * (tensor.dim() - 1)) if same else tensor

        return _mapped(repeated, args), _mapped(repeated, kwargs)


@dataclass(frozen=True)
class _Part:
    """After it: outputs of shape (samples, B, ...)."""

    samples: int

    def __call__(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        size = len(next(each for each in _tensors((args, kwargs)) if each.dim()))

        def parted(tensor: Tensor) -> Tensor:
            same = tensor.dim() and len(tensor) == size
            return tensor.unflatten(0, (self.samples, -1)) if same else tensor

        return _mapped(parted, output)


def _tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        yield from _tensors(list(nest.values()))
    elif isinstance(nest, (list, tuple)):
        for each in nest:
            yield from _tensors(each)


def _mapped(change: Callable[[Tensor], Tensor], nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, dict):
        return type(nest)({name: _mapped(change, each) for name, each in nest.items()})
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_mapped(change, each) for each in nest))
    if isinstance(nest, (list, tuple)):
        return type(nest)(_mapped(change, each) for each in nest)
    return nest
