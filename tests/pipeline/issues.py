"""Records what a rank asks of its process groups, in order, while the real runner works over gloo."""

import contextlib
import threading
from collections import Counter
from unittest import mock

import torch.distributed as dist

from squeezebox.schedules import Call, Issue

_TOGETHER = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single",
    "reduce_scatter_tensor", "reduce_scatter_single",
)  # fmt: skip


class _Work:
    """Work whose waits are recorded."""

    def __init__(self, inner, wait):
        self._inner, self._wait = inner, wait

    def wait(self, *arguments):
        self._wait()
        return self._inner.wait(*arguments)


class Recorder:
    """All calls of one rank, as schedules.find_deadlock reads them."""

    def __init__(self):
        self.log = []
        self._counts = Counter()
        self._main = threading.get_ident()

    def add(self, call, group, ranks, what, number=None):
        line = group.group_desc if group.group_desc != "undefined" else group.group_name
        if number is None:
            number = self._counts[line]
            self._counts[line] += 1
        thread = int(threading.get_ident() != self._main)
        self.log.append(
            Issue(call=call, line=line, number=number, ranks=tuple(ranks), what=what, thread=thread)
        )
        return lambda: self.add(Call.WAIT, group, ranks, what, number)

    def message(self, call, function):
        def recorded(tensor, other, *, group, tag=0):
            what = f"{tag} {tuple(tensor.shape)} {tensor.dtype}"
            wait = self.add(call, group, sorted((dist.get_rank(), other)), what)
            return _Work(function(tensor, other, group=group, tag=tag), wait)

        return recorded

    def together(self, name, function):
        def recorded(*tensors, group=None, async_op=False, **options):
            if group is None:
                *tensors, group = tensors
            wait = self.add(Call.TOGETHER, group, dist.get_process_group_ranks(group), name)
            work = function(*tensors, group=group, async_op=async_op, **options)
            if async_op:
                return _Work(work, wait)
            wait()
            return work

        return recorded

    @contextlib.contextmanager
    def recording(self):
        with contextlib.ExitStack() as stack:
            for name, call in (("isend", Call.SEND), ("irecv", Call.RECEIVE)):
                wrapped = self.message(call, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, wrapped))
            for name in _TOGETHER:
                if hasattr(dist, name):
                    wrapped = self.together(name, getattr(dist, name))
                    stack.enter_context(mock.patch.object(dist, name, wrapped))
            yield
