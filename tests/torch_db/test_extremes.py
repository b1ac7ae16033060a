"""Activations, pools and dropouts of NaN, infinities, both zeros, denormals and the largest values.

At 3 and at 4,096 elements, as torch's vectorised loops and those for what is left over may differ.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.torch_db.comparing import Sample, compared

ACTIVATIONS = {
    **{
        name: getattr(F, name)
        for name in (
            "relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh hardshrink "
            "softshrink tanhshrink softplus softsign sigmoid tanh logsigmoid relu_ leaky_relu_ hardtanh_ elu_"
        ).split()
    },
    "gelu, tanh": partial(F.gelu, approximate="tanh"),
    "hardtanh of one point": partial(F.hardtanh, min_val=0.0, max_val=0.0),
    "hardtanh to NaN": partial(F.hardtanh, max_val=math.nan),
    "threshold": partial(F.threshold, threshold=0.5, value=-1.0),
    "rrelu": partial(F.rrelu, training=True),
    "softmax": partial(F.softmax, dim=-1),
    "log_softmax": partial(F.log_softmax, dim=-1),
    "clamp": partial(torch.clamp, min=-1.0, max=1.0),
}
DROPOUTS = {
    name: getattr(F, name) for name in ("dropout", "alpha_dropout", "dropout2d", "feature_alpha_dropout")
}
POOLS = {
    "max_pool1d": lambda x: F.max_pool1d(x.flatten(0, 1), 2, 1),
    "max_pool2d": partial(F.max_pool2d, kernel_size=(1, 2), stride=1),
    "max_pool2d, one size": lambda x: F.max_pool2d(F.pad(x, (0, 0, 1, 1)), [2]),
    "max_pool3d": lambda x: F.max_pool3d(x[None], (1, 1, 2), 1),
    "avg_pool1d": lambda x: F.avg_pool1d(x.flatten(0, 1), 2, 1),
    "avg_pool2d": partial(F.avg_pool2d, kernel_size=(1, 2), stride=1),
    "avg_pool3d": lambda x: F.avg_pool3d(x[None], (1, 1, 2), 1),
    "lp_pool2d": partial(F.lp_pool2d, norm_type=2, kernel_size=(1, 2), stride=1),
    "adaptive_max_pool2d": partial(F.adaptive_max_pool2d, output_size=1),
    "adaptive_avg_pool2d": partial(F.adaptive_avg_pool2d, output_size=1),
}
OPERATORS = ACTIVATIONS | DROPOUTS | POOLS
SHAPES = ((1, 1, 1, 3), (2, 2, 32, 32))
DTYPES = (torch.float32, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float64, torch.bfloat16)))


def extremes(dtype, shape, turn):
    """Values that few expect, in an order of their own, as an intermediate that an operator may change."""
    info = torch.finfo(dtype)
    denormal = info.tiny / 2
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, denormal, -denormal, info.max, info.min, 0.5]
    numel = math.prod(shape)
    flat = torch.tensor(values, dtype=torch.float64).to(dtype).roll(turn).repeat(numel // len(values) + 1)
    return flat[:numel].view(shape).requires_grad_()


@pytest.mark.parametrize("options", [{"exact": True}, {"noise": 1e-2}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_values_that_few_expect(name, dtype, options):
    for shape in SHAPES:
        for turn in (0, 3, 6):
            sample = Sample(OPERATORS[name], [extremes(dtype, shape, turn)], {})
            outcome = compared(sample, second=False, **options)
            assert outcome.kind == "equal" or outcome.why.startswith("plain "), outcome
