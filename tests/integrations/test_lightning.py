"""Lightning's Trainer: the session comes and goes with training, its state with checkpoints."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="squeezebox[lightning] is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # the data are there already
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),  # Lightning's own
]

import lightning.pytorch as pl  # noqa: E402

import squeezebox  # noqa: E402
from squeezebox.integrations.lightning import SqueezeboxCallback  # noqa: E402
from squeezebox.schema import AttachError, OptionError  # noqa: E402


class Classifier(pl.LightningModule):
    def __init__(self, manual=False, fails_at=None):
        super().__init__()
        self.automatic_optimization, self.fails_at = not manual, fails_at
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        self.net = nn.Sequential(*layers, nn.Linear(8 * 16, 256))

    def training_step(self, batch, index):
        if index == self.fails_at:
            raise RuntimeError("as asked")
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            for each in (loss, lambda: F.cross_entropy(self.net(batch[0]), batch[1])):
                optimizer.zero_grad()
                self.manual_backward(each() if callable(each) else each)
                optimizer.step()
            return None
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(32, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(images, torch.randint(256, (32,), generator=generator)), batch_size=8)


def fit(module, *callbacks, epochs=1, ckpt_path=None, data=None, **options):
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, **options},
    )
    trainer.fit(module, data or loader(), ckpt_path=ckpt_path)
    return trainer


def assert_bare(module):
    assert "forward" not in module.__dict__
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in module.modules())


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_exact_training_is_plain_training_and_covers_the_loss(manual):
    plain, squeezed = Classifier(manual), Classifier(manual)
    fit(plain)
    callback = SqueezeboxCallback(exact=True)
    fit(squeezed, callback)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(squeezed.state_dict()[name], value, rtol=0, atol=0)
    report = callback.report
    assert 0 < report.packed_bytes < report.saved_bytes
    assert any("NllLoss" in row.key for row in report.tensors)
    assert report.record.step == (7 if manual else 3)
    assert_bare(squeezed)


class Decaying(Classifier):
    """Keeps a share of the last gradient."""

    def optimizer_zero_grad(self, epoch, index, optimizer):
        for each in self.parameters():
            if each.grad is not None:
                each.grad.mul_(0.5)


def test_gradients_that_a_module_keeps_stay():
    plain, other = Decaying(), Decaying()
    fit(plain)
    fit(other, SqueezeboxCallback(exact=True))
    assert all(map(torch.equal, plain.parameters(), other.parameters()))


def test_a_training_that_goes_on_from_a_checkpoint_equals_one_without_a_break(tmp_path):
    whole, first, second = Classifier(), Classifier(), Classifier()
    uninterrupted, begun, resumed = (SqueezeboxCallback(noise=1e-2) for _ in range(3))
    fit(whole, uninterrupted, epochs=3)
    fit(first, begun, epochs=2).save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    fit(second, resumed, epochs=3, ckpt_path=tmp_path / "half.ckpt")
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], value, rtol=0, atol=0)
    assert resumed.session.state_dict() == uninterrupted.session.state_dict()
    bounds = [[row.bound for row in each.report.tensors] for each in (resumed, uninterrupted)]
    assert bounds[0] == bounds[1] and max(bounds[0]) > 0.0


@pytest.mark.parametrize(
    ("manual", "options"),
    [(False, {}), (True, {}), (False, {"accumulate_grad_batches": 2, "epochs": 2})],
    ids=["automatic", "manual", "added up"],
)
def test_loggers_get_the_figures_of_reports_where_they_get_the_trainers(tmp_path, manual, options):
    class Logging(Classifier):
        def training_step(self, batch, index):
            self.log("index", float(index))
            return super().training_step(batch, index)

    logger = pl.loggers.CSVLogger(tmp_path)
    callback = SqueezeboxCallback(noise=1e-2)
    fit(Logging(manual), callback, logger=logger, log_every_n_steps=2, **options)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    own = [row for row in rows if row["squeezebox/packed_bytes"]]
    assert [row["step"] for row in own] == [row["step"] for row in rows if row["index"]] == ["1", "3"]
    assert float(own[-1]["squeezebox/packed_bytes"]) == callback.report.packed_bytes


class Saving(pl.Callback):
    """A checkpoint within training."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_checkpoint_within_training_counts_the_steps_before_it(tmp_path, manual):
    callback = SqueezeboxCallback(noise=1e-2)
    fit(Classifier(manual), callback, Saving(tmp_path / "now.ckpt"))
    checkpoint = torch.load(tmp_path / "now.ckpt", weights_only=False)
    (state,) = (each for each in checkpoint["callbacks"].values() if "controller" in each)
    assert state["step"] == (3 if manual else 1)  # of the second batch: they begin with 0
    assert callback.session.state_dict()["step"] == (7 if manual else 3)


class Vast(Classifier):
    def training_step(self, batch, index):
        return self.net(batch[0]).sum() * self.net[0](batch[0]).sum().expand(1 << 50).exp().sum()


class Told(pl.Callback):
    exception = None

    def on_exception(self, trainer, pl_module, exception):
        self.exception = exception


def test_out_of_memory_is_explained_and_other_callbacks_are_told():
    module, later = Vast(), Told()
    with pytest.raises(RuntimeError, match="Out of memory in forward, in Vast: .* were asked for") as caught:
        fit(module, SqueezeboxCallback(exact=True), later)
    assert later.exception is caught.value
    assert_bare(module)


def test_an_exception_leaves_nothing_on_the_module():
    module = Classifier(fails_at=2)
    callback = SqueezeboxCallback(noise=1e-2)
    with pytest.raises(RuntimeError, match="as asked"):
        fit(module, callback)
    assert_bare(module)
    assert callback.report.record.step == 1
    squeezebox.attach(module).detach()


def test_what_is_not_there_yet_and_what_cannot_be():
    with pytest.raises(AttachError, match="no session yet"):
        SqueezeboxCallback().report  # noqa: B018
    with pytest.raises(OptionError, match="optimizer, which is used"):
        SqueezeboxCallback(optimizer=None)


@pytest.mark.parametrize("every", [1, 2], ids=["each", "added up"])
def test_gradients_of_the_step_before_do_not_exceed_a_budget(every):
    class Deep(Classifier):
        def __init__(self):
            super().__init__()
            layers = [layer for _ in range(3) for layer in (nn.Linear(192, 192), nn.GELU())]
            self.net = nn.Sequential(nn.Flatten(), *layers, nn.Linear(192, 256))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return F.cross_entropy(self(batch[0]), batch[1])

    callback = SqueezeboxCallback(
        budget="100%",
        sample=(torch.randn(256, 192), torch.zeros(256).long()),
        loss_fn=F.cross_entropy,
        exact=True,
    )
    images = TensorDataset(torch.randn(1024, 192), torch.zeros(1024).long())
    fit(Deep(), callback, data=DataLoader(images, batch_size=256), accumulate_grad_batches=every)
    assert 0 < callback.report.peak_bytes <= callback.report.record.budget_bytes


@pytest.mark.parametrize("limited", [True, False])
def test_the_batch_is_the_trainers_where_a_part_of_the_module_is_called(limited):
    class Called(Classifier):
        def forward(self, x):
            return self.net(x)

    images, labels = next(iter(loader()))
    planned = {"budget": "100%", "sample": (images, labels), "loss_fn": F.cross_entropy}
    callback = SqueezeboxCallback(**planned if limited else {"noise": 1e-2})
    fit(Called(), callback)
    assert not any(tensor.shape == images.shape for tensor in callback.report.tensors)


def test_several_optimizers_go_without_a_budget():
    class Two(Classifier):
        def configure_optimizers(self):
            return [super().configure_optimizers(), torch.optim.SGD(self.parameters(), lr=0.1)]

    with pytest.raises(OptionError, match="1 ranks and 2 optimizers"):
        fit(Two(manual=True), SqueezeboxCallback(budget="50%"))


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ({}, {}),
        ({"clip": 0.1}, {"gradient_clip_val": 0.1}),
        ({"accumulate": 2}, {"accumulate_grad_batches": 2}),
    ],
    ids=["in backward", "clipped", "added up"],
)
def test_a_plan_with_states_trains_the_same_to_the_bit(way, options):
    class Called(Classifier):
        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return F.cross_entropy(self(batch[0]), batch[1])

    plain, squeezed = Called(), Called()
    fit(plain, **options)
    plan = squeezebox.plan(
        squeezed,
        optimizer=squeezed.configure_optimizers(),
        sample=next(iter(loader())),
        loss_fn=F.cross_entropy,
        exact=True,
        states=True,
        **way,
    )
    fit(squeezed, SqueezeboxCallback(plan=plan), **options)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(squeezed.state_dict()[name], value, rtol=0, atol=0)


class Counted(Classifier):
    """Counts its forwards."""

    forwards, optimizer = 0, staticmethod(torch.optim.SGD)

    def training_step(self, batch, index):
        self.forwards += 1
        return super().training_step(batch, index)

    def configure_optimizers(self):
        return type(self).optimizer(self.parameters(), lr=0.05)


class Searched(Counted):
    optimizer = staticmethod(lambda parameters, lr: torch.optim.LBFGS(parameters, lr=lr, max_iter=3))


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        closure()
        return super().step(closure)


class Doubled(Counted):
    optimizer = Twice


@pytest.mark.parametrize(
    ("kind", "unforeseen"), [(Counted, 0), (Searched, 0), (Doubled, 1)], ids=["once", "LBFGS", "twice"]
)
def test_every_forward_is_squeezed_of_an_optimizer_that_asks_again(kind, unforeseen):
    plain, squeezed, callback = kind(), kind(), SqueezeboxCallback(exact=True)
    fit(plain)
    fit(squeezed, callback)
    assert squeezed.forwards == plain.forwards >= (4 if kind is Counted else 8)
    assert callback.report.record.step == squeezed.forwards - unforeseen - 1
    assert 0 < callback.report.packed_bytes < callback.report.saved_bytes
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(squeezed.state_dict()[name], value, rtol=0, atol=0)
    assert_bare(squeezed)


class Judged(Classifier):
    def test_step(self, batch, index):
        self.net(batch[0])


def test_a_checkpoint_that_is_tested_begins_no_training(tmp_path):
    module, callback = Judged(), SqueezeboxCallback(noise=1e-2)
    trainer = fit(module, callback, epochs=2)
    trainer.save_checkpoint(tmp_path / "old.ckpt", weights_only=False)
    trainer.test(module, loader(), ckpt_path=tmp_path / "old.ckpt", verbose=False)
    fit(module, callback)
    assert callback.report.record.step == 3
    trainer.test(module, loader(), verbose=False)
    callback.load_state_dict(callback.state_dict())  # by hand
    fit(module, callback)
    assert callback.report.record.step == 7
