"""Originals are freed when they are packed, and nothing outlives its step."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import squeezebox
from squeezebox.capture._entries import Entry, Handle
from tests.capture.nets import NETS, images, loss_of, plain_step, resnet

OPTIONS = [{"noise": 1e-2}, {"exact": True}]


def count(kind):
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


def live_bytes():
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def watch_outputs(model, *kinds):
    """Weak references to the storages of every output of modules of these kinds."""
    storages = []

    def hook(module, args, output):
        storages.append(StorageWeakRef(output.untyped_storage()))

    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(hook)
    return storages


def test_originals_are_freed_once_packed():
    model = resnet()
    storages = watch_outputs(model, torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.ReLU, torch.nn.MaxPool2d)
    x = images()
    for options in ({"noise": 1e-2}, {"noise": 1e-2, "checks_per_refresh": 0}):
        session = squeezebox.attach(model, **options)
        plain_step(model, x)  # checks every tensor
        for _ in range(2):
            storages.clear()
            loss = loss_of(model(x))
            alive = [storage for storage in storages if not storage.expired()]
            # Each refresh keeps one exact tensor of a weighted layer and one of another operator.
            assert len(storages) >= 20 and len(alive) <= 2 * options.get("checks_per_refresh", 1)
            loss.backward()
        session.detach()


def test_exact_frees_what_is_only_read_for_its_sign():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    storages = watch_outputs(model, torch.nn.Conv2d, torch.nn.ReLU)
    session = squeezebox.attach(model, exact=True)
    loss = model(images()).sum()
    assert [storage.expired() for storage in storages] == [True, True]
    loss.backward()
    session.detach()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_live_bytes_stay_constant_over_steps(options):
    model, x = resnet(), images()
    session = squeezebox.attach(model, **options)
    found = []
    for _ in range(6):
        plain_step(model, x)
        found.append(live_bytes())
    session.detach()
    assert len(set(found[1:])) == 1  # the first step makes the gradients


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["resnet", "attention", "checkpointed", "custom"])
def test_handles_and_entries_go_with_the_graph(name, options):
    make, make_input = NETS[name]
    model, x = make(), make_input()
    session = squeezebox.attach(model, **options)
    for _ in range(2):
        plain_step(model, x)
        session.report()
        assert (count(Handle), count(Entry)) == (0, 0)
    session.detach()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_graph_without_backward_is_freed_with_its_loss(options):
    model, x = resnet(), images()
    session = squeezebox.attach(model, **options)
    loss = loss_of(model(x))
    assert count(Handle) > 0
    gc.disable()
    try:
        del loss
        alive = sum(type(each) in (Handle, Entry) for each in gc.get_objects())
    finally:
        gc.enable()
    assert alive == 0
    session.detach()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forwards_without_backward_leave_no_trace(options):
    model, x = resnet(), images()
    session = squeezebox.attach(model, **options)
    for _ in range(4):
        model(x)
    assert (count(Handle), count(Entry)) == (0, 0)
    plain_step(model, x)
    report = session.report()
    assert report.record.step == 0
    assert len({row.key for row in report.tensors}) == len(report.tensors) < 40
    session.detach()


def test_a_forgotten_session_and_its_model_are_collected():
    model = resnet()
    session = squeezebox.attach(model, noise=1e-2)
    plain_step(model, images())
    gone = weakref.ref(model), weakref.ref(session)
    del model, session
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_detach_frees_a_pending_step():
    model = resnet()
    session = squeezebox.attach(model, noise=1e-2)
    loss = loss_of(model(images()))
    session.detach()
    loss.backward()
    del loss
    assert (count(Handle), count(Entry)) == (0, 0)


def test_what_backward_unpacks_last_goes_with_it():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    session = squeezebox.attach(model, noise=1e-2)
    model(torch.randn(512, 64)).sum().backward()
    assert not session.engine.store.arena._buffers
    session.detach()
