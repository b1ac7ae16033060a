"""Blocks split over the sequence compute what one process does, and keep no more than their share."""

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

import squeezebox
from squeezebox import OptionError, UnsupportedModelError, layers, memory, pipeline
from squeezebox.layers._sequence import Shared
from tests.pipeline import ranks

BATCH, LENGTH, DIM, HEADS, WORDS = 2, 32, 16, 4, 11
NAMES = {"columns": {"attention.qkv": 3, "up": 1}, "rows": ["attention.out", "down"]}


class Core(nn.Module):
    """Attention by hand."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v):
        return self.dropout((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)) @ v


class Attention(nn.Module):
    def __init__(self, dropout, by_hand):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.core = Core(dropout) if by_hand else None
        self.dropout = dropout

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        if self.core is None:
            dropout = self.dropout if self.training else 0.0
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        else:
            found = self.core(q, k, v)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A module of its own for attention; the MLP's layers lie in the block itself."""

    def __init__(self, dropout, by_hand):
        super().__init__()
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention(dropout, by_hand)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.first(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Net(nn.Module):
    def __init__(self, dropout=0.0, by_hand=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS)
        self.blocks = nn.ModuleList(Block(dropout, by_hand) for _ in range(2))
        self.recomputes = False

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def words(seed=0, length=LENGTH):
    return torch.randint(WORDS, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def train(net, step=lambda net: None, steps=3):
    """Losses and last gradients, with clipping between."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for number in range(steps):
        x = words(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x).flatten(0, 1), x.roll(1, 1).flatten())
        loss.backward()
        with implicit_replication():
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.cat([whole(each.grad).flatten() for each in net.parameters()])


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(_, by_hand, core):
    net = Net(by_hand=by_hand).double()
    layers.split_sequence_(net.blocks, **NAMES, core=core)
    return train(net)


@pytest.mark.parametrize(
    ("world", "by_hand", "core"),
    [
        (2, False, "scaled_dot_product_attention"),
        pytest.param(2, True, None, marks=pytest.mark.slow),
        pytest.param(4, True, "attention.core", marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_one_process_does(world, by_hand, core):
    losses, gradients = train(Net(by_hand=by_hand).double())
    for found, ours in ranks.run(trained, world, by_hand, core):
        assert (found - losses).abs().max() <= 1e-12
        assert (ours - gradients).norm() <= 1e-10 * gradients.norm()


def several(rank):
    """What two ranks find in one go, as starting them takes longest."""
    found, plain = {}, Net()
    net = Net()
    layers.split_sequence_(net.blocks, **NAMES)
    # evaluation; a state_dict that plain modules and split ones both read
    with torch.no_grad():
        found["logits"] = (net.eval()(words()) - plain.eval()(words())).abs().max()
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(net, options=options)
    found["state"] = all(torch.equal(state[name], each) for name, each in plain.state_dict().items())
    set_model_state_dict(net, {name: each + 1 for name, each in state.items()}, options=options)
    found["loaded"] = (whole(net.blocks[0].up.weight) - plain.blocks[0].up.weight - 1).abs().max().item()
    # dropout differs from rank to rank in blocks, and nowhere else; checkpointed, attached: the same
    net = Net(dropout=0.2)
    layers.split_sequence_(net.blocks, **NAMES)
    drops = []
    net.blocks[0].dropout.register_forward_hook(lambda _, args, out: drops.append(out == 0))
    torch.manual_seed(3)
    net(words())
    found["drops"], found["after"] = drops[0], torch.rand(4)
    steps = []
    for way in ("plain", "checkpointed", "attached"):
        net.recomputes = way == "checkpointed"
        session = squeezebox.attach(net, exact=True) if way == "attached" else None
        for _ in range(2 if session else 1):
            torch.manual_seed(3)
            net.zero_grad()
            loss = net(words()).square().mean()
            loss.backward()
        if session:
            session.detach()
        steps.append(torch.cat([loss.detach().view(1), *(whole(p.grad).flatten() for p in net.parameters())]))
    found["steps"] = steps
    found["refused"] = {}
    for name, act in {
        "noise": lambda: squeezebox.attach(net, noise=1e-2),
        "length": lambda: net(words(length=LENGTH - 1)),
        "batch": lambda: net(words(rank)),
        "order": lambda: net.blocks[1](net.embed(words(length=4 * LENGTH))),
        "second": lambda: _cross(net),
    }.items():
        try:
            act()
        except (OptionError, UnsupportedModelError) as error:
            found["refused"][name] = str(error)
    with torch.no_grad():
        found["works after"] = torch.isfinite(net(words())).all()
    found["held"] = _held(split=True), _held(split=False)
    return found


def _held(split):
    """Bytes that forward leaves; attention's core is computed again in both cases."""
    net = Net(dropout=0.1, by_hand=True)
    if split:
        layers.split_sequence_(net.blocks, **NAMES, core="attention.core")
    else:
        for block in net.blocks:
            block.attention.core = checkpoint_wrapper(block.attention.core)
    x = torch.ones(16, 4 * LENGTH, DIM, requires_grad=True)
    net.blocks[1](net.blocks[0](x))  # torch loads what it needs
    found = []
    for _ in range(6):  # what gloo's own thread is the last to free, the meter counts as held: so the least
        meter = memory.PeakMeter(torch.device("cpu"))
        assert meter.start()
        out = net.blocks[1](net.blocks[0](x))
        found.append(meter.stop(()).left_bytes - out.nbytes)
        del out
    return min(found)


def _cross(net):
    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x, other):
            return self.down(self.up(x)) + other

    block = Crossed()
    layers.split_sequence_([block], columns=["up"], rows=["down"])
    block(net.embed(words()), net.embed(words()))


@pytest.mark.slow
def test_states_draws_refusals_and_bytes():
    one, two = ranks.run(several, 2)
    for found in (one, two):
        assert isinstance(found, dict), found
        assert found["logits"] <= 1e-5 and found["state"] and found["loaded"] <= 1e-6 and found["works after"]
        plain, *others = found["steps"]
        assert torch.equal(plain, others[1])  # attached
        assert (plain - others[0]).norm() <= 1e-6 * plain.norm()
        refused = found["refused"]
        assert "exact=True" in refused["noise"] and "pad it" in refused["length"]
        assert "different inputs" in refused["batch"] and "in the order" in refused["order"]
        assert "second tensor" in refused["second"]
        split, plain = found["held"]
        part = 16 * 4 * LENGTH * DIM * 4 // 2  # which is a copy; plainly it is the input itself
        assert split <= 0.5 * plain + part + 8192  # random states are no smaller
    assert not torch.equal(one["drops"], two["drops"]) and torch.equal(one["after"], two["after"])


def changed(rank):
    """Gradients of norms that are unfrozen after the split; what a parameter that was not there leads to."""
    net = Net().double()
    for block in net.blocks:
        block.first.requires_grad_(False)
    layers.split_sequence_(net.blocks, **NAMES)
    for block in net.blocks:
        block.first.requires_grad_(True)
    losses, gradients = train(net, steps=2)
    net.blocks[1].second.weight = nn.Parameter(torch.ones(DIM, dtype=torch.float64))
    with pytest.raises(OptionError, match="'second.weight' was put into a block after") as caught:
        net(words())
    one = Net()
    alone = dist.new_group([0]), dist.new_group([1])
    layers.split_sequence_(one.blocks, **NAMES, group=alone[rank])
    return losses, gradients, str(caught.value), (one(words()) - Net()(words())).abs().max()


def test_what_is_unfrozen_later_is_added_up_and_one_rank_may_be_all():
    losses, gradients = train(Net().double(), steps=2)
    for found, ours, _, alone in ranks.run(changed, 2):
        assert (found - losses).abs().max() <= 1e-12
        assert (ours - gradients).norm() <= 1e-10 * gradients.norm()
        assert alone <= 1e-5


def cut_up(_):
    net = Net()
    model = nn.Sequential(net.embed, *net.blocks, net.head)
    layers.split_sequence_(net.blocks, **NAMES)
    with pytest.raises(UnsupportedModelError, match="make a pipeline of the model") as caught:
        pipeline.cut(model, (words(),))
    return str(caught.value)


def test_split_blocks_are_refused_as_stages():
    for message in ranks.run(cut_up, 2):
        assert message.startswith("'1.attention.qkv.weight' is a DTensor, of which each rank has a part"), (
            message
        )


def test_what_cannot_be_split_is_refused_before_anything_changes():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = Net()
        for wrong, words_ in (
            ({"columns": ["attention"], "rows": ["down"]}, "block 0 has Attention there"),
            ({"columns": ["up"], "rows": ["nothing"]}, "no such module"),
            ({"columns": ["up"], "rows": []}, "nothing to split"),
            ({"columns": {"up": 3}, "rows": ["down"]}, "32 outputs, which 1 ranks do not divide into 3"),
            (NAMES | {"core": "kernel"}, "core='kernel' is no module"),
        ):
            with pytest.raises(OptionError, match=words_):
                layers.split_sequence_(net.blocks, **wrong)
        net.blocks[1].down = nn.Linear(2 * DIM, DIM)
        net.blocks[1].down.weight = net.blocks[0].down.weight
        with pytest.raises(OptionError, match="shares its weight"):
            layers.split_sequence_(net.blocks, **NAMES)
        assert type(net.blocks[0].up) is nn.Linear
    finally:
        dist.destroy_process_group()


class Alone:
    """A sequence of one rank's part, and what it gathered of it."""

    def __init__(self):
        self.wholes = []

    def gather(self, part):
        whole = part.clone()
        self.wholes.append(weakref.ref(whole))
        return whole

    def add(self, whole):
        return whole


def test_a_block_of_which_a_part_is_frozen_lets_go_what_it_gathers_in_backward():
    place, part = Alone(), torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
    shared = Shared(place)
    whole = shared.gather(part, hold=False)
    weights = [torch.randn(DIM, DIM, requires_grad=trained) for trained in (True, False, False)]
    loss = sum(shared.product(whole, weight, None).sum() for weight in weights)
    loss.backward()
    assert len(place.wholes) == 2 and place.wholes[1]() is None
