"""The ways over an image that a step takes: passes that reduce, then passes back that add up gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from squeezebox.streaming._graph import Streamed, is_linear
from squeezebox.streaming._strip import Pass, plan_pass, plan_way_back


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stage:
    """A way over the image, strip by strip.

    ``reduces``: it adds up the states of the pass's reductions; ``derives``: gradients. The last pass does
    both at once where the loss is linear in what it reduces (a mean over pixels).
    """

    work: Pass
    number: int
    reduces: bool
    derives: bool

    @property
    def weight(self) -> int:
        """Its cost a row, in forward passes: backward costs about two."""
        return 3 if self.derives else 1


def stages_of(streamed: Streamed, stored: frozenset[Node], packed: bool) -> list[Stage]:
    """The ways over the image that a step takes, in order; later ones read what earlier ones have stored.

    ``packed``: a session packs what operators save, and those must be ones that it knows.
    """
    passes = {number: plan_pass(streamed, number, stored) for number in streamed.passes}
    derived = [number for number in passes if not streamed.differentiable.isdisjoint(passes[number].ends)]
    wanted = streamed.program.loss in streamed.differentiable
    derived = derived if wanted else []
    fused = (
        max(passes) if derived and max(derived) == max(passes) and is_linear(streamed, max(passes)) else None
    )
    ahead = [
        Stage(work=work, number=number, reduces=True, derives=number == fused)
        for number, work in passes.items()
    ]
    back = [
        Stage(
            work=plan_way_back(passes[number], number, stored, packed),
            number=number,
            reduces=False,
            derives=True,
        )
        for number in reversed(derived)
        if number != fused
    ]
    return ahead + back
