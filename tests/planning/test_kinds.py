"""Arguments of another kind are refused before anything runs."""

import pytest
import torch
from torch.nn import functional as F

import squeezebox
from squeezebox.schema import OptionError
from tests.planning.test_max_batch import batch, network

X, Y = batch(4)


class Unrun(torch.nn.Linear):
    def forward(self, x):
        raise AssertionError("it ran")


def ask(name, model, **options):
    given = {"sample": (X, Y), "loss_fn": F.cross_entropy, **options}
    if name == "find_batch":
        return squeezebox.find_batch(model, given.pop("sample"), memory="1GiB", **given)
    if name in ("max_batch", "compile"):
        given["budget"] = "1GiB"
    return getattr(squeezebox, name)(model, **given)


@pytest.mark.parametrize("name", ("plan", "max_batch", "find_batch", "compile"))
@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"noise": "1e-2"}, "noise '1e-2' is no number"),
        ({"noise": True}, "noise True is no number"),
        ({"sample": (X[:0], Y[:0])}, r"float32\[0, 3, 16, 16\] as inputs, which is no batch"),
        ({"sample": (X, Y, Y)}, r"sample=\(inputs, target\)"),
    ),
)
def test_noise_and_samples_of_another_kind_are_refused(name, options, words):
    with pytest.raises(OptionError, match=words):
        ask(name, Unrun(2, 2), **options)


@pytest.mark.parametrize("name", ("plan", "max_batch", "find_batch", "compile"))
def test_a_model_that_is_no_module_is_refused(name):
    with pytest.raises(OptionError, match=r"is no torch\.nn\.Module"):
        ask(name, lambda x: x)


def test_others_say_what_they_take():
    with pytest.raises(OptionError, match="time_limit '1.3' is no number"):
        ask("plan", Unrun(2, 2), time_limit="1.3")
    with pytest.raises(OptionError, match="noise 'x' is no number"):
        squeezebox.feasibility(Unrun(2, 2), input_shape=(2,), noise="x")
    with pytest.raises(OptionError, match="load 'x' is neither"):
        ask("find_batch", Unrun(2, 2), load="x")


@pytest.mark.parametrize("name", ("estimate", "feasibility", "find_batch"))
def test_a_loss_without_a_backward_is_refused_by_name(name):
    with pytest.raises(OptionError, match="does not depend on any parameter"):
        ask(name, network(), loss_fn=lambda output, target: F.cross_entropy(output, target).detach())


@pytest.mark.parametrize("optimizer", ("adam", torch.optim.Adam), ids=("name", "class"))
def test_an_optimizer_by_its_name_or_class_is_refused(optimizer, tmp_path):
    words = r"not a torch\.optim\.Optimizer\. Give the one that steps"
    for name, options in {"plan": {"cache": tmp_path}, "max_batch": {}, "find_batch": {}}.items():
        with pytest.raises(OptionError, match=words):
            ask(name, Unrun(2, 2), optimizer=optimizer, **options)
    with (
        pytest.raises(OptionError, match=words),
        squeezebox.explain_out_of_memory(Unrun(2, 2), optimizer=optimizer),
    ):
        raise AssertionError("it ran")
