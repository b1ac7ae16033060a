"""Chooses how to hold every saved tensor: the least time within a budget of bytes and noise.

In: a Profile (positions, tensors, measured options) and a Budget. Out: a Plan, or why there is none.
May touch: squeezebox.schema, numpy, and scipy for the optimum; no torch.
"""

from squeezebox.planner._batches import at_batch, largest_batch
from squeezebox.planner._greedy import peak, solve
from squeezebox.planner._milp import optimum
from squeezebox.planner._shortage import shortage
from squeezebox.planner._smallest import smallest

__all__ = ["at_batch", "largest_batch", "optimum", "peak", "shortage", "smallest", "solve"]
