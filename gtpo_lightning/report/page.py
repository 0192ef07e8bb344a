"""Writes a page: one HTML file that needs nothing else, and its figures as PNG files beside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from gtpo_lightning.report.alarms import LOST, WINDOW
from gtpo_lightning.report.reading import RunData
from gtpo_lightning.report.sections import Picture, Section, Table, alarm_table, make_sections
from gtpo_lightning.report.statistics import CONFIDENCE, LAST

__all__ = ["write_page"]


def write_page(
    path: Path, runs: Sequence[RunData], notes: Sequence[str], smooth: int, baseline: str = "gtpo"
) -> list[Path]:
    """Writes the page, its tables and its figures.

    Args:
        path: The page; its tables go to a Markdown file of its name with `_tables` behind it, its figures to a folder
            with `_figures`.
        runs: The runs.
        notes: What could not be read.
        smooth: Logged training steps that the curves are averaged over.
        baseline: The variant that others are compared with, where it is there.

    Returns:
        The page, the tables and the figures.
    """
    sections = make_sections(runs, smooth, baseline)
    folder = path.with_name(f"{path.stem}_figures")
    folder.mkdir(parents=True, exist_ok=True)
    written = [path, path.with_name(f"{path.stem}_tables.md")]
    for picture in (picture for section in sections for picture in _pictures(section)):
        written.append(folder / f"{picture.file}.png")
        written[-1].write_bytes(picture.images["light"])
    everywhere = alarm_table(runs) if len(sections) > 1 else None
    values = {"notes": notes, "smooth": smooth, "baseline": baseline, "count": len(runs)}
    unfinished = sum(run.state not in ("finished", "unknown") for run in runs)
    path.write_text(_html(sections, everywhere, **values, open_runs=unfinished), encoding="utf-8")
    written[1].write_text(_markdown(sections, baseline, everywhere), encoding="utf-8")
    return written


def _markdown(sections: list[Section], baseline: str, everywhere: Table | None) -> str:
    """The tables of the page, for files that hold no HTML."""
    parts = [("Collapse alarms over all regimes", everywhere)]
    for section in sections:
        start = f"{section.name}: " if section.name else ""
        parts += [
            (f"{start}final scores", section.scores),
            (f"{start}differences from {baseline}", section.differences),
            (f"{start}collapse detector", section.collapses),
            (f"{start}collapse alarms", section.alarms),
        ]
    return "\n".join(f"## {title}\n\n{_grid(table)}" for title, table in parts if table is not None)


def _grid(table: Table) -> str:
    rows = [table.headings, ["---"] * len(table.headings), *(row.cells for row in table.rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _pictures(section: Section) -> list[Picture]:
    return [*section.pictures, *section.curves, *(picture for _, own in section.sweeps for picture in own)]


def _html(sections: list[Section], everywhere: Table | None, **values: object) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data_uri"] = lambda image: f"data:image/png;base64,{base64.b64encode(image).decode()}"
    template = (files("gtpo_lightning.report") / "page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        sections=sections,
        alarms=everywhere,
        last=LAST,
        lost=f"{100 * LOST:.0f} points",
        alarm_window=WINDOW,
        confidence=f"{CONFIDENCE:.0%}",
        **values,
    )
