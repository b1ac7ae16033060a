"""Every operator and every module that torch tests, with its samples."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

from tests.torch_db.comparing import Sample

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


def operators(dtype: torch.dtype) -> list[Any]:
    """Those that have a gradient in this dtype on a CPU."""
    trained = (each for each in op_db if each.supports_autograd)
    return [each for each in trained if dtype in each.supported_backward_dtypes("cpu")]


def operator_samples(operator: Any, dtype: torch.dtype, most: int | None = None) -> Iterator[Sample]:
    """Its samples; ``most`` of them, from the first on."""
    torch.manual_seed(0)
    samples = operator.sample_inputs_func(operator, "cpu", dtype, True)  # sample_inputs() walks the stack
    for sample in itertools.islice(samples, most):

        def call(*args: Any, ended: Any = sample.output_process_fn_grad, **kwargs: Any) -> Any:
            return ended(operator(*args, **kwargs))

        yield Sample(call, (sample.input, *sample.args), sample.kwargs)


def modules(dtype: torch.dtype) -> list[Any]:
    """All: where plain PyTorch has no such kernel, that shows itself."""
    return list(module_db)


def module_samples(module: Any, dtype: torch.dtype, most: int | None = None) -> Iterator[Sample]:
    """The module made and called as torch tests it, in training."""
    torch.manual_seed(0)
    try:
        inputs = module.module_inputs_func(module, "cpu", dtype, requires_grad=True, training=True)
    except RuntimeError:  # torch computes some inputs, and has no such kernel
        return
    for each in itertools.islice(inputs, most):
        if each.forward_input is None:
            continue
        made: nn.Module = module.module_cls(*each.constructor_input.args, **each.constructor_input.kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # modules of complex parameters are new
            made = made.to(dtype).train()
        yield Sample(made, each.forward_input.args, each.forward_input.kwargs)


def name_of(entry: Any) -> str:
    """For a test's name and the report."""
    return str(entry.formatted_name)
