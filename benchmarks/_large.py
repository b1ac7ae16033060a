"""A decoder of the sizes of Llama 3 70B (Grattafiori et al. 2024): to be asked about, not to be trained."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Llama(nn.Module):
    """Grouped-query attention and gated layers, without rotary embeddings, which hold next to nothing."""

    def __init__(
        self,
        vocabulary: int = 128256,
        width: int = 8192,
        depth: int = 80,
        heads: int = 64,
        shared_heads: int = 8,
        hidden: int = 28672,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, shared_heads, hidden) for _ in range(depth)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens_NT))))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, shared_heads: int, hidden: int) -> None:
        super().__init__()
        self.width = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.project = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, shared_heads * self.width, bias=False) for _ in range(2))
        self.expand, self.gate = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.shrink = nn.Linear(hidden, width, bias=False)

    def forward(self, x_NTC: Tensor) -> Tensor:
        normed = self.norm1(x_NTC)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x_NTC = x_NTC + self.project(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x_NTC)
        out: Tensor = x_NTC + self.shrink(F.silu(self.gate(normed)) * self.expand(normed))
        return out
