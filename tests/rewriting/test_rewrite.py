"""A rewritten model trains as it did before, in less memory, and is itself again afterwards."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import squeezebox
from benchmarks import models
from squeezebox.profiling import PeakMeter
from squeezebox.rewriting import proposed
from squeezebox.steps import TrainingStep

WORDS = 5003


def loss_fn(output, target):
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def gpt():
    torch.manual_seed(0)
    model = models.build("gpt", num_classes=WORDS, width=64, depth=2, heads=2, context=32)
    return model, (torch.randint(WORDS, (4, 32)), torch.randint(WORDS, (4, 32)))


def step(model, sample, loss=loss_fn):
    model.zero_grad()
    value = loss(model(sample[0]), sample[1])
    value.backward()
    return value.detach(), [each.grad.clone() for each in model.parameters()]


def assert_close(found, expected):
    """Up to rounding: what is far below the largest gradient is what rounding left of zero."""
    floor = 1e-3 * max(float(each.abs().max()) for each in expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 5e-5 * max(float(other.abs().max()), floor)


def peak(model, sample):
    model.zero_grad()
    meter = PeakMeter(torch.device("cpu"))
    assert meter.start()
    loss_fn(model(sample[0]), sample[1]).backward()
    return meter.stop(()).total_bytes


@pytest.fixture(scope="module")
def found():
    model, sample = gpt()
    return squeezebox.rewrite(model, sample=sample, loss_fn=loss_fn).rewrites


def test_a_refusal_proposes_what_it_has_time_for(found):
    model, sample = gpt()
    whole = TrainingStep(model=model, sample=sample, loss_fn=loss_fn)
    assert [row.rule for row in proposed(whole, 600.0).rows] == [row.rule for row in found.rows]
    assert proposed(whole, 0.0) is None


def applied(found, loss=loss_fn):
    model, sample = gpt()
    plain = step(model, sample, loss), peak(model, sample)
    return squeezebox.rewrite(model, rewrites=found), sample, plain


def test_the_head_of_a_gpt_is_found_and_checked(found):
    (row,) = [each for each in found.rows if each.rule == "sliced loss"]
    assert row.where == ("",) and not row.exact and not row.refused
    assert row.after_bytes < row.before_bytes and 0 <= row.error < 1e-5
    assert "sliced loss" in str(found) and found.peak_bytes < found.plain_bytes


def test_losses_and_gradients_stay_and_the_peak_falls(found):
    rewritten, sample, (plain, plain_peak) = applied(found)
    loss, gradients = step(rewritten.model, sample)
    torch.testing.assert_close(loss, plain[0], rtol=1e-6, atol=0)
    assert_close(gradients, plain[1])
    assert peak(rewritten.model, sample) < 0.6 * plain_peak


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, target: functional.cross_entropy(out.transpose(1, 2), target, label_smoothing=0.1),
        lambda out, target: functional.cross_entropy(
            out[:, :-1].reshape(-1, WORDS).float(), target[:, 1:].reshape(-1)
        ),
        lambda out, target: functional.nll_loss(
            functional.log_softmax(out, dim=-1).view(-1, WORDS), target.view(-1)
        ),
        lambda out, target: nn.CrossEntropyLoss(reduction="none")(out.permute(0, 2, 1), target).sum(),
    ],
)
def test_losses_in_other_words_never_have_the_whole_output_either(found, loss):
    rewritten, sample, (plain, _) = applied(found, loss)
    value, gradients = step(rewritten.model, sample, loss)
    torch.testing.assert_close(value, plain[0], rtol=1e-6, atol=0)
    assert_close(gradients, plain[1])
    output = rewritten.model(sample[0])
    loss(output, sample[1])
    assert output.call.made is None


def before(read, out):
    """What was read of an output that is changed in place afterwards."""
    found = read()
    out.div_(3.0)
    return found


def masked(out):
    """A view of an output in which something is written afterwards."""
    flat = out.flatten(0, 1)
    out[..., 0] = 0.0
    return flat


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, target: loss_fn(out * 0.5, target),
        lambda out, target: loss_fn(out, target) + out.square().mean(),
        lambda out, target: loss_fn(out.div_(3.0), target),
        lambda out, target: loss_fn(before(lambda: functional.log_softmax(out, -1), out).exp(), target),
        lambda out, target: loss_fn(before(lambda: out.double(), out), target),
        lambda out, target: loss_fn(masked(out.double()), target),
        lambda out, target: loss_fn(before(lambda: out.data, out) + out, target),
        lambda out, target: loss_fn(out, target) + (out.data.softmax(-1) * out.sin()).mean(),
        lambda out, target: loss_fn(Doubled.apply(out), target),  # no function mode sees it read them
        lambda out, target: functional.cross_entropy(
            out.flatten(0, 1), functional.one_hot(target.flatten(), WORDS).float()
        ),
    ],
)
def test_whoever_reads_the_logits_otherwise_gets_them(found, loss):
    rewritten, sample, (plain, _) = applied(found, loss)
    value, gradients = step(rewritten.model, sample, loss)
    torch.testing.assert_close(value, plain[0], rtol=1e-6, atol=0)
    assert_close(gradients, plain[1])


def test_undo_leaves_the_model_as_it_was(found):
    model, sample = gpt()
    kind, before, names = type(model), dict(vars(model)), list(model.state_dict())
    rewritten = squeezebox.rewrite(model, rewrites=found)
    assert list(model.state_dict()) == names and isinstance(model, kind)
    rewritten.undo()
    rewritten.undo()
    assert type(model) is kind and dict(vars(model)) == before


def test_copies_are_rewritten_and_pickles_are_not(found):
    rewritten, sample, _ = applied(found)
    copied = copy.deepcopy(rewritten.model)
    assert type(copied(sample[0])) is not torch.Tensor
    loaded = pickle.loads(pickle.dumps(rewritten.model))
    assert type(loaded) is models.GPT and type(loaded(sample[0])) is torch.Tensor


def test_a_session_comes_after_a_rewrite_and_goes_before_it(found):
    rewritten, sample, (plain, _) = applied(found)
    session = squeezebox.attach(rewritten.model, exact=True)
    _, gradients = step(rewritten.model, sample)
    assert_close(gradients, plain[1])
    with pytest.raises(squeezebox.AttachError, match="detach"):
        rewritten.undo()
    session.detach()
    rewritten.undo()
    with pytest.raises(squeezebox.AttachError, match="already"):
        squeezebox.rewrite(squeezebox.rewrite(rewritten.model, rewrites=found).model, rewrites=found)


def test_a_loss_that_reads_the_logits_finds_nothing():
    model, sample = gpt()
    found = squeezebox.rewrite(model, sample=sample, loss_fn=lambda out, t: loss_fn(out * 0.5, t))
    assert found.rewrites.rows == () and type(model) is models.GPT
    assert "No rewrite fits" in str(found)


def test_the_table_comes_back_from_its_file(found, tmp_path):
    found.save(tmp_path / "rewrites.json")
    assert squeezebox.load_rewrites(tmp_path / "rewrites.json") == found
    (tmp_path / "rewrites.json").write_text("{}")
    with pytest.raises(squeezebox.FormatError, match="plain_bytes"):
        squeezebox.load_rewrites(tmp_path / "rewrites.json")


def test_bad_arguments_are_named():
    model, sample = gpt()
    with pytest.raises(squeezebox.OptionError, match="no rewrite 'magic'"):
        squeezebox.rewrite(model, sample=sample, loss_fn=loss_fn, without=["magic"])
    with pytest.raises(squeezebox.OptionError, match="sample"):
        squeezebox.rewrite(model)
    model.forward = model.forward
    with pytest.raises(squeezebox.UnsupportedModelError, match="replaced"):
        squeezebox.rewrite(model, sample=sample, loss_fn=loss_fn)


def test_rewrites_of_a_file_are_for_its_model_and_less_what_is_left_out(found):
    model, sample = gpt()
    with pytest.raises(squeezebox.OptionError, match="no module 'x'"):
        other = dataclasses.replace(found.rows[0], where=("", "x"))
        squeezebox.rewrite(model, rewrites=dataclasses.replace(found, rows=(other,)))
    with pytest.raises(squeezebox.OptionError, match="loss_fn= is given without sample="):
        squeezebox.rewrite(model, rewrites=found, loss_fn=loss_fn)
    rewritten = squeezebox.rewrite(model, rewrites=found, without=[row.rule for row in found.rows])
    assert not rewritten.rewrites.applied and "left out by without=" in str(rewritten)
    assert rewritten.rewrites.peak_bytes == found.plain_bytes and type(model(sample[0])) is torch.Tensor


def test_an_output_is_read_before_the_optimizers_step_and_without_gradients_at_any_time(found):
    rewritten, sample, _ = applied(found)
    with torch.no_grad():
        kept = rewritten.model(sample[0])
    expected = kept.clone()
    optimizer = torch.optim.SGD(rewritten.model.parameters(), lr=1.0)
    output = rewritten.model(sample[0])
    loss_fn(output, sample[1]).backward()
    constant = rewritten.model(sample[0]).data
    with torch.inference_mode():
        early = rewritten.model(sample[0]).float().argmax(-1)
    optimizer.step()
    assert not constant.requires_grad and early.shape == sample[1].shape
    assert type(kept) is torch.Tensor and torch.equal(kept, expected)
    with pytest.raises(squeezebox.CaptureError, match="Read it before optimizer.step"):
        output.argmax(-1)


def test_what_else_a_model_returns_stays_the_object_that_it_is(found):
    class Outputs(models.GPT):
        def forward(self, tokens):
            return {"logits": super().forward(tokens), "cache": cache}

    cache = [torch.zeros(1)]
    model, sample = gpt()
    model.__class__ = Outputs
    squeezebox.rewrite(model, rewrites=found)
    with torch.no_grad():
        output = model(sample[0])
    assert type(output["logits"]) is torch.Tensor and output["cache"] is cache


def test_an_output_with_gradients_can_be_read_in_inference_mode(found):
    rewritten, sample, _ = applied(found)
    output = rewritten.model(sample[0])
    with torch.inference_mode():
        seen = output[:, :-1].float().argmax(-1)
    loss_fn(output, sample[1]).backward()
    assert seen.shape == sample[1][:, :-1].shape and rewritten.model.tokens.weight.grad is not None


def test_under_autocast_losses_are_as_they_were(found):
    model, sample = gpt()

    def run():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model(sample[0]), sample[1])
        loss.backward()
        return loss.detach(), model.tokens.weight.grad.clone()

    plain = run()
    squeezebox.rewrite(model, rewrites=found)
    loss, gradient = run()
    assert loss.dtype == plain[0].dtype
    torch.testing.assert_close(loss, plain[0], rtol=1e-3, atol=0)
    assert (gradient - plain[1]).norm() < 2e-2 * plain[1].norm()


def test_a_forward_that_is_broken_off_leaves_rewrites_in_force(found):
    def interrupt(*_):
        raise KeyboardInterrupt

    rewritten, sample, _ = applied(found)
    hook = rewritten.model.norm.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        rewritten.model(sample[0])
    hook.remove()
    assert type(rewritten.model(sample[0])) is not torch.Tensor


def test_a_head_whose_weight_is_freed_after_its_forward_is_refused(found):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
        head = dataclasses.replace(found.rows[0], rule="sliced loss", where=("1",))
        squeezebox.rewrite(model, rewrites=dataclasses.replace(found, rows=(head,)))
        for part in (model[1], model):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(squeezebox.CaptureError, match="reshard_after_forward=False"):
            loss_fn(model(torch.zeros(2, 4, dtype=torch.int64)), torch.zeros(2, 4, dtype=torch.int64))
    finally:
        dist.destroy_process_group()


def test_a_predicted_peak_is_of_the_rewrites_that_are_applied(found):
    one = dataclasses.replace(found.rows[0], where=("",), before_bytes=100, after_bytes=60)
    two = dataclasses.replace(one, rule="silu", before_bytes=60, after_bytes=50)
    both = dataclasses.replace(found, plain_bytes=100, peak_bytes=50, rows=(one, two))
    for without, peak in (((), 50), ((two.rule,), 60), ((one.rule,), 100)):
        assert squeezebox.rewrite(gpt()[0], rewrites=both, without=without).rewrites.peak_bytes == peak


@pytest.mark.slow
def test_an_unmodified_gpt2_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(WORDS, (2, 16))

    class Training(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    found = squeezebox.rewrite(Training(), sample=(tokens, None), loss_fn=lambda loss, _: loss)
    assert [row.where for row in found.rewrites.applied] == [("model.lm_head",)]


def test_a_rewrite_that_saves_next_to_nothing_is_left_out():
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
    sample = torch.randn(256, 64), torch.randint(3, (256,))
    found = squeezebox.rewrite(model, sample=sample, loss_fn=functional.cross_entropy).rewrites
    assert not found.rows and "No rewrite fits" in str(found)
