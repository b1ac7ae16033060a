"""torch.compile with what it saves packed.

In: a model, a sample and the noise allowed. Out: a compiled model whose saved tensors are packed.
May touch: what torch's compiler does to this model.
"""

from squeezebox.compiling._compile import compile_model

__all__ = [
    "compile_model",
]
