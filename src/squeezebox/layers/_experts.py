"""Mixtures of experts that keep less: one of our own, and those of transformers changed in place."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from squeezebox.layers._lean import Activation, Form, Lean, batched, grouped, loop
from squeezebox.schema import OptionError, UnsupportedModelError

Model = TypeVar("Model", bound=nn.Module)
_eagerly: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler's loads the compiler
_FORMS: dict[str | None, Form] = {None: loop, "eager": loop, "batched_mm": batched, "grouped_mm": grouped}
_ARGUMENTS = ["self", "hidden_states", "top_k_index", "top_k_weights"]
_SETTINGS = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False}
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PROBE = 16  # tokens on which a changed module is compared with the unchanged one


def silu_gate(product: Tensor) -> Tensor:
    """SwiGLU: silu of the first half, times the second half."""
    gate, up = product.chunk(2, dim=-1)
    return F.silu(gate) * up


class ExpertMLP(nn.Module):
    """Experts of two products each, of which no token is dropped.

    An expert maps x to W2 act(W1 x); with the default ``act`` that is SwiGLU, and W1 has 2 H rows. Backward
    keeps the input and the first product.

    Args:
        experts: E, how many there are.
        dim: D, of a token.
        hidden: H, what ``act`` gives.
        act: maps (n, ``width``) to (n, hidden), without parameters. Backward calls it again, and draws what
            forward drew, as of dropout.
        width: rows of W1; 2 H if not given.
        recompute: keep the input alone; backward computes the first product again.
    """

    def __init__(
        self,
        experts: int,
        dim: int,
        hidden: int,
        *,
        act: Activation = silu_gate,
        width: int | None = None,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(experts, dim, hidden) < 1:
            raise OptionError(f"{experts} experts of {dim} by {hidden} hold nothing; pick sizes above 0.")
        if _trains(act):
            raise OptionError(
                f"act={type(act).__name__} has parameters, whose gradients experts do not compute; give one "
                "without, such as torch.nn.functional.gelu."
            )
        made: Callable[..., Tensor] = torch.empty
        shapes = (experts, 2 * hidden if width is None else width, dim), (experts, dim, hidden)
        self.first, self.second = (nn.Parameter(made(shape, device=device, dtype=dtype)) for shape in shapes)
        self.act, self.recompute = act, recompute
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as ``nn.Linear`` does."""
        for weight in (self.first, self.second):
            nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[2]), 1 / math.sqrt(weight.shape[2]))

    @_eagerly
    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """The gated sum of each token's experts, of shape (T, D).

        Args:
            x: (T, D).
            ids: (T, k), integers below E.
            gates: (T, k); NaN gives that token NaN, and no other.

        Raises:
            OptionError: an id is out of range, or shapes do not match.
        """
        return run(x, gates, ids, self.first, self.second, self.act, loop, self.recompute)

    def extra_repr(self) -> str:
        """Sizes."""
        experts, dim, hidden = self.second.shape
        return f"experts={experts}, dim={dim}, hidden={hidden}, recompute={self.recompute}"


def run(
    x: Tensor,
    gates: Tensor,
    ids: Tensor,
    first: Tensor,
    second: Tensor,
    act: Activation,
    form: Form,
    recompute: bool,
) -> Tensor:
    """:class:`Lean`, once its input is checked."""
    check_routing(x, gates, ids, len(first))
    check_tokens(x, first)
    found: Tensor = Lean.apply(  # type: ignore[no-untyped-call]
        x, gates, ids, first, second, act, form, recompute
    )
    return found


def check_routing(x: Tensor, gates: Tensor, ids: Tensor, experts: int) -> None:
    """Refuse shapes that do not match, and experts that are not there."""
    if x.dim() != 2 or ids.dim() != 2 or ids.shape != gates.shape or len(ids) != len(x):
        raise OptionError(
            f"Tokens {tuple(x.shape)}, ids {tuple(ids.shape)} and gates {tuple(gates.shape)} do not match; "
            "give (T, D), (T, k) and (T, k)."
        )
    if ids.dtype not in _WHOLE:
        raise OptionError(f"The ids are {ids.dtype}, which names no expert; give integers, such as topk's.")
    if ids.numel():
        least, most = (int(each) for each in ids.aminmax())
        if least < 0 or most >= experts:
            raise OptionError(
                f"The router chose experts {least} to {most}, and there are 0 to {experts - 1}; look for NaN "
                "or an offset in what makes the ids."
            )


def check_tokens(x: Tensor, first: Tensor) -> None:
    """Refuse autocast, and tokens of another dtype or width than the weights (E, 2 H, D)."""
    if torch.is_autocast_enabled(x.device.type):
        raise UnsupportedModelError(
            "Lean experts compute in the dtype that they are given; leave autocast for them "
            "(torch.autocast(..., enabled=False)), or convert model and input."
        )
    if x.dtype != first.dtype or x.shape[1] != first.shape[2]:
        raise OptionError(
            f"Tokens {tuple(x.shape)} of {x.dtype} do not match experts of {first.shape[2]} features in "
            f"{first.dtype}; convert the input or the model."
        )


def lean_experts_(model: Model, *, recompute: bool = False) -> Model:
    """Make the experts of transformers' mixtures within a model keep less for backward, in place.

    Their outputs stay equal to the bit, as transformers' eager, ``batched_mm`` and ``grouped_mm`` forms round
    them; gradients are equal to rounding. A module becomes an instance of a class derived from its own, with
    the same parameters.

    Args:
        model: holds modules as of Mixtral or Qwen-MoE: ``gate_up_proj`` (E, 2 H, D), ``down_proj`` (E, D, H).
        recompute: keep their input alone; backward computes the first product again.

    Returns:
        The model.

    Raises:
        OptionError: there are no such modules, or one has what this does not know (biases, a norm, transposed
            weights, experts on several ranks), or its output on a few random tokens is another one.
    """
    found = {name: each for name, each in model.named_modules() if _looks_like_experts(each)}
    if not found:
        raise OptionError(
            f"{type(model).__name__} has no experts as transformers' Mixtral (gate_up_proj and down_proj); "
            "use squeezebox.layers.ExpertMLP within it."
        )
    for name, module in found.items():
        _check_known(name, module)
    for module in found.values():
        kind: Any = type(module)
        module.__class__ = _lean_class(kind, recompute)
    return model


def _looks_like_experts(module: nn.Module) -> bool:
    names = ("gate_up_proj", "down_proj", "act_fn", "num_experts")
    if isinstance(module, _LeanExperts) or not all(hasattr(module, each) for each in names):
        return False
    return list(inspect.signature(type(module).forward).parameters) == _ARGUMENTS


def _check_known(name: str, module: Any) -> None:
    odd = [key for key, value in _SETTINGS.items() if getattr(module, key, value) != value]
    odd += ["expert parallel"] if getattr(module, "_is_expert_parallel", False) else []
    odd += ["act_fn with parameters"] if _trains(module.act_fn) else []
    if odd:
        raise OptionError(f"{name} has {', '.join(odd)}, which lean experts do not know; leave it as it is.")
    form = _form(module)
    dim, dtype, device = module.down_proj.shape[1], module.down_proj.dtype, module.down_proj.device
    if device.type == "meta":
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBE, dim, generator=generator).to(device, dtype)
    ids = torch.randint(module.num_experts, (_PROBE, 2), generator=generator).to(device)
    gates = torch.rand(_PROBE, 2, generator=generator).to(device, dtype)
    with torch.no_grad():
        plain = module(x, ids, gates)
        ours, _ = form(x, gates, ids, module.gate_up_proj, module.down_proj, _activation(module))
    if not torch.equal(ours.nan_to_num(), plain.nan_to_num()):
        raise OptionError(f"{name} computes something else than gated experts; leave it as it is.")


def _trains(act: Any) -> bool:
    return isinstance(act, nn.Module) and any(True for _ in act.parameters())


def _form(module: Any) -> Form:
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if name not in _FORMS:
        raise OptionError(f"Lean experts have no form {name!r}; pick eager, batched_mm or grouped_mm.")
    return _FORMS[name]


def _activation(module: Any) -> Activation:
    if hasattr(module, "_apply_gate"):
        own: Activation = module._apply_gate
        return own

    def apply(product: Tensor) -> Tensor:
        gate, up = product.chunk(2, dim=-1)
        result: Tensor = module.act_fn(gate) * up
        return result

    return apply


class _LeanExperts:
    """The forward that such a module gets."""

    recompute: bool
    plain_class: type

    @_eagerly
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As of the class that this one is derived from."""
        weights = self.gate_up_proj, self.down_proj
        act, form = _activation(self), _form(self)
        return run(hidden_states, top_k_weights, top_k_index, *weights, act, form, self.recompute)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """The class is built where it is read: no module has it."""
        found: Any = super().__reduce_ex__(protocol)
        return _new_lean, (self.plain_class, self.recompute), *found[2:]


@lru_cache
def _lean_class(kind: type, recompute: bool) -> type:
    return type(f"Lean{kind.__name__}", (_LeanExperts, kind), {"recompute": recompute, "plain_class": kind})


def _new_lean(kind: type, recompute: bool) -> Any:
    """One without contents, as pickle wants."""
    made: Any = _lean_class(kind, recompute)
    return made.__new__(made)
