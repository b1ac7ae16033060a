"""Autocast, and a loss that a GradScaler scales too far at first: those steps teach and harm nothing."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox


def trained(dtype, **how):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 256, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    session = squeezebox.attach(model, optimizer=optimizer, **how) if how else None
    generator = torch.Generator().manual_seed(1)
    scales = []

    def backward(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        return float(loss.detach())

    for _ in range(20):
        batch = torch.randn(8, 3, 16, 16, generator=generator), torch.randint(10, (8,), generator=generator)
        loss = backward(*batch)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return loss, scales, session, lambda: backward(*batch)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_exact_training_is_what_it_would_be(dtype):
    loss, scales, _, _ = trained(dtype)
    exact_loss, exact_scales, session, _ = trained(dtype, exact=True)
    session.detach()
    assert (loss, scales) == (exact_loss, exact_scales)
    assert dtype is torch.bfloat16 or scales[0] < 2.0**30  # the first step's gradients overflowed


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_the_noise_stays_near_its_budget_after_gradients_that_overflowed(dtype):
    loss, _, _, _ = trained(dtype)
    near, scales, session, backward = trained(dtype, noise=1e-2)
    noise = session.measure_noise(backward)
    record = session.report().record
    session.detach()
    assert math.isclose(loss, near, rel_tol=0.1)
    assert math.isclose(record.predicted_noise, 1e-2, rel_tol=0.01)
    assert 0.0 < noise < 3e-2
    assert record.packed_bytes < 0.5 * record.saved_bytes
