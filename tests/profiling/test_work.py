"""What operators compute and move, next to what their shapes say."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from squeezebox.planning._estimate import simulated
from squeezebox.profiling._work import WorkCount


def counted(run):
    with WorkCount() as count:
        run()
    return count.work()


def test_products_convolutions_and_views():
    x, w = torch.ones(4, 8), torch.ones(8, 16)
    (product,) = counted(lambda: x @ w)
    assert (product.flops, product.moved_bytes, product.times) == (2 * 4 * 8 * 16, 4 * (32 + 128 + 64), 1)
    image, kernel = torch.ones(2, 3, 8, 8), torch.ones(5, 3, 3, 3)
    (convolution,) = counted(lambda: F.conv2d(image, kernel))
    assert convolution.flops == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)
    assert counted(x.t) == ()
    (added,) = counted(lambda: x.add_(x[:1].expand(4, 8)))
    assert (added.flops, added.moved_bytes) == (0, 4 * (32 + 8 + 32))
    (twice,) = counted(lambda: (torch.relu(x), torch.relu(x)))
    assert twice.times == 2


def test_attention_and_recurrent_layers_of_a_cpu():
    query = torch.ones(2, 4, 16, 8, requires_grad=True)
    work = counted(lambda: F.scaled_dot_product_attention(query, query, query).sum().backward())
    scores = 2 * (2 * 4 * 16) * 16 * 16  # and weighted values
    assert sorted(each.flops for each in work if each.flops) == [scores, int(2.5 * scores)]
    layer, steps = nn.LSTM(8, 16, batch_first=True), torch.ones(2, 5, 8)
    work = counted(lambda: layer(steps)[0].sum().backward())
    forward = 2 * (2 * 5) * 4 * 16 * (8 + 16)
    assert sorted(each.flops for each in work if each.flops) == [forward, 2 * forward]


def test_a_step_on_fake_tensors_counts_as_one_on_real_ones():
    def network():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
        )

    step, _ = simulated(network, input_shape=(3, 8, 8), batch=2)
    forward, _ = simulated(network, input_shape=(3, 8, 8), batch=2, trains=False)
    flops = {each: sum(work.flops * work.times for work in each.work) for each in (step, forward)}
    assert flops[forward] == 2 * (2 * 4 * 36) * 27 + 2 * 2 * 144 * 5
    assert flops[step] == pytest.approx(3 * flops[forward] - 2 * (2 * 4 * 36) * 27)  # none of the images
    assert forward.optimizer_bytes == forward.gradient_bytes == 0
    assert forward.trace.peak().nbytes < step.trace.peak().nbytes
    model, image = network(), torch.ones(2, 3, 8, 8)
    real = counted(lambda: model(image).sum().backward())
    assert sum(work.flops * work.times for work in real) == flops[step]
