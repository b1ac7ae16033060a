"""The profile of a network many times as deep, for timing the planner.

Goes in: a step's profile. Comes out: one whose forward passes follow each other, and whose backward passes
do so in the opposite order, with the same tensors and options in each.
"""

from __future__ import annotations

import dataclasses

from squeezebox.schema import Option, Profile, TensorProfile


def deeper(profile: Profile, tensors: int) -> Profile:
    """As many whole copies as have about so many ``tensors``; noise is shared among them."""
    copies = max(round(tensors / len(profile.tensors)), 1)
    layers = [_Layer(profile, number, copies) for number in range(copies)]
    base = dict(pair for layer in layers for pair in layer.base())
    return Profile(
        base_bytes=tuple(base[position] for position in range(len(base))),
        tensors=tuple(tensor for layer in layers for tensor in layer.tensors()),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """One copy of the profile among many."""

    profile: Profile
    number: int
    copies: int

    def at(self, position: int) -> int:
        """Where a position comes to lie; those outside the step stay."""
        length = len(self.profile.base_bytes)
        turn = [moment.phase for moment in self.profile.moments].index("loss")
        if not 0 <= position < length:
            return position if position < 0 else self.copies * length
        if position < turn:
            return self.number * turn + position
        return self.copies * turn + (self.copies - 1 - self.number) * (length - turn) + position - turn

    def base(self) -> list[tuple[int, int]]:
        """Positions and their bytes."""
        return [(self.at(position), base) for position, base in enumerate(self.profile.base_bytes)]

    def tensors(self) -> list[TensorProfile]:
        """Moved, and renamed."""
        return [
            dataclasses.replace(
                tensor,
                key=self.name(tensor.key),
                options=tuple(self.option(option) for option in tensor.options),
                gaps=tuple((self.at(first), self.at(last)) for first, last in tensor.gaps),
                **{name: self.at(getattr(tensor, name)) for name in _POSITIONS},
            )
            for tensor in self.profile.tensors
        ]

    def name(self, key: str) -> str:
        """Of a tensor."""
        return f"{self.number} {key}"

    def option(self, option: Option) -> Option:
        """From this copy's tensors, with its share of the noise."""
        sources = tuple(map(self.name, option.sources))
        return dataclasses.replace(option, sources=sources, noise=option.noise / self.copies)


_POSITIONS = ("saved_at", "dropped_at", "idle_until", "first_use", "last_use")
