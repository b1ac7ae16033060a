"""Plans of embedding tables, read back."""

from __future__ import annotations

import os

from squeezebox.schema import EmbeddingPlan


def load_embedding_plan(path: str | os.PathLike[str]) -> EmbeddingPlan:
    """The plan that :meth:`squeezebox.schema.EmbeddingPlan.save` wrote.

    Raises:
        FormatError: the file is missing, damaged, or of another version.
    """
    return EmbeddingPlan.load(path)
