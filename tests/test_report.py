"""The reports: complete, offline, and safe whatever a user's text holds."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from strategies import sample_summary, summaries

from autotune.outcome import Crashed, OutOfMemory
from autotune.output.report import render_reports
from autotune.output.view import view_of
from autotune.space import Config
from autotune.summary import Summary
from autotune.verdict import Verdict

SAMPLE = sample_summary()
EVIL = "<script>alert(1)</script> | `x` \n# [a](b) \" ' &amp; {{ 7*7 }}"
VOID = {"meta", "path", "use", "link", "br"}


class Outline(HTMLParser):
    """Follows the nesting of a page, and collects what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag, and whatever it loads: a link of the reader's own choosing is none."""
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [
            value or ""
            for name, value in attrs
            if name in {"src", "href", "data"} and tag != "a" and not (value or "").startswith("#")
        ]

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost tag, which has to be this one."""
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Collect the text."""
        self.text += data


def outline(html: str) -> Outline:
    """Return the outline of a page."""
    page = Outline()
    page.feed(html)
    return page


def evil(summary: Summary) -> Summary:
    """Return a run whose every text of a user would break a careless template."""
    crashed = replace(SAMPLE.trials[-1], outcome=Crashed(reason=EVIL))
    return replace(
        summary,
        notes=(EVIL,),
        command=EVIL,
        script=f"{EVIL}.py".replace("/", ""),
        left_out={EVIL: EVIL},
        worst_case={EVIL: EVIL},
        machine={EVIL: EVIL},
        versions={EVIL: EVIL},
        device=replace(summary.device, name=EVIL),
        trials=(*summary.trials, crashed),
    )


def test_page_is_one_file_that_fetches_nothing() -> None:
    """No tag, style or script asks for anything; the page is well nested and small."""
    html, _ = render_reports(SAMPLE)

    page = outline(html)
    assert page.open == []
    assert page.fetched == []
    assert not re.search(r"url\((?!#)|@import|<script", html)
    assert len(html.encode()) < 2_000_000


@pytest.mark.parametrize("kind", [0, 1])
def test_report_gives_the_answer_first(kind: int) -> None:
    """What to use, how much faster, memory, cost: all before the first picture or table."""
    text = render_reports(SAMPLE)[kind].replace("\\", "")

    first = text[: text.index("prefetch")]
    for figure in ("1.93 times as fast", "1.88 to 1.98", "6 pairs", "412.7 MiB", "2 min 41 s"):
        assert figure in first


@pytest.mark.parametrize("kind", [0, 1])
def test_every_trial_is_in_the_table(kind: int) -> None:
    """Each trial has a row, with its reason where it has one."""
    text = render_reports(SAMPLE)[kind]

    rows = (
        text.count('<td class="config">')
        if kind == 0
        else len(re.findall(r"^\| \d", text, re.MULTILINE))
    )
    assert rows == len(SAMPLE.trials)
    for trial in SAMPLE.trials:
        assert trial.outcome.reason in text


@pytest.mark.parametrize("verdict", ["tuned", "keep", "unconfirmed", "interrupted"])
def test_every_verdict_has_its_badge(verdict: Verdict) -> None:
    """Both reports say in words how the run ended."""
    view = view_of(replace(SAMPLE, verdict=verdict))

    html, markdown = render_reports(replace(SAMPLE, verdict=verdict))
    assert f'<span class="badge {verdict}">{view.badge}</span>' in html
    assert markdown.splitlines()[0] == f"# bert: {view.badge}"


def test_html_shows_any_text_as_text() -> None:
    """Markup in a path, a reason or a machine's name is shown, not obeyed."""
    page = outline(render_reports(evil(SAMPLE))[0])

    assert "script" not in page.tags
    assert page.text.count("<script>alert(1)</script>") >= 8
    assert "{{ 7*7 }}" in page.text


def test_markdown_shows_any_text_as_text() -> None:
    """A user's text breaks neither out of a table cell, nor of a code block, nor into HTML."""
    text = render_reports(evil(SAMPLE))[1]

    blocks = re.sub(r"^(`{3,})\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "<script>" not in blocks
    assert "[a](b)" not in blocks
    rows = [line for line in blocks.splitlines() if line.startswith("| ") and "alert" in line]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {10}


@settings(max_examples=10, deadline=None)
@given(summaries())
def test_any_run_has_a_report(summary: Summary) -> None:
    """Whatever is unknown, both reports are written and the page is well nested."""
    html, markdown = render_reports(summary)

    assert outline(html).open == []
    assert markdown.startswith("# ")


def test_unknown_is_never_shown_as_none() -> None:
    """What was not measured is left out or said to be unknown."""
    bare = replace(SAMPLE.baseline, outcome=OutOfMemory(reason=""), predicted_peak_bytes=None)
    summary = replace(SAMPLE, measured=None, speedup=None, baseline=bare, trials=(bare,))

    page = outline(render_reports(summary)[0])

    assert "None" not in page.text.replace('": None', "")
    assert "unknown" in page.text


def test_changed_batch_comes_with_rules_and_sources() -> None:
    """A larger effective batch is said plainly, with both rules; nothing is applied."""
    config = Config(batch_size=512)
    summary = replace(
        SAMPLE, config=config, is_global_batch_free=True, best_at_baseline_batch=SAMPLE.baseline
    )

    for text in render_reports(summary):
        assert "512 samples instead of 32" in text
        assert "Nothing of this was applied" in text
        assert "times 16, after a warm" in text
        assert "times 4." in text
        assert all(key in text for key in ("1706.02677", "1404.5997", "2205.10287"))


def test_kept_batch_comes_without_rules() -> None:
    """Where the batch was kept, nothing is said about learning rates."""
    assert not any("learning rate" in text for text in render_reports(SAMPLE))
