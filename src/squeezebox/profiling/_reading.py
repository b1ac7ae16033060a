"""From a step's events to its trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from squeezebox.profiling._ledgers import ALLOCATION, CALL, END, FREE, GONE, KIND, PHASE, Event
from squeezebox.schema import Activity, Call, Kind, StepTrace, Storage

_NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Known:
    """What a storage is, by its address at some moment."""

    kind: Kind
    nbytes: Mapping[int, int]  # by address


@dataclass(frozen=True, slots=True)
class Running:
    """An operator that ran, and the addresses that it was given."""

    operator: str
    phase: str
    module: str
    addresses: Sequence[int]
    stream: int
    activity: Activity = Activity.COMPUTING


@dataclass(slots=True)
class _Life:
    nbytes: int
    allocated_at: int
    call: int | None
    kind: Kind = Kind.TEMPORARY
    freed_at: int = -1
    streams: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class Reading:
    """Goes through the events once; ``notes`` are what the marks of kinds refer to."""

    running: Sequence[Running]
    notes: Sequence[Known]
    lives: list[_Life] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    _now: int = 0
    _began: int = 0  # nanoseconds of the first operator,
    _ended: int = 0  # and of the end
    _living: dict[int, _Life] = field(default_factory=dict)

    def trace(self, before: Iterable[Known], events: Iterable[Event]) -> StepTrace:
        """``before``: what is there when the step begins; where two claim a storage, the first has it."""
        for known in before:
            for address, nbytes in known.nbytes.items():
                if nbytes and address not in self._living:
                    self._begin(address, _Life(nbytes, 0, None, known.kind))
        for event in events:
            self._read(event)
        end = self._now + 1
        return StepTrace(
            storages=tuple(
                Storage(
                    nbytes=life.nbytes,
                    kind=life.kind,
                    allocated_at=life.allocated_at,
                    freed_at=end if life.freed_at < 0 else life.freed_at,
                    call=life.call,
                    streams=tuple(life.streams) or (0,),
                )
                for life in self.lives
            ),
            calls=tuple(self.calls),
            end=end,
            seconds=(self._ended - self._began) / _NANOSECONDS if self._ended else 0.0,
        )

    def _read(self, event: Event) -> None:
        if event.what == ALLOCATION:
            self._end(event.number)  # freed where nobody saw it
            self._now += 1
            life = _Life(event.nbytes, self._now, len(self.calls) - 1 if self.calls else None)
            self._begin(event.number, life)
            self._touch(life)
        elif event.what == FREE or (event.what == GONE and self._is_old(event.number)):
            self._end(event.number)
        elif event.what == CALL:
            self._call(self.running[event.number], event.nanoseconds)
        elif event.what == PHASE:
            for life in self._living.values():
                if life.kind is Kind.TEMPORARY:
                    life.kind = self._held(life)
        elif event.what == KIND:
            self._name(self.notes[event.number])
        elif event.what == END:
            self._ended = event.nanoseconds

    def _call(self, call: Running, nanoseconds: int) -> None:
        if not self.calls:
            self._began = nanoseconds
        self.calls.append(
            Call(
                operator=call.operator,
                phase=call.phase,
                module=call.module,
                began_at=self._now + 1,
                began_seconds=(nanoseconds - self._began) / _NANOSECONDS,
                activity=call.activity,
            )
        )
        for address in call.addresses:
            if address in self._living:
                self._living[address].streams[call.stream] = None

    def _held(self, life: _Life) -> Kind:
        """What is still there when backward begins has been saved, or packed."""
        made_by = Activity.COMPUTING if life.call is None else self.running[life.call].activity
        return Kind.PACKED if made_by is Activity.PACKING else Kind.SAVED

    def _touch(self, life: _Life) -> None:
        if self.calls:
            life.streams[self.running[len(self.calls) - 1].stream] = None

    def _name(self, known: Known) -> None:
        for address, nbytes in known.nbytes.items():
            if address in self._living:
                if self._living[address].allocated_at:
                    self._living[address].kind = known.kind
            elif nbytes and known.kind is Kind.INPUT:  # there before the step, but only now shown
                self._begin(address, _Life(nbytes, 0, None, known.kind))

    def _is_old(self, address: int) -> bool:
        """Whether what is there was there before the step; else somebody else has the address already."""
        return address in self._living and not self._living[address].allocated_at

    def _begin(self, address: int, life: _Life) -> None:
        self._living[address] = life
        self.lives.append(life)

    def _end(self, address: int) -> None:
        life = self._living.pop(address, None)
        if life is not None:
            self._now += 1
            life.freed_at = self._now
