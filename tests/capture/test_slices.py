"""The first layers in slices of the batch: the same outputs, gradients and buffers, and less memory."""

import copy
import io
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.capture import Tracer
from squeezebox.profiling import PeakMeter
from squeezebox.schema import CaptureError
from tests.capture.nets import Residual, Square


class Head(nn.Module):
    """Something after the region: two readers of its result."""

    def __init__(self, channels, dims):
        super().__init__()
        self.mix = nn.LazyLinear(8)
        self.dims = dims

    def forward(self, x):
        pooled = x.flatten(2)
        return self.mix((pooled + torch.tanh(pooled)).mean(2))


class Functional(nn.Module):
    """Everything in one module, whose keys are told apart by their number."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (
            nn.Parameter(torch.randn(8, 3, 3, 3) / 5),
            nn.Parameter(torch.randn(8, 8, 3, 3) / 8),
        )
        self.three = nn.Parameter(torch.randn(8, 8, 3, 3) / 8)
        self.relu = torch.relu

    def forward(self, x):
        x = F.conv2d(x, self.one).relu_()
        x = F.max_pool2d(self.relu(F.conv2d(x, weight=self.two)), 2)
        x = torch.sigmoid(input=F.conv2d(x, self.three))
        return F.relu(F.conv2d(x, self.three)).mean((2, 3))


def stem():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Residual(8, 16, 2),
        Head(16, 2),
    )


def normalised():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8, momentum=None),
        nn.SiLU(),
        nn.Conv2d(8, 12, 3, padding=1, groups=4),
        nn.BatchNorm2d(12, affine=False, eps=1e-3),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(12, 12, 1),
        nn.BatchNorm2d(12, track_running_stats=False, momentum=0.3),
        nn.AvgPool2d(2),
        Head(12, 2),
    )


class Brighten(nn.Module):
    def forward(self, x):
        return (x - 0.3) / 0.7


def prepared():
    return nn.Sequential(Brighten(), nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.AvgPool2d(2), Head(8, 2))


def plain_stack():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.GELU("tanh"),
        nn.Hardtanh(-0.5, 0.5),
        nn.AdaptiveAvgPool2d(3),
        Head(8, 2),
    )


def line():
    return nn.Sequential(nn.Conv1d(3, 8, 5), nn.BatchNorm1d(8), nn.Tanh(), nn.MaxPool1d(3), Head(8, 1))


def volume():
    return nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.Sigmoid(), nn.AvgPool3d(2), Head(8, 3))


NETS = {
    "stem": (stem, (12, 12)),
    "normalised": (normalised, (13, 13)),
    "prepared": (prepared, (14, 14)),
    "stack": (plain_stack, (12, 12)),
    "functional": (Functional, (14, 14)),
    "line": (line, (40,)),
    "volume": (volume, (8, 8, 8)),
}


def made(name, batch=7, dtype=torch.float64):
    make, size = NETS[name]
    model, x = make().to(dtype).train(), torch.randn(batch, 3, *size, dtype=dtype) + 0.5
    with torch.no_grad():
        copy.deepcopy(model)(x)  # lazy layers
        model(x)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter.data, 0.5)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
    return model, x


@contextmanager
def squeezed(model, region=None):
    session = squeezebox.attach(model, exact=True)
    try:
        session.engine.slice(region)
        yield session
    finally:
        session.detach()


def regions(model, x, slices=2):
    """What could be worked in slices, shortest first."""
    model = copy.deepcopy(model)
    with squeezed(model) as session:
        tracer = Tracer()
        with session.engine.store.shown_to(tracer.onlooker):
            out = model(x)
            (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    found = tracer.regions()
    assert all(region.slices == len(x) for region in found)
    return [replace(region, slices=slices) for region in found]


def gradients(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def train(model, inputs, region=None, covered=False):
    """A copy's outputs, gradients and buffers after a few steps; the last note; the keys of what it saved."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    outputs, found = [], []
    with squeezed(model, region) as session:
        for x in inputs:
            optimizer.zero_grad()
            with session.step() if covered else nullcontext():
                outputs.append(model(x))
                loss = outputs[-1].square().mean()
                if covered:
                    loss.backward()
            if not covered:
                loss.backward()
            found.append(gradients(model))
            optimizer.step()
        note = session.engine.recorder.slicer.note if region is not None else ""
        keys = [tensor.key for tensor in session.report().tensors]
    return ([out.detach() for out in outputs], found, dict(model.named_buffers())), note, keys


def assert_same(got, expected, tolerance=1e-11):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("slices", [3, 16])
@pytest.mark.parametrize("name", NETS)
def test_the_same_training_in_slices(name, slices):
    model, x = made(name)
    inputs = [x, x * 2 - 1, x[:5], x[:1].repeat(2, *[1] * (x.dim() - 1))]
    expected, _, keys = train(model, inputs)
    found = regions(model, x, slices)
    assert found
    for region in found:
        got, note, sliced_keys = train(model, inputs, region)
        assert_same(got, expected)
        assert note.endswith(f"in {min(slices, 2)} slices of the batch")
        known = {"3:custom.saved"} if name == "prepared" else set()
        assert [key for key in sliced_keys if key not in known] == [k for k in keys if k not in region.keys]
        assert len(sliced_keys) < len(keys)


@pytest.mark.parametrize("name", ["stem", "normalised", "stack"])
def test_channels_last(name):
    model, x = made(name)
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    for region in regions(model, x, 3):
        assert_same(train(model, [x, x], region)[0], train(model, [x, x])[0])


@pytest.mark.parametrize("name", NETS)
def test_single_precision(name):
    model, x = made(name, dtype=torch.float32)
    for region in regions(model, x, 4):
        assert_same(train(model, [x], region)[0], train(model, [x])[0], 2e-6)


def test_ties_in_pooling():
    x = torch.randn(7, 3, 12, 12, dtype=torch.float64)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(3, 1), nn.Flatten(), nn.Linear(512, 3)
    ).double()
    nn.init.constant_(model[0].weight, 1.0)
    x = x.round()
    (region,) = regions(model, x, 3)
    assert_same(train(model, [x, x], region)[0], train(model, [x, x])[0])


def test_backward_within_step_and_twice():
    model, x = made("normalised")
    (region,) = regions(model, x, 3)
    assert_same(train(model, [x, x], region, covered=True)[0], train(model, [x, x])[0])
    expected, _, _ = train(model, [x])
    with squeezed(model, region):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    assert_same(gradients(model), expected[1][0])


def test_frozen_parameters():
    model, x = made("normalised")
    for number in (1, 3, 6):
        for parameter in model[number].parameters():
            parameter.requires_grad_(False)
    model[0].weight.requires_grad_(False)
    model[4].eval()
    (region,) = regions(model, x)
    got, note, _ = train(model, [x, x], region)
    assert_same(got, train(model, [x, x])[0])
    assert "slices" in note
    model[0].requires_grad_(False)
    assert regions(model, x) == []
    assert "whole" in train(model, [x], region)[1]


def test_weights_that_are_computed():
    model, x = made("stack")
    torch.nn.utils.parametrizations.weight_norm(model[0])
    found = regions(model, x, 3)
    assert len(found) == 2
    for region in found:
        assert_same(train(model, [x, x], region)[0], train(model, [x, x])[0])


def test_chains_end_where_a_second_reader_is():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            first = F.max_pool2d(F.relu(self.down(x)), 2)
            second = F.avg_pool2d(F.relu(self.up(first)), 2)
            return (F.interpolate(second, scale_factor=2) + first).mean((2, 3))

    model, x = Skipping().double(), torch.randn(4, 3, 12, 12, dtype=torch.float64)
    (region,) = regions(model, x)
    assert region.functions == ("conv2d", "relu", "max_pool2d") and region.modules == ("down", "", "")
    assert region.output_bytes == 4 * 8 * 6 * 6 * 8
    assert_same(train(model, [x], region)[0], train(model, [x])[0])


def test_nothing_to_slice():
    x = torch.randn(4, 3, 12, 12)
    no_pooling = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    trained_input = nn.Sequential(
        nn.Conv1d(3, 3, 1), nn.Unflatten(2, (4, 9)), nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)
    )
    indices = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2))
    indices[1].return_indices = True
    no_pooling(x)
    assert regions(no_pooling, x) == regions(trained_input, x.flatten(2)[..., :36]) == []
    assert regions(indices, x) == []


def looks(module, args, output):
    assert output.shape[0] == output.size(0) == len(output) and output.dim() == output.ndim
    assert output.requires_grad and output.is_floating_point() and output.device.type == "cpu"
    assert output.dtype == torch.float64 and isinstance(output, torch.Tensor) and output.numel() > 1


@pytest.mark.parametrize("name", ["stem", "normalised", "stack"])
def test_looking_at_a_shape_changes_nothing(name):
    model, x = made(name)
    region = regions(model, x, 3)[-1]
    for module in model:
        module.register_forward_hook(looks)
    got, note, _ = train(model, [x], region)
    assert "in 3 slices" in note
    assert_same(got, train(model, [x])[0])


kept = []


def prints(module, args, output):
    with redirect_stdout(io.StringIO()) as text:
        print(output)
    assert "grad_fn" in text.getvalue()


READERS = {
    "values": lambda module, args, output: (float(output.detach().mean()), None)[1],
    "no_grad": torch.no_grad()(lambda module, args, output: (output.mean(), None)[1]),
    "prints": prints,
    "strides": lambda module, args, output: (output.stride(), output.is_contiguous(), None)[2],
    "replaces": lambda module, args, output: output * 1.5,
    "changes": lambda module, args, output: (output.data.mul_(0.5), None)[1],
    "gradients": lambda module, args, output: (output.register_hook(lambda gradient: gradient * 2), None)[1],
    "keeps": lambda module, args, output: kept.append(output),
    "list": lambda module, args, output: torch.stack([output, output])[1],
    "adds": lambda module, args, output: (
        output + module(args[0]) if not getattr(module, "busy", True) else None
    ),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("reader", READERS)
def test_reading_in_between(reader, place):
    model, x = made("stem")
    (region,) = regions(model, x, 3)
    model[place].register_forward_hook(READERS[reader])
    expected, _, _ = train(model, [x, x + 1])
    kept.clear()
    got, note, _ = train(model, [x, x + 1], region)
    assert_same(got, expected)
    assert "whole" in note or reader == "adds"
    kept.clear()


def test_a_tensor_kept_and_read_later():
    model, x = made("stem")
    (region,) = regions(model, x, 3)
    model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    results = []
    for chosen in (None, region):
        twin = copy.deepcopy(model)
        with squeezed(twin, chosen):
            loss = twin(x).square().mean() + kept.pop().exp().mean()
            loss.backward()
        results.append((loss.detach(), gradients(twin), dict(twin.named_buffers())))
    assert_same(*results)


def test_other_ways_through():
    class Ways(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.way = made("stem")[0], "all"

        def forward(self, x):
            if self.way == "return":
                return self.layers[1](self.layers[0](x))
            if self.way == "other":
                return self.layers[4:](F.max_pool2d(torch.tanh(self.layers[:2](x)), 2))
            if self.way == "twice":
                return self.layers(x) + self.layers(x * 2)
            if self.way == "no_grad":
                with torch.no_grad():
                    x = self.layers[:4](x)
                return self.layers[4:](x)
            return self.layers(x)

    model, x = Ways(), made("stem")[1]
    (region,) = regions(model, x, 3)
    for model.way in ("all", "return", "other", "twice", "no_grad", "all"):
        expected, _, _ = train(model, [x, x])
        got, note, _ = train(model, [x, x], region)
        assert_same(got, expected)
        assert ("in 3 slices" in note) == (model.way in ("all", "twice"))


def test_arguments_by_name():
    model, x = made("functional")
    (region,) = regions(model, x, 3)
    model.relu = named_relu
    got, note, _ = train(model, [x, x], region)
    assert_same(got, train(model, [x, x])[0])
    assert "whole" in note


def named_relu(x):
    return torch.relu(input=x)


def test_inputs_that_need_gradients_and_autocast():
    model, x = made("stem")
    (region,) = regions(model, x, 3)
    results = []
    for chosen in (None, region):
        twin, image = copy.deepcopy(model), x.clone().requires_grad_()
        with squeezed(twin, chosen) as session:
            twin(image).sum().backward()
            with torch.autocast("cpu", torch.bfloat16):
                out = twin(x)
            out.sum().backward()
            assert chosen is None or "whole" in session.engine.recorder.slicer.note
        results.append((image.grad, gradients(twin)))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_evaluations_are_left_alone():
    model, x = made("stem")
    (region,) = regions(model, x, 3)
    with squeezed(model, region) as session:
        model.eval()
        with torch.no_grad():
            whole = model(x)
        assert session.engine.recorder.slicer.note == ""
        assert type(whole) is torch.Tensor
        model(x).sum().backward()  # gradients with frozen moments
        assert "in 3 slices" in session.engine.recorder.slicer.note
        sliced = gradients(model)
    model.zero_grad()
    model(x).sum().backward()
    assert_same(sliced, gradients(model))


def test_errors_in_the_middle_leave_nothing():
    model, x = made("stem")
    (region,) = regions(model, x, 3)
    _, (expected,), buffers = train(model, [x])[0]
    with squeezed(model, region) as session:
        for error in (ValueError, KeyboardInterrupt):
            hook = model[1].register_forward_hook(lambda module, args, output, error=error: throw(error))
            with pytest.raises(error):
                model(x)
            hook.remove()
        with pytest.raises(RuntimeError, match="channels"):
            model(x[:, :2])
        with pytest.raises(ValueError, match="more than 1 value"):
            model(x[:1, :, :1, :1])
        model[1].reset_running_stats()
        model(x).square().mean().backward()
        assert "in 3 slices" in session.engine.recorder.slicer.note
    assert_same((gradients(model), dict(model.named_buffers())), (expected, buffers))


def throw(error):
    raise error


def test_what_function_modes_do_not_see_is_refused():
    model, x = made("normalised")
    (region,) = regions(model, x, 3)
    scale = torch.ones(1, dtype=torch.float64)
    with squeezed(model, region):
        for hook in (
            model[0].register_forward_hook(lambda module, args, output: Square.apply(output, scale)),
            model[1].register_full_backward_hook(lambda module, before, after: None),
        ):
            with pytest.raises(CaptureError, match="Make a new plan"):
                model(x).sum().backward()
            hook.remove()


def test_a_changed_input_is_noticed():
    model, x = made("stem")
    (region,) = regions(model, x, 3)
    with squeezed(model, region):
        loss = model(x).sum()
        x.add_(1)
        with pytest.raises(CaptureError, match="changed in place"):
            loss.backward()


def test_the_peak_falls():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(4))
    x = torch.randn(16, 3, 64, 64)
    (region,) = regions(model, x, 8)
    peaks = []
    for chosen in (None, region):
        with squeezed(model, chosen):
            for _ in range(2):
                model.zero_grad()
                meter = PeakMeter(torch.device("cpu"))
                meter.start()
                model(x).sum().backward()
                peak = meter.stop([p.grad for p in model.parameters()]).activation_bytes
        peaks.append(peak)
    whole = 16 * 8 * 64 * 64 * 4
    assert peaks[0] > 3 * whole
    assert peaks[1] < 0.8 * whole
