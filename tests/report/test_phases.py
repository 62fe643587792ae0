"""Phases in the report, the summary and the live line."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from megalith.events import EventLog, PhaseBegan
from megalith.report.history import gather
from megalith.report.live import LiveLine
from megalith.report.phases import noise_words, phase_table
from megalith.spec.plan import Plan
from tests.report.run_folder import start, step

PHASE = PhaseBegan(step=3, samples=1008, number=1, seq_len=32, global_batch=8, weights={"a<": 0.25, "b": 0.75})
WORDS = "phase 2 begins with step 3, at sample 1,008: 8 sequences of 32 tokens a step, weights a< 0.25, b 0.75"


def test_the_page_has_a_row_for_each_phase_and_none_without():
    assert phase_table(gather([])) == ""
    page = phase_table(gather([PHASE]))
    assert "<td>1,008</td>" in page and "a&lt; 0.25, b 0.75" in page and "tokens a step" in page


def test_a_phase_that_is_done_again_counts_once():
    assert gather([PHASE, replace(PHASE)]).phases == [PHASE]


def test_the_live_line_says_from_which_sample_a_phase_begins(tmp_path):
    out = StringIO()
    follow = LiveLine(tmp_path, 10, Console(file=out, width=200))
    log = EventLog(tmp_path)
    log.write(PHASE)
    follow.poll()
    assert PHASE.words == WORDS
    assert f"phase: {WORDS}" in out.getvalue()


def test_the_noise_scale_is_shown_beside_the_batch_or_why_there_is_none():
    noisy = step(3, tokens=512, noise={"signal": 1.0, "noise": 8.0, "scale": 8.0, "tokens": 256_000.0})
    assert noise_words(gather([start(), noisy])) == "256k tokens; a step has 512"
    assert noise_words(gather([start(), step(3)])) == "none: the estimates of gradient signal and noise are not positive yet", (
        "two data ranks"
    )
    alone = start(plan=Plan())
    assert noise_words(gather([alone, step(3)])).startswith("none: the only data rank adds up its microbatches")
    assert noise_words(gather([step(3)])) == "none: the run's plan is not known"


def test_the_live_line_has_the_noise_scale(tmp_path):
    out = StringIO()
    follow = LiveLine(tmp_path, 10, Console(file=out, width=200))
    log = EventLog(tmp_path)
    log.write(step(3, noise={"signal": 1.0, "noise": 8.0, "scale": 8.0, "tokens": 2_000_000.0}))
    follow.poll()
    assert "noise scale 2" in out.getvalue()
