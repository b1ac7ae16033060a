"""The README is short, hides nothing, and says what its reports say."""

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NETWORKS = {
    "GPT, AdamW": "gpt",
    "ViT, AdamW": "vit",
    "ResNet-50, momentum": "resnet50",
    "VGG-16, momentum": "vgg16",
}

WAYS = [
    "checkpointing",
    "save_on_cpu",
    "compiled, memory budget 0.5",
    "torchao 8 bit",
    "checkpointing, torchao 8 bit",
]


def test_it_is_short_and_hides_no_code():
    assert len(README.splitlines()) <= 150
    assert "invisible-code-block" not in README


def test_its_table_is_the_reports():
    name = re.search(r"ways_whole-[\d-]+", README).group()
    found = json.loads((ROOT / "benchmarks" / "reports" / f"{name}.json").read_text())["results"]
    rows = [
        line for line in README.splitlines() if line.startswith(tuple(f"| {name} |" for name in NETWORKS))
    ]
    assert rows == [_row(shown, found[name]["rows"]) for shown, name in NETWORKS.items()]
    assert set(found) == set(NETWORKS.values()) and all(each["rows"][-2]["equal"] for each in found.values())


def _row(shown, ways):
    plain, *others, ours, compiled = ways  # torchao's optimizer is AdamW
    others += [None] * (len(WAYS) - len(others))
    assert [each["way"] for each in others if each] == WAYS[: sum(map(bool, others))]
    cells = [_cell(way) for way in (*others, ours, compiled)]
    return f"| {shown} | {plain['peak_bytes'] / 2**20:.1f} | {' | '.join(cells)} |"


def _cell(way):
    if way is None:
        return ""
    return "refused" if "refused" in way else f"{way['peak_bytes'] / 2**20:.1f}, {way['time']['median']:.2f}x"


def test_its_picture_is_drawn_from_the_newest_report():
    drawn = runpy.run_path(str(ROOT / "scripts" / "make_step_picture.py"))["picture"]()
    assert (ROOT / "docs" / "step.svg").read_text() == drawn
