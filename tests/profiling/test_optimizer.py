"""What an optimizer's step takes for a moment, against the allocator's count."""

import pytest
import torch

from squeezebox.profiling import PeakMeter, transient_bytes

SETTINGS = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True}, {"weight_decay": 0.1}],
    "AdamW": [{}, {"weight_decay": 0.0}],
    "NAdam": [{}, {"weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "Adamax": [{}],
    "RMSprop": [{}, {"momentum": 0.9}, {"weight_decay": 0.1}],
    "Adagrad": [{}, {"weight_decay": 0.1}],
}
WAYS = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"maximize": True}]
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
SIZES = [(100, 100), (50, 50), (300, 100), (1000,)]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_step_takes_for_a_moment(name, way):
    if way.get("fused") and name not in FUSED:
        pytest.skip("there is no such kernel")
    for settings in SETTINGS[name]:
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **settings, **way)
        optimizer.step()
        meter = PeakMeter(torch.device("cpu"))
        assert meter.start()
        optimizer.step()
        taken = meter.stop(()).total_bytes
        predicted = transient_bytes([parameter.grad for parameter in parameters], optimizer)
        largest = max(parameter.nbytes for parameter in parameters)
        assert taken - largest // 4 <= predicted <= taken + 1.01 * largest, settings
