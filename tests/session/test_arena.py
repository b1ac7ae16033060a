"""attach(..., arena=True): the same results, the same bytes in every step, and nothing overwritten."""

import dataclasses
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

import squeezebox
from squeezebox.profiling import PeakMeter
from squeezebox.schema import BudgetError, OptionError
from squeezebox.session._offload import plan_with_places

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
        assert record is None or record.tensors or "exact" in options
    assert losses[True] == losses[False]


@pytest.mark.parametrize(
    ("options", "steps"), [({"exact": True}, 1), ({"noise": 1e-3}, 33)], ids=["exact", "noise"]
)
@pytest.mark.parametrize("case", ["convolutions", pytest.param("gpt", marks=pytest.mark.slow)])
def test_a_later_step_takes_the_bytes_of_the_first(case, options, steps):
    training = Training(case, **options)
    for _ in range(steps):  # the first sixteen refresh the bounds
        training.step()
    peaks: dict[int, set[int]] = {}  # by layout: new bounds make some places larger in the next steps
    for _ in range(7):  # up to the next refresh
        peak, arena = training.peak(), training.arena()
        if not arena.spills:
            peaks.setdefault(arena.layouts, set()).add(peak)
    assert arena.layouts in peaks and len(peaks) <= 2
    assert all(len(equal) == 1 for equal in peaks.values()), peaks


@pytest.mark.slow
def test_without_an_arena_they_differ():
    training = Training(arena=False)
    for _ in range(18):
        training.step()
    assert len({training.peak() for _ in range(6)}) > 1


def test_sizes_of_the_first_step_whose_bounds_are_guesses_tell_nothing():
    found = []
    for measured in (False, True):
        training = Training()
        training.step()
        if measured:
            training.session.measure_noise(lambda: training.loss().backward())  # noqa: B023
        for _ in range(2):
            training.step()
        found.append(training.arena().nbytes)
    assert 0 < found[1] < 1.3 * found[0]


def gradients(training, loss, **options):
    return torch.autograd.grad(loss, list(training.model.parameters()), **options)


def warmed(case="convolutions", arena=True):
    training = Training(case, arena)
    for _ in range(6):
        training.step()
    assert not arena or training.arena().tensors
    return training


def test_a_retained_graph_is_not_overwritten():
    training = warmed()
    loss = training.loss()
    before = gradients(training, loss, retain_graph=True)
    training.optimizer.zero_grad()
    training.loss().backward()  # of another batch, in the same places
    again = gradients(training, loss)
    assert all(torch.equal(*pair) for pair in zip(before, again, strict=True))


def test_a_graph_of_an_earlier_step_is_not_overwritten():
    found = []
    for training in (warmed(arena=True), warmed(arena=False)):
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
        training = Training("gpt", arena)
        training.model.eval()  # attention's quick path has no second derivatives; dropout is off
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for _ in range(6):
                training.step()
            first = gradients(training, training.loss(), create_graph=True)
            found.append(gradients(training, sum(gradient.square().sum() for gradient in first)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_two_models_have_arenas_of_their_own():
    pair = [warmed(), warmed()]
    alone = warmed()

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
    assert "arena: nothing of varying size was packed before this step" in str(training.session.report())
    for _ in range(5):
        training.step()
    training.step(64)
    report = training.session.report()
    assert f"{report.record.arena.spills} (" in str(report)
    assert report.to_dict()["arena"]["total_spills"] == report.record.arena.total_spills > 0


def test_detach_gives_the_arena_back():
    training = warmed()
    training.session.detach()
    assert training.session.engine.store.reserve is None


def squared(output, target):
    return output.square().mean()


def peak_of(session, model, inputs):
    """Of one step with everything that is there before it."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    meter = PeakMeter(torch.device("cpu"))
    assert meter.start()
    with session.step():
        loss = squared(model(inputs), None)
    loss.backward()
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), inputs])
    return meter.stop([]).total_bytes + held


@pytest.fixture(scope="module")
def planned():
    """A model, what it is planned for, and its smallest plan."""
    torch.manual_seed(0)
    model, sample = Gpt().eval(), (texts(torch.Generator().manual_seed(1)), None)
    options = {"sample": sample, "loss_fn": squared, "noise": 1e-2}
    return model, options, squeezebox.plan(model, recompute=False, offload=False, **options)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "within", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plan", "budget"]
)
def test_under_a_plan_the_first_step_takes_what_all_take_and_the_budget_holds(planned, within):
    model, options, plan = planned
    budget = (plan.predicted_peak_bytes + plan.plain_peak_bytes) // 2
    session = squeezebox.attach(
        model, arena=True, **({"budget": budget, **options} if within else {"plan": plan})
    )
    generator = torch.Generator().manual_seed(2)
    peaks = [peak_of(session, model, texts(generator)) for _ in range(6)]
    record = session.report().record
    session.detach()
    assert max(peaks) - min(peaks) <= 1e-3 * peaks[0]  # a tensor may outgrow its place
    assert max(peaks) <= record.predicted_peak_bytes <= (budget if within else plan.plain_peak_bytes)
    assert record.arena.total_spills <= 3
    assert within or record.arena.tensors


def test_a_plan_whose_budget_has_no_room_for_places_is_refused(planned):
    model, _, plan = planned
    tight = dataclasses.replace(plan, budget_bytes=plan.predicted_peak_bytes)
    with pytest.raises(BudgetError, match=r"squeezebox.plan\(..., arena=True\)"):
        squeezebox.attach(model, plan=tight, arena=True)
    squeezebox.attach(model, plan=tight).detach()
    squeezebox.attach(model, plan=dataclasses.replace(tight, arena=True), arena=True).detach()


def test_the_parts_of_a_peak_with_places_add_up_to_it(planned):
    plan = plan_with_places(planned[2])
    assert plan.peak.parts.total_bytes == plan.predicted_peak_bytes > planned[2].predicted_peak_bytes
    assert plan.arena


def test_a_plans_file_says_whether_places_are_counted(planned, tmp_path):
    for plan in (planned[2], plan_with_places(planned[2])):
        plan.save(tmp_path / "plan.json")
        assert squeezebox.load_plan(tmp_path / "plan.json") == plan


def test_a_sample_beside_a_plan_is_refused(planned):
    model, options, plan = planned
    with pytest.raises(OptionError, match="sample and loss_fn are for a budget"):
        squeezebox.attach(model, plan=plan, arena=True, sample=options["sample"], loss_fn=squared)


def test_with_a_sample_the_first_step_has_its_places():
    torch.manual_seed(0)
    model, generator = convolutions(), torch.Generator().manual_seed(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"sample": (images(generator), None), "loss_fn": squared, "noise": 1e-3}
    session = squeezebox.attach(model, arena=True, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    records = []
    for _ in range(4):
        peak_of(session, model, images(generator))
        records.append(session.report().record.arena)
    assert records[0].nbytes
    assert [record.spills for record in records[1:]] == [0] * 3  # the first one's bounds are guesses


def test_a_sample_for_an_arena_needs_its_loss():
    with pytest.raises(OptionError, match="loss_fn"):
        squeezebox.attach(convolutions(), arena=True, sample=(torch.zeros(2, 3, 32, 32), None))
