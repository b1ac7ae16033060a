"""Which operator reads what of the tensors it saves: one row an operator and attribute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from squeezebox.schema import Reads, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one saved attribute of one operator may be held.

    ``codec`` names the exact codec that serves the operator's reading (None: the policy chooses by
    ``reads``). ``dense`` says that zeros carry no meaning and no backward reads the sign, so a
    predictor pays. ``scaled`` says that the bound is in units of each channel's or row's standard deviation.
    ``nan`` says that backward, reading a sign, takes NaN for positive.
    ``logits`` measures how wide the logits are that an attention makes of the tensor, ``highest`` up to which
    bound backward's exponentials of them stay near what they are.
    """

    role: Role
    reads: Reads
    codec: str | None = None
    dense: bool = False
    scaled: bool = False
    logits: Callable[[], float] | None = None
    highest: Callable[[], float] | None = None
    nan: bool = True


def _values(role: Role, *, dense: bool = False) -> Rule:
    return Rule(role=role, reads=Reads.VALUES, dense=dense)


_POOL_INPUT = Rule(role=Role.POOL_INPUT, reads=Reads.SHAPE)
_SHAPE = Rule(role=Role.OTHER, reads=Reads.SHAPE)
_POOL_INDEX = Rule(role=Role.POOL_INDEX, reads=Reads.EXACT, codec="narrow")
_SIGN = Rule(role=Role.RELU_OUTPUT, reads=Reads.SIGN)
_POSITIVE = Rule(role=Role.RELU_OUTPUT, reads=Reads.SIGN, nan=False)
_INTERVAL = Rule(role=Role.ACTIVATION, reads=Reads.EXACT, codec="interval")
_ACTIVATION = _values(Role.ACTIVATION, dense=True)
_BATCH_NORM = _values(Role.BATCH_NORM_INPUT, dense=True)
_NORM = _values(Role.NORM_INPUT, dense=True)
_ATTENTION = _values(Role.ATTENTION, dense=True)

_RULES: Mapping[tuple[str, str], Rule] = {
    ("ConvolutionBackward", "input"): _values(Role.CONV_INPUT),
    ("AddmmBackward", "mat1"): _values(Role.LINEAR_INPUT),
    ("MmBackward", "self"): _values(Role.LINEAR_INPUT),
    ("LinearBackward", "input"): _values(Role.LINEAR_INPUT),
    ("GroupedMmBackward", "self"): _values(Role.LINEAR_INPUT),
    ("BmmBackward", "self"): _values(Role.MATMUL_OPERAND),
    ("BmmBackward", "mat2"): _values(Role.MATMUL_OPERAND),
    ("NativeBatchNormBackward", "input"): _BATCH_NORM,
    ("CudnnBatchNormBackward", "input"): _BATCH_NORM,
    ("MiopenBatchNormBackward", "input"): _BATCH_NORM,
    ("NativeLayerNormBackward", "input"): _NORM,
    ("NativeGroupNormBackward", "input"): _NORM,
    ("FusedRmsNormBackward", "input"): _NORM,
    ("ReluBackward", "result"): _SIGN,
    ("LeakyReluBackward", "self"): _POSITIVE,
    ("LeakyReluBackward", "result"): _POSITIVE,
    ("HardtanhBackward", "self"): _INTERVAL,
    ("HardtanhBackward", "result"): _INTERVAL,
    ("SiluBackward", "self"): _ACTIVATION,
    ("GeluBackward", "self"): _ACTIVATION,
    ("HardswishBackward", "self"): Rule(role=Role.ACTIVATION, reads=Reads.EXACT),
    ("SigmoidBackward", "result"): _ACTIVATION,
    ("TanhBackward", "result"): _ACTIVATION,
    ("MkldnnRnnLayerBackward", "input"): _ACTIVATION,
    ("MkldnnRnnLayerBackward", "result0"): _ACTIVATION,
    ("MulBackward", "self"): _values(Role.PRODUCT),
    ("MulBackward", "other"): _values(Role.PRODUCT),
    ("SoftmaxBackward", "result"): Rule(role=Role.SOFTMAX, reads=Reads.EXACT),
    ("LogSoftmaxBackward", "result"): Rule(role=Role.SOFTMAX, reads=Reads.EXACT),
    ("MaxPool2DWithIndicesBackward", "self"): _POOL_INPUT,
    ("MaxPool2DWithIndicesBackward", "result1"): Rule(
        role=Role.POOL_INDEX, reads=Reads.EXACT, codec="pool-index"
    ),
    ("MaxPool3DWithIndicesBackward", "self"): _POOL_INPUT,
    ("MaxPool3DWithIndicesBackward", "result1"): _POOL_INDEX,
    ("AdaptiveMaxPool2DBackward", "self"): _POOL_INPUT,
    ("AdaptiveMaxPool2DBackward", "result1"): _POOL_INDEX,
    ("IndexAddBackward", "source"): _SHAPE,
    **{
        (f"{kind}ReduceBackward:{reduce}", attribute): _SHAPE
        for kind in ("Scatter", "Segment")
        for reduce in ("sum", "mean")
        for attribute in ("self", "src", "data", "result")
    },
    ("AvgPool2DBackward", "self"): _POOL_INPUT,
    ("AvgPool3DBackward", "self"): _POOL_INPUT,
    ("AdaptiveAvgPool2DBackward", "self"): _POOL_INPUT,
    ("MkldnnAdaptiveAvgPool2DBackward", "self"): _POOL_INPUT,
    ("NativeDropoutBackward", "result1"): Rule(role=Role.DROPOUT_MASK, reads=Reads.EXACT, codec="mask"),
    **{
        (f"ScaledDotProduct{kind}Backward", attribute): _ATTENTION
        for kind in ("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention")
        for attribute in ("query", "key", "value", "output", "out")
    },
}

_DROPOUT = Rule(role=Role.DROPOUT_MASK, reads=Reads.EXACT, codec="mask")
_INTEGER = Rule(role=Role.INTEGER, reads=Reads.EXACT, codec="narrow")
_BOOLEAN = Rule(role=Role.OTHER, reads=Reads.EXACT, codec="mask")
OTHER = Rule(role=Role.OTHER, reads=Reads.EXACT)

_WEIGHT_FUNCTIONS = frozenset({"linear", "multi_head_attention_forward"})
_DROPOUT_FUNCTIONS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"})


@cache
def operator_name(node_name: str) -> str:
    """The autograd node's name without namespace and overload digits: ``MulBackward``."""
    return node_name.rpartition("::")[2].rstrip("0123456789")


@cache
def _laid_over() -> dict[tuple[str, str], list[Rule]]:
    """Rules that users registered: of each row the last one is in force."""
    return {}


def lay_over(operator: str, attribute: str, rule: Rule) -> None:
    """Put a user's rule in force, before what is in the row now."""
    _laid_over().setdefault((operator, attribute), []).append(rule)


def take_off(operator: str, attribute: str, rule: Rule) -> None:
    """Take one back, if it is there: that object, not an equal one."""
    rules = _laid_over().get((operator, attribute), [])
    rules[:] = [each for each in rules if each is not rule]


def row(operator: str, attribute: str) -> Rule | None:
    """The rule in force, a user's or the table's own."""
    rules = _laid_over().get((operator, attribute))
    return rules[-1] if rules else _RULES.get((operator, attribute))


def rule_for(operator: str, attribute: str, function: str, *, kind: str) -> Rule:
    """The rule of one saved attribute.

    Args:
        operator: from :func:`operator_name`.
        attribute: the name behind ``_saved_``.
        function: name of the torch function the user's code called (dropout is a product otherwise).
        kind: ``"float"``, ``"bool"``, ``"integer"``: the saved tensor's dtype class; ``"other"``: one that
            no codec packs, such as a complex one.
    """
    if function in _DROPOUT_FUNCTIONS and operator == "MulBackward" and attribute == "other":
        return _DROPOUT
    rule = row(operator, attribute)
    if rule is not None and (kind == "float" or rule.codec in ("pool-index", "narrow", "mask")):
        return rule
    if kind in ("float", "other"):
        return OTHER
    return _BOOLEAN if kind == "bool" else _INTEGER


def is_activation_product(function: str) -> bool:
    """Whether a matrix product's second operand is an activation, not a layer's weight."""
    return function not in _WEIGHT_FUNCTIONS
