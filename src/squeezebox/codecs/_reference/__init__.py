"""Plain-torch kernels, on any device: what every faster backend must equal to the bit.

In: flat tensors. Out: flat codes and scales.
May touch: torch.
"""
