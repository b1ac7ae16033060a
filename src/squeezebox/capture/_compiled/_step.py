"""A model compiled with packed activations, and its report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from squeezebox.capture._compiled._codes import BitRule, Matcher
from squeezebox.reports import CompiledReport
from squeezebox.schema import AttachError, SqueezeboxError


class CompiledStep:
    """A compiled model of which the saved activations are packed. Call it as the model.

    Made by ``squeezebox.compile``. ``module`` is the model itself: its parameters are the ones trained.
    ``noise`` is the relative gradient noise measured when it was made, None where it was not.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        choose: Callable[[tuple[Any, ...], dict[str, Any]], BitRule],
        check: Callable[[], None],
        *,
        fullgraph: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = model
        self.noise: float | None = None
        self._choose, self._check = choose, check
        self._fullgraph, self._options = fullgraph, options
        self._compiled: Callable[..., Any] | None = None
        self._reports: list[CompiledReport] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result. The first call compiles, and so does one with inputs of another shape."""
        self._check()
        if self._compiled is None:
            self._compiled = self._compile(self._choose(args, kwargs))
        try:
            return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, SqueezeboxError):
                raise error.inner_exception from error
            raise

    def report(self) -> CompiledReport:
        """What the training graph compiled last saves.

        Raises:
            AttachError: no forward pass with gradients was compiled yet.
        """
        if not self._reports:
            raise AttachError(
                "there is nothing to report: no forward pass with gradients was compiled yet. Call the step "
                "on a batch once, with gradients enabled, and ask again."
            )
        return dataclasses.replace(self._reports[-1], noise=self.noise)

    def _compile(self, rule: BitRule) -> Callable[..., Any]:
        from squeezebox.capture._compiled import _adapter, _rewrite  # slow to import, and not always needed

        def packed(plain: _adapter.Split, split: _adapter.Split) -> None:
            matcher = Matcher(rule)
            self._reports.append(_rewrite.rewrite(plain, split, matcher))
            matcher.check()

        fingerprint = json.dumps(dataclasses.asdict(rule), sort_keys=True)
        backend = _adapter.Backend(packed, fingerprint, self._options)
        compiled: Callable[..., Any] = torch.compile(
            self.module, backend=backend, fullgraph=self._fullgraph, dynamic=False, **_adapter.ISOLATED
        )
        return compiled
