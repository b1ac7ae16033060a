"""A rank that dies, hangs or raises: the others stop soon, and say which one it was."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import DistStoreError, HashStore, PrefixStore, TCPStore

from squeezebox import schedules
from squeezebox.pipeline import Runner, _runner
from squeezebox.pipeline._health import Assembly, Health
from squeezebox.pipeline._store import PatientStore
from squeezebox.schema import PipelineError
from tests.pipeline import ranks

PATIENCE = 6.0
SHORT = 3.0


class _Troubled(nn.Module):
    """In its second batch, something happens to the rank that holds it."""

    def __init__(self, trouble):
        super().__init__()
        self.trouble, self.calls, self.linear = trouble, 0, nn.Linear(6, 6)

    def forward(self, x):
        self.calls += 1
        if self.calls > 6:
            if self.trouble == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "raises":
                raise ValueError("the input looks bad")
            time.sleep(600)
        return self.linear(x)


def _train(rank, schedule, trouble):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), _Troubled(trouble), nn.Linear(6, 6)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = ranks.plan(4, 4, schedule, 4)
    runner = Runner(
        model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, patience=PATIENCE, clip=1.0
    )
    begun = time.monotonic()
    try:
        for batch in range(4):
            begun = time.monotonic()
            runner.step(*ranks.numbers(batch, 8))
    except Exception as error:  # noqa: BLE001
        seconds = time.monotonic() - begun
        try:
            runner.step()
        except Exception as second:  # noqa: BLE001
            return type(error).__name__, str(error), seconds, str(second)
    return "nothing happened"


@pytest.mark.every(4)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("trouble", ["dies", "raises", "hangs"])
def test_others_stop_and_name_it(schedule, trouble):
    processes, results = ranks.start(_train, 4, schedule, trouble)
    left = 4 if trouble == "raises" else 3
    found = ranks.collect(processes, results, left)
    for rank, result in found.items():
        assert isinstance(result, tuple), result
        kind, message, seconds, second = result
        if rank == 2:
            assert (kind, message) == ("ValueError", "the input looks bad")
        else:
            assert kind == "PipelineError"
            assert message.startswith("rank 2 (stage 2) "), message
            assert {"dies": "is gone", "raises": "raised ValueError: the input looks bad", "hangs": "hangs"}[
                trouble
            ] in message
        assert seconds < PATIENCE + 30.0
        assert "has failed and cannot go on" in second
    for process in processes:  # the one that hangs ends itself
        process.join(3 * PATIENCE + 10.0)
        assert process.exitcode is not None


def _signalled(rank, when, signal_number, stopped, folder):
    """A rank gets a signal that no process can take: at the start, in a step, or while it saves."""

    def happens(*_, **__):
        if rank == stopped and (when != "step" or module.calls > 4):
            os.kill(os.getpid(), signal_number)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)).double()
    module = model[stopped]
    module.calls = 0
    if when == "start":
        _runner.groups_of = happens if rank == stopped else _runner.groups_of
    elif when == "step":
        module.register_forward_pre_hook(
            lambda *_: (setattr(module, "calls", module.calls + 1), happens())[1]
        )
    else:
        model.register_state_dict_pre_hook(happens)
    try:
        runner = Runner(
            model,
            ranks.plan(3, 3, "1f1b", 4),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=nn.functional.mse_loss,
            patience=SHORT,
            clip=1.0,
        )
        for batch in range(4):
            runner.step(*ranks.numbers(batch, 8))
            runner.save(folder)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


@pytest.mark.parametrize(
    ("when", "signal_number", "stopped"),
    [
        ("start", signal.SIGKILL, 1),
        pytest.param("start", signal.SIGSTOP, 1, marks=pytest.mark.slow),
        pytest.param("step", signal.SIGSTOP, 1, marks=pytest.mark.slow),
        pytest.param("save", signal.SIGKILL, 1, marks=pytest.mark.slow),
        pytest.param("save", signal.SIGSTOP, 1, marks=pytest.mark.slow),
        ("step", signal.SIGSTOP, 0),  # which has the store
        pytest.param("save", signal.SIGSTOP, 0, marks=pytest.mark.slow),
    ],
)
def test_others_stop_wherever_a_rank_is_stopped(when, signal_number, stopped, tmp_path):
    processes, results = ranks.start(_signalled, 3, when, signal_number, stopped, tmp_path)
    try:
        for message in ranks.collect(processes, results, 2).values():
            assert message.startswith(f"PipelineError: rank {stopped} (stage {stopped}) "), message
            assert "gives no sign of life" in message, message
    finally:
        processes[stopped].kill()
    assert [path.name for path in tmp_path.glob("batch-*")] == ["batch-1"] * (when == "step")


def _in_a_step(rank, plan, signal_number, folder):
    """Rank 1 gets a signal in a forward of its third batch; when the others end, and what they say."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(plan.stages[-1].end))).double()
    calls = []

    def happens(*_):
        calls.append(rank)
        if rank == 1 and len(calls) > 5:
            (folder / "happened").write_text(str(time.time()))
            os.kill(os.getpid(), signal_number)

    for layer in model:
        layer.register_forward_pre_hook(happens)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_fn": nn.functional.mse_loss, "patience": SHORT}
    try:
        runner = Runner(model, plan, optimizer=optimizer, **options)
        for batch in range(8):
            runner.step(*ranks.numbers(batch, plan.microbatch * plan.microbatches))
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}", time.time()
    return "nothing happened", time.time()


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    "plan",
    [
        ranks.plan(6, 3, "zb-v", 6, loops=2),
        ranks.plan(3, 3, "zb-h2", 6),
        ranks.plan(2, 2, "2bw", 4, in_turn=(1, 2)),
        ranks.plan(2, 2, "2bw", 4, in_turn=(2, 1)),
        ranks.plan(2, 2, "pipedream", 2, in_turn=(1, 2)),
    ],
    ids=["zb-v", "zb-h2", "2bw-1-2", "2bw-2-1", "pipedream-1-2"],
)
def test_others_stop_soon_with_several_stages_or_replicas(plan, signal_number, tmp_path):
    processes, results = ranks.start(_in_a_step, 3, plan, signal_number, tmp_path)
    try:
        found = ranks.collect(processes, results, 2)
        happened = float((tmp_path / "happened").read_text())
        for message, ended in found.values():
            assert message.startswith("PipelineError: rank 1 (stage") and "\n" not in message, message
            assert "gives no sign of life" in message, message
            assert ended - happened < SHORT + 2.0
    finally:
        processes[1].kill()


def test_a_connection_may_break_before_anything_is_waited_for():
    store = HashStore()
    store.set("beat/1", json.dumps([3, "works at F0", None]))  # and never again
    health = Health(store, 0, ["stage 0", "stage 1"], PATIENCE, [], torch.device("cpu"))
    with (
        pytest.raises(PipelineError, match=r"^rank 1 \(stage 1\) is gone"),
        health.guard(),
    ):
        health.works("works at B1")
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711")


def _made(rank, plans, seeds, patience, own=(None, None)):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6 + seeds[rank] * (number == 3)) for number in range(4))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        options = {"loss_fn": nn.functional.mse_loss, "patience": patience, "schedule": own[rank]}
        Runner(model, plans[rank], optimizer=optimizer, **options)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "made"


def test_what_does_not_agree_is_refused_before_the_first_step():
    gpipe, flushing = (ranks.plan(4, 2, name, 4) for name in ("gpipe", "1f1b"))
    for message in ranks.run(_made, 2, [gpipe, flushing], [0, 0], 20.0):
        assert "PipelineError: rank" in message
        assert "has another plan than rank" in message
    own = [replace(each(2, 4), turns=None) for each in (schedules.gpipe, schedules.one_f_one_b)]
    for message in ranks.run(_made, 2, [gpipe, gpipe], [0, 0], 20.0, own):
        assert "has another schedule than rank" in message
    for message in ranks.run(_made, 2, [gpipe, gpipe], [0, 1], 20.0):
        assert "has another model than rank" in message
    three = ranks.plan(4, 3, "gpipe", 4)
    for message in ranks.run(_made, 2, [three, three], [0, 0], 20.0):
        assert "3 ranks x 1 replicas = 3 processes, and 2 run" in message
    short = ranks.plan(3, 2, "gpipe", 4)
    for message in ranks.run(_made, 2, [short, short], [0, 0], 20.0):
        assert "the plan's stages have 3 blocks, and the model has 4" in message


def _with(rank, plan, options):
    model = ranks.chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, **options)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "made"


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("pipedream", {"clip": 1.0}, "update each on its own"),
        ("pipedream", {"correction": True}, "correction=True is for gradients that are one batch late"),
        ("1f1b", {"correction": True}, "those of '1f1b' are not"),
        ("1f1b", {"warmup": 2}, "flushes after each batch anyway"),
        ("2bw", {"clip": 0.0}, "clip=0.0"),
        ("2bw", {"patience": 0.0}, "patience=0.0"),
        ("sideways", {}, "there is no schedule 'sideways'"),
    ],
)
def test_options_that_do_not_go_together(schedule, options, message):
    (found,) = ranks.run(_with, 1, ranks.plan(8, 1, schedule, 1), options)
    assert found.startswith("OptionError") and message in found, found


@pytest.mark.slow
def test_all_who_ask_a_silent_store_are_answered_at_once():
    answers = threading.Event()
    store = PatientStore(SimpleNamespace(check=lambda keys: answers.wait(60.0)), 4.0)

    def ask():
        with pytest.raises(DistStoreError):
            store.check(["key"])
        return time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask)
        time.sleep(3.0)
        second = pool.submit(ask)
        assert second.result() - first.result() < 2.0
    with pytest.raises(DistStoreError, match="is silent"):
        store.check(["key"])
    answers.set()


def test_what_was_gathered_leaves_the_store():
    store, counts = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []

    def assembly(number):
        own = PrefixStore("own", store.clone())
        return Assembly(own, SimpleNamespace(await_key=lambda key, what, peer: own.get(key)), number, 2)

    both = [assembly(number) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for turn in range(4):
            assert [*pool.map(lambda each: each.gather(turn), both)] == [[turn] * 2] * 2  # noqa: B023
            counts.append(store.num_keys())
    assert len({*counts}) == 1, counts
