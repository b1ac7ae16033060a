"""Settings for every test: how many examples a property gets, and kernels without a device."""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when triton is imported

# No deadline and no complaint about slowness: kernels compile on their first example, cores are shared.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=60,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", settings.get_profile("default"), max_examples=2000, derandomize=False)
settings.load_profile("default")
