"""Data parallel training over slow links: the ranks' gradients go in fewer bytes, and what is lost is owed.

In: a DistributedDataParallel model, and how much noise or how many bytes. Out: its exchange compressed.
May touch: torch.distributed, codecs, planner and schema; the model's communication hook.
"""

from squeezebox.gradients._auto import ExchangeCosts, ExchangePlan, SentGroup
from squeezebox.gradients._compress import CompressedGradients, Traffic, compress_gradients
from squeezebox.gradients._link import LinkGroup, link_group
from squeezebox.gradients._measure import ExchangedStep, joined, measure_exchange

__all__ = [
    "CompressedGradients",
    "ExchangeCosts",
    "ExchangePlan",
    "ExchangedStep",
    "LinkGroup",
    "SentGroup",
    "Traffic",
    "compress_gradients",
    "joined",
    "link_group",
    "measure_exchange",
]
