"""``squeezebox report``: a profiled step as a page, a trace and a snapshot."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from squeezebox.cli._values import require_apart
from squeezebox.reports import Timeline
from squeezebox.schema import OutputError


def show(
    run: Path, page: Path | None, trace: Path | None, snapshot: Path | None, open_page: bool
) -> Timeline:
    """Write what is asked for, and open the page if it is to be.

    Raises:
        OptionError: a file would replace another.
        FormatError: ``run`` is no timeline.
        OutputError: a file cannot be written, or there is no browser.
    """
    written = {"--html": page, "--trace": trace, "--snapshot": snapshot}
    require_apart(written, {"RUN.JSON": run})
    timeline = Timeline.load(run)
    if trace is not None:
        timeline.to_trace(trace)
    if snapshot is not None:
        timeline.to_snapshot(snapshot)
    if page is not None:
        timeline.to_html(page)
    if page is not None and open_page and not webbrowser.open(page.resolve().as_uri()):
        raise OutputError(f"found no browser to open {page} with; the page is written: open it yourself.")
    return timeline
