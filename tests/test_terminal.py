"""What a person sees while a run goes on, and at its end."""

from dataclasses import replace
from io import StringIO

from strategies import ANSWER, BASELINE, measured, sample_summary

from autotune.output.terminal import MOST_LINES, Progress, final_words
from autotune.search.task import Event
from autotune.space import Config

BEGINS = Event(phase="0", config=BASELINE, purpose="train", seconds_left=170.0, launches=1)
BASELINE_ENDS = replace(
    BEGINS,
    outcome="measured",
    samples_per_second=68.43,
    best_config=BASELINE,
    best=measured(68.43).measurement,
)
RACE_ENDS = replace(
    BASELINE_ENDS,
    phase="E",
    config=ANSWER,
    samples_per_second=131.0,
    best_config=ANSWER,
    best=measured(131.0).measurement,
    seconds_left=80.0,
    launches=12,
)


class Terminal(StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def test_log_gets_a_line_for_each_launch_that_ended() -> None:
    """Without a terminal a launch's beginning is silent, its end is one plain line."""
    stream = StringIO()
    with Progress(stream=stream) as progress:
        for event in (BEGINS, BASELINE_ENDS, RACE_ENDS):
            progress(event)

    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "race: batch 16 x 2, bf16, 1 worker, end to end: 131 samples/s" in lines[1]
    assert "about 1.91 times yours" in lines[1]
    assert lines[1].endswith("1 min 20 s left")
    assert "\x1b" not in stream.getvalue()


def test_log_says_how_a_failed_launch_ended() -> None:
    """A launch that was not timed shows its outcome."""
    stream = StringIO()

    Progress(stream=stream)(replace(BEGINS, phase="A", outcome="out_of_memory"))

    assert (
        "batch, precision: batch 32, fp32, end to end: out of memory; no best" in stream.getvalue()
    )


def test_log_is_bounded() -> None:
    """A long search does not fill a log."""
    stream = StringIO()
    progress = Progress(stream=stream)
    for _ in range(MOST_LINES + 50):
        progress(RACE_ENDS)

    lines = stream.getvalue().splitlines()
    assert len(lines) == MOST_LINES + 1
    assert "trials.jsonl" in lines[-1]


def test_terminal_shows_what_is_tried_and_leaves_nothing() -> None:
    """In a terminal the picture shows what begins, and is wiped at the end."""
    stream = Terminal()
    with Progress(stream=stream) as progress:
        progress(BASELINE_ENDS)
        progress(replace(RACE_ENDS, outcome=None, samples_per_second=None))
        progress.say("the fp16 trials were left out")

    text = stream.getvalue()
    assert "race: batch 16 x 2, bf16, 1 worker (end to end)" in text
    assert "launch 12, 1 min 20 s left" in text
    assert "the fp16 trials were left out" in text
    assert text.endswith("\x1b[2K")


def test_quiet_shows_nothing() -> None:
    """With quiet nothing is shown, in a terminal or elsewhere."""
    for stream in (StringIO(), Terminal()):
        with Progress(is_quiet=True, stream=stream) as progress:
            progress(BASELINE_ENDS)
            progress.say("hidden")

        assert stream.getvalue() == ""


def test_endless_budget_has_no_time_left() -> None:
    """Without a limit no time left is made up."""
    stream = StringIO()

    Progress(stream=stream)(replace(RACE_ENDS, seconds_left=float("inf")))

    assert "left" not in stream.getvalue()


def test_final_words_are_the_answer_in_ten_lines() -> None:
    """What to use, how much faster, memory, cost, flags and the notes."""
    text = final_words(sample_summary())

    assert len(text.splitlines()) <= 10
    assert text.startswith("Use batch 16 x 2, bf16, 1 worker: 1.93 times as fast")
    for part in ("1.88 to 1.98", "54%", "pays back", "--amp bf16", "fp16 is not native"):
        assert part in text


def test_final_words_tell_a_changed_batch() -> None:
    """A larger effective batch is said at the end too."""
    summary = replace(sample_summary(), config=Config(batch_size=128), is_global_batch_free=True)

    assert "4 times the samples" in final_words(summary)
