"""Profiles kept on disk are used for the very same step only, and damaged ones never."""

import functools
import json
import os
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.schema import OutputError
from tests.planning.test_max_batch import batch, network

CALLS = Counter()


class Counted(nn.Module):
    """A network whose forward passes are counted: by no attribute, as that would be part of the step."""

    def __init__(self):
        super().__init__()
        self.body, self.checkpoints = network(), False

    @property
    def calls(self):
        return CALLS[self]

    def forward(self, x):
        CALLS[self] += 1
        return self.body(x)


class Graph(Counted):
    def forward(self, nodes, edges):
        CALLS[self] += 1
        return torch.sparse.mm(edges, nodes @ self.body[0].weight.flatten()[:96].view(16, 6))


class Scaled(Counted):
    def forward(self, x, scale):
        return super().forward(x * scale)


def times(output, target, by):
    return F.cross_entropy(output, target) * by


def closed(by):
    return lambda output, target: times(output, target, by)


class Times:
    def __init__(self, by):
        self.by = by

    def __call__(self, output, target):
        return times(output, target, self.by)


def plan(model, folder, sample=None, **options):
    """(the plan, forward passes that it took)."""
    before = model.calls
    made = squeezebox.plan(
        model,
        sample=sample or batch(8),
        loss_fn=options.pop("loss_fn", F.cross_entropy),
        cache=folder,
        **options,
    )
    return made, model.calls - before


def test_the_same_step_is_profiled_once(tmp_path):
    model = Counted()
    first, whole = plan(model, tmp_path / "new" / "folder")
    assert whole > 4
    again, calls = plan(model, tmp_path / "new" / "folder")
    assert calls == 0 and again == first
    limited, calls = plan(model, str(tmp_path / "new" / "folder"), budget="80%")
    assert calls <= 2 and limited.predicted_peak_bytes <= limited.budget_bytes  # slices may have been tried
    assert len(os.listdir(tmp_path / "new" / "folder")) == 1


def another_weight(model):
    with torch.no_grad():
        model.body[0].weight[0, 0, 0, 0] += 1e-3


def another_layout(model):
    model.body[0].weight.data = model.body[0].weight.data.to(memory_format=torch.channels_last)


def another_setting(model):
    model.body[0].padding_mode = "reflect"
    model.body[0]._reversed_padding_repeated_twice = [1, 1, 1, 1]


def another_attribute(model):
    model.checkpoints = True


def evaluation(model):
    model.body[2].eval()


def hooked(model):
    model.body[0].register_forward_hook(lambda module, inputs, output: 2 * output)


def hooked_before(model):
    model.body[0].register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


CHANGES = (
    another_weight,
    another_layout,
    another_setting,
    another_attribute,
    evaluation,
    hooked,
    hooked_before,
)


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_model_is_another_step(change, tmp_path):
    model = Counted()
    plan(model, tmp_path, exact=True)
    change(model)
    assert plan(model, tmp_path, exact=True)[1] > 0
    assert plan(model, tmp_path, exact=True)[1] == 0


def test_another_sample_loss_noise_or_optimizer_is_another_step(tmp_path):
    model = Counted()
    x, y = batch(8)
    adam = torch.optim.Adam(model.parameters())
    together = torch.optim.Adam(model.parameters(), foreach=True)
    for options in (
        {"exact": True},
        {"noise": 1e-2},
        {"exact": True, "sample": (x[:4].clone(), y[:4])},
        {"exact": True, "sample": (x, y.flip(0))},
        {"exact": True, "loss_fn": lambda out, target: F.cross_entropy(out, target) * 2},
        {"exact": True, "loss_fn": lambda out, target: F.cross_entropy(out, target) * 3},
        {"exact": True, "loss_fn": functools.partial(times, by=2)},
        {"exact": True, "loss_fn": functools.partial(times, by=3)},
        {"exact": True, "loss_fn": closed(2)},
        {"exact": True, "loss_fn": closed(3)},
        {"exact": True, "loss_fn": Times(2)},
        {"exact": True, "loss_fn": Times(3)},
        {"exact": True, "offload": False},
        {"exact": True, "optimizer": adam},
        {"exact": True, "optimizer": together},
    ):
        assert plan(model, tmp_path, **options)[1] > 0
        assert plan(model, tmp_path, **options)[1] == 0


def test_another_allocator_is_another_step(tmp_path, monkeypatch):
    model = Counted()
    plan(model, tmp_path, exact=True)
    monkeypatch.setenv("MALLOC_CONF", "dirty_decay_ms:0")
    assert plan(model, tmp_path, exact=True)[1] > 0
    assert plan(model, tmp_path, exact=True)[1] == 0


def test_the_learning_rate_is_no_part_of_the_step(tmp_path):
    model = Counted()
    for rate in (0.1, 0.2):
        plan(model, tmp_path, exact=True, optimizer=torch.optim.SGD(model.parameters(), lr=rate))
    assert len(os.listdir(tmp_path)) == 1


def test_a_sparse_input_is_known_by_what_it_holds(tmp_path):
    model, nodes, edges = Graph(), torch.randn(8, 16), torch.eye(8)
    for value in (edges.to_sparse(), (2 * edges).to_sparse()):
        for calls in (True, False):
            sample = (nodes, value), torch.zeros(8, 6)
            found = plan(model, tmp_path, sample, exact=True, loss_fn=F.mse_loss)[1]
            assert (found > 0) == calls


@pytest.mark.parametrize(
    "damage", ("", "{", "[]", "null", '{"checksum": "", "step": "{}"}', "figure", "half")
)
def test_damaged_entries_are_made_anew(damage, tmp_path):
    model = Counted()
    plan(model, tmp_path, exact=True)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_text()
    bad = {"half": whole[: len(whole) // 2], "figure": whole.replace("held_bytes", "held_bites", 1)}
    entry.write_text(bad.get(damage, damage))
    assert plan(model, tmp_path, exact=True)[1] > 0
    assert json.loads(entry.read_text()).keys() == json.loads(whole).keys()
    assert plan(model, tmp_path, exact=True)[1] == 0
    assert list(tmp_path.iterdir()) == [entry]


def test_a_folder_that_cannot_be_is_refused_before_anything_runs(tmp_path):
    model = Counted()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cache"):
        plan(model, tmp_path / "file" / "folder")
    assert model.calls == 0


def test_progress_is_told_step_by_step():
    told = []
    squeezebox.plan(
        network(), sample=batch(4), loss_fn=F.cross_entropy, on_progress=lambda *words: told.append(words)
    )
    assert [done for done, _, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total, _ in told} == {len(told)}
    assert all(isinstance(what, str) and what for _, _, what in told)


def test_what_is_no_tensor_in_a_sample_is_part_of_the_step(tmp_path):
    model, (x, y) = Scaled(), batch(8)
    for scale in (1.0, 2.0):
        sample = ({"x": x, "scale": scale}, y)
        assert plan(model, tmp_path, sample, exact=True)[1] > 0
        assert plan(model, tmp_path, sample, exact=True)[1] == 0


def test_weights_of_a_module_within_the_loss_are_part_of_the_step(tmp_path):
    model, scale = Counted(), nn.Linear(1, 1)
    options = {"exact": True, "loss_fn": lambda *of: F.cross_entropy(*of) * scale.weight.detach().sum()}
    for _ in range(2):
        assert plan(model, tmp_path, **options)[1] > 0
        assert plan(model, tmp_path, **options)[1] == 0
        scale.weight.data += 1.0
