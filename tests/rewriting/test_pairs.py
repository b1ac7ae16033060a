"""Two calls that are computed as one give what they gave, and stay two where something else reads between."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import squeezebox
from squeezebox.rewriting._pairs import Silu


class Skip(nn.Module):
    """As a U-Net's: features from above next to those from below."""

    def __init__(self, read=lambda x: 0.0):
        super().__init__()
        self.first, self.read = nn.Conv2d(3, 8, 3, padding=1), read
        self.second, self.third = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        skip = self.first(x)
        joined = torch.cat((skip, self.second(skip.relu())), dim=1)
        return self.third(joined) + self.read(joined)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(3):
            x = self.linear(x)
            x = x * torch.sigmoid(x)
        return x


class LinearAttention(nn.Module):
    """Without softmax: every position looks at every other, which no matrix of positions is needed for."""

    def __init__(self, is_turned=False):
        super().__init__()
        self.qkv, self.is_turned = nn.Linear(16, 48), is_turned

    def forward(self, x):
        q, k, v = self.qkv(x.view(4, -1, 16)).chunk(3, dim=-1)
        scores = torch.matmul(q, k.transpose(1, 2))
        return v.transpose(1, 2) @ scores.softmax(-1) if self.is_turned else scores @ v / x.shape[0]


class Decoder(nn.Module):
    """Makes an image larger twice, once by whole numbers that differ."""

    def __init__(self, read=lambda x: 0.0):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, (1, 5), padding=(0, 1))
        self.up, self.read = nn.Upsample(scale_factor=2), read

    def forward(self, x):
        large = self.up(x)
        x = self.first(large).relu() + self.read(large)
        return self.second(functional.interpolate(x, size=(3 * x.shape[2], 2 * x.shape[3]))).sin()


class Leaky(nn.Module):
    """Blocks as of YOLO; ``read`` looks at a norm's result besides."""

    def __init__(self, read=lambda x: 0.0, inplace=True):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(n, 8, 3, padding=1, bias=False) for n in (3, 8, 8))
        self.norm, self.read = nn.BatchNorm2d(8), read
        self.activation = nn.LeakyReLU(0.1, inplace=inplace)

    def forward(self, x):
        for convolution in self.convolutions:
            normal = self.norm(convolution(x))
            x = self.activation(normal) + self.read(normal)
        return x


class Routed(nn.Module):
    """Products that a router's gates scale, of two groups of rows and of all."""

    def __init__(self):
        super().__init__()
        self.router, self.first = nn.Linear(64, 2), nn.Linear(64, 64)
        self.groups = nn.Parameter(torch.randn(2, 64, 64) / 8)
        self.second = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        ends = torch.tensor([200, 512], dtype=torch.int32)
        for _ in range(3):
            gates, hidden = self.router(x).softmax(-1), self.first(x).relu()
            x = x + functional.grouped_mm(hidden, self.groups, offs=ends) * gates[:, :1]
            x = x + gates[:, 1:] * functional.linear(hidden, self.second)
        return x


def sample_of(model):
    torch.manual_seed(0)
    images = isinstance(model, (Skip, Decoder, Leaky))
    return (torch.randn(2, 3, 32, 32) if images else torch.randn(512, 64)), None


def loss_fn(output, target):
    return output.square().mean()


def gradients(model, inputs):
    model.zero_grad()
    loss_fn(model(inputs), None).backward()
    return [each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("make", "rule", "where"),
    [
        (Skip, "split conv", [""]),
        (Gate, "silu", [""]),
        (LinearAttention, "product order", [""]),
        (Decoder, "upsampled conv", ["", "up"]),
        (Leaky, "invertible activation", ["norm"]),
        (Routed, "gated product", [""]),
    ],
)
def test_the_pattern_is_found_and_its_gradients_are_the_models(make, rule, where):
    model = make()
    sample = sample_of(model)
    plain = gradients(model, sample[0])
    rewritten = squeezebox.rewrite(model, sample=sample, loss_fn=loss_fn)
    assert [(row.rule, row.where) for row in rewritten.rewrites.applied] == [(rule, tuple(where))]
    torch.testing.assert_close(gradients(model, sample[0]), plain, rtol=1e-4, atol=1e-6)
    before = squeezebox.estimate(make(), sample=sample, loss_fn=loss_fn)
    after = squeezebox.estimate(model, sample=sample, loss_fn=loss_fn)
    assert (after.peak_bytes, after.saved_bytes) < (before.peak_bytes, before.saved_bytes)


@pytest.mark.parametrize("read", [lambda x: x.mean(), lambda x: functional.relu(x).sum()])
def test_a_concatenation_that_is_read_otherwise_is_there(read):
    model = Skip(read)
    inputs, _ = sample_of(model)
    plain = gradients(model, inputs)
    found = squeezebox.rewrite(Skip(), sample=(inputs, None), loss_fn=loss_fn).rewrites
    squeezebox.rewrite(model, rewrites=found)
    torch.testing.assert_close(gradients(model, inputs), plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("read", [lambda x: x.mean(), lambda x: functional.relu(x).mean()])
@pytest.mark.parametrize("make", [Decoder, Leaky, functools.partial(Leaky, inplace=False)])
def test_what_is_read_otherwise_too_is_there_and_is_counted_once(make, read):
    plain = make(read=read)
    rewritten, inputs = copy.deepcopy(plain), sample_of(plain)[0]
    places = squeezebox.rewrite(make(), sample=(inputs, None), loss_fn=loss_fn).rewrites
    squeezebox.rewrite(rewritten, rewrites=places)
    assert places.applied
    pairs = zip(gradients(rewritten, inputs), gradients(plain, inputs), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))
    for ours, theirs in zip(rewritten.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_norm_whose_scale_is_lost_is_not_undone():
    plain = Leaky()
    rewritten, inputs = copy.deepcopy(plain), sample_of(plain)[0]
    squeezebox.rewrite(rewritten, sample=(inputs, None), loss_fn=loss_fn)
    for model in (plain, rewritten):
        nn.init.zeros_(model.norm.weight)
        nn.init.ones_(model.norm.bias)
    assert all(map(torch.equal, gradients(rewritten, inputs), gradients(plain, inputs)))


def test_images_made_larger_in_another_way_stay_as_they_are():
    convolution = nn.Conv2d(3, 4, 3)
    for upsample in (nn.Upsample(scale_factor=1.5), nn.Upsample(scale_factor=2, mode="bilinear")):
        model = nn.Sequential(upsample, convolution)
        found = squeezebox.rewrite(model, sample=sample_of(Decoder()), loss_fn=loss_fn).rewrites
        assert not found.rows
    with torch.autocast("cpu", torch.bfloat16):
        found = squeezebox.rewrite(Decoder(), sample=sample_of(Decoder()), loss_fn=loss_fn).rewrites
    assert not found.rows


def test_a_session_leaves_out_what_a_plan_does_better_without():
    model, sample = Leaky(), sample_of(Leaky())
    session = squeezebox.attach(model, noise=1e-3, sample=sample, loss_fn=loss_fn, rewrite=True)
    assert not session.rewritten.rewrites.rows
    session.detach()


def test_softmax_between_two_products_keeps_their_order():
    model = LinearAttention(is_turned=True)
    found = squeezebox.rewrite(model, sample=sample_of(model), loss_fn=loss_fn).rewrites
    assert not found.rows


class Amplifying(nn.Module):
    """Batch normalisation of a few nearly equal values: rounding grows far beyond what it was."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, eps=1e-12)

    def forward(self, x):
        for _ in range(3):
            first = self.first(1e-3 * x[:, :3] + 1.0)
            x = self.norm(self.second(torch.cat((first, first), dim=1)))
        return x


def test_a_network_that_amplifies_rounding_is_compared_in_float64():
    model = Amplifying()
    found = squeezebox.rewrite(model, sample=sample_of(Skip()), loss_fn=lambda y, _: (y**3).mean()).rewrites
    assert [row.rule for row in found.applied] == ["split conv"] and found.applied[0].error > 1e-5


def test_a_rewrite_that_computes_something_else_is_not_applied(monkeypatch):
    right = Silu.read

    def wrong(self, *given):
        found = right(self, *given)
        return found if found is NotImplemented else found * 1.0001

    monkeypatch.setattr(Silu, "read", wrong)
    model = Gate()
    found = squeezebox.rewrite(model, sample=sample_of(model), loss_fn=loss_fn).rewrites
    (row,) = found.rows
    assert not found.applied and "in float64 by" in row.refused and "not applied" in str(found)
    assert type(model) is Gate and found.peak_bytes == found.plain_bytes


class Changed(nn.Module):
    """Changes a part of a concatenation before that is read."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        part = self.first(x)
        joined = torch.cat((part, part), dim=1)
        part.mul_(2.0)
        return self.second(joined) + part.mean()


def test_an_input_that_is_changed_in_place_is_read_before():
    model, (inputs, _) = Changed(), sample_of(Skip())
    plain = gradients(model, inputs)
    found = squeezebox.rewrite(Skip(), sample=(inputs, None), loss_fn=loss_fn).rewrites
    squeezebox.rewrite(model, rewrites=found)
    torch.testing.assert_close(gradients(model, inputs), plain)


class Blocks(nn.Module):
    """Gates, each of which a checkpoint may repeat in backward."""

    def __init__(self, is_reentrant=None):
        super().__init__()
        self.linear, self.is_reentrant = nn.Linear(64, 64), is_reentrant

    def gate(self, x):
        x = self.linear(x)
        return x * torch.sigmoid(x)

    def forward(self, x):
        for _ in range(3):
            x = self.gate(x) if self.is_reentrant is None else self.repeated(x)
        return x

    def repeated(self, x):
        return checkpoint(self.gate, x, use_reentrant=self.is_reentrant)


class Inner(Blocks):
    """What waits goes into a checkpoint, by its arguments and past them."""

    def repeated(self, x):
        given, past = torch.sigmoid(x), torch.sigmoid(self.linear(x))
        return checkpoint(lambda x, given: x * given + x * past, x, given, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # of a checkpoint in another one's first run
@pytest.mark.parametrize("make", [Blocks, Inner])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_a_checkpoint_repeats_is_not_rewritten(make, is_whole, is_reentrant):
    rewritten, inputs = make(), sample_of(Gate())[0].requires_grad_()
    rows = squeezebox.rewrite(rewritten, sample=(inputs, None), loss_fn=loss_fn).rewrites
    assert [row.rule for row in rows.applied] == ["silu"]
    plain = make()
    plain.load_state_dict(rewritten.state_dict())
    for model in (plain, rewritten):
        model.is_reentrant = is_reentrant
    runs = [functools.partial(checkpoint, each, use_reentrant=is_reentrant) for each in (plain, rewritten)]
    for model, run in zip((plain, rewritten), runs, strict=True):
        loss_fn(run(inputs) if is_whole else model(inputs), None).backward()
    for ours, theirs in zip(rewritten.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7)


class Constant(nn.Module):
    """A gate of which the model says that it is a constant for autograd."""

    def __init__(self, is_held=None):
        super().__init__()
        self.linear, self.is_held = nn.Linear(64, 64), is_held

    def forward(self, x):
        x = self.linear(x)
        if self.is_held is None:
            return x * torch.sigmoid(x)
        with torch.set_grad_enabled(self.is_held):
            gate = torch.sigmoid(x)
        return x * (gate.data if self.is_held else gate)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_gate_without_a_gradient_has_none(is_held):
    model, sample = Constant(), (sample_of(Gate())[0], None)
    found = squeezebox.rewrite(model, sample=sample, loss_fn=loss_fn)
    assert [row.rule for row in found.rewrites.applied] == ["silu"]
    found.undo()
    model.is_held = is_held
    plain = gradients(model, sample[0])
    squeezebox.rewrite(model, rewrites=found.rewrites)
    torch.testing.assert_close(gradients(model, sample[0]), plain)


def test_under_inference_mode_a_rewritten_model_predicts():
    model, inputs = Gate(), sample_of(Gate())[0]
    plain = model(inputs).detach()
    squeezebox.rewrite(model, sample=(inputs, None), loss_fn=loss_fn)
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs), plain)
        strange = inputs.clone()
    with torch.no_grad():
        torch.testing.assert_close(model(strange), plain)


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (0, 8, 4, 4)])
def test_a_norm_of_one_value_a_channel_is_refused_by_torch(shape):
    places = squeezebox.rewrite(Leaky(), sample=sample_of(Leaky()), loss_fn=loss_fn).rewrites
    model = Leaky()
    model.convolutions = nn.ModuleList([nn.Identity()])
    squeezebox.rewrite(model, rewrites=places)
    if shape[0]:
        with pytest.raises(ValueError, match="more than 1 value"):
            model(torch.randn(shape))
    else:
        assert model(torch.randn(shape)).shape == shape


def test_a_part_without_channels_is_convolved_with_the_others():
    model, inputs = Skip(), sample_of(Skip())[0]
    places = squeezebox.rewrite(model, sample=(inputs, None), loss_fn=loss_fn).rewrites

    class Empty(Skip):
        def forward(self, x):
            return self.third(torch.cat((x[:, :0], self.first(x), self.second(self.first(x))), dim=1))

    plain = Empty()
    expected = plain(inputs)
    squeezebox.rewrite(plain, rewrites=places)
    torch.testing.assert_close(plain(inputs), expected)


class Unread(Leaky):
    """Has results of its norm that nobody reads: one is gone at once, and one stays."""

    def forward(self, x):
        x = super().forward(x)
        self.norm(x)
        self.kept = self.norm(2.0 * x)
        return x


def test_a_norm_whose_result_nobody_reads_counts():
    plain, inputs = Unread(), sample_of(Leaky())[0]
    places = squeezebox.rewrite(Leaky(), sample=(inputs, None), loss_fn=loss_fn).rewrites
    rewritten = copy.deepcopy(plain)
    squeezebox.rewrite(rewritten, rewrites=places)
    for model in (plain, rewritten):
        for _ in range(2):
            gradients(model, inputs)
            with torch.no_grad():
                model.norm.weight.mul_(2.0)
        model.kept = None
    for ours, theirs in zip(rewritten.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Named(Gate):
    """Has names that a rewritten model's class might want."""

    def __init__(self):
        super().__init__()
        self.program, self.own = nn.Linear(64, 64), 2.0

    def forward(self, x):
        return self.own * self.program(super().forward(x))


def test_a_models_own_names_stay_its_own():
    model, (inputs, _) = Named(), sample_of(Gate())
    plain = gradients(model, inputs)
    squeezebox.rewrite(model, sample=(inputs, None), loss_fn=loss_fn)
    for each in (model, copy.deepcopy(model)):
        torch.testing.assert_close(gradients(each, inputs), plain, rtol=1e-4, atol=1e-6)


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Unseen(Gate):
    """Has its gate read where no function mode sees it, and may change in place what the gate is of."""

    changes = False

    def forward(self, x):
        x = self.linear(x)
        found = Copied.apply(torch.sigmoid(x))
        if self.changes:
            x.mul_(2.0)
        return found


def test_gradients_of_what_is_read_unseen_are_right_or_refused():
    model, (inputs, _) = Unseen(), sample_of(Gate())
    plain = gradients(model, inputs)
    places = squeezebox.rewrite(Gate(), sample=(inputs, None), loss_fn=loss_fn).rewrites
    squeezebox.rewrite(model, rewrites=places)
    torch.testing.assert_close(gradients(model, inputs), plain)
    loss = loss_fn(model(inputs), None)
    (gradient,) = torch.autograd.grad(loss, [model.linear.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    model.changes = True
    with pytest.raises(squeezebox.CaptureError, match="changed in place"):
        gradients(model, inputs)
