"""The commands of ``squeezebox pipeline`` and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

pipeline = typer.Typer(help="Train over several ranks, a piece of the model each.", no_args_is_help=True)


@pipeline.callback()
def _root() -> None:
    pass


@pipeline.command()
def plan(
    factory: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="Returns the model when called.")],
    ranks: Annotated[int | None, typer.Option(help="Of all replicas together.")] = None,
    memory: Annotated[str | None, typer.Option(help="What one rank may hold, such as 2GiB.")] = None,
    devices: Annotated[
        Path | None,
        typer.Option(help="Unequal ones, in place of --ranks and --memory: what 'devices measure' wrote."),
    ] = None,
    input: Annotated[
        str | None,
        typer.Option(help="One sample's shape; 128 for a text of 128 tokens (default: 3x224x224)."),
    ] = None,
    input_dtype: Annotated[
        str | None, typer.Option(help="Such as int64 (default: tokens for a model that embeds them).")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples between two updates, of all replicas (default: 32).")
    ] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="MODULE:CALLABLE", help="Returns (inputs, target), a real batch.")
    ] = None,
    loss: Annotated[str | None, typer.Option(metavar="MODULE:CALLABLE", help="loss(output, target).")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, sgd-momentum, adam or adamw.")] = "adamw",
    microbatches: Annotated[
        str | None, typer.Option(help="Sizes to try: 1,2,4 (default: powers of two).")
    ] = None,
    schedules: Annotated[
        str,
        typer.Option(help="Also zb-h1, zb-h2, zb-v; 2bw and pipedream (gradients of earlier weights)."),
    ] = "gpipe,1f1b,interleaved-1f1b,breadth-first",
    policies: Annotated[
        str, typer.Option(help="Of keep, recompute and compress; the last only if named: it is lossy.")
    ] = "keep,recompute",
    noise: Annotated[float, typer.Option(help="Gradient noise that compress may cause.")] = 1e-3,
    depth: Annotated[int | None, typer.Option(help="Ranks of a pipeline (default: try all).")] = None,
    threads: Annotated[
        int, typer.Option(help="Of a rank on a CPU, to measure with; torchrun gives each one.")
    ] = 1,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes a second between ranks: 1GiB (default: measured here).")
    ] = None,
    latency: Annotated[float, typer.Option(help="Seconds of a message; goes with --bandwidth.")] = 0.0,
    out: Annotated[Path, typer.Option(help="Where the fastest plan goes, as JSON.")] = Path("plan.json"),
    others: Annotated[int, typer.Option(help="Runners-up to print.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan's JSON and nothing else.")] = False,
) -> None:
    """Choose split, replicas, microbatches, schedule and what each stage keeps, within each rank's memory.

    Measures the model's blocks in this process.
    """
    from squeezebox.cli._train import PlanRequest, make
    from squeezebox.reports import pipeline_plan_line, pipeline_plan_text

    plans = make(
        PlanRequest(
            factory=factory,
            input=input,
            input_dtype=input_dtype,
            batch=batch,
            sample=sample,
            loss=loss,
            optimizer=optimizer,
            ranks=ranks,
            memory=memory,
            devices=devices,
            microbatches=microbatches,
            schedules=schedules,
            policies=policies,
            noise=noise,
            depth=depth,
            threads=threads,
            bandwidth=bandwidth,
            latency=latency,
        ),
        out,
    )
    if as_json:
        print(json.dumps(plans[0].to_dict(), indent=1))
        return
    print(pipeline_plan_text(plans[0]))
    if plans[1:]:
        print("\nRunners-up: seconds a batch, peak of the fullest rank")
        print("\n".join(pipeline_plan_line(each) for each in plans[1 : others + 1]))
    print(f"\nThe plan is in {out}.")


@pipeline.command()
def train(
    plan: Annotated[Path, typer.Argument(help="What 'squeezebox pipeline plan' wrote.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="MODULE:CALLABLE",
            help="Yields batches (inputs, target): whole ones if it takes no arguments, else a replica's "
            "part of them, called with its number and their count.",
        ),
    ],
    loss: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CALLABLE", help="loss(output, target) (default: the plan's)."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, sgd-momentum, adam or adamw.")] = "adamw",
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: the optimizer's).")] = None,
    steps: Annotated[int | None, typer.Option(help="Batches (default: all).")] = None,
    clip: Annotated[float | None, typer.Option(help="Bound of the norm of all gradients.")] = None,
    correction: Annotated[
        bool, typer.Option("--correction", help="Of 2bw's late gradients, for a buffer of weights more.")
    ] = False,
    warmup: Annotated[int, typer.Option(help="Batches that 2bw and pipedream flush at first.")] = 0,
    vertical_sync: Annotated[
        bool, typer.Option("--vertical-sync", help="All of pipedream's stages read the first one's version.")
    ] = False,
    shard: Annotated[
        bool | None,
        typer.Option(
            "--shard/--no-shard",
            help="Replicas keep a part of weights and optimizer state each (default: as planned).",
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A safetensors file or a folder of them to begin with.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A directory for checkpoints.")] = None,
    save_every: Annotated[
        int, typer.Option(min=0, help="Batches from checkpoint to checkpoint; 0: only at the end.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    patience: Annotated[float, typer.Option(help="Seconds that a rank is waited for.")] = 60.0,
    log_every: Annotated[int, typer.Option(help="Batches from loss to loss.")] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON at the end, and losses on standard error.")
    ] = False,
) -> None:
    """Be one rank of a pipeline; start all of them with torchrun.

    torchrun --nproc-per-node 4 -m squeezebox.cli pipeline train plan.json --data my.data:batches
    """
    from squeezebox.cli._train import Request, run

    run(
        Request(
            plan=plan,
            data=data,
            loss=loss,
            optimizer=optimizer,
            rate=lr,
            steps=steps,
            clip=clip,
            correction=correction,
            warmup=warmup,
            vertical_sync=vertical_sync,
            shard=shard,
            weights=weights,
            checkpoint=checkpoint,
            save_every=save_every,
            resume=resume,
            patience=patience,
            log_every=log_every,
            as_json=as_json,
        )
    )


@pipeline.command()
def simulate(
    schedule: Annotated[
        str,
        typer.Argument(
            metavar="SCHEDULE",
            help="gpipe, 1f1b, interleaved-1f1b, breadth-first, zb-h1, zb-h2, zb-v, pipedream or 2bw.",
        ),
    ],
    ranks: Annotated[int, typer.Option(help="How many work together.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Of a batch. PipeDream updates after each.")] = 8,
    loops: Annotated[
        int | None,
        typer.Option(help="Stages a rank; of interleaved-1f1b, breadth-first.", show_default="2 for those"),
    ] = None,
    batches: Annotated[int, typer.Option(help="One after the other.")] = 1,
    forward: Annotated[
        str, typer.Option(help="Seconds of a microbatch: a number, or 1,2,1,1 by stage.")
    ] = "1",
    backward: Annotated[str, typer.Option(help="Likewise; zero-bubble schedules halve it.")] = "2",
    transfer: Annotated[float, typer.Option(help="Seconds from rank to rank.")] = 0.0,
    activation: Annotated[
        str | None, typer.Option(help="Bytes a microbatch leaves at a stage: 12MiB, or a size a stage.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the drawing goes, as SVG.")] = Path("schedule.svg"),
    trace: Annotated[
        Path | None, typer.Option(help="Where a trace for ui.perfetto.dev goes, as JSON.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Where the order goes, for torch.distributed.pipelining to read.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Draw a schedule, and say what a batch takes and what every rank holds; nothing is run."""
    from squeezebox.cli._simulate import Request, run

    result = run(
        Request(schedule, ranks, microbatches, loops, batches),
        forward=forward,
        backward=backward,
        transfer=transfer,
        activation=activation,
        out=out,
        trace=trace,
        csv=csv,
    )
    print(json.dumps(result.to_dict(), indent=1) if as_json else f"{result}\n\nThe drawing is in {out}.")
