import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalith.report import svg
from megalith.report.svg import Cell, Series

numbers = st.floats(-1e12, 1e12)


@given(numbers, numbers, st.integers(2, 12))
@example(0.0, 5e-324, 3)
@settings(deadline=None)
def test_ticks_are_few_evenly_spaced_and_inside(a, b, most):
    low, high = min(a, b), max(a, b)
    found = svg.ticks(low, high, most)
    slack = 1e-6 * max(abs(low), abs(high), 1e-300)
    assert len(found) <= most + 1
    assert all(low - slack <= tick <= high + slack for tick in found)


def test_ticks_are_round():
    assert svg.ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert svg.ticks(0.13, 0.62, most=5) == pytest.approx([0.2, 0.4, 0.6])


@given(
    st.lists(st.tuples(st.integers(0, 10**6), numbers), min_size=1, max_size=300, unique_by=lambda p: p[0]), st.integers(10, 100)
)
@settings(deadline=None)
def test_thinning_keeps_the_order_and_every_spike(points, most):
    points = sorted(points)
    kept = svg.thin(points, most)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert len(kept) <= most + 2
    assert {max(y for _, y in kept), min(y for _, y in kept)} == {max(y for _, y in points), min(y for _, y in points)}


def test_every_point_of_a_curve_lies_inside_the_picture():
    chart = svg.line_chart([Series("loss", [(i, (i * 37 % 101) - 50) for i in range(200)], 0)], x_label="step")
    root = ElementTree.fromstring(chart)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    (line,) = root.iter("polyline")
    for point in line.attrib["points"].split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_a_higher_value_is_drawn_higher():
    chart = ElementTree.fromstring(svg.line_chart([Series("loss", [(0, 1.0), (1, 2.0)], 0)], x_label="step"))
    (line,) = chart.iter("polyline")
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert x0 < x1
    assert y0 > y1  # in SVG y grows downwards


def test_values_that_are_not_finite_are_left_out():
    chart = svg.line_chart([Series("loss", [(0, 1.0), (1, float("nan")), (2, float("inf")), (3, 2.0)], 0)], x_label="step")
    assert "nan" not in chart
    assert "inf" not in chart
    assert "no values yet" in svg.line_chart([Series("loss", [(0, float("nan"))], 0)], x_label="step")


def test_hovering_says_the_values_of_all_curves():
    chart = svg.line_chart([Series("a", [(10, 1.5)], 0), Series("b", [(10, 2.5)], 1)], x_label="step")
    assert [t.text for t in ElementTree.fromstring(chart).iter("title")] == ["step 10\na 1.5\nb 2.5"]


def test_names_are_escaped():
    chart = svg.line_chart([Series("<a> & b", [(0, 1), (1, 2)], 0), Series("c", [(0, 1)], 1)], x_label="step")
    ElementTree.fromstring(chart)
    assert "&lt;a&gt; &amp; b" in chart


def test_legend_entries_do_not_overlap():
    body, height = svg.legend([(f"a rather long name {i}", i) for i in range(8)], left=0, right=400, top=14)
    places = [(float(x), float(y)) for x, y in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)"', body)]
    assert len(set(places)) == 8
    assert max(x for x, _ in places) < 400
    assert height >= max(y for _, y in places) - 14


def test_a_stack_is_as_tall_as_its_parts_together():
    chart = ElementTree.fromstring(
        svg.stacked_columns([(1, {"a": 3.0, "b": 1.0}), (2, {"a": 4.0})], {"a": 0, "b": 1}, x_label="step")
    )
    columns = [g for g in chart.iter("g") if g.attrib.get("class") == "bar"]
    heights = [sum(float(r.attrib["height"]) for r in column.iter("rect")) for column in columns]
    assert heights[0] == pytest.approx(heights[1], abs=0.2)


def test_rows_are_as_long_as_their_share_of_the_longest():
    chart = ElementTree.fromstring(svg.stacked_rows({"rank 0": {"a": 2.0, "b": 2.0}, "rank 1": {"a": 1.0}}, {"a": 0, "b": 1}))
    rows = [[float(r.attrib["width"]) for r in g.iter("rect")] for g in chart.iter("g") if g.attrib.get("class") == "bar"]
    assert sum(rows[0]) == pytest.approx(4 * sum(rows[1]), rel=1e-2)


def test_a_cell_fills_its_parts_by_what_it_holds():
    root = ElementTree.fromstring(svg.grid([[Cell("rank 0", ["x"], [0.5, 0.0, 1.0], "title")]], ["pipeline 0"], ["data 0"]))
    filled = [float(r.attrib["height"]) for r in root.iter("rect") if r.attrib.get("class") == "f0"]
    assert filled == [7.0, 14.0]


def test_a_stand_alone_picture_is_a_whole_svg_file():
    root = ElementTree.fromstring(svg.standalone(svg.line_chart([Series("loss", [(0, 1), (1, 2)], 0)], x_label="a > b")))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme" in (root[0].text or "")
