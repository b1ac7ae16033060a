"""``squeezebox demo --gigapixel`` on a small image."""

import json
import os

import numpy as np
import pytest

from squeezebox.cli import main
from squeezebox.cli._gigapixel import lay_out
from squeezebox.schema import OutputError


def test_the_demo_trains_and_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    out = tmp_path / "demo.json"
    options = ["--size", "128x320", "--memory", "32MiB", "--steps", "2", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--gigapixel", *options])
    assert ended.value.code == 0 and "peak beyond the image" in capfd.readouterr().out
    found = json.loads(out.read_text())
    assert found["parameters"] == 10433 and found["image"] == {"height": 128, "width": 320, "bytes": 122880}
    assert found["losses"][1] < found["losses"][0] < 1.0
    assert not [name for name in os.listdir(tmp_path) if name.startswith("squeezebox-")]


@pytest.mark.parametrize(
    "options",
    [
        ["--size", "100x100"],
        ["--size", "big"],
        ["--steps", "0"],
        ["--memory", "x"],
        ["--seed", "-1"],
        ["--seed", str(2**64)],
    ],
)
def test_options_are_checked_first(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    options = ["--size", "64x64", *options]
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--gigapixel", *options])
    assert ended.value.code == 2


def test_an_image_has_tissue_and_glass(tmp_path):
    slide = lay_out(tmp_path, 512, 512, 0, lambda *progress: None)
    share = slide.mask.mean()
    assert 0.02 < share < 0.98
    assert slide.pixels[slide.mask == 0].min() >= 200 > np.median(slide.pixels[slide.mask == 1])


def test_a_full_disk_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(OutputError, match="EiB|GiB of disk"):
        lay_out(tmp_path, 10**6, 10**9, 0, lambda *progress: None)
    assert not os.listdir(tmp_path)
