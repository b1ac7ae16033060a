"""Bayesian layers compute what plain autograd would with the noise in a tensor, and hold none of it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from squeezebox import OptionError, UnsupportedModelError, layers
from squeezebox.layers._normals import normals

CPU = torch.device("cpu")
PLAIN = [
    (nn.Linear(5, 7), (6, 5)),
    (nn.Linear(5, 7, bias=False), (2, 3, 5)),
    (nn.Conv1d(4, 6, 3, padding=1, groups=2), (4, 4, 9)),
    (nn.Conv2d(3, 4, 3, stride=2, padding=(1, 0), dilation=(1, 2)), (2, 3, 8, 9)),
    (nn.Conv2d(3, 4, (1, 3), padding="same", dilation=2, bias=False), (2, 3, 8, 9)),
    (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 8, 9)),
    (nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 3)),
]


def stored(layer, plain, x, call=0):
    """The layer with eps in tensors, from plain autograd: what is to be reproduced."""
    key = dict(seed=layer.draws.seed, draw=call)
    outs = []
    pairs = [(layer.mu, layer.rho), (layer.bias_mu, layer.bias_rho)]
    pairs = [(mu, None if rho is None else F.softplus(rho)) for mu, rho in pairs]
    for sample, part in enumerate(x.chunk(layer.samples)):
        found = []
        for bias, (mu, sigma) in enumerate(pairs):
            if mu is None:
                found.append(None)
                continue
            eps = normals(mu.numel(), **key, sample=sample, module=4 * layer.draws.module + bias, device=CPU)
            found.append(mu + sigma * eps.view(mu.shape).to(mu.dtype))
        weight, bias = found
        outs.append(
            F.linear(part, weight, bias)
            if isinstance(plain, nn.Linear)
            else plain._conv_forward(part, weight, bias)
        )
    return torch.cat(outs)


def gradients(loss, layer, x):
    return torch.autograd.grad(loss, [x, *layer.parameters()])


@pytest.mark.every(3)
@pytest.mark.parametrize(("plain", "shape"), PLAIN, ids=lambda each: str(each)[:40])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_equal_those_with_stored_noise_to_the_bit(plain, shape, samples, dtype):
    torch.manual_seed(0)
    plain = copy.deepcopy(plain).to(dtype)
    layer = type_of(plain).of(plain, samples=samples)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    out, expected = layer(x), stored(layer, plain, x)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    for found, plain_one in zip(
        gradients((out * grad).sum(), layer, x), gradients((expected * grad).sum(), layer, x), strict=True
    ):
        assert torch.equal(found, plain_one)


def type_of(plain):
    return getattr(layers, f"Bayes{type(plain).__name__}")


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch, of what it does
def test_padding_that_is_wider_on_one_side():
    plain = nn.Conv2d(3, 4, (2, 3), padding="same")
    layer, x = layers.BayesConv2d.of(plain), torch.randn(2, 3, 8, 9)
    assert torch.equal(layer(x), stored(layer, plain, x))


@pytest.mark.parametrize(("plain", "shape"), PLAIN[:4], ids=lambda each: str(each)[:40])
def test_gradcheck_with_the_key_frozen(plain, shape):
    layer = type_of(plain).of(copy.deepcopy(plain).double(), samples=2)
    state = layer.get_extra_state()

    def call(x, *_):
        layer.set_extra_state(state)
        return layer(x)

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))


def test_several_calls_in_one_graph_have_the_right_gradients():
    layer, plain = layers.BayesLinear(5, 5), nn.Linear(5, 5)
    x = torch.randn(3, 5, requires_grad=True)
    found = gradients(layer(torch.relu(layer(x))).square().sum(), layer, x)
    again = stored(layer, plain, torch.relu(stored(layer, plain, x, 0)), 1)
    for one, other in zip(found, gradients(again.square().sum(), layer, x), strict=True):
        torch.testing.assert_close(one, other)


def saved_bytes(run, own):
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    mine = {each.untyped_storage().data_ptr() for each in own}
    return out, sum(nbytes for address, nbytes in seen.items() if address not in mine)


def test_nothing_but_the_input_and_the_parameters_is_kept():
    layer = layers.BayesLinear(64, 64, samples=8)
    x = torch.randn(16, 64, requires_grad=True)
    _, nbytes = saved_bytes(lambda: layer(x), [x, *layer.parameters()])
    assert nbytes == 0
    _, nbytes = saved_bytes(lambda: stored(layer, nn.Linear(64, 64), x), [x, *layer.parameters()])
    assert nbytes > 8 * 64 * 64 * 4


def test_calls_and_modules_draw_other_noise():
    layer, x = layers.BayesLinear(8, 8), torch.randn(4, 8)
    other = copy.deepcopy(layer)
    assert torch.equal(layer(x), other(x))
    assert not torch.equal(layer(x), layer(x))
    assert layers.BayesLinear(8, 8).draws.seed != layer.draws.seed
    model = layers.bayesian_(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), seed=1)
    model[1].load_state_dict({**model[0].state_dict(), "_extra_state": model[1].get_extra_state()})
    assert not torch.equal(model[0](x), model[1](x))


def test_evaluation_does_not_move_the_training_noise():
    layer, x = layers.BayesLinear(8, 8), torch.randn(4, 8)
    other = copy.deepcopy(layer)
    other.eval()
    assert not torch.equal(other(x), copy.deepcopy(layer)(x))
    other.train()
    assert torch.equal(layer(x), other(x))


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def train(model, optimizer, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(4, 1, 8, 8, generator=generator), torch.arange(4)
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out.flatten(0, 1), y.repeat(model[3].samples)) + layers.kl(model) / 1000
        loss.backward()
        optimizer.step()
    return loss


def test_training_resumed_from_a_state_dict_is_the_same_to_the_bit(tmp_path):
    torch.manual_seed(0)
    model = layers.bayesian_(network(), samples=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    torch.save(model.state_dict(), tmp_path / "state")
    loss = train(model, optimizer, 2)
    again = layers.bayesian_(network(), samples=2)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert torch.equal(train(again, torch.optim.SGD(again.parameters(), lr=0.1), 2), loss)


def test_converted_models_give_outputs_of_all_samples():
    model = layers.bayesian_(network(), samples=3, prior=0.5)
    assert [type(each).__name__ for each in model] == ["BayesConv2d", "ReLU", "Flatten", "BayesLinear"]
    out = model(torch.randn(5, 1, 8, 8))
    assert out.shape == (3, 5, 10)
    assert not torch.equal(out[0], out[1])


def test_a_layer_in_two_places_is_converted_once():
    shared = nn.Linear(4, 4)
    model = layers.bayesian_(nn.Sequential(shared, nn.ReLU(), shared))
    assert model[0] is model[2]
    assert model[0].mu is shared.weight
    layers.kl(model).backward()


def test_kl_is_that_of_torch_and_its_gradients_are_checked():
    torch.manual_seed(0)
    layer = layers.BayesLinear(4, 3, prior=0.3, dtype=torch.float64)
    with torch.no_grad():
        layer.rho.uniform_(-35, 3)
    prior = torch.distributions.Normal(0.0, 0.3)
    expected = sum(
        torch.distributions.kl_divergence(torch.distributions.Normal(mu, F.softplus(rho)), prior).sum()
        for mu, rho in ((layer.mu, layer.rho), (layer.bias_mu, layer.bias_rho))
    )
    torch.testing.assert_close(layers.kl(layer), expected)
    parameters = list(layer.parameters())
    assert torch.autograd.gradcheck(lambda *_: layers.kl(layer), parameters, atol=1e-4)


def test_a_sigma_that_underflows_leaves_mu_and_a_finite_divergence():
    layer = layers.BayesLinear(4, 4)
    nn.init.constant_(layer.rho, -200.0)
    nn.init.constant_(layer.bias_rho, -200.0)
    x = torch.randn(2, 4)
    out = layer(x)
    assert torch.equal(out, F.linear(x, layer.mu, layer.bias_mu))
    divergence = layers.kl(layer)
    (out.sum() + divergence).backward()
    assert math.isfinite(divergence.item())
    assert torch.equal(layer.rho.grad, torch.full((4, 4), -1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_train(dtype):
    layer = layers.BayesLinear(8, 8, dtype=dtype, samples=2)
    out = layer(torch.randn(4, 8, dtype=dtype))
    out.float().square().sum().backward()
    assert out.dtype == layer.rho.grad.dtype == dtype
    assert torch.isfinite(layer.rho.grad).all()
    assert torch.isfinite(layers.kl(layer))


def test_autocast_computes_in_its_dtype_with_gradients_of_the_parameters():
    layer = layers.BayesLinear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(4, 8))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert layer.rho.grad.dtype == torch.float32


@pytest.mark.parametrize("frozen", ["mu", "rho", "bias_mu"])
def test_frozen_parameters_get_no_gradient(frozen):
    layer = layers.BayesLinear(4, 4)
    getattr(layer, frozen).requires_grad_(False)
    layer(torch.randn(2, 4)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == (name == frozen)


def test_checkpointing_draws_the_same_noise_again():
    from torch.utils.checkpoint import checkpoint

    layer = layers.BayesLinear(6, 6)
    other, x = copy.deepcopy(layer), torch.randn(3, 6, requires_grad=True)

    def run(layer, x):
        return torch.tanh(layer(x)).square()

    for _ in range(2):
        plain = gradients(run(layer, x).sum(), layer, x)
        again = gradients(checkpoint(run, other, x, use_reentrant=False).sum(), other, x)
        assert all(torch.equal(one, two) for one, two in zip(plain, again, strict=True))


def test_checkpointing_that_cannot_know_its_noise_is_refused():
    from torch.utils.checkpoint import checkpoint

    layer = layers.BayesLinear(6, 6)
    x = torch.randn(3, 6, requires_grad=True)
    both = checkpoint(layer, x, use_reentrant=False) + checkpoint(layer, x, use_reentrant=False)
    with pytest.raises(UnsupportedModelError, match="2 of its calls wait"):
        both.sum().backward()


def test_a_compiled_model_calls_the_layer_as_it_is():
    layer = layers.BayesLinear(6, 6)
    model = nn.Sequential(layer, nn.ReLU())
    other, x = copy.deepcopy(model), torch.randn(3, 6)
    compiled = torch.compile(other, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="BayesLayer.forward"):
        torch.compile(model, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: layers.BayesLinear(2, 2, samples=0), "samples=0"),
        (lambda: layers.bayesian_(network(), samples=1.5), "samples=1.5"),
        (lambda: layers.BayesLinear(2, 2, prior=0.0), "prior=0.0"),
        (lambda: layers.bayesian_(network(), prior=-1.0), "prior=-1.0"),
        (lambda: layers.bayesian_(network(), prior=math.nan), "prior=nan"),
        (lambda: layers.bayesian_(network(), seed=-1), "seed=-1"),
        (lambda: layers.bayesian_(nn.ReLU()), "ReLU holds no nn.Linear"),
        (lambda: layers.bayesian_(nn.Linear(2, 2)), "Linear holds no"),
        (lambda: layers.kl(nn.Linear(2, 2)), "no Bayesian layer"),
        (lambda: layers.BayesLinear(2, 2, samples=2)(torch.randn(3, 2)), "3, 2.*2 equal parts"),
        (lambda: layers.BayesLinear(2, 2)(torch.randn(3, 2).double()), "float64.*float32"),
        (lambda: layers.bayesian_(network(), samples=2)(None), "without a tensor"),
    ],
)
def test_bad_input_is_refused(make, says):
    with pytest.raises(OptionError, match=says):
        make()


def test_layers_that_would_lose_something_are_refused():
    model = network()
    model[3].register_forward_hook(lambda *_: None)
    with pytest.raises(OptionError, match="3 has hooks"):
        layers.bayesian_(model)
    tied = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(OptionError, match="1 shares its weight with 0"):
        layers.bayesian_(tied)


def encoder(**options):
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options))


def test_a_layer_of_which_torch_reads_weights_itself_is_refused():
    with pytest.raises(OptionError, match=r"0\.linear1 is read .*set_fastpath_enabled\(False\)"):
        layers.bayesian_(encoder())
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model = layers.bayesian_(encoder()).eval()
        with torch.no_grad():
            assert model(torch.randn(2, 5, 8)).shape == (2, 5, 8)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("options", [{"batch_first": False}, {"bias": False}, {"activation": torch.tanh}])
def test_a_layer_that_torch_always_calls_is_converted(options):
    layer = nn.TransformerEncoderLayer(8, 2, 12, **({"batch_first": True} | options))
    model = layers.bayesian_(nn.TransformerEncoder(layer, 1)).eval()
    assert type(model.layers[0].linear2) is layers.BayesLinear
    with torch.no_grad():
        assert model(torch.randn(2, 5, 8)).shape == (2, 5, 8)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_an_image_without_a_batch(kind):
    layer = type_of(kind(3, 4, 3)).of(kind(3, 4, 3, padding=1, padding_mode="circular"))
    x = torch.randn(3, *[5] * (layer.mu.dim() - 2))
    state = layer.get_extra_state()
    out = layer(x)
    layer.set_extra_state(state)
    assert torch.equal(out, layer(x[None])[0])
    with pytest.raises(OptionError, match="2 equal parts"):
        type_of(kind(2, 2, 3)).of(kind(2, 2, 3), samples=2)(x[:2])
