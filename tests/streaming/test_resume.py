"""A killed step goes on at its strip, and a checkpoint of another step is refused."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

from squeezebox.schema import FormatError
from squeezebox.streaming import StreamedStep


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=1)
    ).double()


def files():
    random = np.random.default_rng(0)
    return random.integers(0, 256, (1, 3, 200, 40), np.uint8), random.integers(0, 2, (1, 200, 40))


def step(model, **options):
    return StreamedStep(model, nn.CrossEntropyLoss(), height=25, checkpoint_seconds=0.0, **options)


def crawl(path, spool):
    """Slow enough to be killed anywhere; tells when it has begun."""

    def pause(progress):
        print(progress.done, flush=True)
        time.sleep(0.05)

    step(network(), checkpoint=path, progress=pause, spool=spool)(*files())


def killed_after(strips, path, spool):
    program = (
        f"import sys; sys.path.insert(0, {os.getcwd()!r}); "
        f"from tests.streaming import test_resume as t; t.crawl({str(path)!r}, {spool})"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) == strips:
                process.send_signal(signal.SIGKILL)
                break
    assert process.wait() == -signal.SIGKILL


SLOW = pytest.mark.slow


# gathering moments, deriving, deriving through the moments
@pytest.mark.parametrize("strips", [pytest.param(4, marks=SLOW), 13, pytest.param(22, marks=SLOW)])
@pytest.mark.parametrize("spool", [False, pytest.param(True, marks=SLOW)])
def test_a_killed_step_goes_on_to_the_bit(tmp_path, strips, spool):
    path = tmp_path / "step"
    killed_after(strips, path, spool)
    assert path.exists()
    seen, model, whole = [], network(), network()
    loss = step(model, checkpoint=path, progress=seen.append, spool=spool)(*files())
    assert strips - 1 <= seen[0].done - 1 <= strips + 1 and not [*tmp_path.iterdir()]
    assert torch.equal(loss, step(whole, spool=spool)(*files()))
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert torch.equal(model[1].running_var, whole[1].running_var) and model[1].num_batches_tracked == 1


def interrupted(path):
    def stop(progress):
        if progress.done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step(network(), checkpoint=path, progress=stop)(*files())


def test_other_weights_and_images_are_refused(tmp_path):
    path = tmp_path / "step"
    interrupted(path)
    other = network()
    with torch.no_grad():
        other[0].bias += 1e-6
    image, target = files()
    for model, given in ((other, image), (network(), 255 - image), (network()[2:], image[:, :, :100])):
        with pytest.raises((FormatError, RuntimeError), match="belongs to a step|cannot trace"):
            step(model, checkpoint=path)(given, target[:, : given.shape[2]])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FormatError, match="damaged"):
        step(network(), checkpoint=path)(image, target)


@pytest.mark.parametrize("labels", [torch.tensor([1]), np.array([1]), None])
def test_a_checkpoint_with_another_label_is_refused(tmp_path, labels):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    image, given = torch.randn(1, 3, 40, 6, dtype=torch.float64), torch.tensor([0])

    def stop(progress):
        if progress.done == 3:
            raise KeyboardInterrupt

    def stream(target, progress=None):
        options = {"checkpoint": tmp_path / "step", "checkpoint_seconds": 0.0, "progress": progress}
        return StreamedStep(model, nn.CrossEntropyLoss(), height=8, **options)(image, target)

    if labels is None:  # in a file
        given = np.memmap(tmp_path / "labels", np.int64, "w+", shape=(1,))
        labels = 1 - given
    with pytest.raises(KeyboardInterrupt):
        stream(given, stop)
    with pytest.raises(FormatError, match="another image or target"):
        stream(labels)
    stream(given)


def test_a_checkpoint_that_is_interrupted_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(content, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(network(), checkpoint=tmp_path / "step", spool=True)(*files())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("height", [25, (50, 10)])
def test_what_was_added_to_a_spool_after_the_checkpoint_is_taken_back(tmp_path, height):
    path, model, whole, seen = tmp_path / "step", network(), network(), []

    def streamed(model, **options):
        return StreamedStep(
            model, nn.CrossEntropyLoss(), height=height, checkpoint_seconds=0.0, spool=True, **options
        )

    def stop(progress):
        if progress.done == progress.total // 2:  # within the pass that adds gradients
            interrupted._checkpoint_seconds = 1e9
        if progress.done == progress.total // 2 + 3:
            raise KeyboardInterrupt

    interrupted = streamed(model, checkpoint=path, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        interrupted(*files())
    resumed = streamed(model, checkpoint=path, progress=seen.append)
    loss = resumed(*files())
    assert seen[0].done == seen[0].total // 2 and not [*tmp_path.iterdir()]
    assert torch.equal(loss, streamed(whole)(*files()))
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_spool_that_is_gone_is_said(tmp_path):
    def stop(progress):
        if progress.done == 10:
            raise KeyboardInterrupt

    path = tmp_path / "step"
    with pytest.raises(KeyboardInterrupt):
        step(network(), checkpoint=path, progress=stop, spool=True)(*files())
    for name in ("step.spool.*", "step.spool"):  # the journal, then the file
        for file in tmp_path.glob(name):
            file.unlink()
        with pytest.raises(FormatError, match="step.spool.* is not there"):
            step(network(), checkpoint=path, spool=True)(*files())
