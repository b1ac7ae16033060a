"""Compressing the gradients that the ranks of a DistributedDataParallel model exchange."""

from __future__ import annotations

import itertools
import json
import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from squeezebox.gradients._auto import AUTO, Chooser, ExchangeCosts, ExchangePlan
from squeezebox.gradients._balanced import Balanced
from squeezebox.gradients._coders import CODERS, Coder
from squeezebox.gradients._costs import WHOLE
from squeezebox.gradients._exchange import Exchange
from squeezebox.gradients._hook import Buckets, Future, hook_of, in_bucket_order
from squeezebox.gradients._link import all_reduce_bytes, group_like
from squeezebox.gradients._low_rank import LowRank
from squeezebox.gradients._ranks import Worker, own_store
from squeezebox.gradients._residuals import Names, Residuals
from squeezebox.gradients._turn import Turn
from squeezebox.memory import close_at_exit
from squeezebox.schema import FormatError, OptionError, RankError, in_one_line

POWER = "powersgd"
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_USUAL_NOISE = 1e-2  # that "auto" keeps to
_FASTEST = 2.0  # factor by which a pass may change the level
_serials = itertools.count()  # compressions of a process, in the order that all ranks make them in


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a rank has sent of its gradients, in one backward pass or in several.

    ``plain_bytes`` an all-reduce of them would have taken, ``sent_bytes`` went. ``noise`` is the sum of
    squares of what was lost over that of what was packed, which is this rank's gradient with what is owed.
    ``whole`` counts groups that went as they are, because a rank had NaN or infinity.
    """

    plain_bytes: int = 0
    sent_bytes: int = 0
    noise: float = 0.0
    whole: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes went."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0


class CompressedGradients:
    """What :func:`compress_gradients` returns: it knows what was sent, and what is still owed."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        method: str,
        noise: float | None,
        ratio: float | None,
        rank: int | None,
        patience: float,
        balanced: bool,
    ) -> None:
        self._noise, self._ratio = noise, ratio
        named = [(name, each) for name, each in ddp.module.named_parameters() if each.requires_grad]
        self._sizes = {name: each.numel() for name, each in named}
        self._residuals = Residuals(self._sizes)
        self._keeps_unused = ddp.find_unused_parameters
        self._usual = ("plain" if method == AUTO else method, 1.0)
        self._ways: dict[Names, tuple[str, float]] = {}  # of groups that a plan has chosen
        coder = CODERS.get(method)
        shapes = {name: each.shape for name, each in named}
        self._low_rank = LowRank(rank or 1, shapes) if method == POWER else None
        owes = coder is not None or self._low_rank is not None
        self._buckets = Buckets({id(each): name for name, each in named}, owes=owes)
        self._level = 1.0 if coder is None else coder.start(noise, ratio)
        self._highest = math.inf if coder is None else coder.highest(list(self._sizes.values()))
        self._has_warned = False  # that the ratio is out of reach
        self._is_steered = coder.steered if coder is not None else method == AUTO
        self._plan: ExchangePlan | None = None
        self._chooser = Chooser(self._sizes, noise or _USUAL_NOISE) if method == AUTO else None
        self._is_balanced = balanced
        self._balanced: Balanced | None = None
        self._held: list[tuple[Names, Tensor]] = []  # gradients of a pass in which arrivals are measured
        self._jobs: list[Callable[[], None]] = []  # to be done at the end of a pass without packing
        self._is_synced = False  # whether the newest forward's gradients are exchanged
        self._hooks = self._listen(ddp, named) if method == AUTO else []
        self._turns: list[Turn] = []
        self._passes = 0
        self._is_closed = False
        self.method = method
        self.last, self.total = Traffic(), Traffic()
        self._exchange = Exchange(group_like(ddp.process_group, patience))
        store = own_store(next(_serials))
        ranks = dist.get_process_group_ranks(ddp.process_group)
        self._worker = Worker(store, dist.get_rank(), ranks, patience)
        close_at_exit(self)  # a gloo group that is held when Python ends may abort the process

    @property
    def passes(self) -> int:
        """Backward passes whose gradients were exchanged; the first one's go as they are (PowerSGD: two)."""
        return self._passes

    @property
    def level(self) -> float:
        """How much may be lost now, in the method's unit: a share of a root mean square, say.

        With "auto", times the level of each group's plan.
        """
        return self._level

    @property
    def plan(self) -> ExchangePlan | None:
        """What "auto" has chosen, and follows now; None before, and with other methods."""
        return self._plan if self._chooser is not None and self._chooser.is_done else None

    @property
    def costs(self) -> ExchangeCosts | None:
        """What "auto" has measured; None before, and with other methods."""
        return None if self._chooser is None else self._chooser.costs

    def take(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's hook: what one bucket's gradients become."""
        if bucket.index() == 0 and not self._buckets.planned:
            self._held, self._jobs = [], []  # of a backward that was broken off
        future = self._buckets.take(bucket, self._passes, self._start)
        if bucket.is_last():
            for names, flat in self._held:
                self._send(names, flat)
            self._worker.finish()
            self._worker.run_here(self._jobs)
            self._buckets.finish()
            noise = self._noise  # of the plan that this pass was under
            if self._chooser is not None:
                self._choose(self._chooser)
            self._account(noise)
            self._held, self._jobs, self._is_synced = [], [], False
        return future

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs to go on to the bit: this rank's own; each rank saves its own.

        It has the residuals by parameter, the level, and which parameters go together.
        """
        groups = self._buckets.groups
        return {
            "residuals": self._residuals.state(),
            "level": self._level,
            "passes": self._passes,
            "total": asdict(self.total),
            "groups": [list(names) for names in groups],
            "method": self.method,
            "rank": None if self._low_rank is None else self._low_rank.rank,
            "factors": None if self._low_rank is None else self._low_rank.state(groups),
            "plan": None if self.plan is None else self.plan.to_dict(),
            "choices": [] if self._balanced is None else [each.to_dict() for each in self._balanced.plans],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same rank.

        Raises:
            FormatError: it is of another model, method or rank of matrices.
        """
        rank = None if self._low_rank is None else self._low_rank.rank
        if (state["method"], state["rank"]) != (self.method, rank):
            raise FormatError(
                f"the state is of method '{state['method']}' with rank={state['rank']}, and this is "
                f"'{self.method}' with rank={rank}. Take the same."
            )
        self._residuals.restore(state["residuals"])
        self._level, self._passes = state["level"], state["passes"]
        self.total = Traffic(**state.get("total", {}))
        self._exchange.sent_bytes = self.total.sent_bytes
        self._buckets.groups = tuple(tuple(names) for names in state["groups"])
        if state["plan"] is not None and self._chooser is not None:
            self._follow(ExchangePlan.from_dict(state["plan"]))
            self._end_choice(self._chooser, list(map(ExchangePlan.from_dict, state.get("choices", []))))
        if self._low_rank is not None:
            self._low_rank.restore(self._buckets.groups, state["factors"])

    def close(self) -> None:
        """End the thread and the connections; do it last, as DDP takes no other hook."""
        if self._is_closed:
            return
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._worker.stop()
        if dist.is_initialized():
            dist.destroy_process_group(self._exchange.group)
        del self._exchange

    def _listen(
        self, ddp: DistributedDataParallel, named: Sequence[tuple[str, nn.Parameter]]
    ) -> list[RemovableHandle]:
        """Hear when forward ends, and when each gradient is there."""

        def forward_ended(*_: object) -> None:
            if torch.is_grad_enabled():
                self._is_synced = ddp.require_backward_grad_sync
            if self._is_synced:
                self._held, self._jobs = [], []
                self._buckets.begin(self._passes)
                if self._chooser is not None:
                    self._chooser.arrivals.begin()

        def hear(name: str, parameter: nn.Parameter) -> RemovableHandle:
            listen: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            return listen(lambda it: self._arrive(name, it))

        return [ddp.register_forward_hook(forward_ended), *(hear(*each) for each in named)]

    def _arrive(self, name: str, parameter: Tensor) -> None:
        if not self._is_synced or parameter.grad is None:
            return
        if self._chooser is not None and self._chooser.is_measuring:
            self._chooser.arrivals.note(name)
        elif self._buckets.planned:
            self._buckets.arrive(name, in_bucket_order(parameter), self._start)

    def _choose(self, chooser: Chooser) -> None:
        """Follow another plan in the next pass, if it is time to."""
        plan, balanced, seconds = None, self._balanced, chooser.arrivals.elapsed()
        if balanced is not None:
            self._worker.run_here([lambda: balanced.end_pass(seconds, self._exchange)])
            plan = balanced.plan
        elif not chooser.is_done:
            groups = [(each.names, each.flat) for each in self._turns]
            plan = chooser.end_pass(groups, self._exchange, self._worker)
            chooser.arrivals.end()
        if plan is not None and plan != self._plan:
            self._follow(plan)
        if chooser.is_done and balanced is None and plan is not None:
            self._end_choice(chooser, chooser.choices(plan))

    def _follow(self, plan: ExchangePlan) -> None:
        self._ways = {each.names: (each.method, each.level) for each in plan.groups}
        self._noise, self._plan = plan.noise, plan
        self._buckets.planned = not plan.follows_buckets
        self._buckets.groups = tuple(self._ways)

    def _end_choice(self, chooser: Chooser, choices: Sequence[ExchangePlan]) -> None:
        """The plan stays, or is one of these. What the others owe goes with the next gradients."""
        chooser.is_done, self._buckets.owes = True, True
        if self._is_balanced and len(choices) > 1 and self._plan is not None:
            self._balanced = Balanced(choices, self._plan)
        elif not (self._is_balanced or self._buckets.planned):
            for hook in self._hooks:
                hook.remove()

    def _start(self, names: Names, flat: Tensor) -> None:
        """Have a group's gradients exchanged, at the end if arrivals are measured."""
        if self._chooser is not None and self._chooser.is_measuring:
            self._held.append((names, flat))
        else:
            self._send(names, flat)

    def _send(self, names: Names, flat: Tensor) -> None:
        method, level = self._ways.get(names, self._usual)
        is_packed = self._packs(method)
        turn = Turn(
            names=names,
            flat=flat,
            sizes=[self._sizes[name] for name in names],
            residual=self._residuals.of(names, flat.dtype) if is_packed else flat,
            level=self._level * level,
            step=self._passes,
            keeps_unused=self._keeps_unused,
        )
        self._turns.append(turn)
        if not is_packed:
            self._send_whole(turn, WHOLE.get(method))
        elif self._low_rank is None:
            self._worker.submit(turn.begin_packed(CODERS[method], self._exchange))
        else:
            draws = not self._low_rank.knows(names)
            self._worker.submit(turn.begin_low_rank(self._low_rank, self._exchange))
            if draws:  # from the global generator, which recomputing in backward may want meanwhile
                self._worker.finish()

    def _packs(self, method: str) -> bool:
        """Whether groups of this method are packed in this pass."""
        return self._passes > 1 if method == POWER else self._passes > 0 and method in CODERS

    def _send_whole(self, turn: Turn, dtype: torch.dtype | None) -> None:
        """With all that is owed once a plan is chosen; in this thread if nothing is packed in the pass."""
        if self._chooser is not None and self._chooser.is_done:
            owed = self._residuals.take(turn.names, turn.flat.dtype)
            if owed is not None:
                turn.flat.add_(owed)
        methods = [self._usual[0], *(method for method, _ in self._ways.values())]
        if any(self._packs(method) for method in methods):
            norm = float(torch.linalg.vector_norm(turn.flat))
            turn.wanted_squares = norm * norm if math.isfinite(norm) else 0.0
        elif POWER not in methods:
            self._jobs.append(turn.begin_whole(self._exchange, dtype, is_alone=True))
            return
        self._worker.submit(turn.begin_whole(self._exchange, dtype))

    def _account(self, noise: float | None) -> None:
        """Add up a pass, and set the level of the next one."""
        turns, self._turns = self._turns, []
        ranks = self._exchange.ranks
        lost, wanted = sum(each.lost_squares for each in turns), sum(each.wanted_squares for each in turns)
        self.last = Traffic(
            plain_bytes=sum(all_reduce_bytes(each.flat.nbytes, ranks) for each in turns),
            sent_bytes=self._exchange.sent_bytes - self.total.sent_bytes,
            noise=lost / wanted if wanted else 0.0,
            whole=sum(each.went_whole for each in turns),
        )
        noises = self.total.noise * self._passes + self.last.noise
        self._passes += 1
        self.total = Traffic(
            plain_bytes=self.total.plain_bytes + self.last.plain_bytes,
            sent_bytes=self._exchange.sent_bytes,
            noise=noises / self._passes,
            whole=self.total.whole + self.last.whole,
        )
        if self._is_steered and self._passes > 1 and self.last.noise and not self.last.whole:
            self._level = self._steered(noise)

    def _steered(self, noise: float | None) -> float:
        """The level that meets the noise or the ratio asked for; at the highest, one element goes."""
        if noise is not None:
            factor = math.sqrt(noise / max(self.last.noise, 1e-12))
        else:
            sent, plain = self.last.sent_bytes, self.last.plain_bytes
            factor = (self._ratio or 1.0) * sent / plain if plain else 1.0
        level = self._level * min(max(factor, 1.0 / _FASTEST), _FASTEST)
        if self._ratio is not None and level > self._highest and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"ratio={self._ratio:g} cannot be reached: with next to nothing of the gradients, the last "
                f"backward's messages are still {self.last.sent_bytes} bytes for {self.last.plain_bytes}, a "
                f"ratio of {self.last.ratio:.1f}. Training goes on so; ask for a lower ratio.",
                stacklevel=2,
            )
        return min(level, self._highest)


def compress_gradients(
    ddp: nn.Module,
    method: str = "entropy",
    *,
    noise: float | None = None,
    ratio: float | None = None,
    rank: int | None = None,
    patience: float = 60.0,
    balanced: bool = False,
) -> CompressedGradients:
    """Have the ranks of a DistributedDataParallel model exchange compressed gradients.

    Call it on all ranks alike, before the first backward; the training loop stays as it is. What packing
    loses of a gradient is added to the next one (error feedback), so nothing is lost for good: all that was
    sent, and what is owed, sum up to the gradients. All ranks decode the same bytes, and so stay equal to the
    bit. The first backward's gradients go as they are, as DDP then sorts its buckets.

    It takes a tensor of memory for each trained parameter, in float32 (float64 where that is). During
    backward come some MiB a rank ("entropy" and "planes", up to 4 ranks), or two tensors of the size of a
    bucket.

    Args:
        ddp: on CPUs; its gradients are floating-point.
        method: "entropy" (fewest bytes) or "planes" (fastest) hold every element within a share of its
            parameter's root mean square; "auto" chooses what is sent together, and how, by what it takes
            here; "powersgd", "top-k", "random-k", "1-bit", "fp16", "bf16" are there to compare with, and
            "plain" is DDP's own exchange.
        noise: squared error over squared gradient that packing may cause in each backward, such as 0.1; the
            bound follows what was measured. 0 sends gradients as they are. For "auto" 0.01 unless given.
        ratio: how many times fewer bytes to send, such as 50, instead of noise; 1 sends gradients as they
            are. A warning says once if messages cannot become as small.
        rank: of "powersgd", the columns of the two matrices that stand for a gradient, usually 1 to 4
            (default: 1). Gradients of fewer than two dimensions go as they are.
        patience: seconds after which a rank that is waited for counts as failed.
        balanced: with "auto", go on to another plan where the link becomes slower or faster; all of them keep
            to the noise. Bits then depend on what steps take, also in a training that resumes.

    Returns:
        What was sent, and the state to save next to the model's.

    Raises:
        OptionError: the options or the model are not for this.
        RankError: ranks do not have the same options. From backward: a rank is gone or hangs.
    """
    _check_options(method, noise, ratio, rank, patience)
    if balanced and method != AUTO:
        raise OptionError(f"balanced=True with method '{method}': only 'auto' has several plans. Take that.")
    model = _checked_model(ddp)
    if noise == 0 or ratio == 1:
        method = "plain"
    _agree(model, f"method={method}, noise={noise}, ratio={ratio}, rank={rank}, balanced={balanced}")
    made = CompressedGradients(model, method, noise, ratio, rank, patience, balanced)
    try:
        model.register_comm_hook(None, hook_of(made.take))
    except RuntimeError as error:
        made.close()
        raise OptionError(
            f"this model has a communication hook already ({in_one_line(error)}); DDP takes one. "
            "Wrap the model again, and register no other."
        ) from error
    return made


def _require_numbers(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, numbers.Real):
            raise OptionError(f"{name}={value!r} is a {type(value).__name__}. Give a number.")


def _check_options(
    method: str, noise: float | None, ratio: float | None, rank: int | None, patience: float
) -> None:
    _require_numbers(noise=noise, ratio=ratio, patience=patience)
    coder: Coder | None = CODERS.get(method)
    if coder is None and method not in (AUTO, POWER) and method not in WHOLE:
        raise OptionError(f"no method '{method}'; there are {', '.join([AUTO, *CODERS, POWER, *WHOLE])}.")
    if rank is not None and not (method == POWER and type(rank) is int and rank >= 1):
        raise OptionError(
            f"rank={rank} with method '{method}': it is the number of columns, from 1, of the matrices of "
            f"'{POWER}'. Leave it out, or take that with rank=1 to 4."
        )
    steered = coder is not None and coder.steered
    if method == AUTO and ratio is not None:
        raise OptionError(f"method 'auto' keeps to noise, got ratio={ratio}. Give noise={_USUAL_NOISE}, say.")
    if not steered and method != AUTO and (noise or ratio not in (None, 1)):
        raise OptionError(
            f"method '{method}' has one size of messages, got noise={noise} and ratio={ratio}. Leave them "
            "out, or take 'entropy'."
        )
    bounded = method in ("entropy", "planes", AUTO)
    if noise is not None and not (0.0 <= noise < 1.0 and (bounded or noise == 0)):
        raise OptionError(
            f"noise={noise} with method '{method}': it is a share of the squared gradient from 0 to 1, which "
            "'entropy' and 'planes' can keep to. Give such a one, or ratio=."
        )
    if ratio is not None and not 1.0 <= ratio < math.inf:
        raise OptionError(f"ratio={ratio}: it says how many times fewer bytes go, from 1. Try 30.")
    if steered and (noise is None) == (ratio is None):
        raise OptionError(
            f"method '{method}' takes {'one of noise= and ratio=' if bounded else 'ratio='}, got "
            f"noise={noise} and ratio={ratio}. Try {'noise=0.1' if bounded else 'ratio=50'}."
        )
    if not patience > 0.0:
        raise OptionError(f"patience={patience}: a rank must be waited for. Give seconds above 0.")


def _checked_model(ddp: nn.Module) -> DistributedDataParallel:
    if any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(ddp).__mro__):
        raise OptionError(
            "this model is sharded (FSDP), whose ranks reduce and scatter gradients without a hook for "
            "compression. Wrap the model in DistributedDataParallel, or leave gradients as they are."
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise OptionError(
            f"compress_gradients takes a DistributedDataParallel model, got {type(ddp).__name__}: what is "
            "compressed is what its ranks exchange. Wrap the model first."
        )
    if ddp.mixed_precision is not None:
        raise OptionError("DDP's mixed_precision makes gradients of two dtypes; use torch.autocast.")
    for name, module in ddp.module.named_modules():
        if getattr(module, "sparse", False) is True:
            raise OptionError(f"'{name}' has sparse gradients, which do not pack; make it with sparse=False.")
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and (parameter.device.type != "cpu" or parameter.dtype not in _FLOATS):
            raise OptionError(
                f"'{name}' is {parameter.dtype} on {parameter.device}: gradients are packed between CPUs, in "
                "float16, bfloat16, float32 and float64. Leave compress_gradients out here."
            )
    return ddp


def _agree(ddp: DistributedDataParallel, mine: str) -> None:
    """Refuse to begin with ranks of different options, which would wait for each other for good."""
    group = ddp.process_group
    text = torch.frombuffer(bytearray(json.dumps(mine).encode().ljust(256)), dtype=torch.uint8)
    found = [torch.empty_like(text) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, text, group=group)
    for rank, each in enumerate(found):
        theirs = json.loads(bytes(each.numpy()).decode())
        if theirs != mine:
            raise RankError(f"rank {rank} has {theirs}, and this one {mine}. Give all the same options.")
