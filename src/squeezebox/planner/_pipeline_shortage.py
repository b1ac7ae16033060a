"""Why no pipeline fits, and the least memory that one would need."""

from __future__ import annotations

from collections.abc import Sequence

from squeezebox.planner._split import Found, Shape, smallest
from squeezebox.planner._stages import Runs, stage_memory
from squeezebox.schema import BudgetError, Link, PipelineProfile, StageMemory


def too_little(tried: Sequence[tuple[Runs, Shape]], memory_bytes: int, link: Link) -> BudgetError:
    """Names the least that would fit, and the stage that owns the most of it."""
    found = [(each, blocks) for blocks, shape in tried if (each := smallest(blocks, shape, link))]
    if not found:
        return BudgetError(
            "no plan can be made: each policy was measured for some blocks only, and a stage holds all of "
            "its blocks alike. Profile every block with one policy at least."
        )
    least, blocks = min(found, key=lambda pair: pair[0].peak_bytes)
    return BudgetError(
        f"no pipeline fits {_size(memory_bytes)} a rank; the least that one does is "
        f"{_size(least.peak_bytes)}: {_described(least)}. {_owner(least, blocks.profile)} Allow that much, "
        "or give more ranks, smaller microbatches, or policies that hold less."
    )


def _described(found: Found) -> str:
    plan = found.plan
    return (
        f"{plan.schedule} with {plan.microbatches} microbatches of {plan.microbatch} on {plan.replicas} x "
        f"{plan.ranks} ranks"
    )


def _owner(found: Found, profile: PipelineProfile) -> str:
    stages = found.plan.stages
    number = max(range(len(stages)), key=lambda stage: stages[stage].peak_bytes)
    own = profile.blocks[stages[number].first : stages[number].end]
    parts = _parts(stage_memory(profile, found.plan, number))
    blocks = f"'{own[0].name}' to '{own[-1].name}', {stages[number].policy}"
    return f"Stage {number} ({blocks}) owns the most: {parts}."


def _parts(memory: StageMemory) -> str:
    parts = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer state": memory.state_bytes,
        "activations": memory.activation_bytes,
        "buffers": memory.buffer_bytes,
        "working space": memory.working_bytes,
    }
    return ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in parts.items() if nbytes)


def _size(nbytes: int) -> str:
    """``1.50 GiB (1610612736 bytes)``."""
    amount, unit = (nbytes / 2**30, "GiB") if nbytes >= 2**30 else (nbytes / 2**20, "MiB")
    return f"{amount:.2f} {unit} ({nbytes} bytes)"
