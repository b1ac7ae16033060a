"""attach(..., arena=True): the same results, the same bytes in every step, and nothing overwritten."""

import dataclasses
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

import squeezebox
from squeezebox.profiling import PeakMeter

CLASSES = 10


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, 64)
        layer = {"d_model": 64, "nhead": 4, "dim_feedforward": 256, "dropout": 0.1, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer, norm_first=True) for _ in range(2))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, tokens):
        x = self.tokens(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def convolutions():
    layers = []
    for width, wider in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Flatten(), nn.Linear(32 * 64, CLASSES))


def images(generator, batch=16):
    return torch.randn(batch, 3, 32, 32, generator=generator)


def texts(generator, batch=8):
    return torch.randint(0, CLASSES, (batch, 64), generator=generator)


CASES = {"convolutions": (convolutions, images), "gpt": (Gpt, texts)}


class Training:
    """A model under a session, and batches for it."""

    def __init__(self, case="convolutions", arena=True, **options):
        torch.manual_seed(0)
        make, self.batch = CASES[case]
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        options = options or {"noise": 1e-3}
        self.session = squeezebox.attach(self.model, optimizer=self.optimizer, arena=arena, **options)
        self.generator = torch.Generator().manual_seed(1)

    def loss(self, *size):
        inputs = self.batch(self.generator, *size)
        with self.session.step():
            logits = self.model(inputs)
            target = torch.arange(logits.shape[:-1].numel()) % CLASSES
            return functional.cross_entropy(logits.flatten(0, -2), target)

    def step(self, *size):
        self.optimizer.zero_grad()
        loss = self.loss(*size)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def arena(self):
        return self.session.report().record.arena

    def peak(self):
        self.session.report()  # ends the session's own measurement
        self.optimizer.zero_grad()
        gc.collect()
        meter = PeakMeter(torch.device("cpu"))
        assert meter.start()
        self.step()
        return meter.stop([]).total_bytes


@pytest.mark.parametrize("options", [{"noise": 1e-3}, {"exact": True}], ids=["noise", "exact"])
@pytest.mark.parametrize("case", CASES)
def test_results_are_equal_to_the_bit(case, options):
    losses = {}
    for arena in (True, False):
        training = Training(case, arena, **options)
        losses[arena] = [training.step() for _ in range(8)]
        record = training.arena()
        assert (record is not None) == arena
        assert record is None or record.tensors
    assert losses[True] == losses[False]


@pytest.mark.parametrize(
    ("options", "steps"), [({"exact": True}, 5), ({"noise": 1e-3}, 24)], ids=["exact", "noise"]
)
@pytest.mark.parametrize("case", CASES)
def test_a_later_step_takes_the_bytes_of_the_first(case, options, steps):
    training = Training(case, **options)
    for _ in range(steps):  # the first sixteen refresh the bounds
        training.step()
    layouts = training.arena().layouts
    first, *later = [training.peak() for _ in range(6)]
    assert training.arena().spills == 0
    assert later == [first] * 5
    assert training.arena().layouts == layouts


def test_without_an_arena_they_differ():
    training = Training(arena=False)
    for _ in range(18):
        training.step()
    assert len({training.peak() for _ in range(6)}) > 1


def gradients(training, loss, **options):
    return torch.autograd.grad(loss, list(training.model.parameters()), **options)


def warmed(case="convolutions", **options):
    training = Training(case, **options)
    for _ in range(6):
        training.step()
    assert training.arena().tensors
    return training


def test_a_retained_graph_is_not_overwritten():
    training = warmed()
    loss = training.loss()
    before = gradients(training, loss, retain_graph=True)
    training.optimizer.zero_grad()
    training.loss().backward()  # of another batch, in the same places
    again = gradients(training, loss)
    assert all(torch.equal(*pair) for pair in zip(before, again, strict=True))
    assert training.arena().spills


def test_a_graph_of_an_earlier_step_is_not_overwritten():
    plain, squeezed = warmed(arena=True, exact=True), Training(arena=False, exact=True)
    squeezed.model.load_state_dict(plain.model.state_dict())
    found = []
    for training in (plain, squeezed):
        training.generator.manual_seed(5)
        torch.manual_seed(5)
        waiting = training.loss()
        for _ in range(2):
            gradients(training, training.loss())
        found.append(gradients(training, waiting))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_second_derivatives_are_those_without_an_arena():
    found = []
    for arena in (True, False):
        training = Training("gpt", arena, exact=True)
        training.model.eval()  # attention's quick path has no second derivatives; dropout is off
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for _ in range(6):
                training.step()
            first = gradients(training, training.loss(), create_graph=True)
            found.append(gradients(training, sum(gradient.square().sum() for gradient in first)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_two_models_have_arenas_of_their_own():
    pair = [warmed(exact=True), warmed(exact=True)]
    alone = warmed(exact=True)

    def seeded(training):
        torch.manual_seed(5)  # of dropout
        training.generator.manual_seed(5)
        return training.loss()

    waiting = [seeded(training) for training in pair]
    found = [gradients(training, loss) for training, loss in zip(pair, waiting, strict=True)]
    expected = gradients(alone, seeded(alone))
    assert all(torch.equal(*both) for both in zip(found[0], found[1], strict=True))
    assert all(torch.equal(*both) for both in zip(found[0], expected, strict=True))


def test_larger_batches_and_evaluation_fall_back():
    training = warmed()
    training.step(64)
    record = training.arena()
    assert record.spills > 0
    assert record.spilled_bytes > 0
    with torch.no_grad():
        training.model(images(training.generator))
    training.step()
    assert training.arena().total_spills == record.total_spills


def test_the_report_says_what_became_of_the_arena(tmp_path):
    training = Training()
    training.step()
    assert "arena: none yet" in str(training.session.report())
    for _ in range(5):
        training.step()
    training.step(64)
    report = training.session.report()
    assert f"{report.record.arena.spills} (" in str(report)
    assert report.to_dict()["arena"]["total_spills"] == report.record.arena.total_spills > 0


def test_detach_gives_the_arena_back():
    training = warmed()
    training.session.detach()
    assert training.session._store.reserve is None


def test_a_plan_can_have_an_arena():
    torch.manual_seed(0)
    model = Gpt()
    sample = texts(torch.Generator().manual_seed(1)), torch.zeros(8, CLASSES, dtype=torch.int64)

    def loss_fn(output, target):
        return output.square().mean()

    plan = squeezebox.plan(model, sample=sample, loss_fn=loss_fn, noise=1e-2, recompute=False, offload=False)
    session = squeezebox.attach(model, plan=plan, arena=True)
    for _ in range(6):
        with session.step():
            loss = loss_fn(model(sample[0]), sample[1])
        loss.backward()
    assert session.report().record.arena.tensors
    session.detach()
    parts = [value for name, value in dataclasses.asdict(plan.peak).items() if name.endswith("_bytes")]
    assert sum(parts) == plan.predicted_peak_bytes
