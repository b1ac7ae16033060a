"""Models without memory: where their values come from, and what a rank needs to start."""

import dataclasses
import math
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import squeezebox
from squeezebox import FormatError, OptionError, UnsupportedModelError
from squeezebox.pipeline import Construction, Initial, Runner
from squeezebox.schema import InputForm, Link, PipelineError
from tests.pipeline import ranks

safetensors = pytest.importorskip("safetensors.torch")
WIDTH = 1448  # a square of float32 has 8 MiB


class _Layer(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(width, 2), nn.LayerNorm(width)
        self.linear, self.rate = nn.Linear(width, width), rate
        self.gain = nn.Parameter(torch.randn(width) * 0.02)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.place = nn.Parameter(torch.zeros(1, 3, width))
        nn.init.trunc_normal_(self.place, std=0.02)
        self.turn = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.turn.weight)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        self.register_buffer("frequencies", frequencies, persistent=False)


class _Model(nn.Module):
    """Initialised in every way that models are."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(11, width, padding_idx=0)
        self.mixed = nn.ModuleList([nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3), nn.LSTM(3, 5)])
        self.leaning = nn.Linear(8, 8)
        nn.init.normal_(self.leaning.weight.t())
        rates = torch.linspace(0, 0.3, 2)
        assert rates.tolist() == [rate.item() for rate in rates] == list(rates.numpy())
        self.layers = nn.ModuleList(_Layer(width, rate) for rate in rates.tolist())
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5))
        self.apply(self._begin)
        for name, parameter in self.named_parameters():
            if name.endswith("turn.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(6))
        torch.manual_seed(5)
        self.wide = nn.Linear(3, 3).double()
        self.table = nn.Parameter(torch.from_numpy(np.arange(6.0).reshape(2, 3)), requires_grad=False)
        self.parts = nn.Parameter(torch.empty(3, 3))
        with torch.no_grad():
            self.parts.copy_(torch.from_numpy(np.ones((3, 3), dtype=np.float32)))
            self.parts[0] = 7.0
            self.parts[:, 1].uniform_(generator=torch.Generator().manual_seed(2))
        self.order = nn.Parameter(torch.randperm(5).float())
        if self.order.sum() > 3.0:
            self.order.data.mul_(2.0)

    def _begin(self, module):
        if type(module) is nn.Linear:
            nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _built(make, seed=1):
    torch.manual_seed(seed)
    model = make()
    return model, torch.get_rng_state()


def _equal(wanted, model, initial):
    pairs = zip(
        [*wanted.named_parameters(), *wanted.named_buffers()],
        [*model.parameters(), *model.buffers()],
        strict=True,
    )
    for (name, tensor), found in pairs:
        value = initial.of(found)
        assert torch.equal(tensor.detach(), value), name
        assert (value.dtype, value.stride()) == (tensor.dtype, tensor.stride()), name
        assert found.requires_grad == tensor.requires_grad, name


def test_values_are_an_ordinary_constructions_to_the_bit():
    wanted, state = _built(_Model)
    with Construction() as construction:
        model, found = _built(_Model)
    assert torch.equal(state, found)
    assert all(each.is_meta for each in [*model.parameters(), *model.buffers()])
    optimizer = torch.optim.AdamW(model.parameters())
    initial = Initial(model, device=torch.device("cpu"), construction=construction)
    assert not any(each.is_meta for each in optimizer.param_groups[0]["params"])
    _equal(wanted, model, initial)
    with initial.filled(model.layers[1]):
        assert torch.equal(model.layers[1].turn.weight, wanted.layers[1].turn.weight)
    assert model.layers[1].turn.weight.isnan().all()


def test_a_model_on_the_meta_device_is_reset():
    def make():
        return nn.Sequential(
            nn.Linear(3, 3),
            nn.MultiheadAttention(4, 2),
            nn.BatchNorm1d(3),
            nn.TransformerEncoderLayer(8, 2, 16),
        )

    wanted, state = _built(make)
    with torch.device("meta"):
        model = make()
    torch.manual_seed(1)
    _equal(wanted, model, Initial(model, device=torch.device("cpu")))
    assert torch.equal(state, torch.get_rng_state())


def test_what_nothing_initialises_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), _Layer(4, 0.0))
    with pytest.raises(UnsupportedModelError, match=r"^1\.gain is on the meta device, and nothing says"):
        Initial(model)
    assert model[0].weight.is_meta


def test_an_initialiser_that_is_changed_afterwards_is_refused():
    values = torch.zeros(2)
    with pytest.raises(UnsupportedModelError, match=r"\(2,\) initialises the model and is then written"):
        with Construction(), torch.no_grad():
            nn.Linear(2, 2).bias.copy_(values)
            values += 1.0


def test_weights_are_read_by_name(tmp_path):
    torch.manual_seed(0)
    wanted = ranks.Tied()
    tensors = {name: each.clone() for name, each in wanted.state_dict().items()}
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        safetensors.save_file({name: tensors[name] for name in part}, tmp_path / f"{number}.safetensors")
    with torch.device("meta"):
        model = ranks.Tied()
    _equal(wanted, model, Initial(model, device=torch.device("cpu"), weights=tmp_path))
    for other, message in (
        (ranks.Tied(words=12), "has shape"),
        (ranks.Tied(depth=4), "4 of the model's par"),
    ):
        with pytest.raises(FormatError, match=message):
            Initial(other, weights=tmp_path)
    with pytest.raises(FormatError, match="no safetensors file that can be read"):
        Initial(wanted, weights=tmp_path / "none.safetensors")


def _trained(rank, plan, folder, options):
    return [_trained_one(plan, how, folder, options) for how in ("plain", "constructed", "read")]


def _trained_one(plan, how, folder, options):
    construction = None
    if how == "constructed":
        with Construction() as construction:
            model = ranks.tied()
    else:
        model = ranks.tied(seed=0 if how == "plain" else 1)
    model.blocks[1][1].weight.requires_grad_(False)
    optimizer = ranks.OPTIMIZERS["adamw"](model.parameters())
    runner = Runner(
        model,
        plan,
        optimizer=optimizer,
        loss_fn=ranks.entropy,
        construction=construction,
        weights=folder if how == "read" else None,
        **options,
    )
    losses = [runner.step(*ranks.words(batch, 8)) for batch in range(3)]
    losses.append(runner.evaluate(*ranks.words(9, 8)))
    weights = runner.state_dict()
    runner.close()
    return losses, weights


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["own", "torch"])
def test_training_is_that_of_an_ordinary_model_to_the_bit(engine, tmp_path):
    plan = ranks.plan(5, 2, "1f1b", 4, inputs=(InputForm(shape=(5,), dtype="int64"),))
    safetensors.save_model(ranks.tied(), tmp_path / "model.safetensors")
    for found in ranks.run(_trained, 2, plan, tmp_path, {"engine": engine}):
        assert not isinstance(found, str), found
        (losses, weights), *others = found
        for again, values in others:
            assert again == losses
            assert values.keys() == weights.keys()
            assert all(torch.equal(values[name], each) for name, each in weights.items())


def _status(name):
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def _large(blocks=10):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(blocks)))


def _started(rank, plan):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    with Construction() as construction:
        model = _large()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = Runner(
        model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, construction=construction
    )
    peak = _status("VmHWM") - before
    runner.close()
    return peak, runner.weights_bytes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no peak")
def test_a_rank_needs_less_memory_than_the_model_to_start():
    plan = ranks.plan(10, 5, "1f1b", 2, inputs=(InputForm(shape=(WIDTH,), dtype="float32"),))
    whole = 10 * 4 * WIDTH * (WIDTH + 1)
    for result in ranks.run(_started, 5, plan):
        assert not isinstance(result, str), result
        peak, own = result
        assert whole // 5 <= own <= whole // 5 + 4 * 64  # each of 4 tensors begins at a multiple of 64
        assert peak < own + 0.4 * whole  # two or three tensors at a time, and what starting takes


_GROUPS = Path("/sys/fs/cgroup/memory")  # control groups of version 1, or else of version 2
_LIMIT = "memory.limit_in_bytes"
if not _GROUPS.exists():
    _GROUPS, _LIMIT = Path("/sys/fs/cgroup"), "memory.max"


def _limited(folder, nbytes):
    """This process may take so much more memory; the kernel kills it where it takes all."""
    group = folder / str(os.getpid())
    group.mkdir()
    (group / _LIMIT).write_text(str(nbytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _trained_within(rank, plan, folder, nbytes):
    _limited(folder, nbytes)
    with Construction() as construction:
        model = _large(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_fn": nn.functional.mse_loss, "construction": construction}
    runner = Runner(model, plan, optimizer=optimizer, **options)
    given = torch.ones(plan.microbatches * plan.microbatch, WIDTH)
    losses = [runner.step(given, given) for _ in range(3)]
    runner.close()
    return losses


def _whole_within(rank, folder, nbytes):
    _limited(folder, nbytes)
    return len(_large(40))


@pytest.fixture
def groups():
    folder = _GROUPS / f"squeezebox-{os.getpid()}"
    try:
        folder.mkdir()
        if _LIMIT == "memory.max":
            (folder / "cgroup.subtree_control").write_text("+memory")
    except OSError:
        pytest.skip("this user may not limit memory by control groups")
    yield folder
    for each in folder.iterdir():
        if each.is_dir():
            each.rmdir()
    folder.rmdir()


@pytest.mark.slow
def test_ranks_train_a_model_that_none_of_them_may_hold(groups):
    plan = ranks.plan(40, 5, "1f1b", 2, inputs=(InputForm(shape=(WIDTH,), dtype="float32"),))
    nbytes = 40 * 4 * WIDTH * (WIDTH + 1) * 19 // 20
    results = ranks.run(_trained_within, 5, plan, groups, nbytes)
    assert all(losses == [None] * 3 for losses in results[:-1]), results
    assert results[-1][2] < results[-1][0]
    (process,), _ = ranks.start(_whole_within, 1, groups, nbytes)
    process.join(60.0)
    assert process.exitcode == -signal.SIGKILL


def test_blocks_are_planned_one_by_one():
    with Construction() as construction:
        model = ranks.tied()
    sample = ranks.words(0, 8)
    options = {
        "sample": sample,
        "loss_fn": ranks.entropy,
        "ranks": 2,
        "memory_bytes": 2**30,
        "microbatches": [2],
        "link": Link(bytes_per_second=1e9, latency_seconds=1e-5),
    }
    found = squeezebox.plan_pipeline(model, construction=construction, **options)
    assert all(each.is_meta for each in model.parameters())
    wanted = squeezebox.plan_pipeline(ranks.tied(), **options)
    assert found[0].fingerprint == wanted[0].fingerprint and found[0].blocks == wanted[0].blocks
    peaks = {_form(each): [stage.peak_bytes for stage in each.stages] for each in wanted}
    for each in found:  # which of them are worth their time is by what was measured
        assert math.isfinite(each.seconds) and each.seconds > 0.0
        own = [stage.peak_bytes for stage in each.stages]
        assert own == peaks.get(_form(each), own)
    assert any(_form(each) in peaks for each in found)


def _form(plan):
    return plan.schedule, plan.ranks, tuple((stage.first, stage.end, stage.policy) for stage in plan.stages)


def test_arrays_of_numpy_do_not_lose_what_is_written():
    with Construction(), pytest.raises(ValueError, match="read-only"):
        nn.Linear(2, 2).weight.detach().numpy()[0] = 1.0


def test_generators_of_ones_own_draw_the_same():
    def make():
        generator = torch.Generator().manual_seed(7)
        model = nn.Module()
        model.weight = nn.Parameter(torch.randn(3, generator=generator))
        model.bias = nn.Parameter(torch.empty(3).normal_(generator=generator))
        return model

    with Construction() as construction:
        made = make()
    for own, wanted in zip(made.parameters(), make().parameters(), strict=True):
        assert torch.equal(construction.value(own), wanted)


def _made(model, plan):
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    return Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss)


def _unseeded(rank, plan):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    model[1].running_mean += rank
    model[2].requires_grad_(False)
    runner = _made(model, plan)
    weights = runner.state_dict()
    runner.close()
    return weights


def test_replicas_begin_alike_without_a_seed():
    one, other = ranks.run(_unseeded, 2, ranks.plan(3, 1, "1f1b", 2, replicas=2))
    assert all(torch.equal(one[name], each) for name, each in other.items())


def _twice(rank, plan, other):
    model = ranks.chain()
    for _ in range(2):
        _made(model, plan).close()
    try:
        _made(model, other)
    except (OptionError, PipelineError) as error:
        return str(error)


def test_a_model_that_a_runner_has_parted_is_not_parted_elsewhere():
    even = ranks.plan(8, 2, "1f1b", 2)
    first, second = even.stages
    other = dataclasses.replace(
        even, stages=(dataclasses.replace(first, end=5), dataclasses.replace(second, first=5))
    )
    said, _ = ranks.run(_twice, 2, even, other)
    assert said.startswith("4.inner.0.weight has no values: an earlier runner")
