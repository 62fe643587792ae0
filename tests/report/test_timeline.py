from xml.etree import ElementTree

import pytest

from megalith.report.timeline import bubble, chrome_trace, draw, mean_seconds, measured, predicted
from megalith.schedule import Schedule, build, lower, simulate
from megalith.schedule.action import Action, parse, parse_row


def timeline(**changes):
    return simulate(lower(build("1f1b", ranks=2, microbatches=3), 3), {"F": 1.0, "B": 2.0, "GATHER": 0.1}, **changes)


def test_the_drawing_has_a_bar_for_every_span_at_its_place_in_time():
    found = timeline()
    root = ElementTree.fromstring(draw({"predicted": predicted(found)}, 2))
    bars = {g[0].text.split("\n")[0]: g[1] for g in root.iter("g") if g.attrib.get("class") == "bar"}  # type: ignore[union-attr]
    assert len(list(root.iter("g"))) == len(found.spans)
    spans = {str(span.action): span for span in found.spans}
    first, last = spans["0F0"], spans["0B2"]
    scale = float(bars["0B2"].attrib["x"]) - float(bars["0F0"].attrib["x"])
    middle = float(bars["0B1"].attrib["x"]) - float(bars["0F0"].attrib["x"])
    assert middle / scale == pytest.approx((spans["0B1"].start - first.start) / (last.start - first.start), abs=1e-3)


def test_predicted_and_measured_share_one_axis():
    fast = predicted(timeline())
    slow = [bar._replace(start=2 * bar.start, end=2 * bar.end) for bar in fast]
    root = ElementTree.fromstring(draw({"predicted": fast, "measured": slow}, 2))
    widths = [float(g[1].attrib["width"]) for g in root.iter("g") if (g[0].text or "").startswith("1B0\n")]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.03)


def test_the_bubble_of_the_bars_is_the_timelines():
    found = simulate(lower(build("1f1b", ranks=4, microbatches=6), 0), {"F": 1.0, "B": 2.0})
    assert bubble(predicted(found), 4) == pytest.approx(found.bubble)


def test_measured_spans_come_back_as_bars():
    found = timeline()
    event = [(span.rank, str(span.action), span.start, span.end) for span in found.spans]
    assert measured(event, 2) == predicted(found)


def test_a_measured_span_that_is_no_action_keeps_its_name():
    (bar,) = measured([(0, "optimizer", 1.0, 2.0)], 2)
    assert (bar.kind, bar.word) == ("OTHER", "optimizer")
    assert "optimizer" in draw({"measured": [bar]}, 1)


def test_waits_differ_from_other_work():
    """They have a colour and a name in the legend of their own."""
    bars = measured([(0, "WAIT", 0.0, 1.0), (0, "optimizer", 1.0, 2.0)], 2)
    assert [bar.kind for bar in bars] == ["WAIT", "OTHER"]
    assert "wait for messages" in draw({"measured": bars}, 1)


def test_an_overlap_is_drawn_as_its_two_halves():
    rows = (parse_row("0F0 (0F1;0B0) 0B1"),)
    bars = predicted(simulate(lower(Schedule("overlap", rows, 1, 2, (0,)), 0), {"F": 1.0, "B": 1.0}))
    assert [(bar.name, bar.start, bar.end) for bar in bars[1:3]] == [("0F1", 1.0, 2.0), ("0B0", 2.0, 3.0)]


def test_a_frame_goes_around_the_two_halves_of_an_overlap():
    rows = (parse_row("0F0 (0F1;0B0) 0B1"),)
    bars = predicted(simulate(lower(Schedule("overlap", rows, 1, 2, (0,)), 0), {"F": 1.0, "B": 3.0}))
    assert [bar.frame for bar in bars] == [0, 4.0, 0, 0]
    root = ElementTree.fromstring(draw({"predicted": bars}, 1))
    (frame,) = [rect for rect in root.iter("rect") if "stroke" in rect.attrib.get("style", "")]
    first, second = (g[1] for g in root.iter("g") if (g[0].text or "").startswith(("0F1\n", "0B0\n")))
    end = float(second.attrib["x"]) + float(second.attrib["width"])
    assert float(frame.attrib["x"]) == pytest.approx(float(first.attrib["x"]), abs=1)
    assert float(frame.attrib["x"]) + float(frame.attrib["width"]) == pytest.approx(end, abs=2)


@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb-v", 2), ("dualpipev", 2), ("dualpipe", 1)])
def test_shades_distinguish_a_ranks_chunks_or_the_two_directions(name, chunks):
    schedule = build(name, ranks=2, microbatches=4, chunks=chunks)
    bars = predicted(simulate(lower(schedule, 0), {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}))
    for bar in bars:
        action = parse(bar.name)
        assert isinstance(action, Action)
        mirrored = schedule.mirrored is not None and (action.microbatch or 0) >= schedule.mirrored
        assert bar.shade == (action.stage // 2 if chunks == 2 else mirrored)


def test_means_are_by_kind_and_stage():
    spans = [(0, "0F0", 0.0, 1.0), (0, "0F1", 1.0, 4.0), (1, "1B0", 0.0, 5.0), (0, "0SEND_F0", 0, 9), (0, "optimizer", 0, 9)]
    assert mean_seconds([spans]) == {("F", 0): 2.0, ("B", 1): 5.0}
    twice = [(rank, name, 3 * start, 3 * end) for rank, name, start, end in spans]
    assert mean_seconds([spans, twice]) == {("F", 0): 4.0, ("B", 1): 10.0}, "a mean over steps, not a sum"


def test_a_trace_holds_every_span_and_message_in_microseconds():
    found = timeline(transfer=0.25)
    all_events = chrome_trace({"predicted": found, "measured": measured([(0, "0F0", 0.0, 1.5)], 2)})["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in all_events if e["name"] == "process_name"}
    assert names == {0: "predicted", 1: "predicted: messages under way", 2: "measured"}
    assert [(e["name"], e["dur"]) for e in all_events if e["ph"] == "X" and e["pid"] == 2] == [("0F0", 1.5e6)]
    events = [e for e in all_events if e["ph"] == "X" and e["pid"] != 2]
    assert len(events) == len(found.spans) + len(found.transfers)
    backward = next(e for e in events if e["name"] == "1B0")
    span = next(s for s in found.spans if str(s.action) == "1B0")
    assert (backward["tid"], backward["ts"], backward["dur"]) == (1, span.start * 1e6, (span.end - span.start) * 1e6)
    assert {e["cat"] for e in events} == {"forward", "backward", "gather weights", "message"}


def test_nothing_to_draw_says_so():
    assert "nothing to draw" in draw({"predicted": []}, 2)
