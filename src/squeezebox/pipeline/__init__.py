"""Training over several ranks: a model cut into stages that work on microbatches in turn.

In: a model, a plan that says which blocks make which stage, batches. Out: losses, and trained weights.
May touch: torch.distributed, schedules, codecs and schema; what a stage saves is capture's.
"""

from squeezebox.pipeline._cut import Piece, cut, fingerprint
from squeezebox.pipeline._packing import Wire
from squeezebox.pipeline._runner import Runner
from squeezebox.pipeline._wire import Traffic

__all__ = ["Piece", "Runner", "Traffic", "Wire", "cut", "fingerprint"]
