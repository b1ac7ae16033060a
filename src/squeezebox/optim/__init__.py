"""Steps an optimizer parameter by parameter, in backward or in its own step, out of a file.

In: an optimizer of torch's, and whose states and gradients are moved. Out: the same updates, to the bit where
no state is packed.
May touch: that optimizer through its public hooks, gradients of its parameters, a file of squeezebox.memory.
"""

from squeezebox.optim._groups import refuse_unknown
from squeezebox.optim._pieces import PIECE_BYTES
from squeezebox.optim._products import Products, ProductTensor, can_be_cut, slice_bytes, sliceable
from squeezebox.optim._split_weight import SplitWeight, SplitWeights, splittable
from squeezebox.optim._updates import SMALL_BYTES, WAITING_BYTES, Updates

__all__ = [
    "PIECE_BYTES",
    "SMALL_BYTES",
    "WAITING_BYTES",
    "ProductTensor",
    "Products",
    "SplitWeight",
    "SplitWeights",
    "Updates",
    "can_be_cut",
    "refuse_unknown",
    "slice_bytes",
    "sliceable",
    "splittable",
]
