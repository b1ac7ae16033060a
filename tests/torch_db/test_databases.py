"""torch's own databases of operators and modules: exact is equal to the bit, and noise ends no step."""

import pytest
import torch

import squeezebox
from tests.torch_db.comparing import compared

MODES = ({"exact": True}, {"noise": 1e-2})
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
FIRST = 1  # samples of an operator or module in the default run,
MOST = {torch.float32: 4}  # and in the slow one; benchmarks/torch_databases.py runs all
FEWER = 2
DIFFERENTIATED = 1


def _failures(entries, samples_of, dtype, most, options):
    """Of every sample, by the operator's or module's name."""
    failures = []
    for entry in entries:
        second = "exact" in options and getattr(entry, "supports_gradgrad", True)
        for number, sample in enumerate(samples_of(entry, dtype, most)):
            try:
                outcome = compared(sample, second=second, **options)
            except (
                AssertionError,
                RuntimeError,
                ValueError,
                TypeError,
                LookupError,
                ArithmeticError,
            ) as error:
                failures.append((entry.formatted_name, number, repr(error)))
            else:
                failures += [(entry.formatted_name, number, outcome.why)] * (outcome.kind == "refused")
    return failures


def _most(dtype):
    return MOST.get(dtype, FEWER)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_first_samples_of_every_operator(databases, options):
    dtype = torch.float32
    operators = databases.operators(dtype)
    assert not _failures(operators, databases.operator_samples, dtype, FIRST, options)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_first_samples_of_every_module(databases, options):
    dtype = torch.float32
    modules = databases.modules(dtype)
    assert not _failures(modules, databases.module_samples, dtype, FIRST, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators(databases, dtype, options):
    operators = databases.operators(dtype)
    assert not _failures(operators, databases.operator_samples, dtype, _most(dtype), options)


@pytest.mark.slow
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modules(databases, dtype, options):
    modules = databases.modules(dtype)
    assert not _failures(modules, databases.module_samples, dtype, _most(dtype), options)


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences_wherever_they_are_in_plain_pytorch(databases):
    failures, passed = [], 0
    for operator in databases.operators(torch.float64)[1::3]:  # without CTC, a minute; all are equal above
        for sample in databases.operator_samples(operator, torch.float64, DIFFERENTIATED):
            if _passes_gradcheck(sample):
                passed += 1
                session = squeezebox.attach(sample, exact=True)
                session.engine.store.small_bytes = 0
                failures += [] if _passes_gradcheck(sample) else [operator.formatted_name]
                session.detach()
    assert passed > 60 and not failures


def _passes_gradcheck(sample):
    def call(*inputs):
        torch.manual_seed(1)
        return sample(*inputs)

    try:
        return torch.autograd.gradcheck(call, sample.inputs(), fast_mode=True, raise_exception=False)
    except (RuntimeError, ValueError):  # of outputs that it cannot compare, such as sparse or integer ones
        return False
