"""A model in training, and the session that holds what it saves: by a plan, or within bounds that follow it.

In: a model, a plan or a controller. Out: an engine, which follows steps, and a session, which reports them.
May touch: the model's forward, which comes back as it was with ``detach()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squeezebox.schema import door

__all__ = [
    "Balanced",
    "Engine",
    "Replanning",
    "Session",
    "attached",
    "begin",
    "check_alone",
    "codec_of",
    "plan_with_places",
    "profile_with_places",
    "shapes_of",
]

if TYPE_CHECKING:
    from squeezebox.session._balanced import Balanced
    from squeezebox.session._engine import Engine, attached
    from squeezebox.session._offload import codec_of, plan_with_places, profile_with_places
    from squeezebox.session._policy import Replanning, shapes_of
    from squeezebox.session._session import Session, begin, check_alone
else:  # hidden from type checkers, who would take any name for an attribute
    __getattr__ = door(
        __name__,
        {
            "Balanced": "_balanced",
            "begin": "_session",
            "check_alone": "_session",
            "Engine": "_engine",
            "attached": "_engine",
            "codec_of": "_offload",
            "plan_with_places": "_offload",
            "profile_with_places": "_offload",
            "Replanning": "_policy",
            "shapes_of": "_policy",
            "Session": "_session",
        },
    )
