"""Each storage is packed once, and freed addresses that come back are not mistaken for old tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import squeezebox
from squeezebox import codecs
from squeezebox.capture import Choice, Row, Rule, Store
from squeezebox.schema import Reads, Role
from tests.capture.nets import NETS, Residual, images, loss_of, noise_of, plain_step, train

VALUES = Rule(role=Role.CONV_INPUT, reads=Reads.VALUES)
SIGN = Rule(role=Role.RELU_OUTPUT, reads=Reads.SIGN)


class Recording:
    """A codec that notes what it packs."""

    def __init__(self, codec, packs):
        self._codec, self._packs = codec, packs

    def __getattr__(self, name):
        return getattr(self._codec, name)

    def pack(self, tensor, *args, **kwargs):
        self._packs.append((self._codec.name, tensor.numel()))
        return self._codec.pack(tensor, *args, **kwargs)


@pytest.fixture
def packs(monkeypatch):
    noted = []
    get = codecs.get
    monkeypatch.setattr(codecs, "get", lambda name: Recording(get(name), noted))
    return noted


def packs_of_a_settled_step(model, x, packs, **options):
    """Packs in the first step that refreshes no bounds; those before pack what they lose, too."""
    session = squeezebox.attach(model, **options)
    for _ in range(17):
        plain_step(model, x)
    packs.clear()
    with session.step():
        loss = loss_of(model(x))
    found = list(packs)
    loss.backward()
    report = session.report()
    session.detach()
    return found, report


def storages_of(model, x):
    """What plain PyTorch saves, by storage: bytes of those that the model and the caller do not own."""
    own = {t.untyped_storage().data_ptr() for t in [x, *model.parameters(), *model.buffers()]}
    held = []
    with saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor):
        loss = loss_of(model(x))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    del loss
    return [nbytes for address, nbytes in storages.items() if address not in own]


@pytest.mark.parametrize("options", [{"noise": 1e-2}, {"exact": True}], ids=str)
@pytest.mark.parametrize("name", ["resnet", "pools", "attention"])
def test_rows_are_the_storages_of_plain_pytorch(name, options, packs):
    make, make_input = NETS[name]
    model, x = make().eval(), make_input()
    plain = storages_of(model, x)
    found, report = packs_of_a_settled_step(model, x, packs, **options)
    assert sorted(t.saved_bytes for t in report.tensors) == sorted(n for n in plain if n >= 4096)
    assert report.saved_bytes == sum(plain)
    assert len(found) == sum(
        len(t.codec.split("+")) for t in report.tensors if t.codec not in ("keep", "none")
    )


def test_relu_and_two_convolutions_share_one_packed_form(packs):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Residual(16, 32, 2), nn.Flatten())
    x = images()
    found, report = packs_of_a_settled_step(model, x, packs, noise=1e-2)
    numel = 6 * 16 * 18 * 18
    (row,) = [row for row in report.tensors if row.shape == (6, 16, 18, 18)]
    assert [pack for pack in found if pack[1] == numel] == [("entropy-sign", numel)]
    assert row.codec == "entropy-sign" and set(row.roles) == {Role.RELU_OUTPUT, Role.CONV_INPUT}


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, 10)

    def forward(self, x):
        q, k, v = self.qkv(x).view(4, 24, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


def test_views_of_one_storage_are_packed_once(packs):
    found, report = packs_of_a_settled_step(Projections(), torch.randn(4, 24, 32), packs, noise=1e-2)
    (row,) = [row for row in report.tensors if row.saved_bytes == 4 * 4 * 24 * 96]
    assert [pack[1] for pack in found].count(4 * 24 * 96) == 1
    assert row.packed_bytes < row.saved_bytes


class Fixed:
    """The policy of a fixed bound."""

    def __init__(self, codec="entropy-sign", bound=1e-3):
        self.codec, self.bound = codec, bound

    def choose(self, key, rule, tensor):
        return Choice(codec=self.codec, bound=self.bound)


def settled(store, tensor, rule=VALUES, key="tensor"):
    handle = store.handle(tensor)
    store.settle(handle, rule, lambda: (key, ""), {})
    return handle


def test_a_freed_address_that_comes_back_is_another_tensor():
    store = Store(Fixed())
    handles = []
    for number in range(200):
        tensor = torch.full((64, 64), float(number))
        handles.append(settled(store, tensor))
        del tensor
    assert len(store.rows) == 200
    for number, handle in enumerate(handles):
        assert (store.unpack(handle) - number).abs().max() <= 1e-3


def test_a_living_tensor_is_found_again_through_any_view():
    store = Store(Fixed())
    tensor = torch.randn(64, 64)
    views = [tensor, tensor.t(), tensor[3:40], tensor[:, 1::2], tensor.view(32, 128), tensor[5]]
    handles = [settled(store, view) for view in views]
    assert len(store.rows) == 1 and len({id(handle.entry) for handle in handles}) == 1
    for view, handle in zip(views, handles, strict=True):
        found = store.unpack(handle)
        assert found.stride() == view.stride() and (found - view).abs().max() <= 1e-3


def test_exact_codecs_serve_every_view_of_a_storage():
    masks = (torch.rand(2, 64, 128) > 0.5).float()
    rule = Rule(role=Role.DROPOUT_MASK, reads=Reads.EXACT, codec="mask")
    store = Store(Fixed())
    handles = [settled(store, mask, rule) for mask in masks]
    for mask, handle in zip(masks, handles, strict=True):
        assert handle.tensor is None and torch.equal(store.unpack(handle), mask)


def test_a_small_view_does_not_hold_a_large_storage():
    store = Store(Fixed())
    large = torch.randn(64, 64)
    handle = settled(store, large[0, :4])
    assert handle.tensor is None and store.unpack(handle).shape == (4,)


def test_a_sign_is_exact_while_a_recipe_has_the_values():
    store = Store(Fixed("entropy", bound=0.5))
    tensor = torch.randn(64, 64).relu()
    sign, values = (settled(store, tensor, rule) for rule in (SIGN, VALUES))
    values.held.lasting(store)
    assert torch.equal(store.unpack(sign) > 0, tensor > 0)
    assert not torch.equal(store.unpack(values) > 0, tensor > 0)


def test_decoded_buffers_are_shared_by_readers_and_reused_after_them():
    store = Store(Fixed())
    tensor, other = torch.randn(64, 64), torch.randn(64, 64)
    one, two, three = (settled(store, t) for t in (tensor, tensor.t(), other))
    first = store.unpack(one)
    assert store.unpack(two).data_ptr() == first.data_ptr()
    third = store.unpack(three)
    assert third.data_ptr() != first.data_ptr()  # the first is still in use
    address = first.data_ptr()
    del first, third
    assert store.unpack(three).data_ptr() != address
    assert (store.unpack(one) - tensor).abs().max() <= 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_a_resnet_has_the_gradients_of_its_tensors_and_no_others(seed):
    torch.manual_seed(seed)
    model = NETS["resnet"][0]()
    reference = train(model, images, steps=1)
    assert noise_of(train(model, images, steps=1, noise=1e-7), reference) < 1e-6


class Masked(nn.Module):
    """Reads a part of a large mask that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(64, 64), torch.rand(1024, 1024) < 0.5

    def forward(self, x):
        return self.layer(x).masked_fill(self.mask[: len(x), : x.shape[1]], 0.0)


def test_a_part_of_what_is_there_anyway_is_left_to_its_owner():
    net, x, labels = Masked(), torch.randn(256, 64), torch.randint(64, (1 << 16,))
    session = squeezebox.attach(net, exact=True)
    with session.step():
        loss = nn.functional.cross_entropy(net(x), labels[256:512])
    loss.backward()
    report = session.report()
    assert report.saved_bytes < 1 << 18 and not any("mask" in each.key for each in report.tensors)
    session.detach()


class Chosen(nn.Module):
    """Makes more indices than it reads."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        x = self.layer(x)
        return x.gather(1, torch.rand(len(x), 4096).argsort(1)[:, :8] % 64)


def test_a_part_of_what_forward_has_made_is_held():
    net = Chosen()
    session = squeezebox.attach(net, exact=True)
    net(torch.randn(256, 64)).sum().backward()
    assert any("Gather.index" in each.key for each in session.report().tensors), str(session.report())
    session.detach()


def test_a_plan_from_a_part_of_the_data_holds_for_batches_of_their_own():
    torch.manual_seed(0)
    net, x, y = nn.Linear(64, 10), torch.randn(1 << 14, 64), torch.randint(10, (1 << 14,))
    loss_fn = nn.functional.cross_entropy
    plan = squeezebox.plan(net, sample=(x[:1024], y[:1024]), loss_fn=loss_fn)
    session = squeezebox.attach(net, plan=plan)
    for target in (y[:1024], y[:1024].clone()):
        with session.step():
            loss = loss_fn(net(x[:1024]), target)
        loss.backward()
    session.detach()


class Scaled(torch.autograd.Function):
    """Saves a number for each row before the rows."""

    @staticmethod
    def forward(ctx, x):
        scale = x.square().mean(-1, keepdim=True)
        ctx.save_for_backward(scale, x)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        scale, x = ctx.saved_tensors
        return gradient * scale + 2 * x * (gradient * x).mean(-1, keepdim=True)


class Scaling(nn.Module):
    """Reads a number for each row twice, and has functions of somebody's own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        x = self.layer(x)
        scale = x.square().mean(-1, keepdim=True).exp()
        return Scaled.apply(Scaled.apply((scale * x).sin() * scale) * x)


def test_keys_do_not_depend_on_what_is_small():
    net, keys = Scaling(), []
    session = squeezebox.attach(net, exact=True)
    for rows in (2048, 512):  # whose numbers are 8 KiB and 2 KiB
        net(torch.randn(rows, 64)).sum().backward()
        keys.append([each.key for each in session.report().tensors if each.shape[-1] == 64])
    session.detach()
    assert keys[0] == keys[1] and keys[0][-1] == ":custom.saved#4"


def test_a_step_with_statistics_counts_each_row_s_bytes_a_few_times(monkeypatch):
    asked, own = [], Row.packed_bytes.fget
    monkeypatch.setattr(Row, "packed_bytes", property(lambda row: asked.append(row) or own(row)))
    net = nn.Sequential(*[layer for _ in range(30) for layer in (nn.Linear(64, 64), nn.Tanh())])
    session = squeezebox.attach(net, noise=1e-2)
    net(torch.randn(256, 64))
    assert session.engine.refreshes.collector.floor_bytes >= sum(map(own, session.engine.store.rows)) > 0
    assert len(asked) <= 8 * len(session.engine.store.rows)
    session.detach()
