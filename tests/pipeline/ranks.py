"""Real processes over gloo, and what a single process would have come to."""

import io
import multiprocessing
import os
import queue
import socket
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn

from squeezebox.schema import InputForm, PipelinePlan, StagePlan

_PATIENCE = 120.0


def run(function, world, *arguments):
    """Call ``function(rank, *arguments)`` in so many processes with a process group; return what they return.

    A process that raises has its traceback in the place of its result.
    """
    ended = multiprocessing.get_context("forkserver").Event()
    processes, results = start(function, world, *arguments, ended=ended)
    found = collect(processes, results, world)
    ended.set()
    for process in processes:
        process.join(_PATIENCE)
    return [found[rank] for rank in range(world)]


def start(function, world, *arguments, ended=None):
    """Processes end when they have returned, or with ``ended`` not before that is set."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "squeezebox.pipeline", "tests.pipeline.ranks"])
    results = context.Queue()
    port = free_port()
    rest = (world, port, results, arguments, ended)
    processes = [
        context.Process(target=_main, args=(function, rank, *rest), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes, results


def collect(processes, results, count):
    """What so many of the processes return, by rank."""
    found, end = {}, time.monotonic() + _PATIENCE
    while len(found) < count:
        try:
            rank, result = results.get(timeout=1.0)
        except queue.Empty:
            alive = any(process.is_alive() for process in processes)
            assert alive and time.monotonic() < end, f"of {count} ranks, only these have ended: {found}"
            continue
        found[rank] = torch.load(io.BytesIO(result), weights_only=False)
    return found


def _main(function, rank, world, port, results, arguments, ended):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        result = function(rank, *arguments)
    except Exception:  # noqa: BLE001  what it was is for the test to judge
        result = traceback.format_exc()
    file = io.BytesIO()
    torch.save(result, file)  # tensors as such would be shared, with a process that is about to end
    results.put((rank, file.getvalue()))
    results.close()
    results.join_thread()  # what was put is on its way before the process ends
    if ended is not None:
        ended.wait(_PATIENCE)  # the first rank has the store, which others may still be reading


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def plan(
    blocks, ranks, schedule, microbatches, *, loops=1, policy="keep", replicas=1, inputs=None, in_turn=()
):
    """Blocks parted evenly, microbatches of two samples; ``in_turn`` are replicas of each stage."""
    stages = ranks * loops
    ends = [number * blocks // stages for number in range(stages + 1)]
    return PipelinePlan(
        schedule=schedule,
        ranks=sum(in_turn) or ranks,
        replicas=replicas,
        microbatch=2,
        microbatches=microbatches,
        seconds=0.0,
        inputs=inputs or (InputForm(shape=(6,), dtype="float64"),),
        stages=tuple(
            StagePlan(
                first=first,
                end=end,
                policy=policy,
                forward_seconds=0.0,
                backward_seconds=0.0,
                peak_bytes=0,
                replicas=count,
            )
            for first, end, count in zip(ends, ends[1:], in_turn or [1] * stages, strict=False)
        ),
    )


def chain(seed=0):
    """Eight blocks with weights."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*(_Flat(layer) for layer in layers)).double()


class _Flat(nn.Module):
    """Keeps a block in one piece."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Tied(nn.Module):
    """A little language model whose head is its embedding."""

    def __init__(self, depth=3, width=8, words=11):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.embed(tokens) + torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        for block in self.blocks:
            x = x + block(x).relu()
        return self.norm(x) @ self.embed.weight.T


def tied(seed=0):
    torch.manual_seed(seed)
    return Tied().double()


def numbers(batch, samples):
    generator = torch.Generator().manual_seed(batch)
    shape = (samples, 6)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def words(batch, samples):
    generator = torch.Generator().manual_seed(batch)
    return tuple(torch.randint(0, 11, (samples, 5), generator=generator) for _ in range(2))


def entropy(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def reference(
    model,
    optimizer,
    batches,
    data,
    loss_fn,
    microbatches,
    *,
    version,
    clip=None,
    correction=False,
    replicas=1,
):
    """Train in one process: each parameter's gradient of batch t is taken at ``version(name, t)``.

    Returns the losses and the weights by name after the last batch.
    """
    names = dict(model.named_parameters())
    history = [{name: each.detach().clone() for name, each in names.items()}]
    newest = {name: nn.Parameter(each.clone()) for name, each in history[0].items()}
    stepping = OPTIMIZERS[optimizer](newest.values())
    losses, last = [], None
    for batch in range(batches):
        for name, parameter in names.items():
            parameter.data = history[version(name, batch)][name].clone()
            parameter.grad = None
        losses.append(_accumulate(model, batch, data, loss_fn, microbatches, replicas))
        for name, parameter in newest.items():
            parameter.grad = names[name].grad / replicas
        if clip is not None:
            nn.utils.clip_grad_norm_(newest.values(), clip)
        stepping.step()
        if correction:
            update = {name: each.detach() - history[-1][name] for name, each in newest.items()}
            for name, parameter in newest.items():
                parameter.data += update[name] - (last or update)[name]
            last = update
        history.append({name: each.detach().clone() for name, each in newest.items()})
    return losses, history[-1]


def _accumulate(model, batch, data, loss_fn, microbatches, replicas):
    total = 0.0
    for replica in range(replicas):
        inputs, target = data(batch * replicas + replica, 2 * microbatches)
        for x, y in zip(inputs.split(2), target.split(2), strict=True):
            loss = loss_fn(model(x), y) / microbatches
            loss.backward()
            if replica == 0:
                total += loss.item()
    return total
