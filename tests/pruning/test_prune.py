"""squeezebox.prune: the right channels go, in the same run, and a plain narrower model is left."""

import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squeezebox
from squeezebox.pruning._prune import _difference
from squeezebox.reports import PruningReport
from squeezebox.schema import OptionError, UnsupportedModelError

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(8) % 5
SGD = functools.partial(torch.optim.SGD, momentum=0.9)


class Residual(nn.Module):
    """A stem whose channels two sums tie together, and a block within."""

    def __init__(self, width=10, inner=20):
        super().__init__()
        stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU())
        self.first = nn.Sequential(nn.Conv2d(width, inner, 1), nn.GELU(), nn.Conv2d(inner, width, 1))
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.first(x)
        y = self.second(x)
        y += x
        return self.head(y.mean((2, 3)))


class Excited(nn.Module):
    """Depthwise convolutions, squeeze and excitation, a concatenation, and a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.reduce, self.excite = nn.Linear(12, 4), nn.Linear(4, 12)
        self.down, self.up = nn.Conv2d(12, 16, 2, stride=2), nn.ConvTranspose2d(16, 6, 2, stride=2)
        self.norm, self.last = nn.BatchNorm2d(18), nn.Conv2d(18, 5, 1)

    def forward(self, x):
        x = self.depthwise(F.silu(self.expand(x)))
        x = x * torch.sigmoid(self.excite(F.relu(self.reduce(x.mean((2, 3))))))[:, :, None, None]
        x = torch.cat((x, self.up(F.relu(self.down(x)))), 1)
        return self.last(self.norm(x)).mean((2, 3))


def flattened():
    """Channels that are several elements each once they are flattened."""
    layers = [nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(160, 20), nn.Tanh(), nn.Linear(20, 5))


class Tokens(nn.Module):
    """Of a transformer goes what lies between the two layers of its feedforward."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.layer = nn.TransformerEncoderLayer(12, 2, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.layer(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def made(build, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    net = build().double()
    return net, optimizer(net.parameters(), lr=1e-2)


def steps(net, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), Y)
        loss.backward()
        optimizer.step()
    return loss


@pytest.mark.parametrize("build", [Residual, Excited, flattened, Tokens])
def test_the_narrowed_network_equals_the_masked_one_and_goes_on(build):
    net, optimizer = made(build)
    steps(net, optimizer, 2)
    pruning = squeezebox.prune(net, optimizer, inputs=X, channels=0.3, end=2)
    parameters = list(net.parameters())
    assert not pruning.done
    last = steps(net, optimizer, 2)  # whose graph stays alive
    figures = pruning.report().figures
    assert pruning.done and figures.difference < 1e-12 and torch.isfinite(last)
    assert figures.parameters_after < figures.parameters_before
    assert all(len(each.kept) == each.channels - int(0.3 * each.channels) for each in figures.groups)
    steps(net, optimizer, 2)
    assert all(one is other for one, other in zip(parameters, net.parameters(), strict=True))
    for parameter in parameters:
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape == parameter.grad.shape


def test_what_is_left_trains_like_a_plain_network_of_those_widths():
    net, optimizer = made(Residual)
    pruning = squeezebox.prune(net, optimizer, inputs=X, channels=0.3, start=1, end=3)
    steps(net, optimizer, 3)
    kept = {each.places[0]: len(each.kept) for each in pruning.report().figures.groups}
    assert kept == {"stem.0.weight": 7, "first.0.weight": 14}
    plain, other = made(lambda: Residual(7, 14))
    assert str(plain) == str(net)  # the sizes that layers keep
    plain.load_state_dict(net.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(steps(net, optimizer, 3), steps(plain, other, 3))
    assert all(map(torch.equal, net.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize("build", [Residual, Excited, flattened, Tokens])
def test_a_checkpoint_loads_into_a_fresh_model_and_training_goes_on(build, tmp_path):
    net, optimizer = made(build)
    squeezebox.prune(net, optimizer, inputs=X, channels=0.3, end=2)
    steps(net, optimizer, 3)
    torch.save([net.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
    fresh, after = made(build)
    before = list(fresh.parameters())
    weights, state = torch.load(tmp_path / "checkpoint.pt")
    squeezebox.load_pruned(fresh, weights)
    after.load_state_dict(state)
    assert str(fresh) == str(net) and all(map(operator.is_, before, fresh.parameters()))
    torch.manual_seed(5)
    expected = steps(net, optimizer, 3)
    torch.manual_seed(5)
    assert torch.equal(steps(fresh, after, 3), expected)
    assert all(map(torch.equal, net.state_dict().values(), fresh.state_dict().values()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Residual(12, 20), r"stem\.0\.weight has shape \[12, 3, 3, 3\] in the checkpoint and \[10, "),
        (Excited, "depthwise.bias is in one of them alone .38 such names"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(wrong, message):
    net, before = Residual(), str(Residual())
    with pytest.raises(OptionError, match=message):
        squeezebox.load_pruned(net, wrong().state_dict())
    assert str(net) == before and net.stem[0].weight.shape[0] == 10


def test_the_least_important_channels_go_everywhere_and_others_keep_their_state():
    net, optimizer = made(Residual)
    pruning = squeezebox.prune(net, optimizer, inputs=X, channels=0.3, start=1, end=3)
    stepped, another = made(Residual)
    importance = torch.zeros(10, dtype=torch.float64)
    along = {0: ("stem.0.weight", "stem.1.weight", "stem.1.bias", "first.2.weight", "first.2.bias")}
    along[0] += ("second.0.weight", "second.0.bias", "second.1.weight", "second.1.bias")
    along[1] = ("first.0.weight", "second.0.weight", "head.weight")
    for number in range(3):
        steps(stepped, another, 1)
        if number >= 1:
            before = {name: value.clone() for name, value in net.named_parameters()}
            optimizer.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            for dim, names in along.items():
                for name in names:
                    square = (before[name] * net.get_parameter(name).grad).detach() ** 2
                    importance += square.movedim(dim, 0).reshape(10, -1).sum(1)
            optimizer.step()
        else:
            steps(net, optimizer, 1)
    kept = torch.tensor(pruning.report().figures.groups[0].kept)
    assert kept.tolist() == importance.argsort(descending=True)[:7].sort().values.tolist()
    assert torch.equal(net.head.weight, stepped.head.weight[:, kept])
    assert torch.equal(net.second[0].weight, stepped.second[0].weight[kept][:, kept])
    moments = another.state[stepped.second[0].weight]["exp_avg"]
    assert torch.equal(optimizer.state[net.second[0].weight]["exp_avg"], moments[kept][:, kept])
    assert torch.equal(net.stem[1].running_var, stepped.stem[1].running_var[kept])


def test_a_session_holds_less_from_then_on():
    net, optimizer = made(Residual, SGD)
    net.float()
    session = squeezebox.attach(net, optimizer=optimizer, exact=True)
    squeezebox.prune(net, optimizer, inputs=X.float(), channels=0.5, end=2)
    saved = []
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(net(X.float()), Y).backward()
        optimizer.step()
        saved.append(session.report().record.saved_bytes)
    session.detach()
    assert saved[1] > 1.5 * saved[2] and saved[2] == saved[3]
    assert all(optimizer.state[each]["momentum_buffer"].shape == each.shape for each in net.parameters())


def test_a_depthwise_convolution_that_would_keep_one_channel_is_given_back():
    layers = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    net, optimizer = made(lambda: nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 5)))
    before, expected = str(net), net(X)
    pruning = squeezebox.prune(net, optimizer, inputs=X, channels=0.75, end=1)
    assert str(net) == before and torch.equal(net(X), expected)
    steps(net, optimizer, 2)
    assert pruning.done and net[1].out_channels == net[1].groups == 1


def test_cancelled_nothing_goes():
    net, optimizer = made(Residual)
    pruning = squeezebox.prune(net, optimizer, inputs=X, end=1)
    pruning.cancel()
    steps(net, optimizer, 2)
    assert not pruning.done and net.head.in_features == 10
    with pytest.raises(OptionError, match="0 of 1 steps are taken"):
        pruning.report()


class Written(nn.Module):
    """Has a number of channels in its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.last(self.first(x).reshape(-1, 8))


class Asserting(Written):
    def forward(self, x):
        found = self.first(x)
        assert found.shape[1] == 8, "the first layer has 8 channels"
        return self.last(found.flatten(1))


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def grouped():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(288, 5))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Written, "does not compute what it does with them masked"),
        (Asserting, "AssertionError: the first layer has 8 channels"),
        (grouped, "no channels of this model can go"),
        (lambda: nn.Sequential(Branching(8, 8), nn.Linear(8, 5)), "torch.export fails on it"),
        (lambda: torch.compile(Residual()), "is compiled for the sizes"),
        (lambda: nn.DataParallel(Residual()), "DataParallel has made its buckets"),
    ],
)
def test_models_that_cannot_be_narrowed_are_refused_and_left_alone(build, message):
    net, optimizer = made(build)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    first = next(net.parameters())
    gradient = first.grad = torch.ones_like(first)
    with pytest.raises(UnsupportedModelError, match=message):
        squeezebox.prune(net, optimizer, inputs=X, end=1)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert first.grad is gradient and net.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0.0}, "channels 0.0 is not between 0 and 1"),
        ({"channels": 1.0}, "channels 1.0 is not between 0 and 1"),
        ({"channels": 0.01}, "the widest has 20"),
        ({"start": 3, "end": 3}, "start 3 and end 3 leave no step"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    net, optimizer = made(Residual)
    with pytest.raises(OptionError, match=message):
        squeezebox.prune(net, optimizer, **{"inputs": X, "end": 1, **options})


def test_the_optimizer_of_another_model_is_refused():
    net, _ = made(Residual)
    with pytest.raises(OptionError, match="no parameter of this model"):
        squeezebox.prune(net, made(Residual)[1], inputs=X, end=2)


@pytest.mark.parametrize("before", [0, 1])
def test_state_of_other_shapes_is_refused(before):
    net, optimizer = made(Residual, torch.optim.Adafactor)
    if before:
        steps(net, optimizer, 1)
    with pytest.raises(UnsupportedModelError, match="'row_var' of .* has shape"):
        squeezebox.prune(net, optimizer, inputs=X, end=1)
    assert len(optimizer.state) == before * len(list(net.parameters()))


def test_two_optimizers_are_refused():
    net, _ = made(flattened)
    optimizers = [torch.optim.Adam(part.parameters()) for part in (net[:6], net[6:])]
    with pytest.raises(OptionError, match=r"7.weight is trained and .* not in the optimizer \(1 such"):
        squeezebox.prune(net, optimizers[0], inputs=X, end=2)
    net[6:].requires_grad_(False)
    squeezebox.prune(net, optimizers[0], inputs=X, end=2)


def test_channels_of_frozen_weights_alone_stay():
    net, _ = made(flattened)
    net[:6].requires_grad_(False)
    optimizer = torch.optim.AdamW(net[7].parameters())
    pruning = squeezebox.prune(net, optimizer, inputs=X, end=1)
    steps(net, optimizer, 1)
    (group,) = pruning.report().figures.groups
    assert group.channels == 20 and "7.weight" in group.places and net[0].out_channels == 10
    net, _ = made(lambda: nn.Sequential(flattened(), nn.Tanh(), nn.LayerNorm(5)))
    net[0].requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match="all weights of 2 sets of channels are frozen"):
        squeezebox.prune(net, torch.optim.SGD(net[2].parameters()), inputs=X, end=1)


def test_channels_without_a_gradient_until_the_end_stay():
    net, optimizer = made(flattened)
    pruning = squeezebox.prune(net, optimizer, inputs=X, end=1)
    net[:6].requires_grad_(False)
    steps(net, optimizer, 1)
    assert [each.channels for each in pruning.report().figures.groups] == [20]
    squeezebox.prune(net, optimizer, inputs=X, end=1)
    net.requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match="no weight had a gradient up to step 1"):
        optimizer.step()


class Shares(nn.Module):
    """Divides by sums, which are zero of a channel that is gone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(x / x.sum((2, 3), keepdim=True)).mean((2, 3))


class Powers(nn.Module):
    """A number to the power of channels, and channels to the power of a weight's."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 100, 8), nn.Linear(100, 5)
        self.exponent = nn.Parameter(torch.linspace(1, 2, 100))

    def forward(self, x):
        return self.last((2.0 ** torch.tanh(self.first(x).flatten(1))) ** self.exponent)


def test_a_difference_that_is_no_number_is_refused():
    net, optimizer = made(Shares)
    with torch.no_grad():
        net.first.bias.fill_(9.0)
    with pytest.raises(UnsupportedModelError, match="its output is off by nan"):
        squeezebox.prune(net, optimizer, inputs=X, end=1)
    assert net.first.out_channels == 8


def test_infinities_that_both_outputs_have_are_no_difference():
    masked = torch.tensor([1.0, -torch.inf])
    assert _difference([masked], [masked]) == 0.0
    assert _difference([masked], [torch.tensor([2.0, -torch.inf])]) == 1.0
    assert _difference([masked], [torch.tensor([1.0, torch.inf])]) == torch.inf


def test_powers_are_followed_and_a_share_is_rounded_as_it_is_written():
    net, optimizer = made(Powers)
    squeezebox.prune(net, optimizer, inputs=X, channels=0.29, end=1)
    steps(net, optimizer, 2)
    assert net.first.out_channels == len(net.exponent) == 71


class Scaled(nn.Module):
    """Has a buffer of channels that checkpoints leave out."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 8), nn.Linear(8, 5)
        self.register_buffer("scale", torch.linspace(1, 2, 8), persistent=False)
        self.register_buffer("other", torch.ones(8), persistent=False)

    def forward(self, x):
        return self.last(torch.relu(self.first(x).flatten(1)) * self.scale)


def test_a_buffer_that_checkpoints_leave_out_is_loaded_narrow():
    net, optimizer = made(Scaled)
    squeezebox.prune(net, optimizer, inputs=X, channels=0.5, end=1)
    steps(net, optimizer, 1)
    fresh, _ = made(Scaled)
    squeezebox.load_pruned(fresh, net.state_dict())
    assert torch.equal(fresh(X), net(X)) and fresh.scale.shape == (4,) and fresh.other.shape == (8,)
    assert fresh.state_dict().keys() == net.state_dict().keys() and "other" not in fresh.state_dict()


def test_reports_come_back_from_their_file(tmp_path):
    net, optimizer = made(Residual)
    pruning = squeezebox.prune(net, optimizer, inputs=X, end=1)
    steps(net, optimizer, 1)
    report = pruning.report()
    report.save(tmp_path / "pruning.json")
    assert PruningReport.load(tmp_path / "pruning.json") == report
    assert "after step 1: 9 of 30 channels went" in str(report) and "10 -> 7" in str(report)


def test_what_a_gradscaler_leaves_to_a_fused_optimizer_is_done_in_importance_too():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-116)
    found = []
    for scale in (lambda loss: loss, scaler.scale):
        torch.manual_seed(0)
        net = Residual()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        pruning = squeezebox.prune(net, optimizer, inputs=X.float(), end=1)
        while not pruning.done:
            optimizer.zero_grad()
            scale(1e3 * F.cross_entropy(net(X.float()), Y)).backward()
            if scale == scaler.scale:
                scaler.step(optimizer)  # skips the first
                scaler.update()
            else:
                optimizer.step()
        found.append([*pruning._importance.values()])
    assert scaler.get_scale() == 2.0**10 and all(map(torch.equal, *found))


def test_a_closures_own_gradients_are_judged():
    found = []
    for by_closure in (False, True):
        net, optimizer = made(Residual)
        pruning = squeezebox.prune(net, optimizer, inputs=X, end=2)

        def closure(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(X), Y)
            loss.backward()
            return loss

        if by_closure:
            optimizer.step(closure)
            assert optimizer.step(closure=closure) > 0
        else:
            steps(net, optimizer, 2)
        found.append([*pruning._importance.values()])
    assert all(map(torch.equal, *found))
