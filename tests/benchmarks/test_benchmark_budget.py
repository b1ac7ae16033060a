import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _budget_tables, _report, budget
from benchmarks._deeper import deeper
from squeezebox import planner
from squeezebox.schema import Action, Moment, Option, Profile, TensorProfile


def _rival(ours_bytes: int, ratio: float) -> dict[str, Any]:
    ours = {"peak_bytes": ours_bytes, "ratios": {"ours/theirs": {"median": ratio}}}
    return {"peak_bytes": 100, "ours": ours}


def test_a_point_is_below_only_with_no_more_bytes_and_no_more_seconds() -> None:
    rivals = {
        "checkpointing 1": _rival(100, 1.0),
        "checkpointing 3": _rival(100, 1.1),
        "offload all": _rival(101, 0.5),
    }
    below = [_budget_tables._below(rivals, kind) for kind in _budget_tables.KINDS]
    assert below == ["1 of 2", "0 of 1"]


def test_whatever_is_above_one_is_counted_however_little() -> None:
    assert _budget_tables._above_one([0.9, 1.0]) == "0 of 2"
    assert _budget_tables._above_one([1.0, 1.00002]) == "1 of 2 (by +0.002 %)"


@pytest.mark.slow
def test_networks_run_one_by_one_share_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("skimage", reason='needs pip install "squeezebox[bench]"')
    monkeypatch.setattr(_report.write, "__defaults__", (tmp_path,))
    monkeypatch.setattr(_report.today, "__defaults__", (tmp_path,))
    monkeypatch.setattr(budget, "DEEP_TENSORS", 100)
    small = ["--quick", "--batch", "2", "--size", "32", "--train-steps", "2", "--budgets", "1"]
    small += ["--milp-seconds", "3"]
    for name in ("gpt", "unet"):
        monkeypatch.setattr(sys, "argv", ["budget", name, *small])
        budget.main()
    written = next(tmp_path.glob("*.json"))
    networks = json.loads(written.read_text())["results"]
    assert set(networks) == {"gpt", "unet"}
    assert "| gpt |" in written.with_suffix(".md").read_text()
    for network in networks.values():
        assert network["exact"]["equal"]
        assert len(network["budgets"]) == 2
        assert network["budgets"][-1]["peak_bytes"] <= network["plain"]["peak_bytes"]


def test_a_deeper_profile_holds_all_copies_where_forward_ends() -> None:
    keep = Option(action=Action.KEEP, held_bytes=10, serves=True)
    again = Option(action=Action.RECOMPUTE, held_bytes=0, working_bytes=10, sources=("a",), noise=0.0)
    moments = tuple(Moment(phase=phase) for phase in ("forward", "forward", "loss", "backward", "optimizer"))
    tensors = (
        TensorProfile(key="a", saved_at=0, first_use=3, last_use=3, options=(keep,)),
        TensorProfile(key="b", saved_at=1, first_use=2, last_use=3, gaps=((3, 3),), options=(keep, again)),
    )
    profile = Profile(base_bytes=(1, 2, 3, 2, 1), tensors=tensors, moments=moments)
    assert deeper(profile, 2).base_bytes == profile.base_bytes
    whole = deeper(profile, 6)
    assert whole.base_bytes == (1, 2, 1, 2, 1, 2, 3, 2, 1, 3, 2, 1, 3, 2, 1)
    assert [(t.saved_at, t.first_use, t.last_use) for t in whole.tensors] == [
        (0, 13, 13),
        (1, 12, 13),
        (2, 10, 10),
        (3, 9, 10),
        (4, 7, 7),
        (5, 6, 7),
    ]
    assert whole.tensors[3].gaps == ((10, 10),)
    assert whole.tensors[3].options[1].sources == ("1 a",)
    assert planner.peak(whole, {tensor.key: keep for tensor in whole.tensors}) == 60 + 3
