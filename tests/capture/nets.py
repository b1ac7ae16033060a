"""Small networks that together save through every rule, and one way to train them twice."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import squeezebox


class Residual(nn.Module):
    """A basic block with a downsampling shortcut; the ReLUs are in place as in torchvision."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.down(x))


def resnet(channels: int = 16, depth: int = 2) -> nn.Sequential:
    stem = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    blocks = [Residual(channels << k, channels << (k + 1), 2) for k in range(depth)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels << depth, 10)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(x, 3, 2) + F.max_pool2d(x, 3, 2, ceil_mode=True)[..., :-1, :-1]
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2) + F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.adaptive_max_pool2d(F.lp_pool2d(x.abs() + 0.1, 2, 2), 3) + F.adaptive_avg_pool2d(x, 3)
        return self.head(x.mean((2, 3)))


class Activations(nn.Module):
    """Many readers of one tensor, views of one storage among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.prelu = nn.PReLU(16)
        self.mix = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        a, b = y.chunk(2, 1)
        z = torch.cat([F.hardtanh(a, -0.3, 0.3), F.hardtanh(b, -0.3, 0.3)], 1)
        z = z + F.relu6(y * 4) + y.clamp(-0.1, 0.2) + F.leaky_relu(y) + F.leaky_relu(y * 2, 0.2, inplace=True)
        z = z + F.silu(y) + F.gelu(y) + F.hardswish(y) + F.elu(y) + F.softplus(y) + y.sigmoid() * y.tanh()
        z = self.prelu(z) * y.abs() + torch.where(y > 0, y, y * 0.1) + y.exp().log1p()
        z = F.dropout(z, 0.3) + F.dropout2d(z, 0.2) + F.alpha_dropout(z, 0.1)
        return self.head(F.relu_(self.mix(z)).amax((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(50, width), nn.Parameter(torch.randn(24, width))
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mha = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, width))
        self.head = nn.Linear(width, 10)

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index) + self.position
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + (F.dropout(weights, 0.1) @ v).transpose(1, 2).flatten(2)
        x = x + self.mha(x, x, x, need_weights=False)[0] + self.mha(x, x, x)[0]
        return self.head((x + self.mlp(F.layer_norm(x, x.shape[-1:]))).mean(1))


class Functional(nn.Module):
    """Parameters used by free functions; indexing, sorting, gathering, complex numbers, a recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 27) / 5), nn.Parameter(torch.zeros(32))
        self.lstm, self.gru = nn.LSTM(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(F.unfold(x, 3, padding=1).transpose(1, 2), self.weight, self.bias).relu()
        pairs = torch.stack([y.flatten(1).argsort(-1), y.flatten(1).argsort(-1, descending=True)])
        y = y + y.flatten(1).gather(1, pairs[0]).view_as(y) * y.flatten(1).gather(1, pairs[1]).view_as(y)
        wave = torch.fft.rfft(y, dim=1)
        y = y + torch.fft.irfft(wave * wave.conj(), n=y.shape[1], dim=1) + wave.conj().imag.pow(2).mean()
        y = y / y.norm(dim=-1, keepdim=True).clamp_min(1e-3)
        mean, deviation = y.var(1, keepdim=True), y.std(1, keepdim=True)
        y = torch.einsum("npc,nqc->npq", y - mean, y / (deviation + 1))[:, :, :16]
        y = y[:, torch.arange(0, y.shape[1], 4)].cumsum(1).tanh()
        return self.head(self.lstm(y)[0][:, -1] + self.gru(y)[0].logsumexp(1))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * x * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return 2 * x * scale * grad, (x * x * grad).sum().reshape(scale.shape)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 16, 3), nn.Parameter(torch.ones(1))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Square.apply(F.relu(self.conv(x)), self.scale).mean((2, 3)))


class Checkpointed(nn.Module):
    """Recomputed regions, nested and reentrant too."""

    def __init__(self, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.one, self.two = Residual(16, 16), Residual(16, 32, 2)
        self.head = nn.Linear(32, 10)
        self.use_reentrant = use_reentrant

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(checkpoint(self.one, x, use_reentrant=self.use_reentrant), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        x = checkpoint(self.two, x, use_reentrant=self.use_reentrant)
        return self.head(F.relu(x).mean((2, 3)))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = resnet(8, 2), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.net, x, use_reentrant=False))


class Dynamic(nn.Module):
    """Another graph at every call, and another number of calls of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.bn, self.head, self.calls = nn.BatchNorm2d(16), nn.Linear(16, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.relu(self.stem(x))
        for turn in range(1 + self.calls % 3):
            x = F.relu(self.conv(x)) if turn % 2 else F.gelu(self.bn(self.conv(x))) + x
        if self.calls % 2:
            x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class Recursive(nn.Module):
    """Calls itself, and owns one block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 16, 3, padding=1), Residual(16, 16)
        self.again, self.head = self.block, nn.Linear(16, 10)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = self.stem(x) if depth == 2 else x
            return self(self.again(self.block(x)), depth - 1)
        return self.head(x.mean((2, 3)))


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, 16, 3), nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        x = F.relu(self.conv(x)).mean((2, 3))
        return {"one": self.one(x), "rest": (self.two(x), x.detach())}


def images() -> Tensor:
    return torch.randn(6, 3, 18, 18)


def tokens() -> Tensor:
    return torch.randint(50, (4, 24))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet": (resnet, images),
    "pools": (Pools, images),
    "activations": (Activations, images),
    "attention": (Attention, tokens),
    "functional": (Functional, lambda: torch.randn(4, 3, 8, 8)),
    "custom": (Custom, images),
    "checkpointed": (Checkpointed, images),
    "checkpointed reentrant": (lambda: Checkpointed(use_reentrant=True), images),
    "checkpointed whole": (Whole, images),
    "dynamic": (Dynamic, images),
    "recursive": (Recursive, images),
    "outputs": (Outputs, images),
}


def loss_of(out: Tensor | dict) -> Tensor:
    if isinstance(out, dict):
        return loss_of(out["one"]) + loss_of(out["rest"][0]) + out["rest"][1].sum()
    return F.cross_entropy(out.float(), torch.arange(len(out)) % 10)


@dataclass
class Run:
    """What a training run shows: losses, gradients of every step, and the model's last state."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    random: Tensor


Step = Callable[[nn.Module, Tensor], Tensor]


def plain_step(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    loss.backward()
    return loss


def train(
    model: nn.Module,
    make_input: Callable[[], Tensor],
    *,
    step: Step = plain_step,
    steps: int = 3,
    covered: bool = False,
    **options: object,
) -> Run:
    """Train a copy of ``model``; squeezed if there are ``options``, loss covered by step() too if asked."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = squeezebox.attach(model, optimizer=optimizer, **options) if options else None
    torch.manual_seed(7)
    losses, gradients = [], []
    with contextlib.ExitStack() as stack:
        if session:
            stack.callback(session.detach)
        for _ in range(steps):
            optimizer.zero_grad()
            with session.step() if session and covered else contextlib.nullcontext():
                losses.append(step(model, make_input()).detach())
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
        assert session is None or session.report().saved_bytes > 0
    return Run(losses, gradients, model.state_dict(), torch.get_rng_state())


def assert_equal(run: Run, other: Run) -> None:
    """To the bit, random state included."""
    torch.testing.assert_close(run.losses, other.losses, rtol=0, atol=0)
    torch.testing.assert_close(run.gradients, other.gradients, rtol=0, atol=0)
    torch.testing.assert_close(run.state, other.state, rtol=0, atol=0)
    assert torch.equal(run.random, other.random)


def noise_of(run: Run, reference: Run, step: int = 0) -> float:
    """Squared error of one step's gradients over their squared norm."""
    pairs = [(run.gradients[step][n].double(), g.double()) for n, g in reference.gradients[step].items()]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs))
