"""Tables on several ranks are trained as one process trains them with the bags of all ranks."""

import dataclasses

import pytest
import torch
from torch import nn

from squeezebox.layers import ShardedEmbeddingBag
from squeezebox.schema import EmbeddingPlan, OptionError, TableShard
from tests.pipeline import ranks

# torch's Adagrad and SparseAdam make sparse tensors of their own.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

TABLES = ((300, 8), (40, 6), (50, 4))
OPTIMIZERS = {
    "sgd": lambda tables: torch.optim.SGD(tables, lr=0.1),
    "adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.1, initial_accumulator_value=0.2),
    "adam": lambda tables: torch.optim.SparseAdam(tables, lr=0.01),
}


def shard(table, rank, rows, columns):
    sizes = dict(first_row=rows[0], end_row=rows[1], first_column=columns[0], end_column=columns[1])
    return TableShard(table=table, rank=rank, memory_bytes=2000, **sizes)


WHOLE = [shard(0, 0, (0, 300), (0, 8)), shard(1, 1, (0, 40), (0, 6)), shard(2, 0, (0, 50), (0, 4))]
COLUMNS = [shard(0, 1, (0, 300), (0, 5)), shard(0, 0, (0, 300), (5, 8)), *WHOLE[1:]]
ROWS = [shard(0, 1, (0, 120), (0, 8)), shard(0, 0, (120, 300), (0, 8)), *WHOLE[1:]]


def plan(shards, world=2):
    return EmbeddingPlan(tables=TABLES, ranks=world, shards=tuple(shards))


def bags(rank, step, empty=False):
    """Rank 1 has other numbers of bags, and in one step none at all."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    count = (4, 0 if step == 2 else 7, 2)[rank]
    lengths = [torch.randint(0, 6, (count,), generator=generator) for _ in TABLES]
    indices = [
        torch.rand(int(each.sum()), generator=generator).pow(3).mul(rows).long()
        for (rows, _), each in zip(TABLES, lengths, strict=True)
    ]
    return indices, [each.cumsum(0) - each for each in lengths]


def loss(outputs):
    """Of each table's bags; one table's are left out."""
    return outputs[0].square().sum() + (outputs[1].sin()).sum()


def on_rank(rank, plan, optimizer, mode, steps):
    torch.manual_seed(rank)
    layer = ShardedEmbeddingBag(plan, optimizer=OPTIMIZERS[optimizer], mode=mode)
    outputs = []
    for step in range(steps):
        found = layer(*bags(rank, step))
        loss(found).backward()
        layer.step()
        outputs.append([each.detach() for each in found])
    weights = {name: each.clone() for name, each in layer.state_dict().items()}
    state = layer.optimizer_state_dict()
    again = ShardedEmbeddingBag(plan, optimizer=OPTIMIZERS[optimizer], mode=mode, draw=False)
    again.load_state_dict(weights)
    again.load_optimizer_state_dict(state)
    for each in (layer, again):
        loss(each(*bags(rank, steps))).backward()
        each.step()
    last = [layer.weight(table) for table in range(len(TABLES))]
    assert all(torch.equal(a, again.weight(table)) for table, a in enumerate(last)), "resumed to the bit"
    return outputs, weights, last, layer.rows_in_memory


def whole(optimizer, mode, steps, world=2):
    torch.manual_seed(0)
    tables = [nn.EmbeddingBag(rows, dim, mode=mode, sparse=True) for rows, dim in TABLES]
    change = OPTIMIZERS[optimizer]([each.weight for each in tables])
    outputs = []
    for step in range(steps):
        given = [bags(rank, step) for rank in range(world)]
        indices = [torch.cat(parts) for parts in zip(*(each[0] for each in given), strict=True)]
        begins = [
            torch.cat([begin + sum(len(e[0][t]) for e in given[:r]) for r, begin in enumerate(parts)])
            for t, parts in enumerate(zip(*(each[1] for each in given), strict=True))
        ]
        found = [each(*pair) for each, *pair in zip(tables, indices, begins, strict=True)]
        loss(found).backward()
        change.step()
        change.zero_grad()
        counts = [len(each[1][0]) for each in given]
        outputs.append([each.detach().split(counts) for each in found])
    return outputs, [each.weight.detach() for each in tables]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "optimizer", "mode"),
    [
        *(("whole", "sgd", "sum"), ("whole", "adam", "mean"), ("columns", "adagrad", "sum")),
        *(("columns", "sgd", "mean"), ("rows", "adam", "sum"), ("rows", "adagrad", "mean")),
    ],
)
def test_training_is_one_process_with_all_bags(shards, optimizer, mode):
    """To the bit where one rank sums a bag whole; where rows are split, up to rounding."""
    given = {"whole": WHOLE, "columns": COLUMNS, "rows": ROWS}[shards]
    check(ranks.run(on_rank, 2, plan(given), optimizer, mode, 4), optimizer, mode, 4, shards == "rows")


def test_two_ranks_train_as_one_process():
    check(ranks.run(on_rank, 2, plan(COLUMNS), "adagrad", "mean", 3), "adagrad", "mean", 3, False)


def check(found, optimizer, mode, steps, rounds):
    outputs, weights = whole(optimizer, mode, steps + 1)
    limit = 1e-5 if rounds else 0.0
    for rank, (own, state, last, held) in enumerate(found):
        assert sum(held) > 0 and list(state) == ["0.weight", "1.weight", "2.weight"]
        for step, tables in enumerate(own):
            for one, parts in zip(tables, outputs[step], strict=True):
                torch.testing.assert_close(one, parts[rank], rtol=limit, atol=limit)
        for one, other in zip(last, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def refused(rank, plan):
    torch.manual_seed(0)
    layer = ShardedEmbeddingBag(plan, optimizer=OPTIMIZERS["sgd"])
    indices = [torch.zeros(2, 1, dtype=torch.int64) for _ in TABLES]
    before = layer.weight(1)
    if rank == 1:
        indices[1] = indices[1] + 40
    try:
        layer(indices)
    except OptionError as error:
        assert torch.equal(layer.weight(1), before)
        return str(error)


def mismatched(rank, plan):
    try:
        ShardedEmbeddingBag(plan, optimizer=OPTIMIZERS["sgd"])
    except OptionError as error:
        return str(error)


def test_bad_indices_of_one_rank_are_refused_on_all():
    first, second = ranks.run(refused, 2, plan(WHOLE))
    assert first == "Rank 1 has indices that do not fit; its own error says which."
    assert "indices of table 1 go from 40 to 40, but it has rows 0 to 39" in second


def test_a_plan_for_other_ranks_is_refused():
    with pytest.raises(OptionError, match="is for 2 ranks: start them with torchrun"):
        ShardedEmbeddingBag(plan(WHOLE), optimizer=OPTIMIZERS["sgd"])
    with pytest.raises(OptionError, match="leave memory= out"):
        ShardedEmbeddingBag(plan(WHOLE), "2MiB", optimizer=OPTIMIZERS["sgd"])
    (found,) = ranks.run(mismatched, 1, plan(WHOLE))
    assert found == "the plan is for 2 ranks, and the group has 1. Start as many, or plan for these."


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_rank_without_tables_takes_part(optimizer):
    shards = [dataclasses.replace(each, rank=0) for each in WHOLE]
    found = ranks.run(on_rank, 2, plan(shards), optimizer, "sum", 2)
    weights = whole(optimizer, "sum", 3)[1]
    for _, _, last, _ in found:
        assert all(map(torch.equal, last, weights))
    assert found[1][3] == [0, 0, 0]
