"""What attach() refuses, and a session's states."""

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.bounds import Comet, Fixed
from squeezebox.schema import AttachError, OptionError, SqueezeboxError, UnsupportedModelError
from tests.capture.nets import images, plain_step, resnet


@pytest.mark.parametrize("noise", [-1e-3, 0.0, float("nan"), float("inf"), float("-inf")])
def test_a_noise_out_of_range_is_refused(noise):
    with pytest.raises(OptionError, match=f"noise={noise} is not a positive finite number.*exact=True"):
        squeezebox.attach(model := resnet(), noise=noise)
    squeezebox.attach(model, exact=True).detach()


@pytest.mark.parametrize(
    "options",
    [
        {"noise": 1e-3, "exact": True},
        {"noise": 1e-3, "controller": Comet()},
        {"controller": Fixed(value=0.1), "exact": True},
        {"noise": 1e-3, "controller": Comet(), "exact": True},
    ],
    ids=lambda options: " and ".join(options),
)
def test_only_one_of_noise_controller_and_exact(options):
    with pytest.raises(OptionError, match=" and ".join(options) + " exclude each other"):
        squeezebox.attach(resnet(), **options)


def test_a_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"2 devices \(cpu, meta\)"):
        squeezebox.attach(model)


def test_a_model_on_another_kind_of_device_is_refused():
    with pytest.raises(UnsupportedModelError, match="the model is on meta"):
        squeezebox.attach(nn.Linear(4, 4, device="meta"))


IMPORTING = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own compiler warns of torch.jit


@IMPORTING
def test_a_compiled_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="compiled by torch.compile"):
        squeezebox.attach(torch.compile(resnet()))


@IMPORTING
def test_a_model_with_a_compiled_part_is_refused():
    model = resnet()
    model[4].compile()
    with pytest.raises(UnsupportedModelError, match="module '4' is compiled"):
        squeezebox.attach(model)
    model = nn.Sequential(resnet(), torch.compile(nn.Linear(10, 10)))
    with pytest.raises(UnsupportedModelError, match="module '1' is compiled"):
        squeezebox.attach(model)


def test_a_model_has_one_session():
    model = resnet()
    session = squeezebox.attach(model)
    with pytest.raises(AttachError, match="attached already"):
        squeezebox.attach(model, exact=True)
    session.detach()
    squeezebox.attach(model).detach()


def test_a_detached_session_is_over():
    model, x = resnet(), images()
    session = squeezebox.attach(model, exact=True)
    plain_step(model, x)
    session.detach()
    session.detach()
    assert session.report().packed_bytes > 0  # the last report stays
    with pytest.raises(AttachError, match="detached"), session.step():
        pass
    with pytest.raises(AttachError, match="detached"):
        session.measure_noise(lambda: plain_step(model, x))


def test_a_report_needs_a_step():
    model, x = resnet(), images()
    session = squeezebox.attach(model)
    with pytest.raises(AttachError, match="no forward pass with gradients"):
        session.report()
    with torch.no_grad():
        model(x)
    with pytest.raises(AttachError, match="nothing to report"):
        session.report()
    session.detach()


def test_noise_needs_gradients():
    model, x = resnet(), images()
    session = squeezebox.attach(model)
    with pytest.raises(AttachError, match="saw no gradient"):
        session.measure_noise(lambda: model(x))
    session.detach()


def test_noise_of_a_gradient_that_is_not_finite_leaves_the_last_figure():
    model, x = resnet(), images()
    session = squeezebox.attach(model)
    model(x).sum().backward()
    before = session.measure_noise(lambda: model(x).sum().backward())
    with pytest.raises(AttachError, match="not finite"):
        session.measure_noise(lambda: (model(x).sum() * float("inf")).backward())
    assert session.report().noise == before
    session.detach()


def test_every_error_is_one_of_ours():
    for error in (AttachError, OptionError, UnsupportedModelError):
        assert issubclass(error, SqueezeboxError)


def test_comet_without_an_optimizer_is_refused() -> None:
    with pytest.raises(OptionError, match="optimizer="):
        squeezebox.attach(torch.nn.Linear(2, 2), controller=Comet())


def test_an_optimizer_that_is_none_is_refused():
    model = torch.nn.Linear(2, 2)
    sample = torch.zeros(1, 2), torch.zeros(1, 2)
    with pytest.raises(OptionError, match="optimizer is 'sgd', not a torch.optim.Optimizer"):
        squeezebox.plan(model, sample=sample, loss_fn=torch.nn.functional.mse_loss, optimizer="sgd")
