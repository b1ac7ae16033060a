"""The commands and their options. Loads typer, but torch only once a command runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

import squeezebox
from squeezebox.cli._demo_command import demo
from squeezebox.cli._devices import devices
from squeezebox.cli._embeddings_command import embeddings
from squeezebox.cli._estimate import refuse_useless, require_step
from squeezebox.cli._estimate_command import estimate
from squeezebox.cli._gradients import gradients
from squeezebox.cli._memory import memory
from squeezebox.cli._options import (
    Exact,
    Factory,
    Input,
    InputDtype,
    Json,
    Load,
    Loss,
    Noise,
    Optimizer,
    Sample,
)
from squeezebox.cli._pipeline import pipeline
from squeezebox.cli._show import progress
from squeezebox.cli._stream import stream
from squeezebox.cli._values import require_apart

app = typer.Typer(
    help="Train PyTorch networks in less memory by packing what autograd saves, within error bounds.",
    epilog="Exit status: 0 done, 2 a wrong option or argument, 1 anything else.",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)

app.add_typer(pipeline, name="pipeline")
app.add_typer(devices, name="devices")
app.add_typer(memory, name="memory")
app.add_typer(gradients, name="gradients")
app.add_typer(stream, name="stream")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(squeezebox.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(estimate)
app.command()(embeddings)


@app.command()
def plan(
    factory: Factory,
    input: Input = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step (default: 32).")] = None,
    sample: Sample = None,
    loss: Loss = None,
    optimizer: Optimizer = "sgd-momentum",
    input_dtype: InputDtype = None,
    budget: Annotated[
        str | None, typer.Option(help="Peak of the step: 2GiB, or 50% of the plain one's (default: least).")
    ] = None,
    noise: Noise = None,
    exact: Exact = False,
    offload: Annotated[
        bool, typer.Option("--offload/--no-offload", help="Whether tensors may be moved to a file.")
    ] = True,
    offload_folder: Annotated[
        Path | None, typer.Option(help="Where that file is made: a folder on a disk.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute/--no-recompute", help="Whether tensors may be recomputed.")
    ] = True,
    time_limit: Annotated[
        float | None,
        typer.Option(help="As little memory as fits this multiple of the plain step's time, such as 1.3."),
    ] = None,
    arena: Annotated[bool, typer.Option("--arena", help="Count places of an arena.")] = False,
    states: Annotated[
        bool,
        typer.Option("--states", help="Gradients, states and frozen weights may be in a file too, exactly."),
    ] = False,
    clip: Annotated[
        float | None, typer.Option(help="With --states: the norm that your loop clips gradients to.")
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Backward passes that add up to one update.")] = 1,
    update_noise: Annotated[
        float | None,
        typer.Option(help="With --states: error of updates up to which optimizer state may be packed, 0.02."),
    ] = None,
    weight_noise: Annotated[
        float | None,
        typer.Option(help="With --states: error up to which frozen weights may be packed, 0.02."),
    ] = None,
    load: Load = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep profiles, and use them again.")
    ] = True,
    diff: Annotated[
        Path | None, typer.Option(help="An earlier plan: print what changes instead of the plan.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also time squeezebox.compile within the same bytes.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the plan goes, as JSON (default: plan.json; with --diff nowhere)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose how to hold every saved tensor so that a training step fits the budget, in the least time.

    Runs a few steps. Without a sample the inputs are random, which tells bytes and seconds, and noise only
    roughly.
    """
    require_step(input, batch)
    if offload_folder is not None and not offload:
        raise squeezebox.OptionError(
            "--no-offload moves nothing, so --offload-folder is for nothing; give one of them."
        )
    if compiled and (clip is not None or accumulate != 1):
        raise squeezebox.OptionError(
            "--compiled times steps of one backward pass without clipping; leave --clip and --accumulate out."
        )
    require_apart({"--out": out}, {"--diff": diff})
    from squeezebox.cli._plan import Step, make

    if out is None and diff is None:
        out = Path("plan.json")
    earlier = None if diff is None else squeezebox.load_plan(diff)
    step = Step(factory, input, batch, sample, loss, optimizer, input_dtype=input_dtype)
    place = offload if offload_folder is None else str(offload_folder)
    result = make(
        step,
        budget=budget,
        noise=noise,
        exact=exact,
        offload=place,
        recompute=recompute,
        time_limit=time_limit,
        arena=arena,
        states=states,
        clip=clip,
        accumulate=accumulate,
        update_noise=update_noise,
        weight_noise=weight_noise,
        load=load,
        cache=cache,
        out=None if out is None else str(out),
    )
    text = str(result) if earlier is None else earlier.diff(result)
    values = result.to_dict() if earlier is None else {"diff": text}
    from squeezebox.cli._beside import another_way, beside_compiled

    if compiled:
        beside = beside_compiled(result, step, update_noise=update_noise, offload=place)
        text, values = f"{text}\n\n{beside}", {**values, "compiled": beside.to_dict()}
    else:
        text += another_way(result)
    print(json.dumps(values, indent=1) if as_json else text)


@app.command()
def max_batch(
    factory: Factory,
    budget: Annotated[
        str, typer.Option(help="Peak of the step: 2GiB, or 80% of the plain one's at --batch.")
    ],
    input: Input = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step to begin with (default: 8).")] = None,
    sample: Sample = None,
    loss: Loss = None,
    optimizer: Optimizer = "sgd-momentum",
    input_dtype: InputDtype = None,
    noise: Noise = None,
    exact: Exact = False,
    as_json: Json = False,
) -> None:
    """Find the largest batch whose training step fits the budget.

    Runs a few steps at two batches and at the answer.
    """
    require_step(input, batch)
    from squeezebox.cli._plan import Step, largest_batch

    result = largest_batch(
        Step(factory, input, batch, sample, loss, optimizer, usual_batch=8, input_dtype=input_dtype),
        budget=budget,
        noise=noise,
        exact=exact,
    )
    print(json.dumps(result.to_dict(), indent=1) if as_json else result)


@app.command()
def find_batch(
    factory: Factory,
    memory: Annotated[str | None, typer.Option(help="Such as 8GiB (default: what is free now).")] = None,
    reserve: Annotated[str, typer.Option(help="To leave free: 200MiB, or a share of the memory.")] = "10%",
    effective: Annotated[
        int | None, typer.Option(help="Samples of one update, in microbatches that fit.")
    ] = None,
    input: Input = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples a step to begin with, at most (default: 8).")
    ] = None,
    sample: Sample = None,
    loss: Loss = None,
    optimizer: Optimizer = "sgd-momentum",
    input_dtype: InputDtype = None,
    noise: Noise = None,
    exact: Exact = False,
    load: Load = None,
    out: Annotated[Path | None, typer.Option(help="Where its plan goes (default: nowhere).")] = None,
    as_json: Json = False,
) -> None:
    """Find the largest batch that trains in the memory there is, without running out of it.

    Runs a few plain steps of two batches that fit, and one of the answer under its plan.
    """
    require_step(input, batch)
    from squeezebox.cli._plan import Step, found_batch

    result = found_batch(
        Step(factory, input, batch, sample, loss, optimizer, usual_batch=8, input_dtype=input_dtype),
        memory=memory,
        reserve=reserve,
        effective=effective,
        noise=noise,
        exact=exact,
        load=load,
        out=None if out is None else str(out),
    )
    print(json.dumps(result.to_dict(), indent=1) if as_json else result)


@app.command()
def audit(
    train: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="A whole training: train(run).")],
    arms: Annotated[
        str,
        typer.Option(
            help="The first is compared with: plain, squeezed (--noise), exact, noise=1e-2, plan=FILE."
        ),
    ] = "plain,squeezed",
    seeds: Annotated[int, typer.Option(help="Trainings of each series.")] = 10,
    factors: Annotated[
        str, typer.Option(help="Varied alone too; none for none.")
    ] = "initialisation,order,augmentation,implementation",
    noise: Annotated[
        float | None, typer.Option(help="Allowed gradient noise of the squeezed arm (default: 1e-3).")
    ] = None,
    margin: Annotated[float, typer.Option(help="In deviations between the first arm's seeds.")] = 1.0,
    workers: Annotated[int, typer.Option(help="Trainings at the same time, each in a process.")] = 1,
    threads: Annotated[
        int | None,
        typer.Option(help="Of each training (default: as in --out, else cores over workers)."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Repeated operator by operator; 0 for none.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder that keeps finished trainings.")] = Path("audit"),
    as_json: Json = False,
) -> None:
    """Does compression change a training more than its tooling does? Trains it many times to find out.

    What is in --out already is not trained again. Exit status 1 also where the same training twice is not
    equal to the bit. docs/audit.md says what train(run) does.
    """
    from squeezebox.cli._audit import Request, run

    run(Request(train, arms, seeds, factors, noise, margin, workers, threads, steps, out), as_json=as_json)


@app.command()
def calibrate(
    train: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="A whole training: train(run).")],
    margin: Annotated[float, typer.Option(help="Loss of the metric that is too much, in its unit.")] = 0.01,
    metric: Annotated[str, typer.Option(help="accuracy, or the score given to run.finish.")] = "accuracy",
    noise: Annotated[str, typer.Option(help="Tightest and loosest; none leaves it out.")] = "1e-4,0.3",
    update_noise: Annotated[str, typer.Option(help="The same of the optimizer's packed state.")] = "none",
    knob: Annotated[
        list[str] | None, typer.Option(help="NAME=LOW,HIGH of your own, read by run.knob(NAME).")
    ] = None,
    trainings: Annotated[int, typer.Option(help="The most that are made; a short run counts a tenth.")] = 14,
    threads: Annotated[
        int | None, typer.Option(help="Of each training (default: as in --out, else the cores).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder that keeps finished trainings.")] = Path("calibration"),
    as_json: Json = False,
) -> None:
    """Find the loosest noise with which a training's metric stays within a margin of plain training's.

    What is in --out already is not trained again. Exit status 1 where no level is shown.
    docs/calibrate.md says how it is found, docs/audit.md what train(run) does.
    """
    from squeezebox.cli._calibrate import Request, knobs_named, run

    knobs = knobs_named(noise, update_noise, knob or ())
    run(Request(train, margin, metric, knobs, trainings, threads, out), as_json=as_json)


@app.command()
def parity(
    a: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="Returns what is right.")],
    b: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="Returns what should agree with it.")],
    data: Annotated[str, typer.Option(metavar="MODULE:CALLABLE", help="Returns some batches of inputs.")],
    backward: Annotated[bool, typer.Option("--backward/--forward", help="Compare gradients too.")] = True,
    tolerance: Annotated[float, typer.Option(help="Difference of an element that is none.")] = 1e-5,
    as_json: Json = False,
) -> None:
    """Name the first layer in which two models or pipelines differ, and what it does to the output.

    Each returns a model, a function, or a list of stages with their names. Every layer of the second is given
    the first one's inputs, so that its difference is its own. Exit status 1 where they differ.
    """
    from squeezebox.cli._parity import run

    run((a, b), data, backward=backward, tolerance=tolerance, as_json=as_json)


app.command()(demo)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN.JSON", help="From session.timeline(step).save(path).")],
    page: Annotated[
        Path | None, typer.Option("--html", help="Write one page that works offline (RUN.html with --open).")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    snapshot: Annotated[Path | None, typer.Option(help="Write one for pytorch.org/memory_viz.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Show where a profiled step's time and memory went, as text, page, trace or snapshot."""
    from squeezebox.cli._report import show

    page = page or (run.with_suffix(".html") if open_page else None)
    timeline = show(run, page, trace, snapshot, open_page)
    print(json.dumps(timeline.to_dict(), indent=1) if as_json else timeline)


@app.command()
def doctor(
    step: Annotated[
        str | None, typer.Argument(metavar="MODULE:CALLABLE", help="Takes one training step.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="MODULE:CALLABLE", help="Makes what each step is called with.")
    ] = None,
    as_device: Annotated[
        bool, typer.Option("--as-device", help="Without a device, name what would wait for one.")
    ] = False,
    ranges: Annotated[
        bool, typer.Option("--ranges", help="Instead: prove what can overflow fp16, bf16 or integers.")
    ] = False,
    packages: Annotated[
        str | None, typer.Option(help="Check and import these: timm,transformers (default: usual ones).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a training step, or without one the environment.

    A step runs three times; the report names what it does needlessly, by line of Python. With --ranges it
    runs once, and the report names the first operator that can overflow.

    Of the environment: versions, devices, and packages that are not what was installed (exit status 1).
    --packages adds it to a step.
    """
    from squeezebox.cli._doctor import examine_environment, examine_step, show

    given = {"--ranges": ranges, "--batch": batch is not None, "--as-device": as_device}
    if step is None:
        refuse_useless(given, "of a step; name one, as in my_script:step, or leave it out")
    if ranges:
        refuse_useless({"--as-device": as_device}, "of a check without --ranges; leave one of the two out")
    found = None if step is None else examine_step(step, batch, as_device, ranges=ranges)
    wanted = step is None or packages is not None
    show(found, examine_environment(packages) if wanted else None, as_json)


@app.command()
def rewrite(
    factory: Factory,
    input: Input = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step (default: 8).")] = None,
    sample: Sample = None,
    loss: Loss = None,
    optimizer: Optimizer = "sgd-momentum",
    input_dtype: InputDtype = None,
    without: Annotated[str, typer.Option(help="Rewrites to leave out, by name, with commas.")] = "",
    out: Annotated[Path, typer.Option(help="Where the table goes, as JSON.")] = Path("rewrites.json"),
    as_json: Json = False,
) -> None:
    """Find parts of a model that can be computed in less memory, and check them on the sample.

    Your script applies them: squeezebox.rewrite(model, rewrites=squeezebox.load_rewrites("rewrites.json")).
    """
    require_step(input, batch)
    from squeezebox.cli._plan import Step, found_rewrites

    names = tuple(name.strip() for name in without.split(",") if name.strip())
    found = found_rewrites(
        Step(factory, input, batch, sample, loss, optimizer, usual_batch=8, input_dtype=input_dtype),
        without=names,
        out=str(out),
    )
    print(json.dumps(found.to_dict(), indent=1) if as_json else found)


@app.command()
def compile_kernels(
    float64: Annotated[bool, typer.Option(help="Also what float64 tensors need.")] = False,
    as_json: Json = False,
) -> None:
    """Compile what packing on a CPU needs, once for each machine or Docker image."""
    begun = time.monotonic()
    with progress("compiling"):
        squeezebox.compile_kernels(float64)
    seconds = round(time.monotonic() - begun, 1)
    print(json.dumps({"seconds": seconds}) if as_json else f"all kernels are compiled, after {seconds} s")


@app.command()
def codecs(as_json: Json = False) -> None:
    """List the codecs."""
    from squeezebox import codecs as room
    from squeezebox.cli._show import show_codecs

    rows = [
        {
            "name": codec.name,
            "exact": codec.exact,
            "preserves_sign": codec.preserves_sign,
            "fixed_size": codec.fixed_size,
        }
        for codec in map(room.get, room.available())
    ]
    print(json.dumps(rows, indent=1)) if as_json else show_codecs(rows)
