"""Writes a page: one HTML file that needs nothing else, and its figures as PNG files beside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from gtpo_lightning.report.alarms import LOST, WINDOW
from gtpo_lightning.report.reading import RunData
from gtpo_lightning.report.sections import Picture, Section, alarm_table, make_sections
from gtpo_lightning.report.statistics import CONFIDENCE, LAST

__all__ = ["write_page"]


def write_page(
    path: Path, runs: Sequence[RunData], notes: Sequence[str], smooth: int, baseline: str = "gtpo"
) -> list[Path]:
    """Writes the page and its figures.

    Args:
        path: The page; its figures go to a folder of its name with `_figures` behind it.
        runs: The runs.
        notes: What could not be read.
        smooth: Logged training steps that the curves are averaged over.
        baseline: The variant that others are compared with, where it is there.

    Returns:
        The page and the figures.
    """
    sections = make_sections(runs, smooth, baseline)
    folder = path.with_name(f"{path.stem}_figures")
    folder.mkdir(parents=True, exist_ok=True)
    written = [path]
    for picture in (picture for section in sections for picture in _pictures(section)):
        written.append(folder / f"{picture.file}.png")
        written[-1].write_bytes(picture.images["light"])
    path.write_text(_html(sections, list(runs), notes, smooth, baseline), encoding="utf-8")
    return written


def _pictures(section: Section) -> list[Picture]:
    return [*section.pictures, *section.curves, *(picture for _, own in section.sweeps for picture in own)]


def _html(sections: list[Section], runs: list[RunData], notes: Sequence[str], smooth: int, baseline: str) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data_uri"] = lambda image: f"data:image/png;base64,{base64.b64encode(image).decode()}"
    template = (files("gtpo_lightning.report") / "page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        sections=sections,
        notes=notes,
        smooth=smooth,
        last=LAST,
        baseline=baseline,
        lost=f"{LOST:.0%}".replace("%", " points"),
        alarm_window=WINDOW,
        alarms=alarm_table(runs) if len(sections) > 1 else None,
        confidence=f"{CONFIDENCE:.0%}",
        count=len(runs),
        open_runs=sum(run.state not in ("finished", "unknown") for run in runs),
    )
