"""Torch's runtime and the runner's own loop: the same losses, weights, buffers and messages, to the bit."""

import itertools

import pytest
import torch
from torch import nn

from squeezebox.pipeline import Runner, Wire
from tests.pipeline import ranks
from tests.pipeline.test_exact import TOKENS, _last_first
from tests.pipeline.test_faults import PATIENCE, _Troubled


def _noisy():
    """Batch normalisation and dropout: buffers and random numbers count."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))]
    return nn.Sequential(*layers).double()


class _Skips(nn.Module):
    """Tensors that pass a stage as they are, and one that is a view."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(x).tanh()
            kept.append(x)
        for layer in self.up:
            x = layer((x + kept.pop()).unflatten(1, (2, 3)).transpose(1, 2).flatten(1))
        return x


def _skips():
    torch.manual_seed(0)
    return _Skips().double()


def _frozen():
    model = ranks.chain()
    model[:4].requires_grad_(False)
    return model


MODELS = {
    "chain": (ranks.chain, ranks.numbers, nn.functional.mse_loss),
    "noisy": (_noisy, ranks.numbers, nn.functional.mse_loss),
    "skips": (_skips, ranks.numbers, nn.functional.mse_loss),
    "frozen": (_frozen, ranks.numbers, nn.functional.mse_loss),
    "tied": (ranks.tied, ranks.words, ranks.entropy),
}


def _trained(rank, name, plan, options):
    make, data, loss_fn = MODELS[name]
    model = make()
    trained = [each for each in model.parameters() if each.requires_grad]
    runner = Runner(model, plan, optimizer=torch.optim.AdamW(trained, lr=1e-2), loss_fn=loss_fn, **options)
    torch.manual_seed(rank)
    losses = []
    for batch in range(3):
        losses.append(runner.step(*data(batch, 2 * plan.microbatches)))
        if batch == 1:
            losses.append(runner.evaluate(*data(9, 2 * plan.microbatches)))
    found = losses, runner.state_dict(), runner.traffic(), runner.engine
    runner.close()
    return found


def _both(rank, cases):
    return [
        [_trained(rank, name, plan, options | engine) for engine in ({}, {"engine": "torch"})]
        for name, plan, options in cases
    ]


def _quick():
    yield "chain", ranks.plan(8, 2, "breadth-first", 4, loops=2), {}
    yield "noisy", ranks.plan(12, 2, "zb-h1", 4), {}
    yield "noisy", ranks.plan(12, 2, "zb-v", 4, loops=2), {}
    yield "tied", ranks.plan(5, 2, "1f1b", 4, policy="recompute", inputs=TOKENS), {"clip": 0.3}


def _cases(world):
    every = itertools.product(("keep", "recompute"), ("gpipe", "1f1b", "zb-h1", "zb-h2"))
    yield from (("chain", ranks.plan(8, world, name, 4, policy=policy), {}) for policy, name in every)
    yield "chain", ranks.plan(8, world, "interleaved-1f1b", 4, loops=2), {}
    yield "chain", ranks.plan(8, world, "zb-v", 6, loops=2), {}
    yield "chain", ranks.plan(8, world, "gpipe", 4), {"schedule": _last_first(world, 4)}
    for schedule in ("1f1b", "zb-h1"):
        yield "skips", ranks.plan(6, world, schedule, 4), {"clip": 0.1}
    yield "frozen", ranks.plan(8, world, "1f1b", 4), {}


def _check(results):
    for result in results:
        assert not isinstance(result, str), result
        for own, torchs in result:
            assert (own[-1], torchs[-1]) == ("own", "torch")
            assert own[0] == torchs[0]
            assert own[1].keys() == torchs[1].keys()
            assert all(torch.equal(own[1][name], torchs[1][name]) for name in own[1])
            assert [each for each in own[2] if each.plain_bytes] == list(torchs[2])


def test_two_ranks_train_the_same():
    _check(ranks.run(_both, 2, list(_quick())))


@pytest.mark.slow
def test_four_ranks_train_the_same():
    cases = list(_cases(4))
    cases.append(("chain", ranks.plan(8, 2, "zb-h1", 4, replicas=2), {"clip": 0.3}))
    _check(ranks.run(_both, 4, cases))


def _failing(rank, trouble):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), _Troubled(trouble)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_fn": nn.functional.mse_loss, "patience": PATIENCE, "engine": "torch"}
    runner = Runner(model, ranks.plan(2, 2, "1f1b", 4), optimizer=optimizer, **options)
    try:
        for batch in range(4):
            runner.step(*ranks.numbers(batch, 8))
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("raises", "raised ValueError: the input looks bad"),
        pytest.param("dies", "is gone", marks=pytest.mark.slow),
        pytest.param("hangs", "hangs", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_is_named(trouble, told):
    processes, results = ranks.start(_failing, 2, trouble)
    found = ranks.collect(processes, results, 2 if trouble == "raises" else 1)
    assert found[0].startswith("PipelineError: rank 1 (stage 1) ") and told in found[0]
    if trouble == "raises":
        assert found[1] == "ValueError: the input looks bad"
    for process in processes:
        process.join(3 * PATIENCE + 10.0)
        assert process.exitcode is not None


def _refused(rank, cases):
    found = []
    for plan, options in cases:
        model = ranks.chain()
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            options = {"engine": "torch"} | options
            Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, **options)
        except Exception as error:  # noqa: BLE001
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_torch_has_no_place_for_is_refused():
    cases = [
        (ranks.plan(8, 1, "2bw", 1), {}),
        (ranks.plan(8, 1, "1f1b", 1), {"wire": Wire(activation_error=0.1)}),
        (ranks.plan(8, 1, "1f1b", 1), {"engine": "fast"}),
    ]
    (found,) = ranks.run(_refused, 1, cases)
    assert [each.partition(":")[0] for each in found] == ["OptionError"] * 3
    assert "one version of the weights, and '2bw' reads earlier ones" in found[0]
    assert "engine='torch' sends all as it is" in found[1]
    assert "engine='fast' is neither 'own' nor 'torch'" in found[2]
