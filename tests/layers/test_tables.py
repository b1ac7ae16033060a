"""Tables with rows in a file give and learn what nn.EmbeddingBag does, to the bit."""

import copy
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
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
    layer = made("10KiB", optimizer, mode=mode)
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
    layer = made("8KiB")
    for _ in range(40):
        indices = torch.cat([torch.randint(400, (20,)), torch.arange(200, 220)])
        layer([indices, torch.zeros(0, dtype=torch.int64)], [torch.tensor([0])] * 2)[0].sum().backward()
        layer.step()
    assert set(range(200, 220)) <= set(layer.hot_rows(0).tolist())
    assert len(layer.hot_rows(0)) == layer.rows_in_memory[0] < 400


def test_gradients_of_two_forwards_add_up_and_forgotten_ones_do_not():
    layer = made("10KiB")
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


@pytest.mark.parametrize("forget", ["step", "zero_grad"])
def test_a_graph_that_is_kept_gives_each_gradient_once(forget):
    layer, empty = made("10KiB"), torch.zeros(2, 1, dtype=torch.int64)
    before = layer.weight(1)
    sums = layer([empty, torch.tensor([[1, 2], [2, 3]])])[1].sum()
    (3 * sums).backward(retain_graph=True)
    getattr(layer, forget)()
    sums.backward()
    layer.step()
    counts = torch.zeros(30, 1).index_put((torch.tensor([1, 2, 3]),), torch.tensor([[1.0], [2.0], [1.0]]))
    change = (4 if forget == "step" else 1) * 0.1 * counts
    torch.testing.assert_close(layer.weight(1), before - change, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_of_several_forwards_are_added_as_torch_adds_them(optimizer, at_once):
    layer = made("10KiB", optimizer)
    torch.manual_seed(0)
    plain = nn.EmbeddingBag(*TABLES[0], mode="sum", sparse=True)
    other = OPTIMIZERS[optimizer]([plain.weight])
    none = torch.zeros(40, 1, dtype=torch.int64)
    for _ in range(4):
        indices = [torch.rand(40, 5).pow(3).mul(400).long() for _ in range(3)]
        factors = [torch.randn(40, 8) for _ in range(3)]
        for forward, change in ((lambda rows: layer([rows, none])[0], layer), (plain, other)):
            losses = [(forward(rows) * each).sum() for rows, each in zip(indices, factors, strict=True)]
            for loss in [sum(losses)] if at_once else losses:
                loss.backward()
            change.step()
            change.zero_grad()
    assert torch.equal(layer.weight(0), plain.weight)


def test_rows_looked_up_more_often_than_is_counted_stay_right():
    layer = made("8KiB")
    layer._rows[0]._counts[:] = 70_000
    before, rows = layer.weight(0), torch.arange(400)[:, None]
    for _ in range(6):
        layer([rows, torch.zeros(400, 1, dtype=torch.int64)])[0].sum().backward()
        layer.step()
    torch.testing.assert_close(layer.weight(0), before - 6 * 0.1)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_tables_are_drawn_as_torch_draws_them(dim):
    torch.manual_seed(3)
    layer = ShardedEmbeddingBag([(16_385, dim), (7, dim)], "4MiB", optimizer=OPTIMIZERS["sgd"])
    torch.manual_seed(3)
    plain = [nn.EmbeddingBag(16_385, dim), nn.EmbeddingBag(7, dim)]
    assert all(torch.equal(layer.weight(table), bag.weight) for table, bag in enumerate(plain))


def test_bad_input_is_refused_and_nothing_changes(tmp_path):
    layer = made("10KiB")
    before = layer.weight(0)
    with pytest.raises(OptionError, match="table 0 go from 3 to 400, but it has rows 0 to 399"):
        layer([torch.tensor([[3, 400]]), torch.tensor([[0]])])
    with pytest.raises(OptionError, match=r"table 0 are on meta, .* give indices.cpu\(\)"):
        layer([torch.zeros(1, 2, dtype=torch.int64, device="meta"), torch.tensor([[0]])])
    with pytest.raises(OptionError, match="1 tensors of indices came for 2 tables"):
        layer([torch.tensor([[3]])])
    with pytest.raises(OptionError, match="1 tensors of offsets came for 2 tables"):
        layer([torch.tensor([3]), torch.tensor([0])], [torch.tensor([0])])
    with pytest.raises(OptionError, match=r"indices of table 0 are a ndarray; give a tensor of torch.int64"):
        layer([np.zeros((1, 1), np.int64), torch.tensor([[0]])])
    with pytest.raises(OptionError, match=r"offsets of table 1 are a list; give a tensor"):
        layer([torch.tensor([3]), torch.tensor([0])], [torch.tensor([0]), [0]])
    for number in (2, -1):
        with pytest.raises(OptionError, match=f"there are tables 0 to 1, and not {number}"):
            layer.weight(number)
    for make in (torch.optim.AdamW, lambda tables: torch.optim.SGD(tables, lr=0.1, weight_decay=0.1)):
        with pytest.raises(OptionError, match=r"(AdamW|SGD) as it was made fails on sparse gradients"):
            ShardedEmbeddingBag(TABLES, "10KiB", optimizer=make)
    with pytest.raises(OptionError, match=r"indices of table 0 are torch.float32; give torch.int64"):
        layer([torch.ones(1, 1), torch.tensor([[0]])])
    with pytest.raises(OptionError, match=r"offsets of table 0 have the shape \(1, 1\)"):
        layer([torch.tensor([3]), torch.tensor([0])], [torch.tensor([[0]]), torch.tensor([0])])
    with pytest.raises(OptionError, match="table 0 has rows 0 to 399, and not 0 to 401"):
        layer.weight(0, 0, 401)
    with pytest.raises(OptionError, match=r"not copied, as its rows lie in a file"):
        copy.deepcopy(layer)
    with pytest.raises(OptionError, match="tables of torch.bfloat16 are not supported"):
        made("10KiB", dtype=torch.bfloat16)
    assert torch.equal(layer.weight(0), before)
    with pytest.raises(
        BudgetError, match="memory= is 2,048 bytes, and to know where each row is takes 5,160"
    ):
        made("2KiB")
    with pytest.raises(OutputError, match="gone"):
        made("10KiB", folder=tmp_path / "gone")
    with pytest.raises(OptionError, match="momentum"):
        ShardedEmbeddingBag(TABLES, "10KiB", optimizer=lambda t: torch.optim.SGD(t, lr=0.1, momentum=0.9))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_goes_to_plain_tables_and_back_to_the_bit(tmp_path, optimizer):
    """Train, load into plain modules and into a new layer, train on: all three have the same weights."""
    layer = made("10KiB", optimizer)
    first, then = list(batches(12)), list(batches(20))[12:]

    def train(module, change, steps):
        for indices, offsets in steps:
            sum(output.square().sum() for output in module(indices, offsets)).backward()
            change.step()
            change.zero_grad()

    train(layer, layer, first)
    torch.save((layer.state_dict(), layer.optimizer_state_dict()), tmp_path / "state")
    weights, state = torch.load(tmp_path / "state")
    plain = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for rows, dim in TABLES)
    other = OPTIMIZERS[optimizer](list(plain.parameters()))
    assert list(weights) == list(plain.state_dict())
    plain.load_state_dict(weights)
    other.load_state_dict(state)
    torch.manual_seed(9)
    again = ShardedEmbeddingBag(TABLES, "30KiB", optimizer=OPTIMIZERS[optimizer])
    again.load_state_dict(plain.state_dict())
    again.load_optimizer_state_dict(other.state_dict())
    train(lambda *given: [bag(*each) for bag, *each in zip(plain, *given, strict=True)], other, then)
    train(layer, layer, then)
    train(again, again, then)
    for table, bag in enumerate(plain):
        assert torch.equal(layer.weight(table), bag.weight) and torch.equal(again.weight(table), bag.weight)


def test_weights_and_state_in_sixteen_bits_are_converted():
    layer, plain = made("10KiB", "adagrad"), [nn.Parameter(torch.randn(table)) for table in TABLES]
    state = OPTIMIZERS["adagrad"](plain).state_dict()
    for each in state["state"].values():
        each["sum"] = each["sum"].bfloat16()
    layer.load_state_dict({f"{table}.weight": each.bfloat16() for table, each in enumerate(plain)})
    layer.load_optimizer_state_dict(state)
    for table, each in enumerate(plain):
        assert torch.equal(layer.weight(table), each.detach().bfloat16().float())
        found = layer.optimizer_state_dict()["state"][table]["sum"]
        assert torch.equal(found, state["state"][table]["sum"].float())


def test_state_of_other_tables_is_refused_and_nothing_changes():
    layer = made("10KiB", "adagrad")
    before = layer.weight(0)
    other = nn.ModuleList([nn.EmbeddingBag(400, 8), nn.EmbeddingBag(31, 3)])
    with pytest.raises(RuntimeError, match=r"table 1 is \(30, 3\), and \(31, 3\) came for it"):
        layer.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.weight"):
        layer.load_state_dict({"0.weight": before})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*2\.weight"):
        layer.load_state_dict(layer.state_dict() | {"2.weight": before})
    state = torch.optim.Adagrad(other.parameters()).state_dict()
    with pytest.raises(OptionError, match="sum of table 1 is"):
        layer.load_optimizer_state_dict(state)
    assert torch.equal(layer.weight(0), before)


def test_what_came_is_loaded_where_other_keys_are_missing():
    first, second = (nn.ModuleDict({"bags": made("10KiB"), "dense": nn.Linear(3, 3)}) for _ in range(2))
    state = first.state_dict()
    state["bags.0.weight"] = state["bags.0.weight"] + 1
    del state["dense.bias"], state["bags.1.weight"]
    found = second.load_state_dict(state | {"more": torch.ones(1)}, strict=False)
    assert sorted(found.missing_keys) == ["bags.1.weight", "dense.bias"] and found.unexpected_keys == ["more"]
    assert torch.equal(second["bags"].weight(0), state["bags.0.weight"])


def test_another_optimizers_state_is_refused_and_a_fresh_one_begins_anew():
    plain = [nn.Parameter(torch.zeros(table)) for table in TABLES]
    given = {name: factory(plain).state_dict() for name, factory in OPTIMIZERS.items()}
    for own, other, missing in [
        ("adagrad", "sgd", "lr_decay"),
        ("adam", "sgd", "betas"),
        ("sgd", "adam", "momentum"),
    ]:
        with pytest.raises(OptionError, match=f"no {missing}, so it is not of"):
            made("10KiB", own).load_optimizer_state_dict(given[other])
    with pytest.raises(OptionError, match=r"of tables \[0\], and here are tables 0 to 1"):
        made("10KiB", "adagrad").load_optimizer_state_dict(OPTIMIZERS["adagrad"](plain[:1]).state_dict())
    layers = [made("10KiB", "adam"), made("10KiB", "adam")]
    for indices, offsets in batches(3):
        sum(output.square().sum() for output in layers[0](indices, offsets)).backward()
        layers[0].step()
    layers[0].load_state_dict(layers[1].state_dict())
    layers[0].load_optimizer_state_dict(given["adam"])
    for layer in layers:
        for indices, offsets in batches(3):
            sum(output.square().sum() for output in layer(indices, offsets)).backward()
            layer.step()
    assert torch.equal(layers[0].weight(0), layers[1].weight(0))
    assert made("10KiB").optimizer_state_dict() == given["sgd"]


PROGRAM = """
    import json
    import torch
    from squeezebox.layers import ShardedEmbeddingBag
    from squeezebox.memory import return_all

    def status(field):
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

    def optimizer(tables):
        return torch.optim.SparseAdam(tables, lr=0.01)

    def step(layer, rows):
        ids = torch.rand(500, 20).pow(3).mul(rows).long()
        layer([ids])[0].square().mean().backward()
        layer.step()

    warm = ShardedEmbeddingBag([(30_000, 32)], "4MiB", optimizer=optimizer)
    for _ in range(10):
        step(warm, 30_000)
    return_all()
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    layer = ShardedEmbeddingBag([(400_000, 32)], "24MiB", optimizer=optimizer)
    for _ in range(30):
        step(layer, 400_000)
    layer.state_dict()
    print(json.dumps([status("VmHWM") - before, layer.rows_in_memory[0]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux counts the peak")
def test_the_process_grows_by_the_memory_and_a_steps_rows():
    """The table with its state is six times the memory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    grown, held = json.loads(ended.stdout)
    assert held == (24 * 2**20 - 12 * 400_000) // (3 * 32 * 4)
    assert (20 << 20) < grown < (24 + 64) << 20
