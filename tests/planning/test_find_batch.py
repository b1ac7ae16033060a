"""find_batch(): what it answers trains in the memory, a little more does not, and no probe is too large."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn import functional as F

import squeezebox
from squeezebox.planning import _find, _plans
from squeezebox.profiling import free_bytes
from squeezebox.schema import BudgetError, OptionError
from tests.planning.test_max_batch import Sequence, batch, network


def found_for(memory, size=16, **options):
    model = network()
    options = {"loss_fn": F.cross_entropy, "exact": True, "reserve": "10%", **options}
    return model, squeezebox.find_batch(model, batch(size), memory=memory, **options)


@pytest.mark.parametrize("memory", [700_000, 3_000_000])
def test_the_answer_fits_the_memory_less_the_reserve_and_a_tenth_more_does_not(memory):
    model, found = found_for(memory)
    limit = memory - found.reserve_bytes
    assert found.reserve_bytes == memory // 10 and found.measured_peak_bytes <= limit
    assert 2 <= len(found.probes) <= 3 and found.probes[-1] == found.batch
    assert found.batch > found.plain_batch >= max(found.probes[:-1])
    assert found.microbatches == (found.batch,)
    more = int(1.1 * found.batch) + 1
    with pytest.raises(BudgetError):
        squeezebox.plan(model, sample=batch(more), loss_fn=F.cross_entropy, exact=True, budget=limit)
    session = squeezebox.attach(model, plan=found.plan)
    F.cross_entropy(model(batch(found.batch)[0]), batch(found.batch)[1]).backward()
    assert session.report().peak_bytes <= limit
    session.detach()


def test_an_optimizer_that_has_not_stepped_counts_with_its_state():
    model = network()
    adam = torch.optim.Adam(model.parameters())
    options = {"loss_fn": F.cross_entropy, "exact": True, "memory": 2_000_000, "reserve": 0}
    plain = squeezebox.find_batch(model, batch(8), **options)
    adaptive = squeezebox.find_batch(model, batch(8), optimizer=adam, **options)
    assert adaptive.batch < plain.batch and adaptive.measured_peak_bytes <= 2_000_000


def test_an_effective_batch_is_divided_into_microbatches_that_fit():
    _, found = found_for(700_000, effective=100)
    sizes = found.microbatches
    assert sum(sizes) == 100 and max(sizes) <= found.batch and max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-100 // found.batch)
    assert f"An update of 100 takes {len(sizes)} of at most {sizes[0]}" in str(found)
    assert found.to_dict()["microbatches"] == list(sizes)


def test_every_microbatch_of_an_update_fits_with_the_gradients_of_those_before():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
    sample, options = (torch.randn(64, 256), torch.randn(64, 256)), {"loss_fn": F.mse_loss, "exact": True}
    single = squeezebox.find_batch(model, sample, memory="2MiB", **options)
    found = squeezebox.find_batch(model, sample, memory="2MiB", effective=2 * single.batch, **options)
    limit = found.memory_bytes - found.reserve_bytes
    assert found.batch < single.batch and found.plan.accumulate == len(found.microbatches) > 2
    session = squeezebox.attach(model, plan=found.plan)
    for size in found.microbatches[:3]:
        F.mse_loss(model(torch.randn(size, 256)), torch.randn(size, 256)).backward()
        assert session.report().peak_bytes <= limit
    session.detach()
    whole = squeezebox.find_batch(model, sample, memory="2MiB", effective=single.batch // 2, **options)
    assert whole.microbatches == (single.batch // 2,) and whole.plan.accumulate == 1


def test_a_first_probe_that_would_not_fit_is_not_run():
    _, found = found_for(700_000, size=512)
    assert max(found.probes[:-1]) <= found.plain_batch < 512


def test_an_answer_that_needs_more_than_predicted_is_made_smaller(monkeypatch):
    _, fitting = found_for(1_000_000)
    own = _find.measured_at_load
    monkeypatch.setattr(_find, "measured_at_load", lambda *of: int(1.3 * own(*of)))
    _, found = found_for(1_000_000)
    assert found.measured_peak_bytes is None and "not run" in str(found)
    assert 0.6 * fitting.batch < found.batch < fitting.batch
    assert found.predicted_peak_bytes <= found.plan.budget_bytes < 900_000 / 1.2


def test_several_inputs_are_predicted_too():
    model = Sequence()
    sample = (({"tokens": torch.randint(50, (32, 32))}, torch.ones(64)), torch.randint(50, (32 * 32,)))
    found = squeezebox.find_batch(model, sample, loss_fn=F.cross_entropy, memory=2_000_000, exact=True)
    assert found.probes[0] == 32 and found.measured_peak_bytes <= 1_800_000


class ReadsValues(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x if float(x.sum()) else -x)


def test_what_fake_tensors_cannot_run_begins_small():
    sample = (torch.randn(64, 128), torch.randint(10, (64,)))
    found = squeezebox.find_batch(ReadsValues(128, 10), sample, loss_fn=F.cross_entropy, memory=200_000)
    assert found.probes[0] == 2 and found.batch > 64


def costly():
    """A layer whose statistics need far more than a plain step."""
    torch.manual_seed(1)
    layers = [torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.SiLU(), torch.nn.AdaptiveAvgPool2d(1)]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(32, 10))


@pytest.mark.parametrize("memory", [500_000, 2_000_000])
def test_profiles_with_noise_fit_the_memory_too(memory, monkeypatch):
    seen, own = [], _find.profile_step
    monkeypatch.setattr(_find, "profile_step", lambda *a, **k: seen.append(own(*a, **k)) or seen[-1])
    model = costly()
    found = squeezebox.find_batch(model, batch(64), loss_fn=F.cross_entropy, memory=memory, noise=1e-3)
    assert len(seen) == len(found.probes) - 1
    limit, plain = found.memory_bytes - found.reserve_bytes, _plans.plain_peak(seen[0])
    assert all(max(each.peak_bytes, _plans.plain_peak(each)) <= limit for each in seen)
    assert seen[0].peak_bytes > 1.5 * plain and found.measured_peak_bytes <= limit


def test_memory_that_not_even_a_profile_fits_is_refused_before_anything_is_run(monkeypatch):
    monkeypatch.setattr(_find, "profile_step", None)
    with pytest.raises(BudgetError, match=r"batch of 1 can be profiled: that may take .* more than the"):
        squeezebox.find_batch(costly(), batch(64), loss_fn=F.cross_entropy, memory=300_000, noise=1e-3)


@pytest.mark.parametrize("noise", [None, 1e-3])
def test_gradients_and_optimizer_state_are_not_taken_for_more_than_they_are(noise):
    layers = [each for _ in range(8) for each in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sample = torch.randn(4, 256), torch.arange(4)
    options = {"loss_fn": F.cross_entropy, "optimizer": optimizer}
    peak = squeezebox.estimate(model, sample=sample, **options).peak_bytes
    found = squeezebox.find_batch(
        model,
        sample,
        memory=int((1.07 if noise is None else 1.3) * peak),
        reserve=0,
        noise=noise,
        exact=noise is None,
        **options,
    )
    assert found.probes[0] == 4 and found.measured_peak_bytes <= found.memory_bytes


def test_tensors_that_are_small_in_the_probes_and_not_in_the_answer_are_planned():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
    model = torch.nn.Sequential(model, torch.nn.Flatten(), torch.nn.Linear(8, 10))

    def found_in(memory):
        return squeezebox.find_batch(model, batch(16), loss_fn=F.cross_entropy, memory=memory, noise=1e-3)

    first, limit = found_in(2_000_000), 128  # samples of which 8 values are 4096 bytes
    between = (max(first.probes[:-1]) * first.batch) ** 0.5
    found = found_in(int(2_000_000 * limit / between))
    assert max(found.probes[:-1]) * 8 * 4 < 4096 < found.batch * 8 * 4
    assert {":NllLoss.self", ":NllLoss.target"} & {each.key for each in found.plan.tensors}
    session = squeezebox.attach(model, plan=found.plan)
    inputs, target = batch(found.batch)
    with session.step():
        loss = F.cross_entropy(model(inputs), target)
    loss.backward()
    session.detach()


def test_what_cannot_be():
    with pytest.raises(BudgetError, match="can be profiled"):
        found_for(60_000, size=2)
    for wrong in ({"reserve": "200%"}, {"reserve": 10**9}, {"effective": 0}, {"size": 0}, {"memory": "50%"}):
        with pytest.raises(OptionError):
            found_for(**{"memory": 700_000, **wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"effective": 10.5}, "effective=10.5 is no whole number"),
        ({"effective": "512"}, "effective='512' is no whole number"),
        ({"memory": "abc"}, "memory 'abc' is no size"),
        ({"reserve": "abc"}, "reserve 'abc' is no size"),
        ({"reserve": 0.5}, "reserve 0.5 is less than a byte; write '50%'"),
    ],
)
def test_what_is_refused_names_the_argument_before_anything_is_run(wrong, message, monkeypatch):
    monkeypatch.setattr(_find, "profile_step", None)
    with pytest.raises(OptionError, match=message):
        found_for(**{"memory": 700_000, **wrong})


def test_without_memory_it_is_what_this_process_may_still_take():
    program = """
        import resource, torch
        from squeezebox.profiling import free_bytes
        before = free_bytes(torch.device("cpu"))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        first = free_bytes(torch.device("cpu"))
        kept = torch.ones(64 << 20)
        print(before, first, first - free_bytes(torch.device("cpu")))
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    output = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    before, first, taken = map(int, output.split())
    assert first < min(before, 4 << 30) and 256 << 20 <= taken < 400 << 20  # threads too
    assert free_bytes(torch.device("cpu")) > 0
