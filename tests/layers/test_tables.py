"""Tables with rows in a file give and learn what nn.EmbeddingBag does, to the bit."""

import pytest
import torch
from torch import nn

from squeezebox.layers import ShardedEmbeddingBag
from squeezebox.schema import BudgetError, OptionError, OutputError

# torch's Adagrad and SparseAdam make sparse tensors of their own.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

TABLES = [(400, 8), (30, 3)]
OPTIMIZERS = {
    "sgd": lambda tables: torch.optim.SGD(tables, lr=0.1),
    "adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.1, initial_accumulator_value=0.2),
    "adam": lambda tables: torch.optim.SparseAdam(tables, lr=0.01),
}


def made(memory, optimizer="sgd", **options):
    torch.manual_seed(0)
    return ShardedEmbeddingBag(TABLES, memory, optimizer=OPTIMIZERS[optimizer], **options)


def batches(count):
    """Skewed lookups; the last bag is empty, and some batches leave the second table's indices empty."""
    generator = torch.Generator().manual_seed(5)
    for number in range(count):
        many = torch.rand(60, generator=generator).pow(4).mul(400).long()
        few = torch.randint(30, (0 if number % 3 == 2 else 12,), generator=generator)
        yield [many, few], [torch.tensor([0, 7, 30, 60]), torch.tensor([0, 5, 12, 12]).clamp(max=len(few))]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_embedding_bags_to_the_bit(optimizer, mode):
    layer = made("8KiB", optimizer, mode=mode)
    torch.manual_seed(0)
    plain = [nn.EmbeddingBag(rows, dim, mode=mode, sparse=True) for rows, dim in TABLES]
    other = OPTIMIZERS[optimizer]([bag.weight for bag in plain])
    for indices, offsets in batches(25):
        found = layer(indices, offsets)
        expected = [bag(*given) for bag, *given in zip(plain, indices, offsets, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        for outputs, change in ((found, layer), (expected, other)):
            sum(output.square().sum() for output in outputs).backward()
            change.step()
            change.zero_grad()
    assert all(torch.equal(layer.weight(table), bag.weight.detach()) for table, bag in enumerate(plain))
    held = layer.rows_in_memory
    assert 0 < held[0] < 400, "rows are in memory and in the file"


def test_the_rows_looked_up_most_are_in_memory():
    layer = made("6KiB")
    for _ in range(40):
        indices = torch.cat([torch.randint(400, (20,)), torch.arange(200, 220)])
        layer([indices, torch.zeros(0, dtype=torch.int64)], [torch.tensor([0])] * 2)[0].sum().backward()
        layer.step()
    assert (layer._rows[0]._slots[200:220] >= 0).all()


def test_gradients_of_two_forwards_add_up_and_forgotten_ones_do_not():
    layer = made("8KiB")
    before = layer.weight(1)
    first, second = torch.tensor([[1, 2]]), torch.tensor([[2, 3]])
    empty = torch.zeros(1, 1, dtype=torch.int64)
    layer([empty, torch.tensor([[9]])])[1].sum().backward()
    layer.zero_grad()
    for indices in (first, second):
        layer([empty, indices])[1].sum().backward()
    with torch.no_grad():
        layer([empty, torch.tensor([[5]])])
    layer.step()
    counts = torch.zeros(30, 1).index_put((torch.tensor([1, 2, 3]),), torch.tensor([[1.0], [2.0], [1.0]]))
    torch.testing.assert_close(layer.weight(1), before - 0.1 * counts, rtol=1e-6, atol=1e-7)


def test_bad_input_is_refused_and_nothing_changes(tmp_path):
    layer = made("8KiB")
    before = layer.weight(0)
    with pytest.raises(OptionError, match="table 0 go from 3 to 400, but it has rows 0 to 399"):
        layer([torch.tensor([[3, 400]]), torch.tensor([[0]])])
    with pytest.raises(OptionError, match="1 tensors of indices came for 2 tables"):
        layer([torch.tensor([[3]])])
    assert torch.equal(layer.weight(0), before)
    with pytest.raises(
        BudgetError, match="memory= is 2,048 bytes, and to know where each row is takes 3,440"
    ):
        made("2KiB")
    with pytest.raises(OutputError, match="gone"):
        made("8KiB", folder=tmp_path / "gone")
    with pytest.raises(OptionError, match="momentum"):
        ShardedEmbeddingBag(TABLES, "8KiB", optimizer=lambda t: torch.optim.SGD(t, lr=0.1, momentum=0.9))
