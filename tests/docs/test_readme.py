"""The README is short, hides nothing, and says what its reports say."""

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NETWORKS = {
    "ViT": "vit",
    "U-Net": "unet",
    "ResNet-50": "resnet50",
    "EfficientNet-B0": "efficientnet_b0",
    "VGG-16": "vgg16",
}
RIVALS = ("checkpointing 1", "offload all", "compiled 0.5")


def test_it_is_short_and_hides_no_code():
    assert len(README.splitlines()) <= 150
    assert "invisible-code-block" not in README


def test_its_table_is_the_reports():
    name = re.search(r"budget-compiled-[\d-]+", README).group()
    found = json.loads((ROOT / "benchmarks" / "reports" / f"{name}.json").read_text())["results"]
    rows = [
        line for line in README.splitlines() if line.startswith(tuple(f"| {name} |" for name in NETWORKS))
    ]
    assert rows == [_row(shown, found[name]) for shown, name in NETWORKS.items()]
    assert set(found) == set(NETWORKS.values())


def _row(shown, figures):
    least = figures["budgets"][-1]
    ways = [(rival["peak_bytes"], rival["ours"]["ratios"]["theirs/plain"]) for rival in _rivals(figures)]
    ways += [(least["peak_bytes"], least["ratios"]["ours/plain"])]
    cells = [f"{nbytes / 2**20:.1f}, {ratio['median']:.2f}x" for nbytes, ratio in ways]
    return f"| {shown} | {figures['plain']['peak_bytes'] / 2**20:.1f} | {' | '.join(cells)} |"


def _rivals(figures):
    return [figures["rivals"][name] for name in RIVALS]


def test_its_picture_is_drawn_from_the_newest_report():
    drawn = runpy.run_path(str(ROOT / "scripts" / "make_step_picture.py"))["picture"]()
    assert (ROOT / "docs" / "step.svg").read_text() == drawn
