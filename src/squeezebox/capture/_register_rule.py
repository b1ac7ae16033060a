"""Rules of your own in the table of operators."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from functools import cache
from types import TracebackType

import torch
from torch._C import _functions

from squeezebox import codecs
from squeezebox.capture._readings import saved_attributes
from squeezebox.capture._rules import Rule, lay_over, operator_name, row, take_off
from squeezebox.schema import OptionError, Reads, Role

# How these are held depends on what else the operators of their own rows save.
_ROLES = frozenset(
    {Role.CONV_INPUT, Role.LINEAR_INPUT, Role.BATCH_NORM_INPUT, Role.NORM_INPUT, Role.ATTENTION}
)
_CODECS = frozenset({"interval", "pool-index"})


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredRule:
    """A rule in force until :meth:`remove`, or until a ``with`` block over it ends."""

    operator: str
    attribute: str
    rule: Rule

    def remove(self) -> None:
        """The row is as it was before, for forwards from now on; a second time does nothing."""
        take_off(self.operator, self.attribute, self.rule)

    def __enter__(self) -> RegisteredRule:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def register_rule(operator: str, attribute: str, rule: Rule, *, replace: bool = False) -> RegisteredRule:
    """Say how sessions may hold what one operator saves, in this process, for forwards from now on.

    With ``Reads.VALUES`` every element is within the controller's bound: ``|x - held| <= bound``. With
    ``Reads.EXACT`` nothing is lost. ``Reads.SIGN`` holds ``x > 0`` alone and
    ``Reads.SHAPE`` nothing: gradients are right if the operator's backward reads no more.

    Args:
        operator: the autograd node's name, such as "SoftplusBackward"; ``y.grad_fn.name()`` shows it. All
            overloads share a row, so a number at its end is left out. A row of "ScatterReduceBackward" or
            "SegmentReduceBackward" is for reductions that the table does not know, such as "amax".
        attribute: a tensor that the node saves: "self" for ``_saved_self``.
        rule: what backward reads of it.
        replace: whether it may take the place of a rule that is there already.

    Returns:
        What takes it back: call ``remove()``, or use it in a ``with`` statement.

    Raises:
        OptionError: torch has no such node or attribute, the row is there already, or the rule contradicts
            itself.
    """
    operator = operator_name(operator)
    _require_saved(operator, attribute)
    known = row(operator, attribute)
    if known is not None and not replace:
        raise OptionError(
            f"{operator}.{attribute} has a rule already, {known.role.value} of which backward reads "
            f"{known.reads.name}; replace=True takes yours instead."
        )
    _require_sound(rule, known)
    own = dataclasses.replace(rule)  # another object for each registration: one is taken back at a time
    lay_over(operator, attribute, own)
    return RegisteredRule(operator, attribute, own)


@cache
def _saved_by_operators() -> dict[str, set[str]]:
    """The tensors that each of torch's own nodes saves."""
    found: dict[str, set[str]] = {}
    for name, kind in vars(_functions).items():
        if isinstance(kind, type):
            found.setdefault(operator_name(name), set()).update(saved_attributes(kind))
    return found


def _require_saved(operator: str, attribute: str) -> None:
    known = _saved_by_operators()
    if operator not in known:
        near = difflib.get_close_matches(operator, known, n=3)
        raise OptionError(
            f"operator '{operator}' is no autograd node of torch {torch.__version__}"
            f"{', which has ' + ', '.join(near) if near else ''}; y.grad_fn.name() shows y's."
        )
    if attribute not in known[operator]:
        saved = ", ".join(sorted(known[operator])) or "none"
        raise OptionError(f"{operator} saves no tensor '{attribute}'; it saves {saved}.")


def _require_sound(rule: Rule, known: Rule | None) -> None:
    """Refuse what contradicts itself, or needs what only an operator of the table's own row saves."""
    if rule.scaled or rule.logits is not None or rule.highest is not None:
        raise OptionError("a rule's scaled, logits and highest are found with each tensor; leave them out.")
    if rule.dense and rule.reads is not Reads.VALUES:
        raise OptionError(f"dense=True is for Reads.VALUES, and this rule reads {rule.reads.name}.")
    if not rule.nan and rule.reads is not Reads.SIGN:
        raise OptionError(f"nan=False is for Reads.SIGN, and this rule reads {rule.reads.name}.")
    if rule.role in _ROLES and (known is None or known.role is not rule.role):
        raise OptionError(
            f"role '{rule.role.value}' needs what only its own operators save; Role.ACTIVATION or Role.OTHER "
            "does not."
        )
    if rule.codec is not None:
        _require_exact(rule.codec, rule.reads, known)


def _require_exact(codec: str, reads: Reads, known: Rule | None) -> None:
    exact = codecs.get(codec).exact
    if reads is not Reads.EXACT:
        raise OptionError(
            f"codec '{codec}' is for Reads.EXACT, and this rule reads {reads.name}; leave the codec out."
        )
    if (codec in _CODECS or not exact) and (known is None or known.codec != codec):
        why = "needs what only its own operators save" if codec in _CODECS else "is not exact"
        raise OptionError(f"codec '{codec}' {why}; with Reads.EXACT give 'lossless', 'narrow' or 'mask'.")
