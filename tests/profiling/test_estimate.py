"""The estimate against the measured peak and the reported saved bytes of a true step."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

import squeezebox
from squeezebox.profiling import PeakMeter
from squeezebox.schema import OptionError

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 64)
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, tokens):
        x = self.tokens(tokens)
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + attended.transpose(1, 2).flatten(-2)) @ self.tokens.weight.T


def convolutions():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Dropout(0.2), nn.Flatten(), nn.Linear(16 * 16 * 16, 10))
    return model.to(memory_format=torch.channels_last)


CASES = {
    "convolutions": (convolutions, (3, 32, 32), None),
    "attention": (Attention, (128,), "int64"),
}


def measured_peak(model, inputs, make_optimizer):
    optimizer = make_optimizer(model.parameters())

    def step():
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    step()  # makes the optimizer's state
    optimizer.zero_grad()
    gc.collect()
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *model.buffers(), *states, inputs]
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    step()
    return sum(tensor.nbytes for tensor in held) + meter.stop([]).total_bytes


def inputs_of(shape, dtype):
    return torch.zeros((8, *shape), dtype=torch.int64) if dtype else torch.randn(8, *shape)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_foretold(case, optimizer):
    factory, shape, dtype = CASES[case]
    foretold = squeezebox.estimate(
        factory, input_shape=shape, batch=8, optimizer=optimizer, input_dtype=dtype
    )
    measured = measured_peak(factory(), inputs_of(shape, dtype), OPTIMIZERS[optimizer])
    assert foretold.peak_bytes == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("case", CASES)
def test_saved_bytes_are_those_of_a_report(case):
    factory, shape, dtype = CASES[case]
    model = factory()
    session = squeezebox.attach(model, exact=True)
    model(inputs_of(shape, dtype)).sum().backward()
    reported = session.report().saved_bytes
    session.detach()
    foretold = squeezebox.estimate(model, input_shape=shape, batch=8, input_dtype=dtype)
    assert foretold.saved_bytes == sum(foretold.saved.values()) == reported


def test_the_parts_are_counted():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    model[0].weight.requires_grad_(False)
    foretold = squeezebox.estimate(model, input_shape=(1, 8, 8), batch=2, optimizer="adam")
    assert foretold.parameter_bytes == 4 * (36 + 8)
    assert foretold.gradient_bytes == 4 * 8
    assert foretold.optimizer_bytes == 2 * 4 * 8 + 2 * 4
    assert foretold.buffer_bytes == 4 * 8 + 8
    assert foretold.input_bytes == 4 * 2 * 64
    assert model[0].weight.device.type == "cpu"
    assert not model[0]._forward_pre_hooks


def test_a_model_far_larger_than_memory():
    foretold = squeezebox.estimate(lambda: nn.Linear(1 << 20, 1 << 20), input_shape=(1 << 20,), batch=1)
    assert foretold.parameter_bytes > 4 << 40


def test_half_the_width_is_half_the_bytes():
    full, half = (
        squeezebox.estimate(convolutions, input_shape=(3, 32, 32), batch=8, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    assert half.parameter_bytes * 2 == full.parameter_bytes
    assert half.saved["batch-norm input"] * 2 == full.saved["batch-norm input"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch 0 is below 1"),
        ({"input_shape": (3, 0, 32)}, "size below 1"),
        ({"optimizer": "lion"}, "no optimizer 'lion'; there are sgd,"),
        ({"dtype": "float33"}, "'float33' is no dtype"),
        ({"input_shape": (4, 32, 32)}, "forward fails on an input of shape \\(2, 4, 32, 32\\)"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(OptionError, match=message):
        squeezebox.estimate(convolutions, **{"input_shape": (3, 32, 32), "batch": 2, **options})


def test_a_factory_of_something_else():
    with pytest.raises(OptionError, match="returned a dict, not a torch.nn.Module"):
        squeezebox.estimate(dict)


def test_a_model_without_a_backward():
    with pytest.raises(OptionError, match="no tensor that requires gradients"):
        squeezebox.estimate(nn.Identity, input_shape=(4,), batch=2)
