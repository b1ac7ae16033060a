import pytest

from benchmarks import accuracy


def row(seed: int, arm: str, result: float) -> dict[str, object]:
    return {"task": "text", "seed": seed, "arm": arm, "result": result, "seconds": 1.0}


def test_only_seeds_with_all_arms_are_compared() -> None:
    rows = [
        row(seed, arm, seed + 0.01 * seed * (arm != "plain")) for seed in range(3) for arm in accuracy.ARMS
    ]
    half = [row(3, "plain", 1.0)]
    assert accuracy.complete(rows + half, "text") == rows
    found = accuracy.summarised(rows)
    assert found["tests"]["noise 1e-2"]["mean"] == pytest.approx(0.01)
    assert "3 seeds" in "".join(accuracy.table({"text": found}))
