"""Lean experts compute what unmodified ones do, to the bit, and keep less for backward."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from squeezebox import OptionError, UnsupportedModelError, layers
from squeezebox.layers._experts import run
from squeezebox.layers._lean import batched

FORMS = ["eager", "batched_mm", "grouped_mm"]
WITHIN = 4e-7


def mixtral(form, kind="mixtral", dim=32, hidden=48, experts=4):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "mixtral":
        from transformers.models.mixtral import modeling_mixtral as modeling

        config = modeling.MixtralConfig(hidden_size=dim, intermediate_size=hidden, num_local_experts=experts)
        module = modeling.MixtralExperts(config)
    else:
        from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

        config = modeling.Qwen3MoeConfig(hidden_size=dim, moe_intermediate_size=hidden, num_experts=experts)
        module = modeling.Qwen3MoeExperts(config)
    config._experts_implementation = form
    for each in module.parameters():
        nn.init.normal_(each, std=each.shape[-1] ** -0.5)
    return nn.Sequential(module)


@pytest.mark.parametrize("recompute", [False, True])
def test_lean_experts_are_pickled_as_lean_ones(recompute):
    lean = layers.lean_experts_(mixtral("eager"), recompute=recompute)
    for again in (pickle.loads(pickle.dumps(lean)), copy.deepcopy(lean)):  # noqa: S301
        assert type(again[0]) is type(lean[0]) and again[0].recompute is recompute
        assert torch.equal(again[0](*routed()), lean[0](*routed()))
        assert again[0].down_proj is not lean[0].down_proj


def routed(tokens=64, dim=32, experts=4, choices=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, dim, generator=generator, dtype=dtype).requires_grad_()
    scores = torch.randn(tokens, experts, generator=generator, dtype=dtype).softmax(-1)
    gates, ids = scores.topk(choices, -1)
    return x, ids, gates.detach().requires_grad_()


def results(module, x, ids, gates):
    out = module(x, ids, gates)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, torch.autograd.grad((out * weight).sum(), [x, gates, *module.parameters()])


def check(plain, lean, x, ids, gates):
    (out, gradients), (expected, plain_gradients) = (results(each, x, ids, gates) for each in (lean, plain))
    assert torch.equal(out, expected)
    for one, other in zip(gradients, plain_gradients, strict=True):
        assert float((one - other).norm()) <= WITHIN * float(other.norm())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["mixtral", "qwen"])
@pytest.mark.parametrize("recompute", [False, True])
def test_experts_of_transformers_compute_the_same(form, kind, recompute):
    plain = mixtral(form, kind)[0]
    lean = layers.lean_experts_(nn.Sequential(copy.deepcopy(plain)), recompute=recompute)[0]
    assert type(lean).__name__ == f"Lean{type(plain).__name__}"
    check(plain, lean, *routed())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chosen", ["one", "none of the last", "all", "no token"])
def test_odd_routing(form, chosen):
    plain = mixtral(form)[0]
    lean = layers.lean_experts_(nn.Sequential(copy.deepcopy(plain)))[0]
    x, ids, gates = routed(choices=4 if chosen == "all" else 1)
    if chosen == "one":
        ids = torch.full_like(ids, 2)
    elif chosen == "none of the last":
        ids = ids.clamp(max=2)
    elif chosen == "no token":
        x, ids, gates = (each.detach()[:0] for each in (x, ids, gates))
        assert lean(x, ids, gates).shape == (0, 32)
        return
    check(plain, lean, x, ids, gates)


@pytest.mark.parametrize("form", FORMS)
def test_sixteen_bits_with_gates_of_more(form):
    plain = mixtral(form)[0].bfloat16()
    lean = layers.lean_experts_(nn.Sequential(copy.deepcopy(plain)))[0]
    x, ids, gates = routed()
    x = x.detach().bfloat16().requires_grad_()
    (out, gradients), (expected, others) = (results(each, x, ids, gates) for each in (lean, plain))
    assert torch.equal(out, expected)
    for one, other in zip(gradients, others, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).float().norm()) <= 0.01 * float(other.float().norm())


def kept(module, x, ids, gates):
    seen, own = {}, {each.untyped_storage().data_ptr() for each in [x, ids, gates, *module.parameters()]}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x, ids, gates)
    assert out.grad_fn is not None
    return sum(nbytes for nbytes, _ in seen.values())


@pytest.mark.parametrize("form", FORMS)
def test_only_the_first_product_is_kept(form):
    plain = mixtral(form)
    inputs = routed()
    pairs = inputs[1].numel()
    lean = layers.lean_experts_(copy.deepcopy(plain))[0]
    assert kept(lean, *inputs) == pairs * 2 * 48 * 4
    assert kept(layers.lean_experts_(copy.deepcopy(plain), recompute=True)[0], *inputs) == 0
    assert kept(plain[0], *inputs) > 2 * pairs * 2 * 48 * 4


def reference(module, x, ids, gates):
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for choice in range(ids.shape[1]):
            expert = ids[token, choice]
            hidden = module.act(module.first[expert] @ x[token])
            out[token] += gates[token, choice] * (module.second[expert] @ hidden)
    return out


@pytest.mark.parametrize("recompute", [False, True])
def test_own_experts_and_their_gradients(recompute):
    module = layers.ExpertMLP(3, 4, 5, recompute=recompute, dtype=torch.float64)
    x, ids, gates = routed(6, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(module(x, ids, gates), reference(module, x, ids, gates))
    parameters = list(module.parameters())
    assert torch.autograd.gradcheck(lambda x, gates, *_: module(x, ids, gates), (x, gates, *parameters))


def test_gates_and_tokens_in_another_order_of_memory():
    module = layers.ExpertMLP(3, 4, 5)
    given = x, ids, gates = routed(6, 4, 3)
    turned = [each.detach().t().contiguous().t() for each in given]
    turned = turned[0].requires_grad_(), turned[1], turned[2].requires_grad_()
    for one, other in zip(results(module, *turned)[1], results(module, x, ids, gates)[1], strict=True):
        assert torch.equal(one, other)


def test_another_activation():
    module = layers.ExpertMLP(3, 4, 5, act=F.gelu, width=5)
    x, ids, gates = routed(6, 4, 3)
    torch.testing.assert_close(module(x, ids, gates), reference(module, x, ids, gates))


@pytest.mark.parametrize("recompute", [False, True])
def test_an_activation_that_drops_out_drops_the_same_in_backward(recompute):
    act = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
    module = layers.ExpertMLP(3, 4, 5, act=act, width=5, recompute=recompute, dtype=torch.float64)
    x, ids, gates = routed(6, 4, 3, dtype=torch.float64)

    def call(x, gates, *_):
        torch.manual_seed(7)
        return module(x, ids, gates)

    assert torch.autograd.gradcheck(call, (x, gates, *module.parameters()))
    out = call(x, gates)
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_gate_that_is_no_number_stays_with_its_token():
    module = layers.ExpertMLP(3, 4, 5)
    x, ids, gates = routed(6, 4, 3)
    gates = gates.detach().clone()
    gates[2, 0] = torch.nan
    out = module(x, ids, gates)
    assert out.isnan().any(1).tolist() == [False, False, True, False, False, False]


def test_a_whole_model_of_transformers_trains_the_same():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    plain = transformers.MixtralForCausalLM(config)
    lean = layers.lean_experts_(copy.deepcopy(plain))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (plain, lean)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for one, other in zip(lean.parameters(), plain.parameters(), strict=True):
        assert float((one.grad - other.grad).norm()) <= 1e-6 * float(other.grad.norm())
    assert lean.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda x, ids, gates: (x, ids + 1, gates), "experts . to 3, and there are 0 to 2"),
        (lambda x, ids, gates: (x, ids - 1, gates), "experts -1 to"),
        (lambda x, ids, gates: (x, ids.float(), gates), "ids are torch.float32"),
        (lambda x, ids, gates: (x[1:], ids, gates), "do not match"),
        (lambda x, ids, gates: (x, ids, gates[:, 0]), "do not match"),
    ],
)
def test_bad_routing_is_refused(spoil, says):
    with pytest.raises(OptionError, match=says):
        layers.ExpertMLP(3, 4, 5)(*spoil(*routed(16, 4, 3)))


def test_what_cannot_be_lean_is_refused():
    with pytest.raises(OptionError, match="Sequential has no experts"):
        layers.lean_experts_(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(OptionError, match="0 experts of 4 by 5"):
        layers.ExpertMLP(0, 4, 5)
    with pytest.raises(OptionError, match="act=PReLU has parameters"):
        layers.ExpertMLP(3, 4, 5, act=nn.PReLU(), width=5)
    with pytest.raises(UnsupportedModelError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        layers.ExpertMLP(3, 4, 5)(*routed(16, 4, 3))
    biased = mixtral("eager")
    biased[0].has_bias = True
    with pytest.raises(OptionError, match="0 has has_bias"):
        layers.lean_experts_(biased)
    biased[0].has_bias, biased[0].config._experts_implementation = False, "sonicmoe"
    with pytest.raises(OptionError, match="no form 'sonicmoe'"):
        layers.lean_experts_(biased)


def test_random_activations_are_refused_where_experts_are_called_at_once():
    module = layers.ExpertMLP(3, 4, 5)
    x, ids, gates = routed(6, 4, 3)
    weights = module.first, module.second
    with pytest.raises(UnsupportedModelError, match="draws random numbers"):
        run(x, gates, ids, *weights, lambda each: F.dropout(each[:, :5]), batched, False)


def test_experts_that_compute_something_else_are_refused():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.ones(2, 6, 4))
            self.down_proj = nn.Parameter(torch.ones(2, 4, 3))
            self.act_fn, self.num_experts = nn.SiLU(), 2

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states.clamp(max=0.0)

    with pytest.raises(OptionError, match="0 computes something else"):
        layers.lean_experts_(nn.Sequential(Clamped()))
