"""Exact training on inputs larger than memory.

In: a model, a loss function, and images and targets that are read strip by strip.
Out: the loss, and gradients equal to the whole image's. May touch: memory, reports and schema.
"""

from squeezebox.streaming._plan import StreamPlan, StripPlan
from squeezebox.streaming._progress import Progress
from squeezebox.streaming._step import StreamedStep

__all__ = ["Progress", "StreamPlan", "StreamedStep", "StripPlan"]
