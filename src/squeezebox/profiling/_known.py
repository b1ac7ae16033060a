"""Options that another profile of the same tensors has measured, in the lives that they have now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from squeezebox.profiling._timeline import Life
from squeezebox.schema import Action, Option, TensorProfile


def as_known(key: str, lives: Mapping[str, Life], known: Sequence[Option]) -> TensorProfile:
    """The tensor with its known options, but those made from tensors that are not there for as long."""
    own = lives[key]
    options = (option for option in known if outlived(own, option.sources, lives))
    return TensorProfile(
        key=key,
        saved_at=own.saved_at,
        dropped_at=own.dropped_at,
        first_use=own.first_use,
        last_use=own.last_use,
        idle_until=own.idle_until,
        gaps=tuple(own.gaps),
        options=tuple(
            replace(option, packing_bytes=own.packing_bytes) if option.action is Action.COMPRESS else option
            for option in options
        ),
    )


def outlived(own: Life, sources: Sequence[str], lives: Mapping[str, Life]) -> bool:
    """Whether all sources are saved before a tensor, and used as late as it is."""
    return all(
        source in lives and lives[source].saved_at <= own.saved_at and own.last_use <= lives[source].last_use
        for source in sources
    )
