"""Loops over pieces: on several threads, their errors, and in a forked child, which has none of them."""

import multiprocessing
import threading

import pytest
import torch

from squeezebox import codecs


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_both_threads_work_and_results_come_in_order():
    together, seen = threading.Barrier(2, timeout=60), set()

    def work(index):
        if index < 2:
            together.wait()  # for the other thread
        seen.add(threading.get_ident())
        return torch.is_inference_mode_enabled(), index

    with torch.inference_mode():
        assert codecs.in_threads(work, 9) == [(True, index) for index in range(9)]
    assert len(seen) == 2


@pytest.mark.parametrize("bad", (0, 5))
def test_an_error_on_any_thread_is_raised_once_all_have_ended(bad):
    def work(index):
        if index == bad:
            raise ValueError(f"piece {index}")

    with pytest.raises(ValueError, match=f"piece {bad}"):
        codecs.in_threads(work, 9)
    assert codecs.in_threads(lambda index: index, 3) == [0, 1, 2]


def _packed(x):
    return [part.tolist() for part in codecs.get("planes").pack(x, 0.1).payload]


def _send(x, pipe):
    pipe.send(_packed(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads, which is the point here
def test_a_forked_child_packs_the_same():
    x = torch.linspace(-3, 3, 50_000)
    here = _packed(x)
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_send, args=(x, theirs))
    child.start()
    assert mine.poll(60), "the child hangs"
    assert mine.recv() == here
    child.join()
