"""Strips are as high as the memory allows, and compose with compression and recomputation."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.memory import PeakMeter, ProcessMeter
from squeezebox.schema import BudgetError
from squeezebox.streaming import StreamedStep

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tensors_alone(monkeypatch):
    """What else this process grows by depends on the tests before; test_process.py is about that."""
    monkeypatch.setattr(ProcessMeter, "stop", lambda self: None)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 2, 4, 2, 1),
    )


@pytest.fixture
def files(tmp_path):
    """A memory-mapped image of bytes, height x width x 3, and classes."""
    random = np.random.default_rng(0)
    image = np.memmap(tmp_path / "image", np.uint8, "w+", shape=(640, 96, 3))
    image[:] = random.integers(0, 256, image.shape)
    classes = np.memmap(tmp_path / "classes", np.int64, "w+", shape=(1, 640, 96))
    classes[:] = random.integers(0, 2, classes.shape)
    return image.transpose(2, 0, 1)[None], classes


def peak_of(work):
    meter = PeakMeter(CPU)
    assert meter.start()
    work()
    return meter.stop(()).total_bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_stays_within_the_memory(files, recompute):
    model, memory = network(), 3 * 2**19
    step = StreamedStep(model, nn.CrossEntropyLoss(), memory=memory, recompute=recompute)
    plan = step.plan(*files)
    assert 1 < plan.stages[-1].strips < 64
    assert f"{plan.stages[-1].strips} strips" in str(plan)
    peak = peak_of(lambda: step(*files))
    assert 0.5 * memory < peak < memory


def test_bytes_are_scaled_and_equal_the_whole_image(files):
    model, other = network().double(), network().double()
    image, classes = files
    loss = StreamedStep(model, nn.CrossEntropyLoss(), height=100)(image, classes)
    whole = torch.from_numpy(np.array(image)).double() / 255
    expected = nn.functional.cross_entropy(other(whole), torch.from_numpy(np.array(classes)))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-14)


def test_too_little_memory_is_said_with_numbers(files):
    step = StreamedStep(network(), nn.CrossEntropyLoss(), memory="10KiB")
    with pytest.raises(BudgetError, match="one row.*KiB.*10.00 KiB"):
        step(*files)


def test_progress(files):
    seen = []
    StreamedStep(network(), nn.CrossEntropyLoss(), height=100, progress=seen.append)(*files)
    assert [each.done for each in seen] == [*range(1, seen[-1].total + 1)]
    assert seen[0].seconds_left > 0.0 == seen[-1].seconds_left


def test_strips_are_packed_by_a_session(files):
    model = network()
    exact = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = squeezebox.attach(model, optimizer=optimizer, noise=1e-3)
    try:
        step = StreamedStep(model, nn.CrossEntropyLoss(), height=160, context=session.step)
        step(*files)
        record = session.report().record
    finally:
        session.detach()
    StreamedStep(exact, nn.CrossEntropyLoss(), height=160)(*files)
    lossy = [tensor for tensor in record.tensors if tensor.bound > 0.0]
    assert lossy and record.packed_bytes < 0.6 * record.saved_bytes
    pairs = [*zip(model.parameters(), exact.parameters(), strict=True)]
    error = sum(float((mine.grad - theirs.grad).square().sum()) for mine, theirs in pairs)
    norm = sum(float(theirs.grad.square().sum()) for _, theirs in pairs)
    assert 0.0 < error / norm < 1e-2


def test_an_exception_leaves_the_model_as_it_was(files):
    model = nn.Sequential(network(), nn.BatchNorm2d(2))
    before = copy.deepcopy(model.state_dict())

    def stop(progress):
        if progress.done == progress.total - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StreamedStep(model, nn.CrossEntropyLoss(), height=160, progress=stop)(*files)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_way_back_is_measured_where_it_takes_more_than_the_way_ahead(files):
    model, memory = nn.Conv2d(3, 64, 3, padding=1), 8 * 2**20
    step = StreamedStep(model, lambda output, _: output.mean() / 2, memory=memory)
    (stage,) = step.plan(files[0], None).stages
    peak = peak_of(lambda: step(files[0], None))
    assert stage.strips > 1 and 0.5 * memory < peak < memory


def sees_far():
    """A low strip's peak is in the first layer, and a high one's in the last."""
    return nn.Sequential(nn.Conv2d(3, 8, 64, 64), nn.Upsample(scale_factor=64), nn.Conv2d(8, 2, 1))


def has_a_large_head():
    """Gradients of 4 MiB, which are there from the loss on."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2**18))


@pytest.mark.parametrize(("network", "memory"), [(sees_far, 9 * 2**20), (has_a_large_head, 16 * 2**20)])
def test_peaks_that_do_not_grow_evenly(network, memory):
    image = torch.randn(1, 3, 4096, 64)
    step = StreamedStep(network(), lambda output, _: output.square().mean() / 2, memory=memory)
    plan = step.plan(image, None)
    peak = peak_of(lambda: step(image, None))
    assert 0.5 * memory < peak < memory
    for stage in plan.stages:  # of two strips, one less would be half of them
        assert min(0.75, 1 - 1 / stage.strips) * memory < stage.peak_bytes < memory


def has_weights_that_are_computed():
    """1 MiB of weights, which strips read a normalised copy of, and its gradient."""
    layer = nn.Conv2d(3, 2**14, (1, 5), stride=(1, 64))
    return nn.Sequential(nn.utils.parametrizations.weight_norm(layer), nn.Conv2d(2**14, 1, 1))


@pytest.mark.parametrize("memory", [9 * 2**20, 10 * 2**20, 12 * 2**20])
@pytest.mark.parametrize("network", [has_a_large_head, has_weights_that_are_computed])
def test_what_has_no_rows_counts(network, memory):
    image = torch.randn(1, 3, 1024, 64)
    step = StreamedStep(network(), lambda output, _: output.square().mean() / 2, memory=memory)
    plan = step.plan(image, None)
    peak = peak_of(lambda: step(image, None))
    assert max(plan.rowless_bytes, *(stage.peak_bytes for stage in plan.stages)) < memory
    assert plan.rowless_bytes < 1.01 * peak < 1.01 * memory
    assert "values without rows: at most" in str(plan)


def test_too_little_memory_for_what_has_no_rows_is_said_with_numbers():
    step = StreamedStep(has_a_large_head(), lambda output, _: output.square().mean(), memory="6.5MiB")
    with pytest.raises(BudgetError, match=r"values without rows .* need 7.00 MiB, more than the 6.50 MiB"):
        step(torch.randn(1, 3, 1024, 64), None)


def test_strips_of_which_only_some_own_a_row_at_the_end_are_measured_where_they_do():
    step = StreamedStep(nn.Conv2d(3, 8, 16, 16), lambda output, _: output.square().mean(), memory="100KiB")
    with pytest.raises(BudgetError, match="one row"):
        step(torch.randn(1, 3, 51 * 16, 512), None)
