"""A copy, pickle or trace of an attached model is a model of its own, in which nothing of the session is."""

import copy
import gc
import inspect
import io
import pickle
import re
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import squeezebox


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))  # a trace calls each

    def forward(self, x):
        return self.body(x)


class Stated(Net):
    """As LightningModule: what is pickled is made from its ``__dict__``."""

    def __getstate__(self):
        return {**self.__dict__, "trainer": None}


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Reduced(Net):
    """As fx.GraphModule, and parametrized modules."""

    def __reduce__(self):
        return _rebuilt, (self.__dict__.copy(),)

    def __deepcopy__(self, memo):
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


def _rebuilt(state):
    made = Reduced.__new__(Reduced)
    made.__dict__.update(state)
    return made


def parametrized():
    model = nn.Linear(64, 4)
    parametrize.register_parametrization(model, "weight", Twice())
    return model


def traced():
    return torch.fx.symbolic_trace(Net())


MODELS = {"module": Net, "__getstate__": Stated, "__reduce__": Reduced, "fx": traced}


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"squeezebox" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model):
    data = pickle.dumps(model)
    assert b"squeezebox" not in data
    return pickle.loads(data)


def x():
    return torch.ones(8, 64).requires_grad_()


def step(model):
    model(x()).square().sum().backward()


def copied_by_hand(model):
    """As learn2learn's clone_module."""
    made = model.__new__(type(model))
    made.__dict__ = model.__dict__.copy()
    return made


COPIES = {
    "by hand": copied_by_hand,
    "copy by hand": lambda model: copy.copy(copied_by_hand(model)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replica": lambda model: model._replicate_for_data_parallel(),
    "pickle": pickled,
    "torch.save": saved,
}
TRACES = {
    "trace": lambda model: torch.jit.trace(model, x()),
    "script": torch.jit.script,
    "export": lambda model: torch.export.export(model, (x(),)).module(),
    "strict": lambda model: torch.export.export(model, (x(),), strict=True).module(),
    "symbolic": torch.fx.symbolic_trace,
    "make_fx": lambda model: torch.fx.experimental.proxy_tensor.make_fx(model)(x()),
}


def assert_clean(twin, model):
    assert twin.__class__ is model.__class__ or isinstance(model, torch.fx.GraphModule)  # each has its own
    names = {"training", "trainer", "_is_replica", "_former_parameters"}
    for each, own in zip(twin.modules(), model.modules(), strict=True):
        assert set(vars(each)) <= {*vars(own), *names}
        assert not (each._forward_hooks or each._forward_pre_hooks)
    assert not [name for name, value in vars(twin).items() if "squeezebox" in type(value).__module__]
    assert "forward" not in vars(twin)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_is_clean_and_computes_with_its_own_weights(name, way):
    if name == "fx" and "hand" in way:
        pytest.skip("its class is made anew with every instance")
    model = MODELS[name]()
    before = dict(model.__dict__)
    session = squeezebox.attach(model, exact=True)
    step(model)
    expected, rows = model(x()).detach(), session.report().tensors
    twin = COPIES[way](model)
    assert_clean(twin, model)
    if way != "replica":  # whose parts the caller has yet to set
        assert torch.equal(twin(x()), expected)
        twin._modules = {"body": nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(64, 4))}
        assert torch.equal(twin(x()), twin.body(x()))
        twin(x()).sum().backward()
    step(model)
    assert torch.equal(model(x()), expected)
    assert [row.key for row in session.report().tensors] == [row.key for row in rows]
    session.detach()
    assert model.__dict__ == before
    assert list(model.__dict__) == list(before)


@pytest.mark.parametrize("way", TRACES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_is_that_of_the_model(way):
    model = Net()
    session = squeezebox.attach(model, noise=1e-2)
    trace = TRACES[way](model)
    assert torch.equal(trace(x()), model(x()))
    graph = str(getattr(trace, "graph", ""))
    assert "squeezebox" not in re.sub("#.*", "", graph)  # nor in the lines that say where this file is
    step(model)
    assert session.report().saved_bytes > 0
    session.detach()


def test_a_parametrized_model_is_copied():
    model = parametrized()
    session = squeezebox.attach(model, exact=True)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x()), model(x()))
    assert_clean(twin, model)
    session.detach()


def test_a_copy_of_a_model_whose_forward_was_replaced_before_keeps_that():
    model = Net()
    model.forward = replaced = lambda x: Net.forward(model, x) * 2
    session = squeezebox.attach(model, exact=True)
    assert copy.copy(model).forward is replaced
    session.detach()


def test_copies_keep_nothing_alive():
    model = Net()
    session = squeezebox.attach(model, exact=True)
    step(model)
    twin, by_hand = copy.deepcopy(model), copied_by_hand(model)
    session.detach()
    original, session = weakref.ref(model), weakref.ref(session)
    del model
    gc.collect()
    assert original() is None
    assert session() is None
    assert twin(x()).any()
    assert by_hand(x()).any()


def test_the_class_may_change_while_a_session_is_there():
    model = nn.Linear(64, 4)
    session = squeezebox.attach(model, exact=True)
    parametrize.register_parametrization(model, "weight", Twice())
    changed = model.__class__
    step(model)
    assert session.report().saved_bytes > 0
    session.detach()
    assert type(model) is changed
    assert model.parametrizations


def test_parts_and_instances_of_its_class_are_its_own():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    session = squeezebox.attach(model, exact=True)
    assert model.__class__ is nn.Sequential
    assert type(model[:2]) is nn.Sequential
    session.detach()
    assert type(model) is nn.Sequential


class Registered(nn.Linear):
    kinds = ()

    def __init_subclass__(cls, *, name):
        Registered.kinds += (name,)


def test_a_class_hears_nothing_of_it():
    model = Registered(64, 4)
    squeezebox.attach(model, exact=True).detach()
    assert Registered.kinds == ()


def test_forward_has_the_model_s_signature():
    model = Net()
    expected = inspect.signature(model.forward)
    session = squeezebox.attach(model, exact=True)
    assert inspect.signature(model.forward) == expected
    session.detach()


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 goes on without a word: docs/limits.md")
@pytest.mark.parametrize("compiled", [torch.compile, nn.Module.compile])
def test_compiling_an_attached_model_is_refused_by_name(compiled):
    model = Net()
    session = squeezebox.attach(model, exact=True)
    compiled = compiled(model, backend="eager")
    run = model if compiled is None else compiled
    with pytest.raises(squeezebox.UnsupportedModelError, match=r"torch\.compile"):
        run(x())
    with torch.no_grad():
        run(x())
    session.detach()
    torch.compiler.reset()
