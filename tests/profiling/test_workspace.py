"""What operators take on a CPU beyond their results: predicted peaks against those of recorded steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import squeezebox
from squeezebox.profiling import record_step
from squeezebox.schema import Kind


class Recurrent(nn.Module):
    def __init__(self, kind, *sizes, **options):
        super().__init__()
        self.layer = kind(*sizes, **options)

    def forward(self, x):
        return self.layer(x)[0]


class Folding(nn.Module):
    """A convolution, its output in blocks, and the blocks added up again."""

    def __init__(self, kernel, **options):
        super().__init__()
        self.mix = nn.Conv2d(8, 8, 1)
        self.kernel, self.options = kernel, options

    def forward(self, x):
        blocks = functional.unfold(self.mix(x), self.kernel, **self.options)
        return functional.fold(blocks, x.shape[-2:], self.kernel, **self.options)


class Scattering(nn.Module):
    """Rows that are gathered from a wide one, and scattered into a wider one."""

    def __init__(self, reduce, dtype, rows=False):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(96, 2000).to(dtype))
        self.reduce, self.rows = reduce, rows

    def forward(self, index):
        into = 0 if self.rows else 1
        index = index[:, :1].expand(-1, 2000) if self.rows else index
        found = self.wide.gather(into, index % self.wide.shape[into])
        wider = torch.zeros((300, 2000) if self.rows else (96, 300), dtype=found.dtype)
        if self.reduce is None:
            return wider.scatter(into, index, found).float()
        return wider.scatter_reduce(into, index, found, self.reduce).float()


def tokens(*shape, most=300):
    return torch.randint(0, most, shape)


CASES = {
    "lstm": (Recurrent(nn.LSTM, 64, 128), (50, 16, 64)),
    "lstm of many samples": (Recurrent(nn.LSTM, 24, 64, batch_first=True), (80, 40, 24)),
    "lstm in layers, both ways": (Recurrent(nn.LSTM, 32, 48, num_layers=2, bidirectional=True), (20, 40, 32)),
    "lstm without biases": (Recurrent(nn.LSTM, 64, 128, bias=False), (50, 16, 64)),
    "lstm of one sequence": (Recurrent(nn.LSTM, 64, 128), (50, 64)),
    "gru": (Recurrent(nn.GRU, 64, 96, num_layers=2, batch_first=True), (16, 30, 64)),
    "fold of blocks that overlap": (Folding(3, padding=1), (16, 8, 32, 32)),
    "fold of blocks apart": (Folding(2, stride=4), (16, 8, 32, 32)),
    "fold of one image": (Folding(3, padding=2, dilation=2), (8, 32, 32)),
    "bags": (nn.EmbeddingBag(300, 64), tokens(256, 20)),
    "bags added": (nn.EmbeddingBag(300, 8, mode="sum"), tokens(10, 700)),
    "largest of bags": (nn.EmbeddingBag(300, 64, mode="max"), tokens(256, 20)),
    "scattered in 16 bits": (Scattering(None, torch.bfloat16), tokens(96, 500)),
    "scattered sums in 16 bits": (Scattering("sum", torch.float16), tokens(96, 500)),
    "scattered rows in 16 bits": (Scattering("sum", torch.bfloat16, rows=True), tokens(96, 500)),
    "scattered means in 16 bits": (Scattering("mean", torch.bfloat16), tokens(96, 500)),
    "scattered means": (Scattering("mean", torch.float32), tokens(96, 500)),
    "bags with padding": (nn.EmbeddingBag(300, 8, mode="sum", padding_idx=3), tokens(20, 700)),
}


def mean_square(output, target):
    return output.square().mean()


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_that_of_a_recorded_step(case):
    model, inputs = CASES[case]
    inputs = torch.randn(inputs) if isinstance(inputs, tuple) else inputs
    options = {"sample": (inputs, None), "loss_fn": mean_square}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    measured = record_step(model, optimizer=optimizer, **options).peak()
    predicted = squeezebox.estimate(model, optimizer="sgd", **options)
    assert predicted.peak_bytes == pytest.approx(measured.nbytes, rel=0.01)


def test_what_a_recurrent_layer_keeps_is_saved():
    model, shape = CASES["lstm"]
    sample = (torch.randn(shape), None)
    trace = record_step(model, sample=sample, loss_fn=mean_square)
    saved = [storage.nbytes for storage in trace.storages if storage.kind is Kind.SAVED]
    predicted = squeezebox.estimate(model, sample=sample, loss_fn=mean_square, optimizer="sgd")
    assert predicted.saved_bytes == pytest.approx(sum(saved), rel=0.02)
