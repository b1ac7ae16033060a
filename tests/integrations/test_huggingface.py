"""Hugging Face's Trainer and accelerate: exact is plain, state goes through their checkpoints."""

import inspect
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("transformers", reason="squeezebox[hf] is not installed")
pytest.importorskip("accelerate", reason="squeezebox[hf] is not installed")

import safetensors.torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import squeezebox  # noqa: E402
from squeezebox.integrations.accelerate import squeezed  # noqa: E402
from squeezebox.integrations.huggingface import SqueezeboxCallback  # noqa: E402
from squeezebox.schema import OptionError  # noqa: E402

LENGTH = 16
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # there is no device


def passages(count=64):
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[: count * LENGTH]
    rows = torch.tensor(list(text)).view(count, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def gpt2(width=32):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": width, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def trainer_of(model, folder, *callbacks, steps=4, dataset=None, evaluated=None, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", "report_to": "none", **options},
    )
    data = {"train_dataset": dataset or passages(), "eval_dataset": evaluated}
    return Trainer(model, arguments, **data, callbacks=list(callbacks))


def assert_same(model, other):
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=0)


def test_exact_training_is_plain_training_and_covers_the_loss(tmp_path):
    plain, other = gpt2(), gpt2()
    trainer_of(plain, tmp_path).train()
    with SqueezeboxCallback(exact=True) as callback:
        trainer_of(other, tmp_path, callback).train()
    assert_same(plain, other)
    assert any("NllLoss" in row.key for row in callback.report.tensors)
    assert 0 < callback.report.packed_bytes < callback.report.saved_bytes
    squeezebox.attach(other).detach()


@pytest.mark.parametrize(
    "restores", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "restoring callbacks"]
)
def test_a_training_that_goes_on_from_a_checkpoint_equals_one_without_a_break(tmp_path, restores):
    options = {"save_strategy": "steps", "save_steps": 3, "steps": 6}
    whole, resumed = gpt2(), gpt2()
    uninterrupted, callback = SqueezeboxCallback(noise=1e-2), SqueezeboxCallback(noise=1e-2)
    trainer_of(whole, tmp_path, uninterrupted, **options).train()
    again = trainer_of(
        resumed, tmp_path, callback, restore_callback_states_from_checkpoint=restores, **options
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    callback = next(each for each in again.callback_handler.callbacks if isinstance(each, SqueezeboxCallback))
    assert_same(whole, resumed)
    assert callback.session.state_dict() == uninterrupted.session.state_dict()
    assert max(row.bound for row in callback.report.tensors) > 0.0


def test_a_callback_that_the_checkpoint_cannot_make_anew_says_so(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "steps": 1}
    controller = squeezebox.bounds.Comet()
    trainer_of(gpt2(), tmp_path, SqueezeboxCallback(controller=controller), **options).train()
    again = trainer_of(
        gpt2(),
        tmp_path,
        SqueezeboxCallback(controller=controller),
        restore_callback_states_from_checkpoint=True,
        **{**options, "steps": 2},
    )
    with pytest.raises(OptionError, match="cannot hold controller"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


FIGURES = ("saved_bytes", "packed_bytes", "peak_bytes", "predicted_noise")


def test_the_history_has_the_figures_of_reports_and_evaluations_do_not(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 4, "evaluated": passages(8)}
    with SqueezeboxCallback(noise=1e-2) as callback:
        trainer = trainer_of(gpt2(), tmp_path, callback, **options)
        trainer.train()
    *steps, evaluation, whole = trainer.state.log_history
    assert [each["step"] for each in steps] == [1, 2, 3, 4]
    assert steps[-1].items() >= callback.report.figures().items()
    assert {f"squeezebox/{name}" for name in FIGURES} <= steps[-1].keys()
    assert "eval_loss" in evaluation and "train_runtime" in whole
    assert not any(name.startswith("squeezebox/") for each in (evaluation, whole) for name in each)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_gets_the_figures_once_each_step(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with SqueezeboxCallback(noise=1e-2) as callback:
        trainer = trainer_of(gpt2(), tmp_path, callback, report_to="tensorboard")
        callback.log_to(trainer)
        trainer.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    figures = callback.report.figures()
    assert {f"squeezebox/{name}" for name in FIGURES} <= figures.keys()
    for name, value in figures.items():
        logged = events.Scalars(f"train/{name}")
        assert [each.step for each in logged] == [1, 2, 3, 4]
        assert logged[-1].value == pytest.approx(value, rel=1e-6)
    assert len(events.Scalars("train/loss")) == 4


def test_the_callback_that_a_checkpoint_makes_goes_before_loggers_too(tmp_path):
    class Logger(TrainerCallback):
        seen = ()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                self.seen = set(logs)

    options = {"save_strategy": "steps", "save_steps": 1}
    trainer_of(gpt2(), tmp_path, SqueezeboxCallback(noise=1e-2), steps=1, **options).train()
    more = {"steps": 2, "restore_callback_states_from_checkpoint": True}
    with SqueezeboxCallback(noise=1e-2) as callback:
        logger = Logger()
        trainer = trainer_of(gpt2(), tmp_path, logger, callback, **more)
        callback.log_to(trainer)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "squeezebox/packed_bytes" in logger.seen


@pytest.mark.slow
def test_a_checkpoint_from_before_the_callback(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    trainer_of(gpt2(), tmp_path, steps=1, **options).train()
    callback = SqueezeboxCallback(noise=1e-2)
    trainer_of(gpt2(), tmp_path, callback, steps=3, **options).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    assert callback.report.record.step == 1


def test_the_context_ends_what_an_exception_interrupts(tmp_path):
    model = gpt2()
    broken = [*passages(16), *({"input_ids": torch.full((LENGTH,), 256), "labels": row["labels"]}
                               for row in passages(16))]  # fmt: skip
    with pytest.raises(IndexError), SqueezeboxCallback(noise=1e-2) as callback:
        trainer_of(model, tmp_path, callback, steps=8, dataset=broken).train()
    assert "forward" not in model.__dict__
    squeezebox.attach(model).detach()


@pytest.mark.slow
def test_the_context_ends_a_training_whose_callback_the_checkpoint_made_anew(tmp_path):
    trainer_of(
        gpt2(), tmp_path, SqueezeboxCallback(noise=1e-2), save_strategy="steps", save_steps=1, steps=1
    ).train()
    model, more = gpt2(), {"steps": 3, "restore_callback_states_from_checkpoint": True}
    broken = [{"input_ids": torch.full((LENGTH,), 256), "labels": row["labels"]} for row in passages()]
    with pytest.raises(IndexError), SqueezeboxCallback(noise=1e-2) as callback:
        trainer_of(model, tmp_path, callback, dataset=broken, **more).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )
    squeezebox.attach(model).detach()
    with SqueezeboxCallback(noise=1e-2) as callback:
        trainer_of(model, tmp_path, callback, **more).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )
    assert callback.report.record.step == 2


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))


def loop(steps, folder=None, *, load=None, mixed="no", **options):
    """Weights and the session after some steps of an accelerate loop, from a checkpoint or not."""
    AcceleratorState._reset_state(reset_partial_state=True)  # one for all of the process, else
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 16, generator=generator)
    data = DataLoader(TensorDataset(inputs, torch.randint(256, (64,), generator=generator)), batch_size=8)
    model, optimizer, data = accelerator.prepare(module, optimizer, data)
    batches = list(data)
    with squeezed(accelerator, model, optimizer, **options) as session:
        if load is not None:
            accelerator.load_state(str(load))
        for number in steps:
            optimizer.zero_grad()
            with session.step():
                loss = F.cross_entropy(model(batches[number][0]), batches[number][1])
            accelerator.backward(loss)
            optimizer.step()
            if folder is not None and number == 3:
                accelerator.save_state(str(folder))
    squeezebox.attach(accelerator.unwrap_model(model)).detach()
    return module.state_dict(), session


@pytest.mark.parametrize("mixed", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_an_accelerate_loop_goes_on_to_the_bit(tmp_path, mixed):
    whole, uninterrupted = loop(range(8), tmp_path / "state", noise=1e-2, mixed=mixed)
    rest, resumed = loop(range(4, 8), load=tmp_path / "state", noise=1e-2, mixed=mixed)
    for name, value in whole.items():
        torch.testing.assert_close(rest[name], value, rtol=0, atol=0)
    assert resumed.state_dict() == uninterrupted.state_dict()
    assert any("NllLoss" in row.key for row in resumed.report().tensors)
    assert max(row.bound for row in resumed.report().tensors) > 0.0


def test_a_context_for_each_epoch_goes_on_and_is_one_in_a_checkpoint(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model, optimizer = network(), None
    model = accelerator.prepare(model)
    for epoch in range(2):
        with squeezed(accelerator, model, optimizer, noise=1e-2) as session:
            for _ in range(3):
                with session.step():
                    loss = model(torch.ones(8, 16)).square().mean()
                accelerator.backward(loss)
            assert session.report().record.step == 3 * epoch + 2
    accelerator.save_state(str(tmp_path))
    assert len(list(tmp_path.glob("custom_checkpoint_*"))) == 1


def test_a_budget_is_planned_in_the_mode_of_training(tmp_path):
    model = gpt2().eval()  # as from_pretrained returns it
    model.config.use_cache = False  # as a Trainer sets it
    words = torch.stack([each["input_ids"] for each in passages(8)])
    sample = {"input_ids": words, "labels": words}, None
    options = {"budget": "100%", "sample": sample, "loss_fn": lambda output, _: output.loss, "exact": True}
    with SqueezeboxCallback(**options) as callback:
        trainer_of(model, tmp_path, callback, steps=1).train()
    assert callback.report.record.step == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plan_with_states_trains_the_same_to_the_bit_and_clips_as_trainer_does(accumulate, tmp_path):
    options = {"gradient_accumulation_steps": accumulate}
    plain, other = gpt2(), gpt2()
    wanted = trainer_of(plain, tmp_path, **options)
    wanted.train()
    other.config.use_cache = False  # as a Trainer sets it
    words = torch.stack([each["input_ids"] for each in passages()[:8]])
    given, names = {"input_ids": words, "labels": words}, list(inspect.signature(other.forward).parameters)
    plan = squeezebox.plan(
        other,
        optimizer=torch.optim.AdamW(other.parameters()),
        sample=(tuple(given.get(name) for name in names[: names.index("labels") + 1]), None),
        loss_fn=lambda output, _: output.loss,
        exact=True,
        states=True,
        clip=1.0,
        accumulate=accumulate,
    )
    with SqueezeboxCallback(plan=plan) as callback:
        found = trainer_of(other, tmp_path, callback, **options)
        found.train()
    assert_same(plain, other)
    norms = [
        [each["grad_norm"] for each in t.state.log_history if "grad_norm" in each] for t in (wanted, found)
    ]
    assert norms[0] == norms[1] and len(norms[0]) == 4


def frozen_gpt2():
    """Only biases and norms are trained; the embedding is the head's weight, too."""
    model = gpt2(width=128)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    return model


def test_a_checkpoint_has_the_frozen_weights_that_a_plan_has_in_a_file_and_training_goes_on_from_it(tmp_path):
    options = {"save_strategy": "steps", "eval_strategy": "steps", "evaluated": passages(8), "save_steps": 2}
    options |= {"eval_steps": 2, "load_best_model_at_end": True}
    plain = frozen_gpt2()
    trainer_of(plain, tmp_path / "plain", **options).train()
    model = frozen_gpt2()
    model.config.use_cache = False  # as a Trainer sets it
    words = torch.stack([each["input_ids"] for each in passages(8)])
    plan = squeezebox.plan(
        model,
        optimizer=torch.optim.AdamW(model.parameters()),
        sample=({"input_ids": words, "labels": words}, None),
        loss_fn=lambda output, _: output.loss,
        exact=True,
        states=True,
        clip=1.0,
    )
    assert "transformer.wte.weight" in plan.weights.moved
    for resumed in (False, True):
        with SqueezeboxCallback(plan=plan) as callback:
            trainer = trainer_of(model, tmp_path / "planned", callback, **options)
            trainer.train(
                resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-2") if resumed else None
            )
        assert_same(plain, model)
        assert not model._state_dict_hooks
        for number in (2, 4):
            wanted, found = (
                safetensors.torch.load_file(tmp_path / way / f"checkpoint-{number}" / "model.safetensors")
                for way in ("plain", "planned")
            )
            assert list(found) == list(wanted) and all(
                torch.equal(found[name], wanted[name]) for name in wanted
            )
        model = frozen_gpt2()


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_accelerate_saves_the_weights_that_a_plan_holds_otherwise(tmp_path, mixed):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    module = network()
    module[2].requires_grad_(False)
    optimizer, sample = torch.optim.SGD(module.parameters()), (torch.ones(8, 16), torch.ones(8).long())
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed == "bf16"):
        options = {"optimizer": optimizer, "sample": sample, "loss_fn": F.cross_entropy, "states": True}
        plan = squeezebox.plan(module, exact=True, **options)
    assert plan.weights.moved == ("2.weight",) and bool(plan.optimizer.split) == (mixed == "bf16")
    wanted = {name: value.clone() for name, value in module.state_dict().items()}
    model, optimizer = accelerator.prepare(module, optimizer)
    with squeezed(accelerator, model, optimizer, plan=plan):
        accelerator.save_model(model, str(tmp_path / "model"))
        accelerator.save_state(str(tmp_path / "state"))
    for kind in ("model", "state"):
        found = safetensors.torch.load_file(tmp_path / kind / "model.safetensors")
        assert found.keys() == wanted.keys() and all(
            torch.equal(found[name], wanted[name]) for name in wanted
        )
    assert not module._state_dict_hooks
