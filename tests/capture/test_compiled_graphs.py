"""The graphs of a compiled step, run operator by operator: what is saved, and what gradients come of it.

No code is generated here, so that many networks can be looked at; tests/compiling/test_compile.py compiles.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from squeezebox.capture._compiled import _adapter, _codes, _rewrite
from squeezebox.schema import PlanError, UnsupportedModelError
from tests.capture.nets import NETS, loss_of


def with_partition(model, partition):
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


def gradients(model, step, x, loss=loss_of):
    model.zero_grad()
    torch.manual_seed(1)
    loss(step(x)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def both(model, x, rule, loss=loss_of):
    """Gradients of the stock graphs, those of the rewritten ones, and the report."""
    reports = []
    matcher = _codes.Matcher(rule)
    partition = _adapter.Partitioner(lambda *splits: reports.append(_rewrite.rewrite(*splits, matcher)), "")
    twin = copy.deepcopy(model)
    plain = gradients(model, with_partition(model, min_cut_rematerialization_partition), x, loss)
    return plain, gradients(twin, with_partition(twin, partition), x, loss), reports[-1], twin


def error(plain, packed):
    energy = sum(float(g.square().sum()) for g in plain.values())
    return (sum(float((packed[n] - g).square().sum()) for n, g in plain.items()) / energy) ** 0.5


def all_in(bits):
    return _codes.BitRule(default=bits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at_most", "less"),
    [
        ("resnet", 0.02, 3.4),
        ("pools", 0.01, 2.5),
        pytest.param("attention", 0.03, 3.0, marks=pytest.mark.slow),
    ],
)
def test_eight_bits(name, at_most, less):
    torch.manual_seed(0)
    make, inputs = NETS[name]
    plain, packed, report, _ = both(make(), inputs(), all_in(8))
    assert 0.0 < error(plain, packed) < at_most
    assert report.saved_bytes > less * report.packed_bytes


def test_nothing_lost_is_exact():
    """Cheap operators are computed again and masks are packed; nothing is rounded. Recomputed regions too."""
    torch.manual_seed(0)
    make, inputs = NETS["checkpointed"]
    plain, packed, report, _ = both(make(), inputs(), all_in(None))
    assert error(plain, packed) < 1e-5
    assert report.packed_bytes <= report.saved_bytes
    assert {row.bits for row in report.tensors} <= {None, 1}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.after, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.after(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


@pytest.mark.parametrize(("bits", "layout"), [(8, torch.channels_last), (2, torch.contiguous_format)])
def test_masks_are_exact(bits, layout):
    """What reaches BatchNorm's bias is the masked gradient alone: one wrong flag would show."""
    torch.manual_seed(0)
    model, x = ConvNet().to(memory_format=layout), torch.randn(8, 3, 24, 24).to(memory_format=layout)
    plain, packed, report, _ = both(model, x, all_in(bits))
    torch.testing.assert_close(packed["norm.bias"], plain["norm.bias"])
    assert not torch.allclose(packed["norm.weight"], plain["norm.weight"], rtol=1e-6)
    assert {bits, 1} <= {row.bits for row in report.tensors}
    assert report.saved_bytes > (5 if bits == 8 else 10) * report.packed_bytes


def test_a_mask_of_values_that_are_saved_themselves_is_read_off_their_signs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plain, packed, report, _ = both(model, torch.randn(64, 64), all_in(4))
    torch.testing.assert_close(packed["0.bias"], plain["0.bias"])
    assert [row.bits for row in report.tensors if row.bits] == [4]


def test_offsets_of_pools_are_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(1936, 10))
    plain, packed, report, _ = both(model, torch.randn(8, 3, 25, 25), all_in(8))
    torch.testing.assert_close(packed["0.weight"], plain["0.weight"])
    assert 4 in {row.bits for row in report.tensors if row.dtype == "int8"}


def test_dropout_masks_are_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.Linear(128, 10))
    plain, packed, report, _ = both(model, torch.randn(64, 64), all_in(8))
    torch.testing.assert_close(packed["0.bias"], plain["0.bias"])
    assert error(plain, packed) < 0.01
    assert 1 in {row.bits for row in report.tensors}


def test_softmax_and_divisors_are_kept():
    class Delicate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x):
            y = self.first(x)
            return self.last(y.softmax(-1) + y.cosh().log() + 1 / y.cosh())

    torch.manual_seed(0)
    plain, packed, report, _ = both(Delicate(), torch.randn(64, 64), all_in(2))
    kept = next(row for row in report.tensors if row.module == "first")
    assert kept.bits is None and kept.saved_bytes == 64 * 64 * 4
    torch.testing.assert_close(packed["first.weight"], plain["first.weight"])


def test_rules_reach_tensors_by_module_and_operator():
    torch.manual_seed(0)
    rule = _codes.BitRule(
        default=None,
        by_key={"norm:NativeBatchNorm.input": 4, "after:Convolution.input": 8, "head:Addmm.mat1": 2},
    )
    _, _, report, _ = both(ConvNet(), torch.randn(8, 3, 24, 24), rule)
    bits = {
        row.module: row.bits for row in report.tensors if row.dtype == "float32" and row.saved_bytes > 4096
    }
    assert bits == {"conv": 8, "after": None} or bits == {"conv": 8}, bits


def test_rules_that_match_nothing_are_refused():
    matcher = _codes.Matcher(_codes.BitRule(default=None, by_key={"elsewhere:Convolution.input": 8}))
    with pytest.raises(PlanError, match="elsewhere.*another model"):
        matcher.check()


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("L['self'].blocks.0.norm1", "blocks.0.norm1"),
        ("L['fn'].4.down.1", "4.down.1"),
        ("L['self']._modules['stem']._modules['0']", "stem.0"),
        ("getattr(getattr(L['self'].layers, '0'), '1').conv", "layers.0.1.conv"),
        ("L['self']", ""),
    ],
)
def test_paths_are_read_as_tracers_write_them(written, path):
    assert _codes.dotted(written) == path


def split_of(fw_names, bw_names):
    """Two graphs that hand over tensors of these names."""
    graphs = []
    for _ in range(2):
        graphs.append(fx.Graph())
    value = torch.zeros(4, 4)
    nodes = {}
    for name in fw_names:
        nodes[name] = graphs[0].placeholder(name)
        nodes[name].meta["val"] = value
    graphs[0].output(tuple(nodes.values()))
    inputs = {}
    for name in bw_names:
        inputs[name] = graphs[1].placeholder(name)
        inputs[name].meta["val"] = value
    graphs[1].output(tuple(inputs.values()))
    handed = [_adapter.Handed(nodes[name], inputs[name]) for name in fw_names]
    modules = [fx.GraphModule(nn.Module(), graph) for graph in graphs]
    return SimpleNamespace(forward=modules[0], backward=modules[1], outputs=[], saved=handed)


def test_a_known_convention_is_accepted_and_another_order_is_not():
    _adapter._check_order(split_of(["a", "b"], ["a", "b"]))
    with pytest.raises(
        UnsupportedModelError, match=f"torch {torch.__version__.split('+')[0]}.*another order"
    ):
        _adapter._check_order(split_of(["a", "b"], ["b", "a"]))


def test_a_tensor_of_another_shape_is_not_accepted():
    split = split_of(["a"], ["a"])
    split.saved[0].input.meta["val"] = torch.zeros(2, 2)
    with pytest.raises(UnsupportedModelError, match="not what forward saves"):
        _adapter._check_order(split)


def test_the_key_of_cached_code_holds_the_plan():
    one, other = (_adapter.Partitioner(lambda *_: None, fingerprint) for fingerprint in ("8", "4"))
    assert one.uuid() != other.uuid()
    assert one.uuid() == _adapter.Partitioner(print, "8").uuid()
