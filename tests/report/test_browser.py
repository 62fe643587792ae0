"""Pages of reports in a real browser: nothing but the page is requested, text is readable on a phone, and curves can be zoomed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalith import events
from megalith.planner.atlas import atlas
from megalith.planner.request import PlanRequest
from megalith.report import compare
from megalith.report.atlas import page as draw_atlas
from megalith.report.page import write
from tests.report.run_folder import start, step, write_run
from tests.report.test_dryrun import a_page
from tests.watch.browser import CHROMIUM, SMALLEST, Browser

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: make browser installs it")]

CURVE = "document.querySelector('svg[data-log] .curve').getAttribute('points').split(' ').length"
LABELS = "[...document.querySelectorAll('svg[data-log]')][1].querySelector('.axes').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the page of a run with everything that a report can show, that of its comparison with another run, of a dry run, and of
    the best layouts of two models."""
    folder = tmp_path_factory.mktemp("runs")
    run, other = write_run(folder / "one"), folder / "two"
    (run / "provenance.json").write_text(json.dumps({"started.host": "node1", "started.command": "megalith train run.toml"}))
    log = events.EventLog(other)
    for event in (start(), *(step(i, grad_norm=10.0 ** (i % 5)) for i in range(1, 400))):
        log.write(event)
    log.close()
    found = compare.write(compare.read([run, other]), folder / "compare.html")
    dried, map_of_layouts = folder / "dried.html", folder / "atlas.html"
    dried.write_text(a_page(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGALITH_CACHE", str(folder / "cache"))
        layouts = atlas(PlanRequest(cluster="h100:16", seq_len=128, global_batch=16), ("tiny", "dense-2t"))
    map_of_layouts.write_text(draw_atlas(layouts), encoding="utf-8")
    return {"run": write(run), "long": write(other), "compare": found, "dry run": dried, "atlas": map_of_layouts}


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["run", "long", "compare", "dry run", "atlas"])
def test_a_page_fits_and_its_text_is_readable(
    name: str, dark: bool, width: int, browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages[name].as_uri(), width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(SMALLEST) >= 10.99
    assert browser.said == []
    assert browser.asked == [pages[name].as_uri()]
    browser.leave()


def test_a_drag_zooms_in_and_a_double_click_shows_everything(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["long"].as_uri())
    place = browser.run(
        "(() => { const r = document.querySelector('svg[data-log]').getBoundingClientRect(); return [r.x, r.y, r.width]; })()"
    )
    whole = browser.run(CURVE)

    def mouse(kind: str, share: float, clicks: int = 1) -> None:
        where = {"x": place[0] + share * place[2], "y": place[1] + 120}
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=clicks, **where)

    for kind, share in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseReleased", 0.6)):
        mouse(kind, share)
    assert browser.run(CURVE) < whole / 3
    for clicks in (1, 2):
        mouse("mousePressed", 0.5, clicks)
        mouse("mouseReleased", 0.5, clicks)
    assert browser.run(CURVE) == whole
    assert browser.said == []
    browser.leave()


def test_an_axis_can_be_logarithmic(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["long"].as_uri())
    before = browser.run(LABELS)
    browser.run("document.querySelector('figcaption button').click()")
    assert "100" in browser.run(LABELS) != before
    browser.call("Input.dispatchKeyEvent", type="keyDown", text="l", key="l")
    assert browser.run(LABELS) == before
    browser.leave()
