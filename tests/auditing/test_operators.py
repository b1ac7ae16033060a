"""The ledger of operators leaves a training as it would be without, whatever its operators do."""

import copy

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
