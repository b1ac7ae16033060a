"""Training over several ranks: a model cut into stages that work on microbatches in turn.

In: a model, a plan that says which blocks make which stage, batches. Out: losses, and trained weights.
May touch: torch.distributed, codecs, schedules and schema; what a stage saves is capture's.
"""

from squeezebox.pipeline._construction import Construction
from squeezebox.pipeline._cut import Piece, cut, fingerprint
from squeezebox.pipeline._initial import Initial
from squeezebox.pipeline._packing import Wire
from squeezebox.pipeline._runner import Runner
from squeezebox.pipeline._setup import is_first_process, join, own_device, schedule_of, told_by_all
from squeezebox.pipeline._shards import steps_elements
from squeezebox.pipeline._stage import Passage, Stage
from squeezebox.pipeline._wire import Traffic, measure_link, measure_links

__all__ = [
    "Construction",
    "Initial",
    "Passage",
    "Piece",
    "Runner",
    "Stage",
    "Traffic",
    "Wire",
    "cut",
    "fingerprint",
    "is_first_process",
    "join",
    "measure_link",
    "measure_links",
    "own_device",
    "schedule_of",
    "steps_elements",
    "told_by_all",
]
