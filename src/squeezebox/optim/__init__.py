"""Steps an optimizer parameter by parameter, in backward or in its own step, with states and gradients in a file.

In: an optimizer of torch's, and which parameters' states and gradients are moved. Out: the same updates, to the bit.
May touch: that optimizer through its public hooks, its parameters' gradients, a file through squeezebox.memory.
"""

from squeezebox.optim._single import refuse_unknown, step_one
from squeezebox.optim._updates import Updates

__all__ = ["Updates", "refuse_unknown", "step_one"]
