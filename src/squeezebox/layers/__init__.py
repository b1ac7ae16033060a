"""Layers that keep less for backward by the way they are made.

In: a model, or sizes as for torch's own layers. Out: modules that compute their noise where they need it.
May touch: codecs, memory, planner, reports and schema; torch.distributed; numba on first use.
"""

from __future__ import annotations

from squeezebox.layers._bayes import BayesConv1d, BayesConv2d, BayesConv3d, BayesLayer, BayesLinear
from squeezebox.layers._convert import bayesian_
from squeezebox.layers._dispatch import Dispatch
from squeezebox.layers._divergence import kl
from squeezebox.layers._experts import ExpertMLP, lean_experts_
from squeezebox.layers._plan_tables import plan_embeddings
from squeezebox.layers._sharded import Experts
from squeezebox.layers._split import split_sequence_
from squeezebox.layers._tables import ShardedEmbeddingBag

__all__ = [
    "BayesConv1d",
    "BayesConv2d",
    "BayesConv3d",
    "BayesLayer",
    "BayesLinear",
    "Dispatch",
    "ExpertMLP",
    "Experts",
    "ShardedEmbeddingBag",
    "bayesian_",
    "kl",
    "lean_experts_",
    "plan_embeddings",
    "split_sequence_",
]
