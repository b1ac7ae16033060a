"""Steps under torch.autocast, and of models in few bits: as exact as torch's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from squeezebox.schema import FormatError, UnsupportedModelError
from squeezebox.streaming import BagStep, StreamedStep
from tests.streaming.test_memory import peak_of


class Casting(nn.Module):
    """Has autocast in its own forward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


class Attentive(nn.Module):
    """Gates channels by the image's mean, and has a detached value."""

    def __init__(self):
        super().__init__()
        self.score, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x):
        x = self.score(x)
        return x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None] - x.detach().amax()


def network(norm):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm(), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GELU()
    )


NETWORKS = {
    "batch norm": lambda: network(lambda: nn.BatchNorm2d(8)),
    "fixed norm": lambda: network(lambda: nn.BatchNorm2d(8)).eval(),
    "group norm": lambda: network(lambda: nn.GroupNorm(2, 8)),
    "layer norm": lambda: network(lambda: nn.LayerNorm(24)),
    "gate": Attentive,
}


def loss_fn(output, target):
    return (output.float() - target).square().mean()


def errors(model, step_of, image, target):
    """Of the gradients of a plain step and of a streamed one, against the step in float64."""
    exact, plain, streamed = (copy.deepcopy(model) for _ in range(3))
    loss_fn(exact.double()(image.double()), target.double()).backward()
    step_of(plain, lambda model: loss_fn(model(image), target).backward())
    step_of(streamed, lambda model: StreamedStep(model, loss_fn, height=4)(image, target))
    for mine, theirs in zip(streamed.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
    wanted = [each.grad for each in exact.parameters()]

    def error(model):
        pairs = zip(model.parameters(), wanted, strict=True)
        assert all(each.grad.dtype == each.dtype for each in model.parameters())
        return sum(float((each.grad.double() - right).square().sum()) for each, right in pairs)

    return error(plain), error(streamed), sum(float(each.square().sum()) for each in wanted)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("where", ["around", "within", "weights"])
def test_gradients_are_about_as_near_to_the_exact_ones_as_torchs(name, where):
    torch.manual_seed(0)
    image = torch.randn(1, 3, 256, 24)
    model = NETWORKS[name]()
    with torch.no_grad():
        target = torch.randn_like(model(image))

    def step_of(model, step):
        if where == "around":
            with torch.autocast("cpu", torch.bfloat16):
                step(model)
        elif where == "within":
            step(Casting(model))
        else:
            step(Casting(model.bfloat16()))

    plain, streamed, whole = errors(model, step_of, image, target)
    assert 0.0 < streamed < 2.0 * plain < 0.01 * whole


HEADS = {
    "softmax": lambda x: x[:, :4].flatten(2).softmax(-1) @ x[:, 4:].flatten(2).mT,
    "log softmax": lambda x: x.flatten(2).log_softmax(-1).amax(-1),
    "norm": lambda x: x.flatten(2).norm(dim=-1),
    "norm of order 3": lambda x: x.flatten(2).norm(p=3, dim=-1),
    "normalised": lambda x: functional.normalize(x.flatten(2), dim=-1).amax(-1),
    "cosine": lambda x: functional.cosine_similarity(x[:, :4].flatten(2), x[:, 4:].flatten(2), dim=-1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HEADS)
def test_heads_over_all_pixels_are_as_exact_as_torchs(name, dtype):
    torch.manual_seed(0)
    conv, image = nn.Conv2d(3, 8, 3), torch.rand(1, 3, 130, 66) * (2 if "soft" in name else 400)
    model = Headed(conv, HEADS[name])
    exact = copy.deepcopy(model).double()(image.double()).detach()
    with torch.autocast("cpu", dtype):
        plain = model(image).detach()
        streamed = StreamedStep(model, loss_fn, height=16).predict(image)
    assert streamed.dtype == plain.dtype and bool(streamed.isfinite().all())
    scale = float(exact.abs().max())
    error, own = (float((each.double() - exact).abs().max()) / scale for each in (plain, streamed))
    assert own < 2.0 * error + torch.finfo(dtype).eps


class Headed(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        return self.head(self.body(x))


def taken(model, image, target, **options):
    """The gradients of a step of a copy, under autocast."""
    model = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = StreamedStep(model, loss_fn, **options)(image, target)
    return [loss, *(each.grad for each in model.parameters())]


def test_an_interrupted_step_resumes_to_the_bit_in_the_same_precision_alone(tmp_path):
    image, target = torch.randn(1, 3, 64, 24), torch.randn(1, 8, 32, 12)
    model, options = NETWORKS["batch norm"](), {"height": 8, "checkpoint": tmp_path / "step.pt"}

    def stop(progress):
        if progress.done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        taken(model, image, target, progress=stop, checkpoint_seconds=0, **options)
    with pytest.raises(FormatError, match="belongs to a step with other weights"):
        StreamedStep(copy.deepcopy(model), loss_fn, **options)(image, target)
    resumed, whole = taken(model, image, target, **options), taken(model, image, target, height=8)
    assert all(torch.equal(*pair) for pair in zip(resumed, whole, strict=True))


@pytest.mark.parametrize("name", ["batch norm", "gate"])
def test_the_peak_is_within_the_memory(name):
    model, memory = NETWORKS[name](), 2**20
    image = torch.randn(1, 3, 1024, 48)
    with torch.autocast("cpu", torch.bfloat16):
        target = torch.randn_like(model(image)).detach()
        step = StreamedStep(model, loss_fn, memory=memory)
        step.plan(image, target)
        peak = peak_of(lambda: step(image, target))
    assert 0.5 * memory < peak < memory


def test_predictions_and_metrics_are_in_the_precision_of_the_call():
    model, image = NETWORKS["fixed norm"](), torch.randn(1, 3, 64, 24)
    step = StreamedStep(model, loss_fn, height=8)
    for is_enabled in (True, False):
        with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=is_enabled):
            whole = model(image)
            found, (loss,) = step.predict(image), step.evaluate([(image, whole)])
        assert found.dtype == whole.dtype == (torch.float16 if is_enabled else torch.float32)
        torch.testing.assert_close(found, whole)
        assert float(loss) < 1e-6


class Detaching(nn.Conv2d):
    """Has values without gradient, and updates a buffer, within autocast."""

    def __init__(self, dtype=None, *, changes=False):
        super().__init__(3, 2, 3)
        self.dtype, self.changes = dtype, changes
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            y = super().forward(x)
            with torch.no_grad():
                other = super().forward(x * x)
                self.seen.view(-1).lerp_(y.mean((0, 2, 3)).float(), 0.5)
                if self.changes:
                    y += 1
                with torch.autocast("cpu", enabled=False):
                    other = other * super().forward(x)
            return y * other + y.detach() * y.float().exp() - self.seen[:, None, None]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_detached_within_autocast_has_no_gradient(dtype):
    torch.manual_seed(0)
    model, target = Detaching(dtype), torch.randn(1, 2, 30, 6)
    image = torch.randn(1, 3, 32, 8, requires_grad=True)
    loss_fn(model(image), target).backward()
    gradient, streamed = torch.zeros(1, 3, 32, 8), copy.deepcopy(model)
    streamed.weight.grad = streamed.bias.grad = None
    streamed.seen.zero_()
    StreamedStep(streamed, loss_fn, height=4)(image.detach(), target, gradient=gradient)
    pairs = [(gradient, image.grad), (streamed.seen, model.seen), (streamed.weight.grad, model.weight.grad)]
    for mine, theirs in pairs:
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=(1e-5 if dtype is None else 0.02) * scale)


def test_what_is_changed_without_gradient_within_autocast_is_refused():
    step = StreamedStep(Detaching(torch.bfloat16, changes=True), loss_fn, height=4)
    with pytest.raises(UnsupportedModelError, match=r"changed in place under torch.no_grad\(\)"):
        step(torch.randn(1, 3, 32, 8), torch.randn(1, 2, 30, 6))


def test_bags_of_images():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 8, 3, stride=2, padding=1)

        def forward(self, image):
            return self.body(image).relu().mean((2, 3))

    class Head(nn.Linear):
        def forward(self, vectors):
            return super().forward(torch.cat(vectors))

    torch.manual_seed(0)
    encoder, head = Encoder(), Head(8, 2)
    images, label = [torch.randn(1, 3, 48, 40), torch.randn(1, 3, 24, 64)], torch.tensor([1, 0])
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(head([encoder(each) for each in images]), label)
        parameters = [*encoder.parameters(), *head.parameters()]
        wanted = torch.autograd.grad(loss, parameters)
        found = BagStep(encoder, head, nn.functional.cross_entropy, height=8)(images, label)
    torch.testing.assert_close(found, loss.detach(), rtol=0.01, atol=0.01)
    for each, gradient in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(each.grad, gradient, rtol=0.02, atol=0.02 * float(gradient.abs().max()))


def test_gradients_of_strips_are_float32_whatever_the_default():
    torch.manual_seed(0)
    image, weights = torch.randn(1, 3, 256, 24).bfloat16(), nn.Conv2d(3, 2, 3).bfloat16().state_dict()
    found = []
    try:
        for dtype in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            model = nn.Conv2d(3, 2, 3).bfloat16()
            model.load_state_dict(weights)
            StreamedStep(model, lambda output, _: output.square().mean(), height=4)(image, None)
            found.append(model.weight.grad)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(*found)
