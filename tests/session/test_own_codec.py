"""A codec from outside: registered, and used wherever it keeps its promises."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox import codecs
from squeezebox.codecs import _registry
from tests.capture.nets import images, loss_of, plain_step, resnet


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubles(codecs.Codec):
    """Holds every element exactly, in float64: easily told from the usual codecs."""

    def pack(self, tensor, bound=None, hints=None):
        flat = tensor.detach().contiguous()
        return codecs.Packed(
            codec=self.name,
            version=self.version,
            shape=tuple(tensor.shape),
            stride=flat.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            bound=bound,
            payload=(flat.double().view(-1),),
        )

    def unpack(self, packed, out=None):
        flat = torch.empty(packed.numel, dtype=packed.dtype) if out is None else out[: packed.numel]
        return flat.copy_(packed.payload[0]).view(packed.shape)

    def check(self, packed):
        pass


def doubles(**promises):
    return Doubles(
        **{"name": "doubles", "exact": False, "preserves_sign": True, "fixed_size": True} | promises
    )


@pytest.fixture
def registered():
    codecs.register(doubles())
    yield
    _registry._table().pop("doubles")


def test_it_is_listed_and_its_bytes_can_be_read(registered):
    x = torch.randn(3, 5)
    assert "doubles" in codecs.available()
    packed = codecs.loads(codecs.dumps(codecs.get("doubles").pack(x, 0.1)))
    assert torch.equal(codecs.get("doubles").unpack(packed), x)


def test_a_name_belongs_to_one_codec(registered):
    codecs.register(doubles())  # as a module that is imported anew does
    with pytest.raises(squeezebox.OptionError, match="there is a codec 'doubles' already, Doubles"):
        codecs.register(doubles(exact=True))
    with pytest.raises(squeezebox.OptionError, match="there is a codec 'entropy' already, Entropy"):
        codecs.register(doubles(name="entropy"))


def test_a_session_holds_values_with_it_but_for_bounds_by_channel(registered):
    model, x = resnet(), images()
    session = squeezebox.attach(model, codec="doubles")
    plain_step(model, x)
    used = {tensor.role.value: tensor.codec for tensor in session.report().record.tensors}
    session.detach()
    assert used["conv input"] == "doubles"
    assert used["batch-norm input"] == "entropy"


def test_where_a_sign_may_be_read_it_must_preserve_it():
    codecs.register(doubles(preserves_sign=False))
    try:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU())
        session = squeezebox.attach(model, codec="doubles")
        model(torch.randn(64, 64)).sum().backward()
        used = {tensor.role.value: tensor.codec for tensor in session.report().record.tensors}
    finally:
        _registry._table().pop("doubles")
    assert used == {"relu output": "entropy-sign", "activation": "doubles"}


@pytest.mark.parametrize("options", [{"exact": True}, {"budget": "1GiB"}])
def test_it_does_not_go_with_a_plan_or_nothing_to_lose(options, registered):
    with pytest.raises(squeezebox.OptionError, match="codec is for noise or a controller"):
        squeezebox.attach(resnet(), codec="doubles", **options)


def test_an_unknown_codec_is_refused():
    with pytest.raises(squeezebox.OptionError, match="no codec 'doubles'"):
        squeezebox.attach(resnet(), codec="doubles")


def test_speed_holds_values_in_planes():
    held = {}
    for speed in ("small", "fast"):
        torch.manual_seed(0)
        model, x = resnet(), images()
        session = squeezebox.attach(model, noise=1e-2, speed=speed)
        for _ in range(2):
            loss_of(model(x)).backward()
        record = session.report()
        session.detach()
        held[speed] = {row.codec.partition("-")[0] for row in record.tensors if row.bound > 0.0}
    assert held == {"small": {"entropy"}, "fast": {"planes"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": "quick"}, "speed 'quick' is neither 'small' nor 'fast'"),
        ({"speed": "fast", "exact": True}, "speed is for noise or a controller"),
        ({"speed": "fast", "codec": "bf16"}, "each name a codec"),
    ],
)
def test_a_speed_that_says_nothing_is_refused(options, message):
    with pytest.raises(squeezebox.OptionError, match=message):
        squeezebox.attach(resnet(), **options)
