"""A recorded step against the allocator's own peak, real and fake, and what it says of every storage."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from squeezebox.memory import layout
from squeezebox.profiling import PeakMeter, fake_like, record_step
from squeezebox.schema import Kind, OptionError

PERSISTENT = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.STATE)


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(16, 32, 3, stride=2), nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def subject(optimizer=torch.optim.Adam):
    model = network()
    sample = torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
    taken = optimizer(model.parameters())
    functional.cross_entropy(model(sample[0]), sample[1]).backward()
    taken.step()
    taken.zero_grad()
    return model, sample, taken


def recorded(model, sample, optimizer, loss_fn=functional.cross_entropy):
    return record_step(model, sample=sample, loss_fn=loss_fn, optimizer=optimizer)


def measured(model, sample, optimizer):
    gc.collect()
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = sum(t.nbytes for t in [*model.parameters(), *model.buffers(), *sample, *states])
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    optimizer.zero_grad()
    functional.cross_entropy(model(sample[0]), sample[1]).backward()
    optimizer.step()
    return held + meter.stop([]).total_bytes


def faked(model, sample, optimizer=torch.optim.Adam):
    with FakeTensorMode():
        twin = network()
        return recorded(twin, fake_like(sample, None), optimizer(twin.parameters()) if optimizer else None)


def test_the_recorded_peak_is_the_allocators():
    model, sample, optimizer = subject()
    peak = recorded(model, sample, optimizer).peak()
    optimizer.zero_grad()
    assert peak.nbytes == measured(model, sample, optimizer)
    assert sum(peak.by_kind.values()) == peak.nbytes


def test_fake_tensors_make_the_same_storages():
    model, sample, _ = subject()
    real, fake = recorded(model, sample, None).peak(), faked(model, sample, None).peak()
    assert fake.nbytes == real.nbytes
    assert (fake.call.phase, fake.call.module) == (real.call.phase, real.call.module)


class Attention(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.qkv, self.masked = nn.Linear(64, 192), masked

    def forward(self, x):
        parts = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril() if self.masked else None
        return functional.scaled_dot_product_attention(*parts, attn_mask=mask)


OPERATORS = {
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, groups=16), (8, 16, 32, 32)),
    "strided": (lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1), (12, 16, 32, 32)),
    "transposed": (lambda: nn.ConvTranspose2d(16, 8, 2, stride=2), (8, 16, 16, 16)),
    "conv3d": (lambda: nn.Conv3d(4, 8, 3), (4, 4, 12, 12, 12)),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32)), (8, 16, 32, 32)),
    "attention": (lambda: Attention(masked=False), (8, 128, 64)),
    "attention with a mask": (lambda: Attention(masked=True), (8, 128, 64)),
    "product": (lambda: nn.Linear(512, 16), (256, 512)),
    "recurrent": (lambda: nn.GRU(32, 64, batch_first=True), (8, 20, 32)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_what_operators_take_and_give_back_is_predicted(name):
    make, shape = OPERATORS[name]

    def loss_fn(output, _):
        return (output[0] if isinstance(output, tuple) else output).sum()

    real = recorded(make(), (torch.randn(shape), None), None, loss_fn).peak()
    with FakeTensorMode():
        fake = recorded(make(), (torch.randn(shape), None), None, loss_fn).peak()
    assert fake.nbytes == pytest.approx(real.nbytes, rel=0.015)


def test_every_kind_is_told_apart():
    model, sample, optimizer = subject()
    trace = recorded(model, sample, optimizer)
    total = {kind: sum(s.nbytes for s in trace.storages if s.kind is kind) for kind in Kind}
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert total[Kind.PARAMETER] == total[Kind.GRADIENT] == parameters
    assert total[Kind.STATE] == 2 * parameters + 4 * len(list(model.parameters()))
    assert total[Kind.INPUT] == sum(tensor.nbytes for tensor in sample)
    assert total[Kind.SAVED] > sample[0].nbytes
    assert all(s.call is None and s.allocated_at == 0 for s in trace.storages if s.kind in PERSISTENT)


def test_state_that_the_step_makes_is_state():
    model = network()
    sample = torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)
    trace = recorded(model, sample, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    made = sum(storage.nbytes for storage in trace.storages if storage.kind is Kind.STATE)
    assert made == sum(parameter.nbytes for parameter in model.parameters())


def test_calls_know_phase_and_module():
    model, sample, optimizer = subject()
    calls = recorded(model, sample, optimizer).calls
    found = {(call.phase, call.operator.split(".")[0], call.module) for call in calls}
    assert ("forward", "convolution", "4") in found
    assert ("backward", "convolution_backward", "4") in found
    assert ("backward", "native_batch_norm_backward", "1") in found
    assert {call.phase for call in calls} == {"forward", "loss", "backward", "optimizer"}


def test_what_checkpointing_computes_again_is_backwards_and_its_modules():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    model = Checkpointed()
    trace = recorded(model, (torch.randn(4, 8), None), None, lambda output, _: output.sum())
    again = [call for call in trace.calls if call.phase == "backward" and "relu" == call.operator]
    assert [call.module for call in again] == ["body.1"]


def test_lifetimes_lie_within_the_step_and_can_be_laid_out():
    trace = recorded(*subject())
    assert all(0 <= s.allocated_at < s.freed_at <= trace.end for s in trace.storages)
    placed = layout(trace.buffers())
    assert placed.lower_bound_bytes >= trace.peak().nbytes
    assert len(trace.buffers(Kind.SAVED)) < len(trace.buffers())


def test_hooks_come_off_when_the_loss_raises():
    model, sample, optimizer = subject()

    def broken(output, target):
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        recorded(model, sample, optimizer, broken)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.autograd.profiler._is_profiler_enabled
    recorded(model, sample, optimizer)


def test_the_profiler_ends_when_the_model_has_no_shapes_yet():
    sample = torch.randn(2, 4), torch.randn(2, 3)
    with pytest.raises(ValueError, match="uninitialized") as caught:
        recorded(nn.LazyLinear(3), sample, None, functional.mse_loss)
    assert not torch.autograd.profiler._is_profiler_enabled, caught  # held, and all that it refers to


def test_another_profiler_is_refused():
    with torch.autograd.profiler.profile(), pytest.raises(OptionError, match="another profiler"):
        recorded(*subject())


def test_streams_of_a_host_are_the_default_one():
    assert {storage.streams for storage in recorded(*subject()).storages} == {(0,)}
