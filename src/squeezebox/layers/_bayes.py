"""Bayesian layers: a weight of normal distribution, drawn again for every call and sample."""

from __future__ import annotations

import abc
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from squeezebox.layers._draws import Draws
from squeezebox.layers._sampled import Convolution, Linear, Product, Sampled
from squeezebox.schema import OptionError

Size = int | tuple[int, ...]
_eagerly: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler's loads the compiler
_FIRST_RHO = -3.0  # softplus of it is 0.049


class BayesLayer(nn.Module, abc.ABC):
    """What Bayesian layers have in common.

    The weight is mu + softplus(rho) eps with eps of standard normal distribution, and so is the bias. No
    tensor holds eps: forward and backward compute it from a key, whose counter goes into ``state_dict()``.
    Calls draw different noise, and so do the ranks of ``torch.distributed``, unless ``same_on_ranks``.

    Attributes:
        mu, rho: parameters of the weight's shape.
        bias_mu, bias_rho: parameters of the bias's shape, or None.
        prior: standard deviation of the weight's prior, whose mean is 0.
        samples: equal parts of the batch (dimension 0) that draw noise of their own.
        draws: the key's counter.
    """

    rho: nn.Parameter
    bias_mu: nn.Parameter | None
    bias_rho: nn.Parameter | None

    def __init__(self, plain: Any, draws: Draws | None, prior: float, samples: int) -> None:
        super().__init__()
        check_samples(samples)
        check_prior(prior)
        self.prior, self.samples = prior, samples
        self.draws = own_draws() if draws is None else draws
        self.mu, self.rho = _pair(plain.weight)
        self.bias_mu, self.bias_rho = (None, None) if plain.bias is None else _pair(plain.bias)
        self._product = self._product_of(plain)

    @classmethod
    def of(cls, plain: nn.Module, *, draws: Draws | None = None, prior: float = 1.0, samples: int = 1) -> Any:
        """A Bayesian layer for a plain one; its weight and bias are the parameters mu and bias_mu."""
        layer = cls.__new__(cls)
        BayesLayer.__init__(layer, plain, draws, prior, samples)
        return layer.train(plain.training)

    @abc.abstractmethod
    def _product_of(self, plain: Any) -> Product:
        """What the plain layer does with its weight."""

    def _padded(self, x: Tensor) -> Tensor:
        return x

    @_eagerly  # a compiled model calls it as it is
    def forward(self, x: Tensor) -> Tensor:
        """The output for noise that no other call has drawn.

        Args:
            x: the batch; ``samples`` divides its dimension 0, whose parts belong to one sample each.

        Raises:
            OptionError: ``samples`` does not divide the batch.
        """
        if self.samples > 1 and (x.dim() < 2 or len(x) % self.samples):
            raise OptionError(
                f"A batch of shape {tuple(x.shape)} does not have {self.samples} equal parts, one for each "
                "sample; repeat the batch for each sample, as bayesian_ does for a whole model."
            )
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        elif x.dtype != self.mu.dtype:
            raise OptionError(f"The input is {x.dtype} and mu is {self.mu.dtype}; give both one dtype.")
        call = self.draws.call(self.samples, training=self.training)
        with torch.autocast(kind, enabled=False):
            out: Tensor = Sampled.apply(  # type: ignore[no-untyped-call]
                self._padded(x),
                self.mu,
                self.rho,
                self.bias_mu,
                self.bias_rho,
                self._product,
                self.samples,
                call,
            )
        return out

    def get_extra_state(self) -> dict[str, int]:
        """What the next call draws by, for ``state_dict()``."""
        return self.draws.state()

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.draws.load(state)

    def extra_repr(self) -> str:
        """Shape, prior and samples."""
        return f"{tuple(self.mu.shape)}, prior={self.prior}, samples={self.samples}"


class BayesLinear(BayesLayer):
    """``nn.Linear`` with a random weight and bias; see :class:`BayesLayer`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        prior: float = 1.0,
        samples: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        plain = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        super().__init__(plain, None, prior, samples)

    def _product_of(self, plain: nn.Linear) -> Product:
        return Linear()


class _BayesConv(BayesLayer):
    """The convolutions: all arguments but ``prior`` and ``samples`` are the plain layer's."""

    _plain: ClassVar[Any]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        *others: Any,
        prior: float = 1.0,
        samples: int = 1,
        **options: Any,
    ) -> None:
        plain = self._plain(in_channels, out_channels, kernel_size, *others, **options)
        super().__init__(plain, None, prior, samples)

    def _product_of(self, plain: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Product:
        padding, self._pads, self._padding_mode = _paddings(plain)
        return Convolution(
            stride=tuple(plain.stride), padding=padding, dilation=tuple(plain.dilation), groups=plain.groups
        )

    def forward(self, x: Tensor) -> Tensor:
        """As of :class:`BayesLayer`; like the plain layer, it takes one input without a batch too."""
        alone = x.dim() == self.mu.dim() - 1
        out: Tensor = super().forward(x[None] if alone else x)
        return out[0] if alone else out

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, self._pads, mode=self._padding_mode) if any(self._pads) else x


class BayesConv1d(_BayesConv):
    """``nn.Conv1d`` with a random weight and bias, and its arguments; see :class:`BayesLayer`."""

    _plain = nn.Conv1d


class BayesConv2d(_BayesConv):
    """``nn.Conv2d`` with a random weight and bias, and its arguments; see :class:`BayesLayer`."""

    _plain = nn.Conv2d


class BayesConv3d(_BayesConv):
    """``nn.Conv3d`` with a random weight and bias, and its arguments; see :class:`BayesLayer`."""

    _plain = nn.Conv3d


def _paddings(plain: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[tuple[int, ...], list[int], str]:
    """What the convolution pads, and what is padded before it: last dimension first, and how."""
    sizes = zip(plain.dilation, plain.kernel_size, strict=True)
    if plain.padding == "valid":
        sides = [(0, 0) for _ in sizes]
    elif plain.padding == "same":
        spans = [dilation * (kernel - 1) for dilation, kernel in sizes]
        sides = [(span // 2, span - span // 2) for span in spans]
    else:
        sides = [(int(pad), int(pad)) for pad in plain.padding]
    if plain.padding_mode == "zeros" and all(left == right for left, right in sides):
        return tuple(left for left, _ in sides), [0] * (2 * len(sides)), "constant"
    mode = "constant" if plain.padding_mode == "zeros" else plain.padding_mode
    return (0,) * len(sides), [side for pair in reversed(sides) for side in pair], mode


def check_samples(samples: int) -> None:
    """Refuse a count that is none."""
    if not isinstance(samples, int) or samples < 1:
        raise OptionError(
            f"samples={samples!r} is no count of weights to draw; pick a whole number from 1 on."
        )


def check_prior(prior: float) -> None:
    """Refuse what is no standard deviation."""
    if not (prior > 0 and math.isfinite(prior)):
        raise OptionError(f"prior={prior} is no standard deviation; pick one above 0, such as 1.0.")


def _pair(values: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    """mu, which is the very parameter if it is one, and rho."""
    mu = values if isinstance(values, nn.Parameter) else nn.Parameter(values)
    rho = torch.full_like(mu, _FIRST_RHO, memory_format=torch.contiguous_format)
    return mu, nn.Parameter(rho, requires_grad=mu.requires_grad)


def own_draws() -> Draws:
    """A seed of torch's generator, as initial weights are."""
    return Draws(int(torch.randint(2**62, ())))
