"""Training goes on from a saved state to the bit, whatever buckets the new process begins with."""

import io

import pytest
import torch

import squeezebox
from squeezebox.schema import FormatError
from tests.gradients import ranks


def _optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def _whole(rank, options, before, after):
    """Train, and save on the way."""
    net = ranks.model()
    ddp, optimizer = ranks.wrapped(net), _optimizer(net)
    squeezed = squeezebox.compress_gradients(ddp, **options)
    ranks.train(ddp, rank, before, optimizer)
    file = io.BytesIO()
    state = squeezed.state_dict()
    torch.save([net.state_dict(), optimizer.state_dict(), state], file)
    losses = ranks.train(ddp, rank, after, optimizer, first=before)
    squeezed.close()
    return file.getvalue(), losses, ranks.weights(net), squeezed.total.noise


def _resumed(rank, options, before, after, files):
    net = ranks.model(seed=7)
    model, states, state = torch.load(io.BytesIO(files[rank]))  # tensors and plain values only
    net.load_state_dict(model)
    ddp, optimizer = ranks.wrapped(net), _optimizer(net)
    optimizer.load_state_dict(states)
    squeezed = squeezebox.compress_gradients(ddp, **options)
    squeezed.load_state_dict(state)
    losses = ranks.train(ddp, rank, after, optimizer, first=before)
    squeezed.close()
    return losses, ranks.weights(net), squeezed.total.noise


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("options", "before"),
    [
        ({"noise": 0.1}, 3),
        ({"method": "powersgd", "rank": 2}, 3),
        pytest.param({"noise": 0.1}, 1, marks=pytest.mark.slow),
        pytest.param({"noise": 0.1}, 2, marks=pytest.mark.slow),
        pytest.param({"method": "powersgd"}, 2, marks=pytest.mark.slow),
        pytest.param({"method": "random-k", "ratio": 10.0}, 3, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_training_goes_on_to_the_bit(options, before):
    whole = ranks.run(_whole, 2, options, before, 3)
    assert all(isinstance(result, tuple) for result in whole), whole
    resumed = ranks.run(_resumed, 2, options, before, 3, [result[0] for result in whole])
    for (_, losses, weights, noise), result in zip(whole, resumed, strict=True):
        assert isinstance(result, tuple), result
        assert noise > 0.0
        assert result[0] == losses
        assert torch.equal(result[1], weights)
        assert result[2] == pytest.approx(noise)


def _wrong(rank):
    said = []
    squeezed = squeezebox.compress_gradients(ranks.wrapped(ranks.model()), noise=0.1)
    ranks_state = squeezed.state_dict()
    for change in ({"method": "planes"}, {"rank": 2}, {"residuals": {"nothing.weight": torch.zeros(3)}}):
        try:
            squeezed.load_state_dict(ranks_state | change)
        except FormatError as error:
            said.append(str(error))
    squeezed.close()
    return said


def test_a_state_of_something_else_is_refused():
    (said,) = ranks.run(_wrong, 1)
    assert "'planes'" in said[0]
    assert "rank=2" in said[1]
    assert "'nothing.weight'" in said[2]
