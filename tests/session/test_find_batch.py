"""find_batch(): what it answers trains in the memory, a little more does not, and no probe is too large."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn import functional as F

import squeezebox
from squeezebox.profiling import free_bytes
from squeezebox.schema import BudgetError, OptionError
from squeezebox.session import _find
from tests.session.test_max_batch import Sequence, batch, network


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
    assert found.to_dict()["microbatches"] == sizes


def test_a_first_probe_that_would_not_fit_is_not_run():
    _, found = found_for(700_000, size=512)
    assert max(found.probes[:-1]) <= found.plain_batch < 512


def test_an_answer_that_needs_more_than_foretold_is_made_smaller(monkeypatch):
    _, fitting = found_for(1_000_000)
    own = _find.measured_peak
    monkeypatch.setattr(_find, "measured_peak", lambda *of: int(1.3 * own(*of)))
    _, found = found_for(1_000_000)
    assert found.measured_peak_bytes is None and "not run" in str(found)
    assert 0.6 * fitting.batch < found.batch < fitting.batch
    assert 1.3 * found.predicted_peak_bytes <= 900_000 == found.memory_bytes - found.reserve_bytes


def test_several_inputs_begin_small():
    model = Sequence()
    sample = (({"tokens": torch.randint(50, (32, 32))}, torch.ones(64)), torch.randint(50, (32 * 32,)))
    found = squeezebox.find_batch(model, sample, loss_fn=F.cross_entropy, memory=2_000_000, exact=True)
    assert found.probes[0] == 4 and found.measured_peak_bytes <= 1_800_000


def test_what_cannot_be():
    with pytest.raises(BudgetError, match="whatever|smallest plan"):
        found_for(60_000, size=2)
    for wrong in ({"reserve": "200%"}, {"reserve": 10**9}, {"effective": 0}, {"size": 0}, {"memory": "50%"}):
        with pytest.raises(OptionError):
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
