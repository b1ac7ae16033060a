"""No element outside of a proven interval, the first operator that overflows, the codecs' own arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.codecs._reference import _groups
from squeezebox.doctor._intervals import Interval
from squeezebox.doctor._ranges import Ranges, checked_ranges
from squeezebox.reports import RangeCheck
from squeezebox.schema import OptionError

UNARY = [torch.relu, torch.tanh, torch.sigmoid, torch.exp, F.gelu, F.silu, torch.abs, torch.neg, torch.floor,
    torch.ceil, torch.round, torch.sign, lambda x: x.clamp(-1, 2), lambda x: x**2, lambda x: x**3,
    lambda x: x.sum(1, keepdim=True), lambda x: x.mean(0, keepdim=True), lambda x: x.amax(1, keepdim=True),
    lambda x: x.softmax(1), lambda x: x.log_softmax(1), lambda x: F.layer_norm(x, (6,)), lambda x: 3 - x,
    lambda x: x / (x.abs() + 1), lambda x: x.where(x > 0, -0.5 * x), lambda x: x.masked_fill(x > 1, 7.0),
    lambda x: F.pad(x[:, :5], (1, 0)), lambda x: x[:, [5, 4, 3, 2, 1, 0]], lambda x: x.div(0.25),
    lambda x: F.gelu(x, approximate="tanh")]  # fmt: skip
BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.minimum,
    torch.maximum,
    lambda x, y: x @ y.t(),
    lambda x, y: torch.cat([x, y])[: len(x)],
    lambda x, y: torch.add(x, y, alpha=-3),
    lambda x, y: x.clone().add_(y),
]
EDGES = st.floats(-3, 3, width=32)


def outside(proven, again):
    """Operators of a run with an element outside of what another run proved, by name."""
    assert [each.operator for each in proven] == [each.operator for each in again]
    return [
        one.operator
        for one, other in zip(proven, again, strict=True)
        for interval, seen in zip(one.proven, other.seen, strict=True)
        if interval is not None and not interval.low <= seen.low <= seen.high <= interval.high
    ]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, len(UNARY) + len(BINARY) - 1), min_size=1, max_size=6),
    EDGES,
    EDGES,
    st.integers(0, 99),
)
def test_random_programs_stay_within_what_is_proven(program, one, other, seed):
    low, high = sorted((one, other))
    interval = Interval(float(torch.tensor(low)), float(torch.tensor(high)))

    def run(x, y):
        for number in program:
            if number < len(UNARY):
                x = UNARY[number](x).expand(6, 6)
            else:
                x = BINARY[number - len(UNARY)](x, y).expand(6, 6)
        return x

    def ranges(x, y):
        with Ranges() as found:
            for each in (x, y):
                found.assume(each, interval)
            run(x, y)
        return found.reached

    generator = torch.Generator().manual_seed(seed)

    def drawn(kind):
        share = torch.rand(6, 6, generator=generator)
        return torch.lerp(torch.tensor(low), torch.tensor(high), share.round() if kind else share)

    proven = ranges(drawn(0), drawn(0))
    for kind in range(4):
        assert not outside(proven, ranges(drawn(kind % 2), drawn(kind // 2)))


TENS = torch.full((1, 1, 8, 8), 10.0)


def written(write):
    def program():
        base = torch.zeros(8, 8)
        write(base)
        return base * 1e3

    return program


def copied_in_backward():
    x = TENS.clone().requires_grad_()
    (F.avg_pool2d(x, 3, divisor_override=-1).sum() + torch.zeros(8, 8).copy_(x[0, 0]).sum() * 5).backward()


def moved_moments():
    norm = nn.BatchNorm2d(1)
    norm(TENS * torch.linspace(100, 101, 64).view(8, 8))
    return norm.eval()(TENS * 0)


def scaled_weight():
    weight = nn.Parameter(torch.ones(4, 4))
    before = TENS.view(16, 4) @ weight
    with torch.no_grad():
        torch._foreach_mul_([weight], 1e4)
    return before + TENS.view(16, 4) @ weight


PLACED = {
    "copy": written(lambda base: base.copy_(TENS[0, 0])),
    "copy to integers": lambda: torch.zeros(4, dtype=torch.int32).copy_(torch.full((4,), 9.7)) * 3,
    "one row": written(lambda base: base.__setitem__(2, TENS[0, 0, 0])),
    "rows": written(lambda base: base.__setitem__(slice(4), TENS[0, 0, :4])),
    "masked": written(lambda base: base.__setitem__(base == 0, 7.0)),
    "masked fill": written(lambda base: base.masked_fill_(base == 0, 7.0)),
    "index": written(lambda base: base.index_add_(0, torch.zeros(8, dtype=torch.long), TENS[0, 0])),
    "scatter": written(lambda base: base.scatter_(1, torch.ones(8, 1, dtype=torch.long), TENS[0, 0])),
    "fill": written(lambda base: base[1].fill_(5.0)),
    "diagonal": written(lambda base: base.fill_diagonal_(5.0)),
    "several": written(lambda base: torch._foreach_add_([base], 1e4)),
    "slice scatter": lambda: torch.slice_scatter(torch.zeros(4, 4), torch.ones(2, 4), 0, 0, 2) * 2,
    "pad": lambda: F.pad(TENS, (1, 1), value=77.0) * 2,
    "sum of a window": lambda: F.avg_pool2d(TENS, 3, divisor_override=1),
    "sum of less": lambda: F.avg_pool2d(TENS, 3, ceil_mode=True, divisor_override=9),
    "zeros in a window": lambda: 1 / F.avg_pool2d(TENS, 3, padding=1),
    "zeros of one dimension": lambda: 1 / F.avg_pool1d(TENS[0], 3, padding=1),
    "rounded mean": lambda: F.avg_pool2d(torch.full((1, 1, 256, 256), 0.1), 256),
    "rounded adaptive mean": lambda: F.adaptive_avg_pool2d(torch.full((1, 1, 256, 256), 0.1), 2),
    "decimals": lambda: torch.full((3,), 0.26).round(decimals=1),
    "booleans": lambda: (TENS * 0.05).bool().float() * 3 + 1 / TENS.bool().float(),
    "nothing": lambda: TENS.flatten()[:0].sum() * 2,
    "infinite": lambda: torch.tensor([1.0, torch.inf]).nan_to_num(posinf=-5.0) * 2,
    "bits": lambda: TENS.view(torch.int32) + 0,
    "complex": lambda: torch.complex(TENS, TENS).abs() + torch.fft.rfft2(TENS).real.sum(),
    "conjugate": lambda: torch.complex(TENS, TENS).conj().imag * 2 + (torch.complex(TENS, TENS) * 1j).real,
    "scalar": lambda: torch.tensor(3.0).log_softmax(0) + torch.tensor(3.0).softmax(0),
    "moments": moved_moments,
    "weight": scaled_weight,
    "backward": copied_in_backward,
}


@pytest.mark.parametrize("name", PLACED)
def test_what_is_written_in_place_padded_or_cast_is_within(name):
    with Ranges() as found:
        PLACED[name]()
    full = [each for each in found.reached if "empty" not in each.operator and each.operator != "slice"]
    assert not outside(full, full)


def test_a_copy_reaches_as_far_as_what_is_copied():
    def step():
        buffer = torch.zeros(8, 8)
        buffer[:4] = TENS[0, 0, :4] * 100
        return buffer * 1e3

    [fp16, *_] = squeezebox.check_ranges(step, margin=1.0).figures.overflows
    assert fp16.operator == "mul" and fp16.reach == pytest.approx(1e6, rel=1e-3)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_what_kernels_lose_near_zero_is_within_too(approximate):
    for low in torch.arange(-10.0, 3.0, 0.125).tolist():
        x = torch.linspace(low, low + 0.125, 1000)
        with Ranges() as found:
            found.assume(x, Interval(low, low + 0.125))
            seen = F.gelu(x, approximate=approximate)
        [proven] = found.reached[-1].proven
        assert proven.low <= float(seen.min()) and float(seen.max()) <= proven.high
        assert proven.high - proven.low < 0.2


def network():
    torch.manual_seed(3)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2)
    return nn.Sequential(
        *layers, nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 16), nn.GELU(), nn.Linear(16, 5)
    )


def stepped(model, images, labels):
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()


def test_a_step_stays_within_for_other_inputs_and_weights():
    model, labels = network(), torch.arange(4)
    images = torch.linspace(-1, 1, 4 * 3 * 144).reshape(4, 3, 12, 12)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Ranges(2.0) as proven:
        stepped(model, images, labels)
    assert all(each.is_proven for each in proven.reached)
    for seed in range(5):
        torch.manual_seed(seed)
        model.load_state_dict(before)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.0 + torch.rand_like(weight) if seed % 2 else 2.0)
        first = model[0].weight[0].detach().sign().tile(1, 4, 4)[:, :12, :12]
        drawn = 2.0 * (
            first.expand(4, -1, -1, -1) if seed == 4 else torch.rand(4, 3, 12, 12).mul(2).sub(1).sign()
        )
        with Ranges() as again:
            stepped(model, drawn, labels)
        assert not outside(proven.reached, again.reached)


class Normalised(nn.Module):
    """Group and layer norms, with and without weights, attention, an embedding and average pools."""

    def __init__(self):
        super().__init__()
        self.words, self.norm, self.bare = nn.Embedding(7, 16), nn.LayerNorm(16), nn.LayerNorm(16, eps=1e-3)
        self.bare.register_parameter("weight", None)
        self.group, self.last = nn.GroupNorm(2, 4), nn.Linear(16, 5)

    def forward(self, words, pixels):
        x = self.words(words) + pixels.flatten(2).transpose(1, 2)
        x = self.norm(x) + F.scaled_dot_product_attention(*[x[:, None]] * 3)[:, 0]
        x = F.avg_pool2d(self.group(self.bare(x).view(-1, 4, 8, 8)), 3, stride=2, padding=1)
        return self.last(F.avg_pool2d(x, 2).flatten(1))


@pytest.mark.parametrize("training", [True, False])
def test_backward_of_norms_attention_and_pools_stays_within(training):
    torch.manual_seed(0)
    model = nn.ModuleList([Normalised(), nn.BatchNorm2d(16)]).train(training)
    labels, words = torch.arange(4), torch.arange(64).view(4, 16) % 7

    def run(pixels, words=words):
        with Ranges() as found:
            found.assume(pixels, Interval(-2.0, 2.0))
            found.assume(words, Interval(0.0, 6.0))
            model.zero_grad()
            F.cross_entropy(model[0](words, model[1](pixels)), labels).backward()
        return found.reached

    before = {name: value.clone() for name, value in model.state_dict().items()}
    proven = run(torch.linspace(-2, 2, 4 * 256).view(4, 16, 4, 4))
    unproven = {each.operator for each in proven if not each.is_proven}
    assert unproven == set()
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(4, 16, 4, 4, generator=generator) * 4 - 2
        spikes = torch.full_like(drawn, -2.0)
        spikes.view(4, 16, 16)[:, :, seed] = 2.0
        for pixels in (drawn, drawn.sign() * 2, spikes, drawn * 1e-4):
            model.load_state_dict(before)
            again = run(pixels, torch.randint(7, (4, 16), generator=generator) if seed else words * 0)
            assert not outside(proven, again)


def test_the_first_operator_that_can_overflow_and_the_shift_that_cures_it(tmp_path):
    weight, inputs = torch.full((100, 64), 3.0), torch.full((2, 64), 400.0)

    def step(shift=0):
        return (F.linear(inputs / 2**shift, weight) + 1).relu()

    found = squeezebox.check_ranges(step, margin=1.0)
    (overflow,) = found.figures.overflows
    assert (overflow.type, overflow.operator, overflow.count) == ("fp16", "mm", 3)
    assert overflow.reach == pytest.approx(64 * 3 * 400, rel=1e-3) and overflow.shift == 1
    assert not step().half().isfinite().any() and step(1).half().isfinite().all()
    assert not squeezebox.check_ranges(lambda: step(overflow.shift), margin=1.0).figures.overflows
    assert "fp16: operator 1, mm, is the first" in str(found) or "is the first that can overflow" in str(
        found
    )
    found.save(tmp_path / "ranges.json")
    assert RangeCheck.load(tmp_path / "ranges.json") == found
    with pytest.raises(OptionError, match=r"margin 0.5 is no factor from 1"):
        squeezebox.check_ranges(step, margin=0.5)


def test_int32_holds_sums_of_int8_products_up_to_a_length():
    def found(terms):
        rows = torch.zeros(1, terms)
        return [each.type for each in squeezebox.check_ranges(lambda: rows @ rows.t()).figures.overflows]

    most = (2**31 - 1) // 127**2
    assert (found(most), found(most + 1)) == ([], ["int32"])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_the_codecs_own_integers_are_proven(bits):
    values = torch.linspace(-3, 3, 512)
    anything = Interval(-3.0e38, 3.0e38)
    for pack in (_groups.pack_zero, _groups.pack_minmax):
        if pack is _groups.pack_zero and bits == 1:
            values = values.abs()  # one bit has no room for a sign
        with Ranges() as ranges:
            ranges.assume(values, anything)
            codes, scales = pack(values, bits, False, 0)
        assert integers(ranges) == []
        with Ranges() as ranges:
            ranges.assume(codes, Interval(0.0, 255.0))
            _groups.unpack_lanes(codes.view(-1, 32 * bits), bits)
        assert integers(ranges) == []
    assert codes.dtype == torch.uint8


def integers(ranges):
    """Operators on integers that can leave their type, and those that no rule proves."""
    overflows = [each for each in checked_ranges(ranges.reached, 1.0).overflows if "int" in each.type]
    unproven = [
        each.operator for each in ranges.reached if not each.is_proven and not each.dtype.is_floating_point
    ]
    return [*[(each.type, each.operator) for each in overflows if each.type != "int32"], *unproven]


def test_the_noise_of_rounding_wraps_in_one_product_only():
    with Ranges() as ranges:
        _groups.uniform(4096, 2**32 - 1, torch.device("cpu"), torch.float32)
    found = [each for each in checked_ranges(ranges.reached, 1.0).overflows if each.type == "int64"]
    assert [(each.type, each.operator, each.count) for each in found] == [("int64", "mul", 1)]


def test_what_is_not_a_number_hides_no_other_element():
    def step(x):
        known = torch.nan_to_num(x)
        return (known * known).sum()

    def overflows(*elements):
        found = squeezebox.check_ranges(step, batch=lambda: torch.tensor([elements]), margin=1.0)
        return [(each.type, each.operator) for each in found.figures.overflows]

    assert overflows(torch.nan, 300.0) == overflows(300.0, torch.nan) == [("fp16", "mul")]
    assert overflows(torch.nan, torch.nan) == []
