"""A model compiled with packed activations, and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from squeezebox.reports import CompiledReport
from squeezebox.schema import AttachError


class CompiledStep:
    """A compiled model whose saved activations are packed; call it as the model. Made by ``compile()``."""

    def __init__(
        self,
        model: torch.nn.Module,
        choose: Callable[[Any], int | None],
        fingerprint: str,
        *,
        fullgraph: bool = False,
        options: Mapping[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        from squeezebox.capture._compiled import _adapter, _rewrite  # slow to import, and not always needed

        self._reports: list[CompiledReport] = []
        self._check = check

        def packed(plain: Any, split: Any) -> None:
            self._reports.append(_rewrite.rewrite(plain, split, choose))

        backend = _adapter.Backend(packed, fingerprint, options)
        self._compiled = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return self._compiled(*args, **kwargs)

    def report(self) -> CompiledReport:
        """What the last compiled training graphs save. Compilation happens in the first call.

        Raises:
            AttachError: no forward with gradients was compiled yet.
        """
        if not self._reports:
            raise AttachError(
                "there is nothing to report: no forward pass with gradients was compiled yet. Call the step "
                "once on a batch, with gradients enabled, and ask again."
            )
        return self._reports[-1]
