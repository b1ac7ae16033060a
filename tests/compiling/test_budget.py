"""squeezebox.compile(budget=): the measured peak is within the budget, and nothing is lost."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import partitioners
from torch.fx.experimental.proxy_tensor import make_fx

import squeezebox
from squeezebox.capture import Saving
from squeezebox.capture._compiled import _adapter
from squeezebox.capture._compiled._saved import Choice, Joint, Packed, Part
from squeezebox.compiling._budget import _Attempt, _Search
from squeezebox.memory import Operator, PeakMeter, Ran
from squeezebox.schema import BudgetError, OptionError, UnsupportedModelError
from squeezebox.steps import held_by
from tests.compiling.conftest import needs_compiler

pytestmark = needs_compiler


class Net(nn.Module):
    """Layers with dropout between, and a BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1, self.training)
        return self.last(x)


X, Y = torch.randn(4096, 64), torch.randint(10, (4096,))


def step_of(model, budget):
    torch._dynamo.reset()
    return squeezebox.compile(model, budget=budget, sample=(X, Y), loss_fn=F.cross_entropy)


def trained(model, call):
    """Loss, gradients and buffers after one step."""
    torch.manual_seed(7)
    model.zero_grad()
    loss = F.cross_entropy(call(X), Y)
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters()), *model.buffers()]


@pytest.mark.slow
def test_no_cut_draws_a_mask_again(monkeypatch):
    """Some of torch's for lower peaks would: backward then has other masks than forward."""
    found, own, seeds = [], Part.with_draws, "inductor_seeds_default"

    def seen(part, cut):
        bare = [each for each in cut if each.name not in ("gt", "gt_1", seeds)]
        found.append({each.name for each in own(part, bare)} - {each.name for each in bare})
        return own(part, cut)

    monkeypatch.setattr(Part, "with_draws", seen)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 256)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Dropout(), nn.Linear(256, 256), nn.ReLU(), nn.Dropout())
    model.append(nn.Linear(256, 10))
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    torch._dynamo.reset()
    squeezebox.compile(model, budget="100%", sample=(x, y), loss_fn=F.cross_entropy)(x)
    assert found and all(names == {seeds} for names in found)


class Attention(nn.Module):
    """Of four heads, with a residual."""

    def __init__(self, dropout):
        super().__init__()
        self.all, self.out, self.dropout = nn.Linear(64, 192), nn.Linear(64, 64), dropout

    def forward(self, x):
        query, key, value = self.all(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        return x + self.out(found.transpose(1, 2).reshape(x.shape))


def gradients(model, call, x, y):
    torch.manual_seed(3)
    model.zero_grad()
    F.cross_entropy(call(x), y).backward()
    return [each.grad.clone() for each in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_as_without_a_budget(dropout):
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(dropout) for _ in range(3)), nn.Flatten(), nn.Linear(4096, 10))
    x, y = torch.randn(16, 64, 64), torch.randint(10, (16,))
    torch._dynamo.reset()
    expected = gradients(model, torch.compile(model), x, y)
    torch._dynamo.reset()
    step = squeezebox.compile(model, budget="75%", sample=(x, y), loss_fn=F.cross_entropy)
    torch.testing.assert_close(gradients(model, step, x, y), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_gradients_of_a_max_pooling_are_the_eager_ones():
    """Torch 2.13's own compiled step has zeros for those of the convolution."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model.append(nn.Linear(2048, 10))
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    torch._dynamo.reset()
    step = squeezebox.compile(model, budget="100%", sample=(x, y), loss_fn=F.cross_entropy)
    expected = gradients(model, model, x, y)
    torch.testing.assert_close(gradients(model, step, x, y), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_every_budget_holds_and_nothing_is_lost():
    plain = Net()
    expected = trained(plain, torch.compile(plain, fullgraph=True))
    own = partitioners.choose_saved_values_set
    peaks, held = [], []
    for budget in ("100%", "78%"):
        model = Net()
        step = step_of(model, budget)
        peaks.append(step.peak_bytes)
        held.append(step.report().packed_bytes)
        for found, other in zip(trained(model, step), expected, strict=True):
            torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(model.norm.num_batches_tracked, torch.tensor(1))
    assert peaks[1] <= 0.78 * peaks[0] and held[0] > held[1] and step.report().saved_bytes == held[0]
    # the last one: evaluation of any shape, and training of smaller ones
    model.eval()
    with torch.no_grad():
        assert step(X[:3]).shape == (3, 10)
    model.train()
    assert step(X[:64]).shape == (64, 10)
    assert step.report().packed_bytes < held[1] / 50
    with pytest.raises(OptionError, match=r"peak with its sample is .* would take about .* MiB"):
        step(torch.cat([X, X]))
    assert partitioners.choose_saved_values_set is own
    with pytest.raises(BudgetError, match=r"gradients at the end, .* 1\.20 MiB, and .* is 100\.00 KiB"):
        step_of(Net(), "100KiB")


@pytest.mark.slow
def test_what_torch_would_run_uncompiled_is_refused():
    step = step_of(Net(), "88%")
    with torch._dynamo.config.patch(recompile_limit=2):
        assert step(X[:64]).shape == (64, 10)
        with pytest.raises(OptionError, match="compiled for 2 forms of input"):
            step(X[:32])
    assert not torch._dynamo.config.fail_on_recompile_limit_hit


@pytest.mark.slow
def test_lightning_may_be_imported():
    pytest.importorskip("lightning.fabric")  # which wraps torch.compile, for the whole process
    step = step_of(Net(), "88%")
    assert step.peak_bytes <= 0.88 * step_of(Net(), "100%").peak_bytes


class Broken(Net):
    """A break between two graphs, a branch on data, and a graph that runs for three layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Rows() for _ in range(4))

    def forward(self, x):
        x = self.layers[0](self.norm(self.first(x)))
        if x.mean() > 1e9:
            x = 2 * x
        return self.looped(x)

    def looped(self, x):
        for layer in list(self.layers)[1:]:
            x = layer(x)
            torch._dynamo.graph_break()
        return self.last(x)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(x)))


def peak_of(model, step):
    """Of a step with the sample from no gradients on."""
    model.zero_grad()
    meter = PeakMeter(torch.device("cpu"))
    assert meter.start()
    F.cross_entropy(step(X), Y).backward()
    return meter.stop(()).total_bytes + sum(each.nbytes for each in [*held_by(model), X, Y])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_several_graphs_share_the_budget():
    torch._dynamo.reset()
    plain = Broken()
    expected = trained(plain, torch.compile(plain))
    other = Broken()
    whole = peak_of(other, torch.compile(other))
    model = Broken()
    step = step_of(model, "60%")
    for found, other in zip(trained(model, step), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)
    assert peak_of(model, step) <= step.peak_bytes <= 0.6 * whole + 4096
    assert step.report().saved_bytes > 3 * 2 * 4096 * 256 * 4  # of every layer, though three share a graph


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_that_is_never_compiled_is_refused():
    class Disabled(Net):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x)

    with pytest.raises(UnsupportedModelError, match="no graph with gradients"):
        step_of(Disabled(), "50%")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "50%"}, "sample="),
        ({"budget": "50%", "bits": 4, "sample": (X, Y), "loss_fn": F.cross_entropy}, "exclude each other"),
        ({"budget": "half", "sample": (X, Y), "loss_fn": F.cross_entropy}, "no size"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(OptionError, match=words):
        squeezebox.compile(Net(), **options)


class Scaled(nn.Module):
    """Layers, and a parameter whose gradient tells the values that it scaled: all behind it is exact."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(12))
        self.scale = nn.Parameter(torch.ones(1024, 128))

    def forward(self, x):
        x = torch.relu(self.layers[0](x)) * self.scale
        for layer in self.layers[1:]:
            x = torch.relu(layer(x))
        return x


@pytest.mark.slow
def test_with_noise_values_are_packed_within_their_bounds():
    x, y = torch.randn(1024, 128), torch.zeros(())
    options = {"sample": (x, y), "loss_fn": lambda output, _: output.sum()}
    torch._dynamo.reset()
    model = Scaled()
    plain = squeezebox.compile(model, budget="100%", **options)
    options["budget"] = int(0.56 * plain.peak_bytes)
    with pytest.raises(BudgetError):
        squeezebox.compile(model, **options)
    step = squeezebox.compile(model, noise=1e-2, **options)
    assert step.peak_bytes <= options["budget"] and 0.0 < step.noise <= 1e-2
    model(x).sum().backward()
    exact = model.scale.grad
    model.zero_grad()
    step(x).sum().backward()
    values = torch.relu(model.layers[0](x)).detach()
    [bits] = {row.bits for row in step.report().tensors if row.name == "relu"}
    bound = values.amax(1, keepdim=True) / (2**bits - 2) / 2
    gradient = torch.where(values > 0, exact / values, 0.0)  # with respect to what was scaled
    assert ((model.scale.grad - exact).abs() <= 1.001 * bound * gradient.abs() + 1e-7).all()
    assert not model.scale.grad[values == 0].any() and not torch.equal(model.scale.grad, exact)


def traced(function, tensors):
    """(graph, nodes that do not read the second tensor)"""
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    nodes = list(graph.nodes)
    late = {nodes[1]}
    for node in nodes:
        late |= {node} if late & set(node.all_input_nodes) else set()
    return graph, [each for each in nodes if each not in late]


def joint():
    """Eight layers and their backward by hand, traced: (graph, forward's nodes)."""

    def function(x, above, *weights):
        read, out = [x], x
        for weight in weights:
            out = torch.tanh(out @ weight)
            read.append(out)
        gradients = []
        for weight in reversed(weights):
            above = above * (1 - read.pop() ** 2)
            gradients.append(read[-1].t() @ above)
            above = above @ weight.t()
        return out, *gradients

    return traced(
        function,
        [torch.empty(256, 64), torch.empty(256, 64), *(torch.empty(64, 64) for _ in range(8))],
    )


def test_the_search_saves_less_for_more_time():
    graph, forward = joint()
    joint_graph = Joint([Part(graph, forward, 1)])
    tanhs = [node for node in forward if "tanh" in str(node.target)]
    part = 256 * 64 * 4
    everything = joint_graph.choice(frozenset(tanhs), 1 << 40)
    least = joint_graph.within(tanhs, 0)
    limit = everything.peak_bytes - part // 2
    between = joint_graph.within(tanhs, limit)
    assert everything.excess == between.excess == 0.0
    assert least.peak_bytes < 0.65 * everything.peak_bytes and between.peak_bytes <= limit
    assert everything.seconds < between.seconds < least.seconds


def test_what_is_written_anew_costs_more_than_what_is_fused():
    def function(x, above, weight):
        product = x @ weight
        scaled = product * 2.0 - 1.0
        total = scaled.cumsum(0)
        return total, above * scaled + above * total.relu()

    graph, forward = traced(function, [torch.empty(256, 64), torch.empty(256, 64), torch.empty(64, 64)])
    [product] = (node for node in forward if "mm" in node.name)
    [scaled] = (node for node in forward if node.name.startswith("sub"))
    [total] = (node for node in forward if "cumsum" in node.name)
    joint_graph = Joint([Part(graph, forward, 1)])
    seconds = {
        saved: joint_graph.choice(frozenset(saved), 1 << 40).seconds
        for saved in ((product, scaled, total), (product, total), (product, scaled))
    }
    everything, fused, summed = seconds.values()
    assert 0.0 < 4 * (fused - everything) < summed - everything


@pytest.mark.slow
def test_a_budget_of_torchs_own_peak_takes_no_more_time_than_torchs_own_way(monkeypatch):
    seen, starts = [], Saving.starts
    monkeypatch.setattr(Saving, "starts", lambda self: seen.append((self, starts(self))) or seen[-1][1])
    squeezebox.compile(Net(), budget="80%", sample=(X, Y), loss_fn=F.cross_entropy)
    saving, ways = seen[-1]
    joint_graph, _ = saving.known()
    found = [joint_graph.choice(frozenset(way), 1 << 40) for way in ways]
    assert len({each.saved for each in found}) > 2
    for each in found:
        best = joint_graph.search(ways, each.peak_bytes)
        assert best.peak_bytes <= each.peak_bytes and best.seconds <= each.seconds


@pytest.mark.slow
def test_freed_memory_is_held_for_the_sample_alone_whose_peak_is_measured(monkeypatch):
    compiled, reuses = _adapter.compile_fx, []

    def seen(graph, inputs, config_patches):
        reuses.append(config_patches.get("allow_buffer_reuse", True))
        return compiled(graph, inputs, config_patches=config_patches)

    monkeypatch.setattr(_adapter, "compile_fx", seen)
    step = step_of(Net(), "100%")
    assert reuses[0] is False and reuses[-1] is True
    made = len(reuses)
    step(X[:100]).sum().backward()
    assert reuses[made:] == [False]


class OutOfReach:
    """A model of bytes that finds another choice each time, as long as it is asked, all above any budget."""

    def choice(self, saved, limit_bytes):
        return Choice(saved, 1000, 0.0, 1.0, "an operator")

    def learn(self, saved, ran):
        self.learned = saved

    def search(self, starts, limit_bytes):
        return self.choice(frozenset({object()}), limit_bytes)


def test_a_budget_out_of_reach_is_given_up_soon():
    model = OutOfReach()
    saving = Saving(model.choice(frozenset(), 0))
    saving.known, saving.chosen = lambda: (model, saving.choice), Saving
    search, tried = _Search(saving, 100, None), _Attempt(None, saving, 1000, 0)
    made = 0
    while (found := search.next(tried, None)) is not None:
        tried, made = _Attempt(None, found, 1000, 0), made + 1
    assert made == 3


def test_the_search_gives_up_all_parts_of_a_storage():
    def function(x, above, *weights):
        read, out = [], x
        for weight in weights:
            parts = (out @ weight).chunk(3, 1)
            read.append(parts)
            out = parts[0] * parts[1] * parts[2]
        for first, second, third in reversed(read):
            above = torch.tanh(above * first) * second + third
        return out, above

    graph, forward = traced(
        function,
        [torch.empty(256, 64), torch.empty(256, 64), *(torch.empty(64, 192) for _ in range(8))],
    )
    joint_graph = Joint([Part(graph, forward, 1)])
    parts = frozenset(node for node in forward if "split" in str(node.target) or "getitem" in node.name)
    everything = joint_graph.choice(parts, 1 << 40)
    least = joint_graph.search([parts], 0)
    assert least.peak_bytes < 0.6 * everything.peak_bytes


def test_the_search_is_corrected_by_what_was_measured():
    graph, forward = joint()
    joint_graph = Joint([Part(graph, forward, 1)])
    tanhs = frozenset(node for node in forward if "tanh" in str(node.target))
    before = joint_graph.choice(tanhs, 1 << 40)
    shapes = ((256, 64), (64, 64))
    products = [Operator("aten::mm", shapes, 2 * n, 2 * n) for n in range(8)]
    live = [before.peak_bytes + 5000 + n for n in range(17)]
    joint_graph.learn(tanhs, Ran(products, live))
    assert joint_graph.choice(tanhs, 1 << 40).peak_bytes >= before.peak_bytes + 5000
    live[1::2] = [nbytes + 10**6 for nbytes in live[1::2]]  # between two products
    joint_graph.learn(tanhs, Ran(products, live))
    assert joint_graph.choice(tanhs, 1 << 40).peak_bytes == max(live[1:14:2])


def test_what_a_product_ends_is_free_behind_it():
    ran = Ran([Operator("aten::mm", (), 1, 2)], [0, 5, 9, 4, 2, 6])
    assert ran.most(1, 2) == 9 and ran.freed(2) == 4 and ran.most(ran.freed(2), 5) == 6


def test_values_in_fewer_bits_take_their_codes_alone():
    graph, forward = joint()
    tanhs = [node for node in forward if "tanh" in str(node.target)]
    part = 256 * 64 * 4
    joint_graph = Joint([Part(graph, forward, 1, codes=dict.fromkeys(tanhs, (part // 4, 100)))])
    kept = joint_graph.choice(frozenset(tanhs), 1 << 40)
    packed = joint_graph.choice(frozenset(map(Packed, tanhs)), 1 << 40)
    # in the first layer's backward, its own value or the one before is there once more
    assert kept.peak_bytes - packed.peak_bytes == pytest.approx(8 * part * 3 / 4, abs=2 * part)
    assert kept.seconds < packed.seconds and packed.excess == 0.0
    exact = Joint([Part(graph, forward, 1)]).within(tanhs, 0)
    assert joint_graph.within(tanhs, 0).peak_bytes < exact.peak_bytes
    between = joint_graph.within(tanhs, kept.peak_bytes - part // 2)
    assert 0 < sum(isinstance(each, Packed) for each in between.saved) < 8


def test_graphs_run_forward_one_by_one_and_back():
    (graph, forward), (other, others) = joint(), joint()
    parts = [Part(graph, forward, 1), Part(other, others, 1)]

    def peak(run):
        saved = [node for part in run for node in part.forward if "tanh" in str(node.target)]
        return Joint(run).choice(frozenset(saved), 1 << 40).peak_bytes

    part = 256 * 64 * 4
    # what the first saved is there while the second runs
    assert peak(parts) == pytest.approx(peak(parts[:1]) + 8 * part, abs=2 * part)
    assert peak(parts) == peak([parts[0], parts[0]])
