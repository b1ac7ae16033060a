"""A training step as its user has it: model, sample and loss; what they hold, and leaving them as they were.

In: models, samples, losses. Out: their tensors, devices and sizes, other samples, errors that explain.
May touch: the model's gradients, buffers and random states, which come back as they were.
"""

from squeezebox.steps._models import (
    device_of,
    gradient_noise,
    held_by,
    mean_momentum,
    names_of,
    nbytes_of,
    persistent,
    random_states,
    restored,
    tensors_in,
    ungraded,
    viewed_bytes,
)
from squeezebox.steps._stand_ins import random_inputs, stand_in
from squeezebox.steps._step import (
    LossFunction,
    Progress,
    TrainingStep,
    apart,
    batch_of,
    check_loss,
    check_optimizer,
    check_sample,
    described,
    explained,
    mapped,
    resize,
)

__all__ = [
    "LossFunction",
    "Progress",
    "TrainingStep",
    "apart",
    "batch_of",
    "check_loss",
    "check_optimizer",
    "check_sample",
    "described",
    "device_of",
    "explained",
    "gradient_noise",
    "held_by",
    "mapped",
    "mean_momentum",
    "names_of",
    "nbytes_of",
    "persistent",
    "random_inputs",
    "random_states",
    "resize",
    "restored",
    "stand_in",
    "tensors_in",
    "ungraded",
    "viewed_bytes",
]
