"""All that is private to torch.compile, in one place: its partitioner, its graphs' conventions, its caches.

Each convention is checked where it is used; a graph that breaks one is refused, never rewritten on a guess.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
)
from torch._inductor import custom_graph_pass
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx.experimental.proxy_tensor import make_fx

from squeezebox.capture._compiled._first import first_layers
from squeezebox.capture._compiled._lower import lower_peaks
from squeezebox.capture._compiled._spending import SPEND, Spending
from squeezebox.schema import UnsupportedModelError

if TYPE_CHECKING:
    from squeezebox.capture._compiled._saved import Part

# Steps compiled from one model do not count towards each other's limit of recompilations, past which torch
# runs them eagerly.
_ARGUMENTS = inspect.signature(torch.compile).parameters
ISOLATED: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in _ARGUMENTS else {}

# What Inductor would save rather than compute again because backward has to write it to memory. Unpacking
# writes it too, so computing it again from packed values is no slower, and holds less.
_CHEAP_RECOMPUTE = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
}

# Freed memory is given back. Inductor would hold it for later tensors wherever its own estimate of the peak
# allows, which nothing here can foresee.
_AT_ONCE = {"allow_buffer_reuse": False}


@dataclass(eq=False, frozen=True, slots=True)
class Handed:
    """A tensor that forward hands to backward: forward's node and backward's input."""

    node: fx.Node
    input: fx.Node


@dataclass(slots=True)
class Split:
    """A joint graph cut in two.

    ``outputs`` are forward's own results, ``saved`` the tensors that autograd holds for backward, ``others``
    what forward hands over besides: tensors that autograd does not check, opaque objects, symbols.
    ``gradients`` are backward's inputs that do not come from forward.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: list[fx.Node]
    saved: list[Handed]
    others: list[fx.Node]
    gradients: list[fx.Node]
    replaced: list[Handed] = dataclasses.field(default_factory=list)


# Gets a joint graph, and what Inductor would save of it: as it is, and in ways that hold less.
Save = Callable[["Part", Iterator[Sequence[fx.Node]]], Container[fx.Node]]

_BUDGETS = 0.75, 0.5, 0.25  # shares of what it would save, as torch's activation_memory_budget takes them
_SPENT = "squeezebox_spent"  # in the meta of backward's output: (number, name of the parameter, place)
_CONVOLUTION = torch.ops.aten.convolution.default
_OBJECTS = (torch.Tensor, torch.ScriptObject, FakeScriptObject)


class Backend:
    """``torch.compile(backend=...)``: Inductor as it is, with ``rewrite`` between cut and compilation.

    ``saving`` says what forward saves, and gets each compiled graph to follow; without it that is a min-cut
    where recomputation is cheap. ``spending`` takes gradients as soon as they are there; those of parameters
    that it does not name are results. With ``slices`` of the batch the first layers are worked in these, and
    not compiled. Where ``reuses`` says so, freed memory is held for later tensors. The settings are in force
    while this callable is compiled and at no other time. ``fingerprint`` is part of the key under which
    Inductor caches code. AOTAutograd's own cache is left out, since a hit would skip the cut, and with it the
    record of what is saved.
    """

    def __init__(
        self,
        rewrite: Callable[[Split, Split], None],
        fingerprint: str,
        options: Mapping[str, Any] | None = None,
        saving: tuple[Save, Callable[[Any], Callable[..., Any]]] | None = None,
        spending: Spending | None = None,
        slices: int = 1,
        reuses: Callable[[], bool] = lambda: True,
    ) -> None:
        save = None if saving is None else saving[0]
        self._slices, self.sliced, self._reuses = slices, False, reuses
        self._follow = None if saving is None else saving[1]
        self.partitioner = Partitioner(rewrite, fingerprint, save, spending)
        ours = {"custom_partitioner_fn": self.partitioner, "_pre_fusion_custom_pass": _Renames()}
        self._patches = {**(options or {}), **ours}
        if spending is not None:
            self._patches["post_grad_custom_post_pass"] = Spender(spending.number)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        first = first_layers(graph) if self._slices > 1 and torch.is_grad_enabled() else None
        if first is None:
            return self._compiled(graph, inputs)
        self.sliced = True
        return first.before(self._compiled(first.rest, first.inputs(inputs)), self._slices)

    def _compiled(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.partitioner.take_inputs(inputs)
        patches = self._patches if self._reuses() else {**_AT_ONCE, **self._patches}
        with functorch_config.patch(enable_autograd_cache=False):
            compiled = compile_fx(graph, inputs, config_patches=patches)
        return compiled if self._follow is None else self._follow(compiled)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """Itself: Lightning, once imported, copies what torch.compile is given."""
        return self


class _Renames(getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)):  # type: ignore[misc]
    """Has what reads a buffer stay behind what changes it in place, also where kernels are fused.

    Torch 2.13 forgets that when it looks at an operator again to fuse it (its issue 185509). A gradient of a
    max pooling was then read before it was there.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Change the scheduler's nodes, each for itself."""
        for node in nodes:
            if getattr(node, "mutation_renames", None) and hasattr(node, "recompute_size_and_body"):
                node.recompute_size_and_body = functools.partial(_look_again, node)
        return nodes

    def uuid(self) -> str:
        """This source."""
        return _source_hash()


def _look_again(node: Any, *args: Any, **kwargs: Any) -> None:
    type(node).recompute_size_and_body(node, *args, **kwargs)
    node.set_read_writes(node.read_writes.rename(node.mutation_renames))


class Partitioner(CustomPartitionerFn):
    """Inductor's min-cut, twice: as it is, to compare with, and where recomputation is cheap."""

    def __init__(
        self,
        rewrite: Callable[[Split, Split], None],
        fingerprint: str,
        save: Save | None = None,
        spending: Spending | None = None,
    ) -> None:
        self._rewrite, self._save = rewrite, save
        self._fingerprint, self._spending = fingerprint, spending
        self._places: dict[int, int] = {}

    def take_inputs(self, inputs: Sequence[Any]) -> None:
        """Those of the graph that is compiled next: which of them are parameters with gradients to spend."""
        own = self._spending.parameters if self._spending is not None else ()
        places = {id(parameter): place for place, parameter in enumerate(own)}
        self._places = {at: places[id(each)] for at, each in enumerate(inputs) if id(each) in places}

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **settings: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut the joint graph and let ``rewrite(plain, split)`` change ``split`` in place."""
        results: int = settings["num_fwd_outputs"]
        if self._save is not None:
            lower_peaks(gm.graph, results)
        spent = _spent(gm, results, self._places)
        plain = _cut(_copied(gm), joint_inputs, settings)
        with self._choosing(results, spent):
            split = _cut(gm, joint_inputs, settings)
        if self._spending is not None:
            _hand_parameters(split, spent)
        self._rewrite(plain, split)
        return split.forward, split.backward

    @contextlib.contextmanager
    def _choosing(self, results: int, spent: Mapping[int, int]) -> Iterator[None]:
        """Min-cuts where recomputation is cheap; or ``save`` answers, when torch asks what forward saves."""
        save, own = self._save, partitioners.choose_saved_values_set
        if save is None:
            with functorch_config.patch(_CHEAP_RECOMPUTE):
                yield
            return

        from squeezebox.capture._compiled._saved import Part  # slow to import, and not always needed

        def choose(graph: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
            def cuts() -> Iterator[list[fx.Node]]:
                for share in (1.0, *_BUDGETS):
                    yield own(graph, info, memory_budget=share)
                with functorch_config.patch(_CHEAP_RECOMPUTE):
                    cheap = own(graph, info, memory_budget=1)
                yield cheap

            gradients: Any = graph.output_node().args[0]
            taken = self._spending.taken_bytes if self._spending is not None else ()
            used = {gradients[results + at]: taken[place] for at, place in spent.items()}
            saved = save(Part(graph, info.required_fw_nodes, results, used), cuts())
            given = {*map(_storage, info.inputs)} - {None}  # views of these are built again
            return [
                *info.inputs,
                *(node for node in graph.nodes if node in saved and _storage(node) not in given),
            ]

        torch_functions: Any = partitioners
        torch_functions.choose_saved_values_set = choose
        try:
            yield
        finally:
            torch_functions.choose_saved_values_set = own

    def uuid(self) -> str:
        """This rewriting's source, what it was asked to do, and the gradients that are spent."""
        return f"{_source_hash()} {self._fingerprint} {sorted(self._places.items())}"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Inductor pickles its settings into the cache's key."""
        return str, (self.uuid(),)


@functools.cache
def _source_hash() -> str:
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(source).hexdigest()


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own over the same modules; cutting one changes it."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


def _cut(gm: fx.GraphModule, joint_inputs: Sequence[object], settings: Mapping[str, Any]) -> Split:
    forward, backward = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **settings)
    results = _results(forward)
    count = settings["num_fwd_outputs"]
    outputs, handed = results[:count], results[count:]
    symbols = sum(not isinstance(node.meta.get("val"), _OBJECTS) for node in handed)
    inputs = _inputs(backward)[symbols:]
    pairs = [Handed(node, taken) for node, taken in zip(handed, inputs, strict=False)]
    saved = [pair for pair in pairs if _is_checked_tensor(pair.node)]
    split = Split(
        forward=forward,
        backward=backward,
        outputs=outputs,
        saved=saved,
        others=handed[len(saved) :],
        gradients=inputs[len(handed) - symbols :],
    )
    _check_order(split)
    return split


def _spent(gm: fx.GraphModule, results: int, places: Mapping[int, int]) -> dict[int, int]:
    """Which of backward's results are gradients to spend: their numbers, and the places of the parameters.

    One that several parameters share, or that is given to backward as it is, stays a result.
    """
    output = gm.graph.output_node()
    outputs: Any = output.args[0]
    gradients, meant = outputs[results:], output.meta.get("desc", ())[results:]
    return {
        number: places[each.grad_of.idx]
        for number, (node, each) in enumerate(zip(gradients, meant, strict=False))
        if isinstance(each, GradAOTOutput)
        and isinstance(each.grad_of, PlainAOTInput)
        and each.grad_of.idx in places
        and isinstance(node, fx.Node)
        and node.op == "call_function"
        and gradients.count(node) == 1
    }


def _hand_parameters(split: Split, spent: Mapping[int, int]) -> None:
    """Have backward take each parameter whose gradient is spent, and note which results are."""
    given, noted = _inputs(split.forward), list[tuple[int, str, int]]()
    for at, place in spent.items() if split.saved else ():
        same = [each for each in split.saved if _storage(each.node) == _storage(given[at])]
        if any(each.node is not given[at] for each in same):
            continue  # backward takes it as a view, of which Inductor does not know that it changes
        taken = same[0].input if same else add_saved(split, split.saved[0], [given[at]])[0]
        noted.append((at, taken.name, place))
    split.backward.graph.output_node().meta[_SPENT] = noted
    finish(split)


class Spender(CustomGraphPass):
    """Hands gradients on in Inductor's graph of backward, each behind all that reads its parameter.

    That is after all of Inductor's own passes, which move operators past each other.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        output = graph.output_node()
        given: Any = output.args[0]
        results = list(given)
        inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        for at, name, place in output.meta.get(_SPENT, ()):
            gradient, taken = results[at], inputs[name]
            last = next(node for node in reversed(graph.nodes) if node is gradient or _reads(node, taken))
            with graph.inserting_before(last.next):
                graph.call_function(SPEND, (taken, gradient, self._number, place))
            results[at] = None
        output.args = (tuple(results),)
        visible = output.meta.get("user_visible_output_idxs", ())
        output.meta["user_visible_output_idxs"] = [at for at in visible if results[at] is not None]

    def uuid(self) -> str:
        """What it does hangs on its number, and on the graph, of which it is a part."""
        return f"{_source_hash()} {self._number}"


def _reads(node: fx.Node, taken: fx.Node) -> bool:
    """Whether it reads an input, itself or through a view."""
    return any(_storage(each) == _storage(taken) for each in node.all_input_nodes)


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _is_checked_tensor(node: Any) -> bool:
    """Whether autograd saves it and checks it for in-place changes; what it does not comes after these."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and not node.meta.get("saved_tensor_with_no_vc_check", False)


def _results(module: fx.GraphModule) -> list[Any]:
    results: Any = module.graph.output_node().args[0]
    return list(results)


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _check_order(split: Split) -> None:
    """Forward gives its own results, then what it saves; backward takes the latter in the same order."""
    results = _results(split.forward)
    if results[len(split.outputs) :][: len(split.saved)] != [handed.node for handed in split.saved]:
        raise _unknown_convention("forward's results are not its own followed by the tensors it saves")
    wanted = {handed.input for handed in split.saved}
    if [node for node in _inputs(split.backward) if node in wanted] != [h.input for h in split.saved]:
        raise _unknown_convention("backward takes the saved tensors in another order than forward gives them")
    for handed in split.saved:
        given, taken = handed.node.meta["val"], handed.input.meta.get("val")
        if not isinstance(taken, torch.Tensor) or (given.shape, given.dtype) != (taken.shape, taken.dtype):
            raise _unknown_convention(f"backward's input {handed.input} is not what forward saves for it")


def _unknown_convention(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"torch {torch.__version__} cuts graphs in a way that squeezebox.compile() does not know: {what}. "
        "Use squeezebox.attach() with the eager model, or the torch version that constraints.txt names."
    )


def replace_saved(split: Split, old: Handed, pieces: Sequence[fx.Node]) -> list[fx.Node]:
    """Save ``pieces`` (nodes of forward) in place of ``old``; returns them as backward's inputs.

    ``old.input`` stays in the graph until :func:`finish`, and must have no users by then.
    """
    inputs = add_saved(split, old, pieces)
    split.saved.remove(old)
    split.replaced.append(old)
    return inputs


def add_saved(split: Split, before: Handed, pieces: Sequence[fx.Node]) -> list[fx.Node]:
    """Save ``pieces`` (nodes of forward) too, before another one; returns them as backward's inputs."""
    with split.backward.graph.inserting_before(before.input):
        new = [Handed(piece, _new_input(split.backward.graph, piece)) for piece in pieces]
    place = split.saved.index(before)
    split.saved[place:place] = new
    return [handed.input for handed in new]


def finish(split: Split) -> None:
    """Write what is saved now into both graphs."""
    for old in split.replaced:
        split.backward.graph.erase_node(old.input)
    split.replaced.clear()
    output = split.forward.graph.output_node()
    output.args = ((*split.outputs, *(handed.node for handed in split.saved), *split.others),)
    own, count, rest = len(split.outputs), len(split.saved), len(split.others)
    if "desc" in output.meta:
        descriptions = list(output.meta["desc"])
        others = descriptions[len(descriptions) - rest :]
        last = [dataclasses.replace(each, idx=count + i) for i, each in enumerate(others)]
        saved = [SavedForBackwardsAOTOutput(number) for number in range(count)]
        output.meta["desc"] = [*descriptions[:own], *saved, *last]
    if "output_stack_traces" in output.meta:
        traces = list(output.meta["output_stack_traces"])
        output.meta["output_stack_traces"] = [*traces[:own], *[None] * (count + rest)]
    for module in (split.forward, split.backward):
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    _check_order(split)


def copied_bytes(split: Split) -> int:
    """Of weights and images of convolutions on a CPU: Inductor saves copies of them in channels_last.

    It copies whatever it is given in another layout, and chooses the layout of what it computes.
    """
    saved = {handed.node for handed in split.saved}
    convolutions = (each for each in split.forward.graph.nodes if each.target is _CONVOLUTION)
    read = {each for node in convolutions for each in node.args[:2] if each in saved}
    values = [each.meta["val"] for each in read if each.op == "placeholder"]
    return sum(each.nbytes for each in values if _is_copied(each))


def _is_copied(value: torch.Tensor) -> bool:
    is_image = value.dim() == 4 and value.device.type == "cpu" and torch.backends.mkldnn.is_available()
    return is_image and not value.is_contiguous(memory_format=torch.channels_last)


def pool_window(node: fx.Node) -> int | None:
    """How many places of its window a max pool's saved offset chooses among; None for other tensors."""
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    if not isinstance(source, fx.Node) or not str(source.target).startswith("prims._low_memory_max_pool"):
        return None
    kernel: Any = source.args[1]
    return math.prod(kernel) if all(isinstance(size, int) for size in kernel) else None


def _new_input(graph: fx.Graph, piece: fx.Node) -> fx.Node:
    created = graph.placeholder(f"saved_{piece.name}")
    created.meta = {key: piece.meta[key] for key in ("val", "tensor_meta") if key in piece.meta}
    return created


def emit(graph: fx.Graph, function: Callable[..., Any], arguments: Sequence[fx.Node]) -> list[fx.Node]:
    """Write what ``function`` does with the arguments' tensors where the graph inserts; its results."""
    values = [argument.meta["val"] for argument in arguments]
    with values[0].fake_mode:
        traced = make_fx(function, decomposition_table=select_decomp_table())(*values)
    known = dict(zip(_inputs(traced), arguments, strict=True))
    for node in traced.graph.nodes:
        if node.op == "call_function":
            known[node] = graph.node_copy(node, known.__getitem__)
    results: Any = traced.graph.output_node().args[0]
    return [known[node] for node in (results if isinstance(results, (list, tuple)) else [results])]
