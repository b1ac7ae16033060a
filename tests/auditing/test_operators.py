"""The ledger of operators leaves a training as it would be without, whatever its operators do."""

import copy
import random

import pytest
import torch
from torch import nn

from squeezebox.auditing._operators import OperatorLedger, _Trace
from squeezebox.auditing._run import Tooling


def ledger():
    tooling = Tooling(threads=1)
    return OperatorLedger(tooling, {"nondeterministic": tooling})


def test_running_statistics_are_written_once():
    model, inputs = nn.BatchNorm2d(4), torch.randn(8, 4, 6, 6)
    watched, found = copy.deepcopy(model), ledger()
    model(inputs)
    with found:
        watched(inputs)
    assert all(torch.equal(value, watched.state_dict()[name]) for name, value in model.state_dict().items())
    assert {row.name: row.unequal["again"] for row in found.rows()}["aten.native_batch_norm.default"] == 0


def test_an_operator_whose_error_is_caught_has_no_row():
    found = ledger()
    with found:
        with pytest.raises(RuntimeError):
            torch.mm(torch.zeros(2, 3), torch.zeros(2, 3))
        torch.zeros(2).add(1)
    assert [row.name for row in found.rows()] == ["aten.zeros.default", "aten.add.Tensor"]


def test_a_profilers_marks_are_not_repeated():
    found = ledger()
    with found, torch.profiler.record_function("a part"):
        torch.zeros(2)
    assert [row.name for row in found.rows()] == ["aten.zeros.default"]


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_lazy_views_of_complex_numbers_are_compared(view):
    numbers, found, trace = torch.randn(3, 3, dtype=torch.complex64), ledger(), _Trace()
    for mode in (found, trace):
        with mode:
            view(numbers).clone()
    assert found.rows() and trace.calls


ALIASED = {
    "out": lambda x: torch.maximum(x, -x, out=x),
    "itself": lambda x: x.mul_(x),
    "data": lambda x: x.data.add_(x.data),
    "list": lambda x: torch._foreach_add_([x], [x]),
}


@pytest.mark.parametrize("call", ALIASED.values(), ids=ALIASED)
def test_arguments_that_are_the_same_tensor_are_no_difference(call):
    numbers, found = torch.tensor([-2.0, 3.0]), ledger()
    with found:
        call(numbers)
    rows = found.rows()
    assert rows and not any(count for row in rows for count in row.unequal.values())


@torch.library.custom_op("audited::scrawl", mutates_args={"x"})
def scrawl(x: torch.Tensor) -> None:
    x.add_(random.random())


def test_what_is_written_differently_is_a_difference():
    found = ledger()
    with found:
        scrawl(torch.zeros(2))
    (row,) = (row for row in found.rows() if "scrawl" in row.name)
    assert row.unequal["again"] == 1
