"""Plans of embedding tables: proposed by a sample, measured, and carried out by the layer."""

import itertools
import json

import numpy as np
import pytest
import torch

import squeezebox
from squeezebox.layers import ShardedEmbeddingBag
from squeezebox.planner import TableSample, TableSearch
from squeezebox.schema import BudgetError, EmbeddingPlan, FormatError, OptionError
from tests.layers.test_table_ranks import OPTIMIZERS, TABLES, bags, loss, whole
from tests.pipeline import ranks

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def batches(rank=0, count=6):
    return [bags(rank, 10 + step) for step in range(count)]


def sample(rows, dim, lookups, *, seed=0):
    """Skewed lookups of 8 steps."""
    random = np.random.default_rng(seed)
    steps = [np.unique((random.random(lookups) ** 3 * rows).astype(np.int64)) for _ in range(8)]
    ids = np.unique(np.concatenate(steps))
    early, late = np.zeros(len(ids), np.int64), np.zeros(len(ids))
    for step, each in enumerate(steps):
        (early if step < 4 else late)[np.searchsorted(ids, each)] += 1
    return TableSample(size=(rows, dim), bags=32, lookups=lookups, ids=ids, early=early, late=late / 4)


def search(samples, memory):
    return TableSearch(samples, memory, known_bytes=12, element_bytes=8)


def test_memory_goes_to_rows_looked_up_most_for_their_bytes():
    """Of two tables of one size, that with ten times the lookups gets more; none gets more than it has."""
    samples = [sample(2000, 8, 4000), sample(2000, 8, 400)]
    memory = 12 * 4000 + 1000 * 64
    (placement,) = search(samples, [memory]).best(4)
    busy, idle = (shard.memory_bytes for shard in placement)
    assert busy > 2 * idle
    assert busy + idle <= memory - 12 * 4000
    (placement,) = search(samples, [10 * memory]).best(4)
    assert [shard.memory_bytes for shard in placement] == [2000 * 64] * 2


@pytest.mark.parametrize("seed", range(3))
def test_whole_tables_are_near_the_best_of_all_placements(seed):
    """Seven tables on two ranks: the slowest rank's rows and lookups, next to all 2**7 ways."""
    random = np.random.default_rng(seed)
    lookups = [int(each) for each in random.integers(100, 4000, 7)]
    samples = [sample(3000, 16, each, seed=number) for number, each in enumerate(lookups)]
    found = search(samples, [10**7] * 2).best(50)
    unsplit = next(each for each in found if len(each) == 7)

    def slowest(places):
        loads = [[n for n, place in zip(lookups, places, strict=True) if place == rank] for rank in range(2)]
        return max(sum(each) for each in loads)

    best = min(slowest(places) for places in itertools.product(range(2), repeat=7))
    assert slowest([shard.rank for shard in unsplit]) <= 1.25 * best
    assert len(set(found)) == len(found)


def test_one_table_on_two_ranks_is_split():
    first = search([sample(5000, 64, 20_000)], [10**7] * 2).best(3)[0]
    assert sorted(shard.rank for shard in first) == [0, 1]


def test_a_table_that_one_rank_cannot_know_is_split_by_rows():
    memory = [30_000, 30_000]
    found = search([sample(4000, 8, 4000)], memory).best(9)
    assert found
    for placement in found:
        assert len({(shard.first_row, shard.end_row) for shard in placement}) == len(placement) >= 2
        assert all(12 * shard.rows < memory[shard.rank] for shard in placement)


def test_too_little_memory_names_what_would_do():
    samples = [sample(4000, 8, 500), sample(1000, 8, 500)]
    with pytest.raises(BudgetError, match="takes 60,000, of one table up to 48,000") as refused:
        search(samples, [2000] * 2).best(4)
    least = int(str(refused.value).split("ranks ")[1].split(", or")[0].replace(",", ""))
    assert search(samples, [least] * 2).best(4)


def test_a_plan_of_one_process_trains_as_plain_tables(tmp_path):
    plan = squeezebox.plan_embeddings(TABLES, batches(), "8KiB", optimizer=OPTIMIZERS["adagrad"])
    assert plan.seconds > 0 and len(plan.of(0)) == 1
    plan.save(tmp_path / "plan.json")
    loaded = squeezebox.load_embedding_plan(tmp_path / "plan.json")
    assert loaded == plan and "in memory" in str(loaded)
    torch.manual_seed(0)
    layer = ShardedEmbeddingBag(loaded, optimizer=OPTIMIZERS["adagrad"])
    for step in range(3):
        loss(layer(*bags(0, step))).backward()
        layer.step()
    weights = whole("adagrad", "sum", 3, world=1)[1]
    assert all(torch.equal(layer.weight(table), each) for table, each in enumerate(weights))


def planned(rank, memory):
    plan = squeezebox.plan_embeddings(
        TABLES, batches(rank), memory, optimizer=OPTIMIZERS["adam"], mode="mean"
    )
    torch.manual_seed(0)
    layer = ShardedEmbeddingBag(plan, optimizer=OPTIMIZERS["adam"], mode="mean")
    for step in range(3):
        loss(layer(*bags(rank, step))).backward()
        layer.step()
    return plan, [layer.weight(table) for table in range(len(TABLES))]


def test_ranks_get_one_plan_and_carry_it_out():
    (plan, weights), other = ranks.run(planned, 2, "12KiB")
    assert plan == other[0] and plan.ranks == 2 and len(plan.others) >= 1
    for one, expected in zip(weights, whole("adam", "mean", 3)[1], strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


def bad(rank):
    given = batches(rank)
    if rank == 1:
        given[4][0][2][0] = 50
    try:
        squeezebox.plan_embeddings(TABLES, given, "12KiB", optimizer=OPTIMIZERS["sgd"])
    except OptionError as error:
        return str(error)


def test_bad_input_is_refused_in_a_sentence():
    def plan(given, memory="8KiB", tables=TABLES):
        squeezebox.plan_embeddings(tables, given, memory, optimizer=OPTIMIZERS["sgd"])

    with pytest.raises(OptionError, match="1 batches came; give at least 2"):
        plan(batches(count=1))
    with pytest.raises(OptionError, match="batch 0 has indices of 3 tables, and there are 2"):
        plan(batches(), tables=TABLES[:2])
    with pytest.raises(OptionError, match="both at least 1"):
        plan(batches(), tables=[(300, 8), (40, 0), (50, 4)])
    with pytest.raises(BudgetError, match="of one table up to 3,600. Give each of 1 ranks 4,681"):
        plan(batches(), "1KiB")
    short = [([each[:1] for each in indices], offsets) for indices, offsets in batches()]
    with pytest.raises(OptionError, match=r"in batch 0, offsets of table . do not go up from 0 to its 1 "):
        plan(short)
    flat = [(indices, None) for indices, _ in batches()]
    with pytest.raises(OptionError, match="give bags x rows, or all bags' one behind another with offsets"):
        plan(flat)
    first, second = ranks.run(bad, 2)
    assert first == "Rank 1 has batches that do not fit; its own error says why."
    assert second.startswith("in batch 4, indices of table 2 go from 0 to 50, but it has rows 0 to 49")


def test_a_damaged_plan_is_refused_by_its_field(tmp_path):
    plan = squeezebox.plan_embeddings(TABLES, batches(), "8KiB", optimizer=OPTIMIZERS["sgd"])
    values = plan.to_dict()
    assert EmbeddingPlan.from_dict(json.loads(json.dumps(values))) == plan
    for change, problem in [
        (lambda v: v["shards"][1].update(end_row=39), "the shards of table 1 are not the whole of it"),
        (
            lambda v: v["shards"][0].update(rank=1),
            "the shards of table 0 are not the whole of it, on 1 ranks",
        ),
        (lambda v: v["shards"].pop(2), "the shards of table 2 are not the whole of it"),
        (lambda v: v["shards"][0].pop("rank"), r"shards\[0\].rank is missing"),
        (lambda v: v.update(version=0), "its version is 0, and this Squeezebox reads 1"),
    ]:
        changed = json.loads(json.dumps(values))
        change(changed)
        (tmp_path / "plan.json").write_text(json.dumps(changed))
        with pytest.raises(FormatError, match=problem):
            squeezebox.load_embedding_plan(tmp_path / "plan.json")
