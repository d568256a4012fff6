"""The report of a run: report.html for a browser, report.md for a terminal or a pull request."""

from dataclasses import fields

from autotune.output.render import render
from autotune.output.view import View, view_of
from autotune.summary import Summary


def render_reports(summary: Summary) -> tuple[str, str]:
    """Return `report.html`, one file that asks for nothing from outside, and `report.md`."""
    view = view_of(summary)
    shown = {item.name: getattr(view, item.name) for item in fields(View)}
    return render("report.html.jinja", **shown), render("report.md.jinja", **shown)
