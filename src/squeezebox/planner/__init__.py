"""Chooses how to hold every saved tensor: the least time within a budget of bytes and noise.

In: a Profile (positions, tensors, measured options) and a Budget. Out: a Plan, or why there is none.
May touch: squeezebox.schema, numpy, and scipy for the optimum; no torch.
"""

from squeezebox.planner._greedy import peak, smallest, solve
from squeezebox.planner._milp import optimum

__all__ = ["optimum", "peak", "smallest", "solve"]
