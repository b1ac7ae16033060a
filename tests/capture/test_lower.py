"""A joint graph put in an order of which less lives at a time computes the same."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from squeezebox.capture._compiled._lower import lower_peaks


def lowered(function, tensors, results):
    """The graph before and after, both run on the tensors."""
    module = make_fx(function, tracing_mode="fake")(*tensors)
    before = [node.name for node in module.graph.nodes]
    plain = fx.Interpreter(module).run(*tensors)
    lower_peaks(module.graph, results)
    module.recompile()
    return before, list(module.graph.nodes), plain, fx.Interpreter(module).run(*tensors)


def test_gradients_of_weights_come_first():
    def layer(x, weight, above):
        hidden = torch.tanh(x)
        out = hidden @ weight
        below = above @ weight.t()
        return out, hidden.t() @ above, below * (1 - hidden * hidden)

    tensors = torch.randn(64, 32), torch.randn(32, 16), torch.randn(64, 16)
    before, nodes, plain, found = lowered(layer, tensors, 1)
    assert all(map(torch.equal, plain, found))
    names = [node.name for node in nodes]
    assert sorted(names) == sorted(before)
    products = [node.name for node in nodes if node.target is torch.ops.aten.mm.default]
    assert products == ["mm", "mm_2", "mm_1"]


def test_an_input_that_the_weight_s_gradient_is_computed_from_stays_before_it():
    def layer(x, weight, above):
        out = x @ weight
        below = above @ weight.t()
        return out, (x * below).t() @ above, below

    tensors = torch.randn(64, 32), torch.randn(32, 16), torch.randn(64, 16)
    _, nodes, plain, found = lowered(layer, tensors, 1)
    assert all(map(torch.equal, plain, found))
    assert [node.name for node in nodes if "mm" in node.name] == ["mm", "mm_1", "mm_2"]


def stack(first, second, third):
    rows = torch.cat([first, second, third]).view(3, *first.shape).permute(1, 3, 0, 2, 4)
    return (rows.clone(memory_format=torch.contiguous_format).view(-1, 3 * 4 * 8),)


def test_a_stack_is_made_in_the_order_in_which_it_is_read():
    tensors = [torch.randn(2, 4, 5, 8) for _ in range(3)]
    _, nodes, plain, found = lowered(stack, tensors, 1)
    assert torch.equal(*plain, *found) and found[0].stride() == plain[0].stride()
    targets = [node.target for node in nodes]
    assert torch.ops.aten.clone.default not in targets and targets.count(torch.ops.aten.cat.default) == 1


def test_a_stack_that_is_read_elsewhere_stays():
    def both(*tensors):
        rows = torch.cat(tensors)
        return rows.view(3, 2, 4, 5, 8).permute(1, 3, 0, 2, 4).clone(), rows

    tensors = [torch.randn(2, 4, 5, 8) for _ in range(3)]
    before, nodes, plain, found = lowered(both, tensors, 1)
    assert all(map(torch.equal, plain, found)) and [node.name for node in nodes] == before
