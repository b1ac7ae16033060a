"""The clock waits for the device that it is asked about, and for no other."""

import pytest
import torch

from squeezebox.profiling import now


@pytest.mark.parametrize(("device", "awaited"), [("cpu", []), ("cuda:1", [torch.device("cuda:1")])])
def test_the_clock_waits_for_its_device_alone(device, awaited, monkeypatch):
    found = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *which: found.append(*which))
    first = now(torch.device(device))
    assert found == awaited
    assert now(torch.device("cpu")) >= first
