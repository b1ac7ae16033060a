"""Steps an optimizer parameter by parameter, in backward or in its own step, out of a file.

In: an optimizer of torch's, and whose states and gradients are moved. Out: the same updates, to the bit.
May touch: that optimizer through its public hooks, gradients of its parameters, a file of squeezebox.memory.
"""

from squeezebox.optim._single import refuse_unknown, step_one
from squeezebox.optim._updates import Updates

__all__ = ["Updates", "refuse_unknown", "step_one"]
