"""The colours of a pipeline's drawing, on light and on dark."""

from __future__ import annotations

from squeezebox.reports._chart import ChartKind

# From strong to pale; numbers on them are nearly black in both schemes.
COLOURS = {
    ChartKind.FORWARD: ("#5b9bf5", "#8bbaf9", "#b3d2fb", "#d0e3fd"),
    ChartKind.BACKWARD: ("#55b567", "#84cc92", "#acdfb6", "#cdeed3"),
    ChartKind.INPUT: ("#ab85e6", "#c4a8ef", "#d9c6f6", "#e8dcfa"),
    ChartKind.WEIGHT: ("#efa92f", "#f4c169", "#f8d799", "#fbe8c3"),
    ChartKind.UPDATE: ("#d6455d",),
}
_LIGHT = {"page": "#ffffff", "waiting": "#eef0f3", "grid": "#c3c9d1", "ink": "#1b1f24"}
_DARK = {"page": "#14171c", "waiting": "#262c35", "grid": "#4a525e", "ink": "#e6e9ee"}


def style(shortest: float) -> str:
    """CSS for a drawing whose narrowest action is ``shortest`` pixels wide.

    Updates get an outline, by which those that take no time are seen too.
    """
    edge, mark = (0.8 if shortest >= 4.0 else 0.0), min(2.0, max(0.1, 0.3 * shortest))
    rules = [
        ".pipeline text{font:12px system-ui,'DejaVu Sans',sans-serif}",
        ".pipeline .title{font-size:16px;font-weight:600}",
        ".pipeline .tick{text-anchor:middle}.pipeline .rank{text-anchor:end}",
        f".pipeline path{{stroke-width:{edge:g}}}.pipeline .grid{{stroke-width:1}}",
        f".pipeline path.update-0{{stroke:{COLOURS[ChartKind.UPDATE][0]};stroke-width:{mark:.3g}}}",
        *(
            f".pipeline .{kind.name.lower()}-{shade}{{fill:{colour}}}"
            for kind, colours in COLOURS.items()
            for shade, colour in enumerate(colours)
        ),
        _scheme(_LIGHT, edge),
        f"@media (prefers-color-scheme:dark){{{_scheme(_DARK, edge)}}}",
        ".pipeline .number{fill:#14171c;font-size:10px;text-anchor:middle;pointer-events:none}",
    ]
    return "\n".join(rules)


def _scheme(colours: dict[str, str], edge: float) -> str:
    kinds = [kind.name.lower() for kind in COLOURS if kind is not ChartKind.UPDATE]
    outlined = ",".join(f".pipeline path[class^={kind}]" for kind in kinds)
    outlines = f"{outlined}{{stroke:{colours['page']}}}" if edge else ""
    return (
        f".pipeline .page{{fill:{colours['page']}}}.pipeline .waiting{{fill:{colours['waiting']}}}"
        f".pipeline .grid{{stroke:{colours['grid']}}}.pipeline text{{fill:{colours['ink']}}}{outlines}"
    )
