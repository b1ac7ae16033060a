"""Data parallel training over slow links: the ranks' gradients go in fewer bytes, and what is lost is owed.

In: a DistributedDataParallel model, and how much noise or how many bytes. Out: its exchange compressed.
May touch: torch.distributed, codecs, planner and schema; the model's communication hook.
"""

from squeezebox.gradients._auto import ExchangePlan, SentGroup
from squeezebox.gradients._compress import CompressedGradients, Traffic, compress_gradients
from squeezebox.gradients._link import LinkGroup, link_group

__all__ = [
    "CompressedGradients",
    "ExchangePlan",
    "LinkGroup",
    "SentGroup",
    "Traffic",
    "compress_gradients",
    "link_group",
]
