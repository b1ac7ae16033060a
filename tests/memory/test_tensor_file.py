"""A tensor in a file is computed with as if it were in memory."""

import copy
import errno
import io
import weakref
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from squeezebox.memory import (
    CHUNK_BYTES,
    FileTensor,
    TensorFile,
    _chunks,
    disk_folder,
    flat_in_memory,
    parts_of,
)
from squeezebox.memory._chunks import Chunks
from squeezebox.memory._disk import SECTOR
from squeezebox.schema import CaptureError

LAYOUTS = {
    "small": lambda: torch.randn(3, 5),
    "channels_last": lambda: torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last),
    "several chunks": lambda: torch.randn(CHUNK_BYTES // 4 * 2 + 7),
    "bfloat16": lambda: torch.randn(9, 2).bfloat16(),
    "complex": lambda: torch.randn(9, dtype=torch.complex64),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0),
}


@pytest.fixture
def file(tmp_path):
    made = TensorFile(disk_folder(tmp_path))
    yield made
    made.close()


def filed(tensor, file, norm=None):
    made = FileTensor(tensor, file)
    made.store(tensor, norm)
    return made


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_its_elements_are_those_stored(make, file):
    torch.manual_seed(0)
    value = make()
    tensor = filed(value, file)
    assert torch.equal(tensor, value) and torch.equal(tensor.load(), value)
    assert tensor.load().stride() == value.stride()
    assert not list(parts_of(tensor))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.add_(1.0),
        lambda tensor: tensor.mul_(0.3),
        lambda tensor: tensor.mul_(torch.tensor(0.3)).mul_(3),
        lambda tensor: tensor.mul_(2.0).add_(tensor),
        lambda tensor: tensor.zero_(),
        lambda tensor: tensor.detach().mul_(2.0),
        lambda tensor: torch._foreach_mul_([tensor, tensor], 0.5),
        lambda tensor: torch._foreach_add_([tensor], [torch.ones(())]),
        lambda tensor: torch.add(torch.ones(()), tensor, out=tensor),
    ],
)
def test_what_works_in_place_reaches_the_file(change, file):
    torch.manual_seed(0)
    value = torch.randn(100, 3)
    tensor = filed(value, file)
    change(tensor), change(value)
    assert torch.equal(tensor, value)


@pytest.mark.parametrize("foreach", [None, True])
def test_clipping_is_torch_s_to_the_bit(foreach, file):
    torch.manual_seed(0)
    parameters = [[torch.nn.Parameter(torch.zeros(64, 5)) for _ in range(3)] for _ in range(2)]
    for own, other in zip(*parameters, strict=True):
        other.grad = torch.randn(64, 5)
        own.grad = filed(other.grad, file, torch.linalg.vector_norm(other.grad))
    norms = [torch.nn.utils.clip_grad_norm_(each, 0.1, foreach=foreach) for each in parameters]
    assert torch.equal(*norms)
    for own, other in zip(*parameters, strict=True):
        assert torch.equal(own.grad, other.grad)
        assert torch.equal(own.grad.norm(), other.grad.norm())


def test_autograd_adds_to_it(file):
    parameter = torch.nn.Parameter(torch.ones(5))
    parameter.grad = filed(torch.arange(5.0), file)
    (parameter * 2.0).sum().backward()
    assert isinstance(parameter.grad, FileTensor)
    assert torch.equal(parameter.grad, torch.arange(5.0) + 2.0)


def test_a_scaler_takes_its_scale_away_and_sees_infinities(file):
    for worst in (1.0, float("inf")):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler.scale((parameter * torch.tensor([1.0, 2.0, worst])).sum()).backward()
        parameter.grad = filed(parameter.grad, file)
        scaler.unscale_(optimizer)
        assert torch.equal(parameter.grad, torch.tensor([1.0, 2.0, worst]))
        assert scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item() == (worst > 1.0)


def test_copies_and_files_of_it_are_plain_tensors(file):
    value = torch.randn(7)
    tensor, written = filed(value, file), io.BytesIO()
    torch.save({"state": tensor}, written)
    written.seek(0)
    for found in (copy.deepcopy(tensor), tensor.clone(), torch.load(written)["state"], tensor.to("cpu")):
        assert torch.equal(torch.as_tensor(found), value)
    assert type(copy.deepcopy(tensor)) is torch.Tensor
    assert tensor.tolist() == value.tolist() and (tensor.numpy() == value.numpy()).all()


def test_a_view_is_refused(file):
    with pytest.raises(CaptureError, match="clone"):
        filed(torch.ones(4), file).view(2, 2)


def test_pieces_are_lent_and_read_ahead(file):
    """In the order of the round before, from the file once they are no longer in a buffer."""
    elements = CHUNK_BYTES // 4
    tensors = [filed(torch.full((3 * elements,), float(number)), file) for number in range(5)]
    for turn in range(3):
        for number, tensor in enumerate(tensors):
            for start in range(0, 3 * elements, elements):
                with tensor.lent(start, start + elements) as piece:
                    assert (piece == number + turn).all()
                    piece += 1.0
        file.end_round()
    assert all((tensor.load() == number + 3).all() for number, tensor in enumerate(tensors))


def test_a_piece_given_back_unchanged_is_forgotten(file):
    tensor = filed(torch.ones(4), file)
    tensor.mul_(2.0)
    for _ in range(2):
        with tensor.lent(0, 4, changed=False) as piece:
            assert torch.equal(piece, torch.full((4,), 2.0))
    assert torch.equal(tensor, torch.full((4,), 2.0))


class _Area:
    """Bytes of which those at ``broken`` cannot be written, which is known later."""

    def __init__(self):
        self.content, self.broken = bytearray(8 * SECTOR), -1

    def begin_write(self, data, offset):
        done = Future()
        if offset == self.broken:
            self.failing = done
            return done
        self.content[offset : offset + len(data)] = data
        done.set_result(None)
        return done

    def begin_read(self, out, offset):
        out[:] = self.content[offset : offset + len(out)]
        done = Future()
        done.set_result(None)
        return done


@pytest.mark.parametrize("others", range(4))
@pytest.mark.parametrize("how", ["put", "lent"])
def test_what_could_not_be_written_is_missing_whenever_it_is_read(how, others):
    area = _Area()
    chunks, ones, out = Chunks(area), np.ones(SECTOR, np.uint8), np.zeros(SECTOR, np.uint8)
    for place in range(5):
        chunks.put(place * SECTOR, ones)
        chunks.drop(place * SECTOR)
    chunks.settle()
    area.broken = 0
    if how == "put":
        chunks.put(0, 2 * ones)
        chunks.drop(0)
    else:
        chunks.lend(0, SECTOR, filled=True)[:] = 2
        chunks.give_back(0, SECTOR, changed=True)
    chunks.put(4 * SECTOR, ones)
    chunks.drop(4 * SECTOR)
    area.failing.set_exception(OSError(errno.EIO, "Input/output error"))
    for place in range(1, 1 + others):  # which may take over the buffer
        chunks.get(place * SECTOR, out)
    for _ in range(2 if others else 0):
        with pytest.raises(OSError, match="Input/output error"):
            chunks.get(0, out)
    area.broken = -1
    chunks.put(0, 3 * ones)
    chunks.settle()
    chunks.get(0, out)
    assert (out == 3).all()


def test_a_closed_file_has_no_buffers(tmp_path, monkeypatch):
    pages, buffers = _chunks._pages, []

    def noted(nbytes):
        made = pages(nbytes)
        buffers.append(weakref.ref(made))
        return made

    monkeypatch.setattr(_chunks, "_pages", noted)
    file = TensorFile(disk_folder(tmp_path))
    tensor = filed(torch.ones(4), file)
    assert torch.equal(tensor, torch.ones(4))
    file.close()
    assert buffers and not any(buffer() is not None for buffer in buffers)


def test_elements_are_put_in_order_on_their_own_device():
    value, like = torch.empty(4, 6, device="meta").t(), torch.empty(6, 4, device="meta")
    assert flat_in_memory(value, like).is_meta
