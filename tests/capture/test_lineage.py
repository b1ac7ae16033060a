"""What is made again is what it was, to the bit, and leaves no trace."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.capture import Onlooker
from squeezebox.capture._held import Recomputed
from squeezebox.schema import Action, CaptureError, Option, PlanError


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None)
        self.conv3, self.drop = nn.Conv2d(8, 8, 3), nn.Dropout(0.5)
        self.norm3, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = identity = torch.relu_(self.norm1(self.conv1(x)))
        x = self.norm2(self.conv2(x))
        x += identity
        x = F.gelu(self.conv3(self.drop(F.relu(x)))).permute(0, 2, 3, 1)
        return self.head(self.norm3(x)).mean((1, 2))


def in_place():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True)),
        *(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.SiLU(True), nn.Dropout(0.3, inplace=True)),
        *(nn.Conv2d(8, 8, 3), nn.Hardswish(inplace=True), nn.MaxPool2d(2), nn.ReLU6(inplace=True)),
        *(nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 18 * 18, 5)),
    )


class Attention(nn.Module):
    """Written out, with its dropout, and fused."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(32), nn.Linear(32, 96)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, 5)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2).repeat(1, 1, 11)[:, :, :32].contiguous()
        for fused in (False, True):
            q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
            if fused:
                x = (
                    x
                    + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=0.1)[:, 0]
                )
            else:
                x = x + self.drop(torch.softmax(q @ k.mT * 0.2, -1)) @ v
        return self.head(F.silu(x)).mean(1)


NETWORKS = {"residual": Residual, "in_place": in_place, "attention": Attention}


def rotary(x, w, v):
    c = torch.view_as_complex((x @ w).reshape(4, 32, 24, 2))
    turned = torch.view_as_real(c * torch.polar(torch.ones(24), torch.arange(24.0))).flatten(2)
    return torch.softmax(turned.transpose(1, 2).contiguous() * 1.0, 1).sum(2) @ v


def bits_as_numbers(x, w, v):
    h = torch.relu(x @ w)
    k = h.view(torch.int32).float() * 1e-10
    return torch.exp((k * -1.0).clamp(-1, 1) * w[0]) @ v + torch.sigmoid(h) @ v


def slice_in_place(x, w, v):
    part = (x * 2.0)[:, 16:].detach()
    part.mul_(v[0])
    return part @ w


def evaluated_then_trained(x, w, v):
    mean, variance = torch.zeros(32), torch.ones(32)
    h = F.batch_norm(x @ w, mean, variance, training=False)
    later = F.batch_norm(x @ v, mean, variance, training=True)
    return torch.sigmoid(h + later) @ v + torch.relu(h) @ w


def learned_bias(x, w, v):
    q = (x @ w)[:, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=w[:32, :32])[:, 0] @ v


def chosen_kernel(x, w, v):
    q = (x @ w)[:, None]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)[:, 0] @ v


def frozen_part(x, w, v):
    with torch.inference_mode():
        h = torch.relu(x * 2.0)
    return torch.sigmoid(h.clone() @ w) @ v


def mapped(x, w, v):
    return torch.vmap(lambda a: torch.relu(a @ w) * 2)(x) @ v


def long_chain(x, w, v):
    h = x @ w
    for _ in range(300):
        h = h + 1e-3
    return h @ v


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def named_pair(x, w, v):
    return torch.sigmoid(torch.cat(Pair(x @ w, x @ v), -1)) @ torch.cat((w, v))


def alpha_dropped(x, w, v):
    return F.alpha_dropout(torch.selu(x @ w), 0.4, training=True) @ v


HOSTILE = (
    *(rotary, bits_as_numbers, slice_in_place, evaluated_then_trained, learned_bias, chosen_kernel),
    *(frozen_part, mapped, long_chain, named_pair, alpha_dropped),
)


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w, self.v = (nn.Parameter(0.3 * torch.randn(48, 48)) for _ in range(2))
        self.last = nn.Linear(48, 5)

    def forward(self, x):
        return self.last(self.function(x, self.w, self.v).flatten(0, -2))


class Deriving:
    """Looks on at one step and notes how each tensor could be made again."""

    def __init__(self):
        self._derive, self.found = {}, {}
        self.onlooker = Onlooker(measures=True, saving=self._saving, using=self._using)

    def _saving(self, row, tensor, derive):
        self._derive[row.key] = derive

    def _using(self, row):
        derivation = self._derive.pop(row.key, lambda: None)()
        if derivation is not None:
            self.found[row.key] = derivation.sources


def gradients(model, x, y, autocast=False):
    """Of one step from the same random state, and the buffers after it; those before are put back."""
    torch.manual_seed(1)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    results = [
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        *(b.clone() for b in model.buffers()),
    ]
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return [*results, torch.rand(3)]


def session_of(model, x, y, autocast=False):
    """A lossless session, and what its step can make again."""
    session = squeezebox.attach(model, exact=True)
    store = session.engine.store
    deriving, store.lineage = Deriving(), session.engine.recorder.lineage()
    with store.shown_to(deriving.onlooker):
        gradients(model, x, y, autocast)
    return session, deriving.found


def recomputed(sources):
    """A plan that makes the tensors of these keys again, of the others."""
    pairs = ((key, tuple(each)) for key, each in sources.items())
    options = {key: Option(action=Action.RECOMPUTE, held_bytes=0, sources=each) for key, each in pairs}
    return options.get


@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("name", NETWORKS)
def test_every_tensor_alone_and_all_together(name, autocast):
    torch.manual_seed(0)
    model, x, y = NETWORKS[name](), torch.randn(4, 3, 24, 24), torch.randint(5, (4,))
    expected = gradients(model, x, y, autocast)
    session, found = session_of(model, x, y, autocast)
    assert len(found) >= 6
    for plan in ({}, found, *({key: sources} for key, sources in found.items())):
        session.engine.store.planned = recomputed(plan)
        results = gradients(model, x, y, autocast)
        assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True)), plan
        rows = {row.key: row for row in session.report().record.tensors}
        assert all(rows[key].packed_bytes == 0 for key in plan)
    session.detach()


@pytest.mark.parametrize("function", HOSTILE, ids=lambda function: function.__name__)
def test_code_that_invites_mistakes(function):
    torch.manual_seed(0)
    model, x = Wrapped(function), torch.randn(4, 32, 48)
    y = torch.randint(5, (len(model(x)),))
    expected = gradients(model, x, y)
    session, found = session_of(model, x, y)
    for plan in (found, *({key: sources} for key, sources in found.items())):
        session.engine.store.planned = recomputed(plan)
        results = gradients(model, x, y)
        assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True)), plan
    session.detach()


def test_nothing_is_held_for_what_is_made_again():
    model, x, y = in_place(), torch.randn(4, 3, 24, 24), torch.randint(5, (4,))
    session, found = session_of(model, x, y)
    session.engine.store.planned = recomputed(found)
    loss = F.cross_entropy(model(x), y)
    held = [entry for entry in session.engine.store._entries.values() if entry.row.key in found]
    assert held
    assert all(isinstance(entry.values, Recomputed) and entry.values.ready is None for entry in held)
    assert not any(entry.signs or entry.parts for entry in held)
    del held
    loss.backward()
    assert not session.engine.store._entries
    session.detach()


def test_a_tensor_made_otherwise_is_refused():
    model, x, y = Residual(), torch.randn(4, 3, 24, 24), torch.randint(5, (4,))
    session, found = session_of(model, x, y)
    key = next(key for key in found if "Gelu" in key)
    session.engine.store.planned = recomputed({key: found[key]})
    model.conv3.forward = lambda x: torch.cummax(nn.Conv2d.forward(model.conv3, x), 0)[0]
    with pytest.raises(PlanError, match="another way"):
        model(x)
    session.detach()


def test_a_parameter_changed_too_early_is_noticed():
    model, x, y = Residual(), torch.randn(4, 3, 24, 24), torch.randint(5, (4,))
    session, found = session_of(model, x, y)
    session.engine.store.planned = recomputed(found)
    loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        model.norm1.weight.mul_(2.0)
    with pytest.raises(CaptureError, match="changed in place between forward and backward"):
        loss.backward()
    session.detach()
