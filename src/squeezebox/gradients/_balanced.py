"""Several plans of an exchange, of which that one is in force that is fastest as the link now is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from squeezebox.gradients._auto import ExchangePlan
from squeezebox.gradients._exchange import Exchange
from squeezebox.planner import Balance


class Balanced:
    """The plans, and which of them the next pass is for: all ranks decide alike, by the slowest rank.

    Those of a pass are gathered while the next one goes on, so nobody waits for them.
    """

    def __init__(self, plans: Sequence[ExchangePlan], first: ExchangePlan) -> None:
        self.plans = tuple(plans)
        loads = [each.nbytes for each in plans]
        self._balance = Balance(
            [each.seconds for each in plans],
            first=self.plans.index(first),
            loads=loads if all(loads) else None,
        )
        self._told: tuple[int, Callable[[], list[list[float]]]] | None = None  # of the pass before

    @property
    def plan(self) -> ExchangePlan:
        """The one in force."""
        return self.plans[self._balance.choice]

    def end_pass(self, seconds: float, exchange: Exchange) -> None:
        """A pass under the plan took this rank these ``seconds``."""
        told, now = self._told, self._balance.choice
        self._told = now, exchange.begin_numbers([seconds])
        if told is not None:
            choice, rows = told
            if choice == now:  # or it tells of the one before
                self._balance.note(max(row[0] for row in rows()))
            else:
                rows()
