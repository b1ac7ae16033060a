"""What hooks switch off in autograd is done here: the version check, and shapes and dtypes compared."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squeezebox
from squeezebox import codecs
from squeezebox.capture import Choice, Rule, Store
from squeezebox.schema import CaptureError, Reads, Role
from tests.capture.nets import assert_equal, images, noise_of, train


class Spoiled(nn.Module):
    """Changes a convolution's input after it was saved."""

    def __init__(self, *, spoil: bool = True) -> None:
        super().__init__()
        self.one, self.two, self.spoil = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 10, 3), spoil

    def forward(self, x):
        y = self.one(x)
        z = self.two(y)
        if self.spoil:
            y.add_(1)
        return z.mean((2, 3))


def test_a_kept_tensor_changed_in_place_is_refused():
    session = squeezebox.attach(model := Spoiled(), exact=True)
    with pytest.raises(CaptureError, match=r"\(6, 16, 16, 16\).*version 0, now 1"):
        model(images()).sum().backward()
    session.detach()


def test_a_parameter_changed_before_backward_is_refused():
    session = squeezebox.attach(model := Spoiled(spoil=False), noise=1e-2)
    loss = model(images()).sum()
    with torch.no_grad():
        model.two.weight.mul_(2)
    with pytest.raises(CaptureError, match="version"):
        loss.backward()
    session.detach()


def test_a_packed_copy_is_immune():
    model = Spoiled()
    spoiled = train(model, images, steps=1, noise=1e-4)
    model.spoil = False
    assert noise_of(spoiled, train(model, images, steps=1)) < 1e-3


def test_a_tensor_saved_before_and_after_a_change_is_two_tensors():
    class Twice(nn.Module):
        def __init__(self, *, clone):
            super().__init__()
            self.conv, self.clone = nn.Conv2d(3, 16, 3), clone

        def forward(self, x):
            y = self.conv(x)
            before = F.leaky_relu(y, 0.3)
            y = y.neg() if self.clone else y.neg_()
            return (before + F.leaky_relu(y, 0.1) * 3).mean((2, 3))

    torch.manual_seed(0)
    spoiling = Twice(clone=False)
    cloning = Twice(clone=True)
    cloning.load_state_dict(spoiling.state_dict())
    assert_equal(train(spoiling, images, exact=True), train(cloning, images))


class Policy:
    def choose(self, key, rule, tensor):
        return Choice(codec="entropy-sign", bound=0.1)


RULE = Rule(role=Role.CONV_INPUT, reads=Reads.VALUES)


def test_a_change_between_saving_and_packing_is_refused():
    store = Store(Policy())
    tensor = torch.randn(64, 64)
    handle = store.handle(tensor)
    tensor.add_(1)
    store.settle(handle, RULE, lambda: ("key", ""), {})
    with pytest.raises(CaptureError, match="version 0, now 1"):
        store.unpack(handle)


@pytest.mark.parametrize(
    "wrong", [lambda t: t.double(), lambda t: t.view(-1)[:, None].expand(-1, 2)], ids=["", "shape"]
)
def test_a_codec_that_gives_back_another_tensor_is_found_out(wrong, monkeypatch):
    store = Store(Policy())
    indices = torch.randint(9, (1, 1, 64, 64))
    handle = store.handle(indices)
    options = {"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
    real = codecs.get

    class Wrong:
        def __init__(self, name):
            self.codec = real(name)

        def pack(self, tensor, *args, **kwargs):
            return real("narrow").pack(tensor)

        def unpack(self, packed, out=None):
            return wrong(real(packed.codec).unpack(packed))

    monkeypatch.setattr(codecs, "get", Wrong)
    rule = Rule(role=Role.POOL_INDEX, reads=Reads.EXACT, codec="pool-index")
    store.settle(handle, rule, lambda: ("key", ""), options | {"input_shape": (1, 1, 128, 128)})
    with pytest.raises(CaptureError, match="saved as torch.int64 of shape"):
        store.unpack(handle)
