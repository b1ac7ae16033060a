"""What a step does in vain: planted ones are found, and whatever is found is true."""

import gc
import inspect
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from squeezebox.profiling import check_redundancy
from squeezebox.profiling._redundancy_events import facts_of, waited_bytes
from squeezebox.schema import Waste
from tests.profiling.sabotage import CPU, findings_hold


@pytest.fixture(scope="module", autouse=True)
def nothing_frozen(collecting_quickly):
    """As in a program: a recording freezes what is there by itself."""
    gc.unfreeze()


def check(step, **options):
    step()
    return check_redundancy(step, device=CPU, **options).findings


def found(step, waste, **options):
    return [each for each in check(step, **options) if each.waste is waste]


X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.ones(32, 32, requires_grad=True)
WEIGHT.grad = torch.zeros(32, 32)
NORM = nn.BatchNorm1d(32)
KEPT = []
BUFFER = torch.zeros(32, 32)


class Wasteful(nn.Module):
    """Three layers, each with a mask of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(32))

    def forward(self, x):
        mask = torch.ones(32, 32, dtype=torch.bool).tril()
        return (x @ self.weight).masked_fill(~mask, 0.0)


def test_a_mask_made_anew_in_every_layer_is_named_by_line_module_and_bytes():
    model = Wasteful()
    repeated = found(lambda: model(X).sum().backward(), Waste.REPEATED)
    assert {each.operator for each in repeated} == {"aten.ones", "aten.tril", "aten.bitwise_not"}
    for each in repeated:
        assert each.file == __file__ and each.function == "forward" and each.phase == "forward"
        assert each.modules == ("layers.1", "layers.2") and each.count == 2 and each.nbytes == 2 * 32 * 32
        assert each.first == f"{__file__}:{each.line} of layers.0" and each.seconds > 0.0
    first = inspect.getsourcelines(Masked.forward)[1]
    assert {each.operator: each.line - first for each in repeated} == {
        "aten.ones": 1,
        "aten.tril": 1,
        "aten.bitwise_not": 2,
    }
    constants = found(lambda: model(X).sum().backward(), Waste.CONSTANT)
    assert {each.operator for each in constants} >= {"aten.ones", "aten.tril", "aten.bitwise_not"}
    assert all(
        each.modules == ("layers.0",) and not each.note for each in constants if "tril" in each.operator
    )


def twice_the_product():
    return (X @ X).sum() + (X @ X).mean()


def twice_a_literal():
    return sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).sin().sum() for _ in range(2))


def store_overwritten():
    made = torch.zeros(100)
    made.copy_(X.flatten()[:100])
    return made.sum()


def in_place_overwritten():
    made = torch.full((100,), 2.0).mul(X.flatten()[:100])
    made.zero_()
    made.copy_(X.flatten()[100:200])
    return made.sum()


def result_unread():
    unread = X.exp().sin()
    return X.sum() if unread.shape else None


def copied():
    same = X.clone()
    return same.sum() + same.mean()


def cast_there_and_back():
    return X.double().float().sum()


def turned_there_and_back():
    return X.t().contiguous().t().contiguous().sum()


def buffer_cleared_and_filled():
    BUFFER[:] = 0.0
    BUFFER[:] = X
    return BUFFER.sum()


def gradient_cleared_twice():
    for _ in range(2):
        if WEIGHT.grad is not None:
            WEIGHT.grad.zero_()
    (X @ WEIGHT).sum().backward()


def copy_changed_that_nobody_reads():
    changed = X.clone()
    changed.mul_(2.0)
    return X.sum()


PLANTED = {
    "product": (twice_the_product, Waste.REPEATED, {"aten.mm": 1}),
    "literal": (twice_a_literal, Waste.REPEATED, {"aten.lift_fresh": 1, "aten.sin": 1, "aten.sum": 1}),
    "overwritten": (store_overwritten, Waste.DEAD, {"aten.zeros": 1}),
    "overwritten in place": (
        in_place_overwritten,
        Waste.DEAD,
        {"aten.zero_": 1, "aten.mul.Tensor": 1, "aten.full": 1},
    ),
    "unread": (result_unread, Waste.DEAD, {"aten.exp": 1, "aten.sin": 1}),
    "copied": (copied, Waste.COPY, {"aten.clone": 1}),
    "turned": (turned_there_and_back, Waste.COPY, {"aten.clone": 2}),
    "buffer": (buffer_cleared_and_filled, Waste.DEAD, {"aten.fill_.Tensor": 1}),
    "gradient": (gradient_cleared_twice, Waste.DEAD, {"aten.zero_": 1}),
    "changed": (copy_changed_that_nobody_reads, Waste.DEAD, {"aten.clone": 1, "aten.mul_.Tensor": 1}),
    "cast": (cast_there_and_back, Waste.COPY, {"aten._to_copy": 2}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_waste_is_found(name):
    step, waste, operators = PLANTED[name]
    assert {each.operator: each.count for each in found(step, waste)} == operators


def updated_in_place():
    made = torch.zeros(32, 32)
    for _ in range(3):
        made.add_(X)
        made.mul_(0.5)
    return made.sum()


def input_changed_between():
    made = X.clone()
    first = made.exp()
    made.add_(1.0)
    return first.sum() + made.exp().sum()


def changed_through_a_view():
    made = X.clone()
    first = made.exp()
    made[0].zero_()
    return first.sum() + made.exp().sum()


def result_changed_later():
    first, second = torch.zeros(32, 32), torch.zeros(32, 32)
    first.add_(X)
    second.sub_(X)
    return first.sum() * second.mean()


def draws():
    kept = functional.dropout(X, 0.5).sum() + functional.dropout(X, 0.5).sum()
    noise = torch.randn(32, 32).sum() + torch.randn(32, 32).sum() + torch.rand_like(X).sum()
    torch.rand(32, 32)
    torch.bernoulli(X.abs().clamp(max=1))
    mixed = torch.randperm(32).sum() + torch.randperm(32).sum() + torch.multinomial(X.square(), 2).sum()
    own = torch.Generator().manual_seed(0)
    return kept + noise + mixed + torch.empty(32, 32).normal_(generator=own).sum()


def other_arguments():
    return (
        X.sum(0).sum()
        + X.sum(1).sum()
        + X.softmax(0).sum()
        + X.softmax(1).sum()
        + X.pow(2).sum()
        + X.pow(3.0).sum()
    )


def normalised_twice():
    return (NORM(X) + NORM(X)).sum()


def copied_to_be_changed():
    made = X.clone()
    made[0].fill_(7.0)
    return made.sum()


def copied_before_a_change():
    made = X * 2
    before = made.clone()
    made.add_(1.0)
    return (before - made).sum()


def cast_that_loses():
    return X.half().float().sum()


def laid_out_anew():
    return X.t().contiguous().sum()


def small_part_of_what_goes():
    part = (X * 2)[0].clone()
    return part.sum()


def gradients_zeroed_and_added_up():
    if WEIGHT.grad is not None:
        WEIGHT.grad.zero_()
    (X @ WEIGHT).sum().backward()
    (X.t() @ WEIGHT).square().sum().backward()


def read_by_numpy():
    return (X + 1).numpy().sum() + sum((X + 2).tolist()[0])


def kept_by_the_user():
    KEPT[:] = [X.clone(), X.exp(), X.sin()]


def checkpointed():
    checkpoint(lambda x: (x @ WEIGHT).exp().sin(), X, use_reentrant=False).sum().backward()


def checkpointed_reentrant():
    checkpoint(lambda x: (x @ WEIGHT).exp().sin(), X + WEIGHT, use_reentrant=True).sum().backward()


def given_another_storage():
    made = X * 2
    made.set_(X.clone().untyped_storage(), 0, (32, 32), (32, 1))
    return made.sum()


def half_overwritten():
    made = torch.ones(32, 32)
    made[:16].copy_(X[:16])
    return made.sum()


INNOCENT = (
    updated_in_place,
    input_changed_between,
    changed_through_a_view,
    result_changed_later,
    draws,
    other_arguments,
    normalised_twice,
    copied_to_be_changed,
    copied_before_a_change,
    cast_that_loses,
    laid_out_anew,
    small_part_of_what_goes,
    gradients_zeroed_and_added_up,
    read_by_numpy,
    kept_by_the_user,
    checkpointed,
    checkpointed_reentrant,
    given_another_storage,
    half_overwritten,
)


@pytest.mark.parametrize("step", INNOCENT)
def test_innocent_steps_have_no_finding(step):
    assert [each for each in check(step) if each.waste is not Waste.CONSTANT] == []


@pytest.mark.parametrize("step", INNOCENT + tuple(step for step, *_ in PLANTED.values()))
def test_whatever_is_found_is_true_of_handmade_steps(step):
    found = findings_hold(lambda: (step, tuple))
    assert (len(found) > 0) == (step not in INNOCENT)


def checked_after_the_update():
    """The next step's forward, of the same batch and weights, is not this line's."""
    (X @ WEIGHT).square().sum().backward()
    with torch.no_grad():
        WEIGHT.sub_(WEIGHT.grad, alpha=1e-3)
    return (X @ WEIGHT.detach()).mean()


def test_a_constant_is_the_same_on_the_same_line():
    assert found(checked_after_the_update, Waste.CONSTANT) == []
    (table,) = found(lambda: X.sin().sum(), Waste.CONSTANT)[:1]
    assert "other data" in table.note


def test_a_frozen_part_is_the_same_in_every_step():
    part = nn.Sequential(nn.Conv1d(32, 4, 3), nn.BatchNorm1d(4), nn.ReLU()).requires_grad_(False).eval()
    same = found(lambda: part(X[None]).sum(), Waste.CONSTANT)
    assert {each.operator for each in same} >= {"aten.convolution", "aten.native_batch_norm", "aten.relu"}


def test_syncs_are_told_as_if_on_a_device_only_when_asked():
    def step():
        chosen = X[X > 0] if X.isfinite().all() else X
        X.max().item()
        return X.nonzero().tolist(), X.cpu().numpy(), chosen

    assert found(step, Waste.SYNC) == []
    syncs = found(step, Waste.SYNC, as_device=True)
    first = min(each.line for each in syncs)
    assert {(each.operator, each.line - first, each.nbytes) for each in syncs} == {
        ("aten._local_scalar_dense", 0, 1),
        ("aten.index.Tensor", 0, 8),
        ("aten._local_scalar_dense", 1, 4),
        ("aten.nonzero", 2, 8),
        ("Tensor.tolist", 2, 8 * 2 * X.numel()),
        ("Tensor.cpu", 2, X.nbytes),
    }


ELSEWHERE = torch.empty(8, device="meta")
HERE = torch.empty(8)
ATEN = torch.ops.aten
WAITS = (
    (ATEN._local_scalar_dense.default, (ELSEWHERE[0],), {}, 4),
    (ATEN._local_scalar_dense.default, (HERE[0],), {}, None),
    (ATEN.nonzero.default, (ELSEWHERE,), {}, 8),
    (ATEN.masked_select.default, (ELSEWHERE, ELSEWHERE > 0), {}, 8),
    (ATEN.index.Tensor, (ELSEWHERE, [ELSEWHERE > 0]), {}, 8),
    (ATEN.index.Tensor, (ELSEWHERE, [ELSEWHERE.long()]), {}, None),
    (ATEN.equal.default, (ELSEWHERE, ELSEWHERE), {}, 8),
    (ATEN.add.Tensor, (ELSEWHERE, HERE[0]), {}, None),
    (ATEN.copy_.default, (HERE, ELSEWHERE), {}, 32),
    (ATEN.copy_.default, (HERE, ELSEWHERE, True), {}, None),
    (ATEN.copy_.default, (ELSEWHERE, ELSEWHERE), {}, None),
    (ATEN._to_copy.default, (ELSEWHERE,), {"device": "cpu"}, 32),
    (ATEN.lift_fresh.default, (ELSEWHERE,), {}, 32),
    (ATEN.lift_fresh.default, (HERE,), {}, None),
    (ATEN._to_copy.default, (HERE,), {"device": "meta"}, 32),
    (ATEN._to_copy.default, (HERE,), {"device": "meta", "non_blocking": True}, None),
    (ATEN._to_copy.default, (ELSEWHERE,), {"dtype": torch.float64}, None),
)


@pytest.mark.parametrize(("func", "args", "kwargs", "nbytes"), WAITS)
def test_the_host_waits_for_values_shapes_and_copies_from_elsewhere(func, args, kwargs, nbytes):
    """Of a device that computes nothing, so that no device is needed."""
    assert waited_bytes(facts_of(func), args, kwargs, as_device=False) == nbytes


def test_the_count_of_steps_that_optimizers_keep_on_the_host_is_no_sync():
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])

    def step():
        weight.square().sum().backward()
        optimizer.step()

    assert found(step, Waste.SYNC, as_device=True) == []


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        y = functional.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        y += x
        return functional.relu(y, inplace=True)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + functional.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1)


def resnet():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), Residual(8), Residual(8)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), torch.randn(
        4, 3, 16, 16
    )


def gpt():
    embedding, head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, Attention(16), Attention(16), nn.LayerNorm(16), nn.Flatten(0, 1), head)
    return model, torch.randint(20, (3, 8))


def recurrent():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 5)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1])

    return Last(), torch.randn(4, 5, 6)


def attending():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.layer(x, x, x)[0].flatten(0, 1)

    return Weighted(), torch.randn(4, 5, 8)


MODELS = {
    resnet: set(),
    gpt: set(),
    # torch makes both halves of the first state from zeros of the same size, and stacks last states unasked
    recurrent: {(Waste.REPEATED, "aten.zeros"), (Waste.CONSTANT, "aten.zeros"), (Waste.DEAD, "aten.stack")},
    attending: {(Waste.DEAD, "aten.mean.dim")},  # of the attention weights, which nobody asked for
}


def training(make):
    """A plain training step, and what it changes."""
    torch.manual_seed(0)
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        output = model(x)
    target = torch.arange(len(output)) % output.shape[1]

    def step():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    step()
    return step, lambda: [model.state_dict(), optimizer.state_dict()["state"]]


@pytest.mark.parametrize("make", MODELS)
def test_all_that_is_found_in_real_models_is_known_and_true(make):
    assert {(each.waste, each.operator) for each in check(training(make)[0])} == MODELS[make]
    replaced = {operator for waste, operator in MODELS[make] if waste is not Waste.CONSTANT}
    assert len(findings_hold(partial(training, make))) >= len(replaced)


OPERATIONS = {
    "exp": lambda a, b: torch.exp(a),
    "add": torch.add,
    "mm": torch.mm,
    "row": lambda a, b: a[1],
    "turn": lambda a, b: a.t(),
    "clone": lambda a, b: a.clone(),
    "dense": lambda a, b: a.contiguous(),
    "cast": lambda a, b: a.to(torch.float64 if a.dtype is torch.float32 else torch.float32),
    "half": lambda a, b: a.half().to(a.dtype),
    "zeros": lambda a, b: torch.zeros(4, 4),
    "like": lambda a, b: torch.ones_like(a),
    "literal": lambda a, b: torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4),
    "random": lambda a, b: torch.rand(4, 4),
    "dropped": lambda a, b: functional.dropout(a, 0.5),
    "add_": lambda a, b: a.add_(1.0),
    "zero_": lambda a, b: a.zero_(),
    "copy_": lambda a, b: a.copy_(b),
    "fill_part": lambda a, b: a[0].fill_(3.0),
    "out": lambda a, b: torch.sin(
        a, out=b.to(a.dtype, copy=True) if a.shape == b.shape else torch.empty_like(a)
    ),
    "sort": lambda a, b: a.sort(0).values,
    "item": lambda a, b: a * float(b.detach().sum().clamp(-1, 1)),
}
NAMES = range(6)
INSTRUCTIONS = st.tuples(
    st.sampled_from(sorted(OPERATIONS)), *(st.sampled_from(NAMES) for _ in range(3)), st.booleans()
)


def program(instructions, gradients):
    """A step that runs them on six names, of which two last from one step to the next, and what lasts."""
    torch.manual_seed(0)
    lasting = [torch.randn(4, 4, requires_grad=gradients) for _ in range(2)]

    def step():
        names = [
            lasting[number % 2].detach() if number % 4 > 1 else lasting[number % 2] * 1.5 for number in NAMES
        ]
        for operation, target, first, second, differentiated in instructions:
            with torch.set_grad_enabled(differentiated):
                try:
                    names[target] = OPERATIONS[operation](names[first], names[second])
                except (RuntimeError, IndexError):  # shapes that do not fit, or what autograd forbids
                    continue
        try:
            loss = names[0].double().sum() + names[1].double().sum()
            if loss.requires_grad:
                loss.backward()
        except RuntimeError:  # what autograd forbids, or a saved tensor was changed
            pass
        return names[0], names[2]

    return step, lambda: (lasting, [each.grad for each in lasting])


@given(st.lists(INSTRUCTIONS, min_size=3, max_size=25), st.booleans())
def test_whatever_is_found_is_true_of_any_program(instructions, gradients):
    findings_hold(partial(program, instructions, gradients))
