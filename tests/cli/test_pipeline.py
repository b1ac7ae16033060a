"""``squeezebox pipeline`` from outside: figures, drawings, and errors without tracebacks."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from squeezebox.cli import main
from squeezebox.schedules import PUBLISHED, Costs, gathers, make, simulate

SCHEDULES = {
    name: make(name, 4, 8, loops=2 if row.loops else 1, batches=2) for name, row in PUBLISHED.items()
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capfd, *arguments):
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(("pipeline", *arguments))
    captured = capfd.readouterr()
    return ended.value.code, captured.out, captured.err


@pytest.mark.parametrize("name", SCHEDULES)
def test_figures_are_those_of_the_simulation(folder, capfd, name):
    costs = ("--forward", "1.5", "--backward", "2.5", "--transfer", "0.25", "--activation", "3KiB")
    code, out, err = run(capfd, "simulate", name, "--batches", "2", *costs, "--json")
    assert (code, err) == (0, "")
    schedule, figures = SCHEDULES[name], json.loads(out)
    stages = schedule.num_stages
    timeline = simulate(
        schedule,
        Costs(
            forward=(1.5,) * stages,
            backward=(2.5,) * stages,
            transfer=0.25,
            activation_bytes=(3072,) * stages,
        ),
    )
    assert (figures["schedule"], figures["stages"]) == (name, stages)
    assert (figures["seconds"], figures["bubble"]) == (timeline.seconds, timeline.bubble)
    assert figures["seconds_per_batch"] == timeline.seconds / 2
    assert figures["ideal_seconds_per_batch"] == 8 * 4.0 * stages / 4
    for rank, row in enumerate(figures["ranks"]):
        own = [stage for stage, owner in enumerate(schedule.placement) if owner == rank]
        assert row == {
            "rank": rank,
            "busy_seconds": timeline.busy(rank),
            "live_microbatches": timeline.live[rank],
            "live_bytes": timeline.live_bytes[rank],
            "weight_versions": max(timeline.versions[stage] for stage in own),
            "transfers": timeline.transfers[rank],
            "gathers": gathers(schedule, rank),
        }
    assert ElementTree.parse(folder / "schedule.svg").getroot().tag.endswith("svg")


def test_text_and_trace(folder, capfd):
    code, out, err = run(capfd, "simulate", "1f1b", "--trace", "trace.json", "--out", "other.svg")
    assert (code, err) == (0, "")
    assert "33 s a batch; ideal 24 s; bubble 27.3%" in out and "other.svg" in out and "bytes" not in out
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * (8 + 8 + 1)
    assert sorted(path.name for path in folder.iterdir()) == ["other.svg", "trace.json"]


def test_an_order_for_torch(folder, capfd):
    assert run(capfd, "simulate", "zb-v", "--ranks", "2", "--microbatches", "4", "--csv", "order.csv")[0] == 0
    assert (folder / "order.csv").read_text() == make("zb-v", 2, 4, loops=2).to_csv()
    code, _, err = run(capfd, "simulate", "pipedream", "--csv", "other.csv", "--out", "other.svg")
    assert code == 1 and "cannot be exported" in err
    assert sorted(path.name for path in folder.iterdir()) == ["order.csv", "schedule.svg"]


def test_a_value_for_every_stage(capfd):
    figures = json.loads(
        run(
            capfd,
            "simulate",
            "gpipe",
            *("--ranks", "2", "--microbatches", "3", "--forward", "1, 2", "--backward", "3,4", "--json"),
            *("--activation", "1KB,2.5 MiB"),
        )[1]
    )
    assert [rank["busy_seconds"] for rank in figures["ranks"]] == [12.0, 18.0]
    assert [rank["live_bytes"] for rank in figures["ranks"]] == [3000, 3 * 5 * 2**19]
    assert figures["ideal_seconds_per_batch"] == 18.0


def test_of_hundreds_of_ranks_a_few_are_shown(capfd):
    code, out, _ = run(capfd, "simulate", "1f1b", "--ranks", "200", "--microbatches", "20")
    assert code == 0
    assert len(out.splitlines()) < 16
    assert "\n   0 " in out and "\n 199 " in out and "of 200 ranks" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpip"], f"there is no schedule 'gpip'; take one of {', '.join(PUBLISHED)}."),
        (["gpipe", "--ranks", "0"], "--ranks 0 is below 1"),
        (["gpipe", "--microbatches", "-1"], "--microbatches -1 is below 1"),
        (["interleaved-1f1b", "--loops", "0"], "--loops 0 is below 1"),
        (["gpipe", "--loops", "2"], "loops is 2, and gpipe has one stage a rank"),
        (["gpipe", "--batches", "0"], "--batches 0 is below 1"),
        (["gpipe", "--ranks", "10000", "--microbatches", "10000"], "200000000 actions"),
        (["interleaved-1f1b", "--microbatches", "6"], "groups of 4"),
        (["2bw", "--microbatches", "2"], "2BW with 4 ranks"),
        (["gpipe", "--forward", "1,2"], "--forward 1,2 has 2 values for 4 stages"),
        (["interleaved-1f1b", "--backward", "1,2,3,4"], "4 values for 8 stages"),
        (["gpipe", "--forward", "fast"], "--forward fast is no number of seconds"),
        (["gpipe", "--forward", ""], "--forward nothing is no number of seconds"),
        (["gpipe", "--backward", "nan"], "--backward nan is no number"),
        (["gpipe", "--backward", "0"], "--backward 0 is no number"),
        (["gpipe", "--transfer", "-1"], "--transfer -1 is no number"),
        (["gpipe", "--transfer", "inf"], "--transfer inf is no number"),
        (["gpipe", "--activation", "12MiX"], "--activation 12MiX is no size"),
        (["gpipe", "--activation", "1,2,3"], "has 3 values for 4 stages"),
        ([], "Missing argument 'SCHEDULE'"),
    ],
)
def test_wrong_arguments(folder, capfd, arguments, message):
    code, out, err = run(capfd, "simulate", *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert not list(folder.iterdir())


def test_help_names_every_published_schedule(capfd):
    _, out, _ = run(capfd, "simulate", "--help")
    assert f"{', '.join([*PUBLISHED][:-1])} or {[*PUBLISHED][-1]}" in " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize("option", ("--out", "--trace"))
def test_files_that_cannot_be_written(folder, capfd, option):
    code, out, err = run(capfd, "simulate", "gpipe", option, "missing/file")
    assert (code, out) == (1, "")
    assert "cannot write missing/file" in err
    assert not list(folder.iterdir())


def test_no_torch_is_loaded(folder):
    files = ["--out", str(folder / "drawing.svg"), "--trace", str(folder / "trace.json")]
    program = (
        "import sys, squeezebox.cli as cli\n"
        f"try: cli.main(['pipeline', 'simulate', 'zb-h1', *{files}])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.endswith("False\n")
