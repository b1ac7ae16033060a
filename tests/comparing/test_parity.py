"""squeezebox.parity: the planted layer is named, forward and backward, and nothing of a model changes."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import squeezebox
from squeezebox.reports import Parity, wilson
from squeezebox.schema import FormatError, OptionError

IMAGES = [torch.randn(4, 3, 14, 14, generator=torch.Generator().manual_seed(n)) for n in range(2)]


class Net(nn.Module):
    """A residual block with in-place operators, a pool, interpolation, dropout, a shared layer."""

    def __init__(self, mode="bilinear"):
        super().__init__()
        self.mode = mode
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, stride=2)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.relu = nn.ReLU(inplace=True)
        self.shared = nn.Conv2d(8, 8, 1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(self.stem(x))
        y = self.body(x)
        y += x
        y = self.shared(self.relu(y))
        y = F.interpolate(y, scale_factor=2, mode=self.mode)
        return self.head(self.drop(self.shared(y)).mean((2, 3)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def norm(b):
    b.body[1].eps = 1e-3
    return "body.1"


def padding(b):
    b.body[0].padding_mode = "replicate"
    return "body.0"


def ceil_mode(b):
    b.pool.ceil_mode = True
    return "pool"


def interpolation(b):
    b.mode = "nearest"
    return "model"


def one_weight(b):
    b.shared.weight.data[3, 2] += 0.02
    return "shared"


def dtype(b):
    b.head.weight.data = b.head.weight.data.bfloat16().float()
    return "head"


def forgotten_mode(b):
    b.drop.eval()
    return "drop"


FAULTS = (norm, padding, ceil_mode, interpolation, one_weight, dtype, forgotten_mode)


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_named(net, plant):
    b = copy.deepcopy(net)
    where = plant(b)
    found = squeezebox.parity(net, b, IMAGES)
    assert not found.agrees and found.first.layer == where and not found.first.backward
    assert {each.layer for each in found.differing} == {where}
    assert found.figures.share > 0.9  # of a layer that is called twice, the first call is mended
    assert found.figures.output > 0 and where in str(found)


@pytest.mark.parametrize("train", [True, False])
def test_a_pair_without_a_fault_is_silent_to_the_bit(net, train):
    net.train(train)
    found = squeezebox.parity(net, copy.deepcopy(net), IMAGES)
    assert found.agrees and "they agree to the bit" in str(found)
    kinds = {(each.layer, each.what) for each in found.figures.places}
    assert {("body.0", "gradient of weight"), ("body.0", "gradient of input"), ("head", "output")} <= kinds
    assert {("model", "code before shared"), ("model", "code before shared (call 2)")} <= kinds


class BiasLater(nn.Conv2d):
    """The same convolution, whose bias' gradient is summed by another kernel."""

    def forward(self, x):
        return F.conv2d(x, self.weight, padding=self.padding) + self.bias.view(-1, 1, 1)


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference(net):
    b = copy.deepcopy(net)
    b.stem[0].__class__ = BiasLater  # before a normalisation, which takes the bias away
    found = squeezebox.parity(net, b, IMAGES)
    biases = [e for e in found.figures.places if (e.layer, e.what) == ("stem.0", "gradient of bias")]
    assert found.agrees and biases[0].own > 1e-3


def test_other_strides_are_kept_and_agree_within_rounding(net):
    net.drop.eval()  # its mask is drawn in the order of memory
    found = squeezebox.parity(net, copy.deepcopy(net).to(memory_format=torch.channels_last), IMAGES)
    assert found.agrees and found.figures.output < 1e-4
    net.drop.train()
    found = squeezebox.parity(net, copy.deepcopy(net).to(memory_format=torch.channels_last), IMAGES)
    assert found.first.layer == "drop"


class Scaled(torch.autograd.Function):
    """What it is given, with a gradient that is a hundredth too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def test_a_wrong_backward_is_named_though_forward_agrees(net):
    b = copy.deepcopy(net)
    b.body[0].register_forward_pre_hook(lambda module, args: (Scaled.apply(args[0]),))
    found = squeezebox.parity(net, b, IMAGES)
    assert {(each.layer, each.backward) for each in found.differing} == {("body", True)}
    assert found.first.what == "backward of code before body.0" or "gradient" in found.first.what
    assert found.figures.output == 0.0 and found.figures.share == pytest.approx(1.0)
    assert squeezebox.parity(net, b, IMAGES, backward=False).agrees


def test_of_two_faults_the_first_in_execution_is_named_with_its_share(net):
    b = copy.deepcopy(net.eval())
    dtype(b), norm(b)
    found = squeezebox.parity(net, b, IMAGES)
    assert [each.layer for each in found.differing if not each.backward] == ["body.1", "head"]
    assert 0.0 <= found.figures.share < 0.5


def test_layers_of_other_names_are_matched_by_their_order(net):
    class Renamed(nn.Module):
        def __init__(self, of):
            super().__init__()
            self.a, self.b, self.c, self.d = of.stem, of.pool, of.body, of.relu
            self.e, self.f, self.g = of.shared, of.drop, of.head

        def forward(self, x):
            x = self.b(self.a(x))
            y = self.c(x) + x
            y = F.interpolate(self.e(self.d(y)), scale_factor=2, mode="bilinear")
            return self.g(self.f(self.e(y)).mean((2, 3)))

    clean = squeezebox.parity(net, Renamed(copy.deepcopy(net)), IMAGES)
    assert clean.agrees and clean.figures.layers > 10
    faulty = copy.deepcopy(net)
    norm(faulty)
    assert squeezebox.parity(net, Renamed(faulty), IMAGES).first.layer == "c.1"


def decode(image):
    return torch.from_numpy(image).float() / 255


def deployed(image):
    return torch.from_numpy(image // 2 * 2).float() / 255


def test_stages_are_compared_as_layers_are(net):
    images = [(each * 40 + 120).clamp(0, 255).to(torch.uint8).numpy() for each in IMAGES]
    a = [("decode", decode), ("normalise", lambda x: (x - 0.5) / 0.25), ("net", net.eval())]
    found = squeezebox.parity(a, {"decode": deployed, "normalise": a[1][1], "net": net}, images)
    assert found.first.layer == "decode" and len(found.differing) == 1
    whole = [("all at once", lambda image: a[1][1](deployed(image))), a[2]]
    assert squeezebox.parity(a, whole, images).first.layer == "all at once"
    assert squeezebox.parity(a, lambda image: net(a[1][1](decode(image))), images).agrees


def test_what_fails_by_itself_is_named_all_the_same():
    torch.manual_seed(0)
    a = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    b = copy.deepcopy(a)
    b[1].padding, b[1].ceil_mode = 1, True
    found = squeezebox.parity(a, b, IMAGES)
    assert found.first.layer == "1" and "shapes" in found.first.why and found.figures.output is None
    assert any("fails by itself: RuntimeError" in note for note in found.figures.notes)


def test_checkpointed_models_and_sessions_agree_with_plain_ones(net):
    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    b = Checkpointed()
    b.load_state_dict(net.state_dict())
    assert squeezebox.parity(net, b, IMAGES).agrees
    norm(b)
    found = squeezebox.parity(net, b, IMAGES)
    assert {each.layer for each in found.differing} == {"body.1"}
    session = squeezebox.attach(c := copy.deepcopy(net), exact=True)
    assert "to the bit" in str(squeezebox.parity(net, c, IMAGES))
    session.detach()


class Answered(nn.Module):
    """Gives more than its output, if it is asked to."""

    def __init__(self, more):
        super().__init__()
        self.first, self.last, self.more = Halves(), nn.Linear(14, 5), more

    def forward(self, x):
        return self.last(self.first(x, more=self.more)[0])


class Halves(nn.Module):
    def forward(self, x, more):
        return (x / 2, x * 2) if more else (x / 2,)


def test_flags_and_values_of_one_alone_are_no_difference_between_layers():
    torch.manual_seed(0)
    a, b = Answered(more=True), Answered(more=False)
    b.load_state_dict(a.state_dict())
    assert "to the bit" in str(squeezebox.parity(a, b, IMAGES))
    both = squeezebox.parity(lambda x: (a(x), x), lambda x: (b(x),), IMAGES)
    assert both.first.layer == "model" and both.first.why == "2 values and 1"


def state_of(*nets):
    return [
        [each.clone() for net in nets for each in net.state_dict().values()],
        [module.training for net in nets for module in net.modules()],
        [parameter.grad for net in nets for parameter in net.parameters()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for net in nets for m in net.modules()],
        [len(p._backward_hooks or {}) for net in nets for p in net.parameters()],
        [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()],
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_left_as_it_was(net, fails):
    b = copy.deepcopy(net)
    for each in (net, b):
        each(IMAGES[0]).sum().backward()
    net.head.eval()

    def side(x):
        b.eval()
        np.random.rand(), random.random()
        if fails:
            raise KeyError("nothing of this name")
        return b(x)

    before = state_of(net, b)
    gradients = [parameter.grad.clone() for each in (net, b) for parameter in each.parameters()]
    if fails:
        with pytest.raises(OptionError, match=r"b fails on a batch of float32\[4, 3, 14, 14\]: KeyError"):
            squeezebox.parity(net, side, IMAGES)
    else:
        assert not squeezebox.parity(net, side, IMAGES).agrees
    after = state_of(net, b)
    assert all(map(torch.equal, before[0], after[0])) and before[1] == after[1] and before[3:5] == after[3:5]
    assert all(one is other for one, other in zip(before[2], after[2], strict=True))
    assert all(map(torch.equal, gradients, after[2]))
    assert torch.equal(before[5][0], after[5][0]) and before[5][1:] == after[5][1:]


def test_flips_have_wilsons_interval(net):
    b = copy.deepcopy(net.eval())
    with torch.no_grad():
        b.head.bias[0] += 100.0
    figures = squeezebox.parity(net, b, IMAGES).figures
    with torch.no_grad():
        other = torch.cat([net(x).argmax(1) != 0 for x in IMAGES]).double().mean()
    assert figures.predictions == 8 and figures.flipped == float(other) > 0.0
    assert (figures.flipped_low, figures.flipped_high) == wilson(float(other), 8)
    assert wilson(0.1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)  # Wilson's, of 1 in 10
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)


def test_reports_come_back_from_their_file(net, tmp_path):
    b = copy.deepcopy(net)
    ceil_mode(b)
    found = squeezebox.parity(net, b, IMAGES)
    found.save(tmp_path / "parity.json")
    assert Parity.load(tmp_path / "parity.json") == found
    (tmp_path / "parity.json").write_text("{}")
    with pytest.raises(FormatError):
        Parity.load(tmp_path / "parity.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batches": []}, "there is no batch"),
        ({"tolerance": 0.0}, "tolerance 0.0 is not finite and above 0"),
        ({"b": []}, "b has no stage"),
        ({"b": [("net", 3)]}, "stage 'net' of b is a int"),
        ({"a": [("x", F.relu), ("x", F.relu)]}, "two stages of a are called 'x'"),
        ({"a": [F.relu, F.gelu], "b": [F.relu, F.gelu, F.silu]}, "3 that end with 'silu'"),
        ({"batches": [torch.ones(2, 4)]}, r"a fails on a batch of float32\[2, 4\]: RuntimeError"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(net, given, message):
    with pytest.raises(OptionError, match=message):
        squeezebox.parity(**{"a": net, "b": net, "batches": IMAGES, **given})


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


def test_sparse_gradients_are_compared():
    torch.manual_seed(0)
    words = [torch.randint(0, 20, (4, 5))]
    a = Mean()
    b = copy.deepcopy(a)
    assert "to the bit" in str(squeezebox.parity(a, b, words))
    with torch.no_grad():
        b.head.weight.add_(0.1)
    assert squeezebox.parity(a, b, words).first.layer == "head"


def test_a_long_error_is_quoted_by_its_first_line(net):
    def fails(x):
        raise RuntimeError("wrong:\nfirst " + "x" * 400 + ".\nsecond")

    with pytest.raises(OptionError, match=r"RuntimeError: wrong: first x{200,300} \.\.\.\. Give") as raised:
        squeezebox.parity(fails, net, IMAGES)
    assert "second" not in str(raised.value)
