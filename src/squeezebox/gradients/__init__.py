"""Data parallel training over slow links: the ranks' gradients go in fewer bytes, and what is lost is owed.

In: a DistributedDataParallel model, and how much noise or how many bytes. Out: its exchange compressed.
May touch: torch.distributed, codecs, planner and schema; the model's communication hook.
"""

from squeezebox.gradients._compress import CompressedGradients, Traffic, compress_gradients

__all__ = ["CompressedGradients", "Traffic", "compress_gradients"]
