import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from megalith import events
from megalith.cost.parts import parts
from megalith.cost.predicted import workload_of
from megalith.report.history import bits_a_byte, history, tokens_a_byte
from megalith.report.page import flat, smoothed, write
from megalith.report.predicted import predict
from megalith.report.summary import of_folder
from megalith.schedule.action import Action
from megalith.spec.plan import Plan
from tests.commands.calling import call
from tests.report.run_folder import holdings, spans, spec, start, step, write_run
from tests.specs import tiny_run

VOID = {"meta"}


class Nesting(HTMLParser):
    """Fails on a tag that is closed in the wrong order, and collects the headings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def parsed(page: str) -> Nesting:
    nesting = Nesting()
    nesting.feed(page)
    assert nesting.open == []
    for picture in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(picture)
    return nesting


def log(folder, *written: events.Event):
    file = events.EventLog(folder)
    for event in written:
        file.write(event)
    file.close()
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder = write_run(tmp_path_factory.mktemp("run"))
    (folder / "provenance.json").write_text(json.dumps({"plan.zero": "file run.toml", "optimizer.lr": "command line"}))
    (folder / "run.toml").write_text("[plan]\nzero = 3 # <shards>\n")
    return write(folder).read_text(encoding="utf-8")


def test_a_full_run_has_every_section(page):
    assert parsed(page).headings == [
        "Loss",
        "Speed",
        "Memory",
        "Who holds what",
        "Pipeline",
        "Samples",
        "Checkpoints",
        "Specification",
    ]


def test_the_page_needs_nothing_from_outside(page):
    assert not re.search(r"<(link|img|iframe)|\bsrc=|@import|url\(|https?://", page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in page, "no text of a run can be executed"


def test_headline_numbers_stand_on_what_they_assume(page):
    for said in (
        "first light",
        "finished",
        "14.7 %",
        "2.5 TFLOP/s",
        "measured matrix product",
        "6 N + attention",
        "5 steps repeated",
    ):
        assert said in page, said


def test_text_of_the_run_is_escaped(page):
    assert "universally &lt;b&gt;acknowledged&lt;/b&gt; &amp; so on" in page
    assert "rank 3 was killed &lt;9&gt;" in page
    assert "# &lt;shards&gt;" in page


def test_values_say_where_they_came_from(page):
    assert "<td>plan.zero</td><td>3</td><td>file run.toml</td>" in page
    assert "<td>optimizer.lr</td><td>0.003</td><td>command line</td>" in page


def test_the_pipeline_is_drawn_as_predicted_and_as_measured(page):
    assert "predicted from the mean time of each stage" in page
    assert "measured in step 30" in page
    assert "gap +0.0 %" in page  # the folder's measured spans are a simulation of the same schedule


def test_domains_have_curves_of_their_own(page):
    assert "Validation loss by domain" in page
    assert "austen" in page


def test_an_empty_folder_says_that_nothing_is_there(tmp_path):
    page = write(tmp_path).read_text(encoding="utf-8")
    assert parsed(page).headings == []
    assert "records no start of a run" in page


@pytest.mark.parametrize(
    "written",
    [
        (start(),),
        (step(1),),
        (events.Problem("error", "no such file", None),),
        (start(), step(1, loss=float("nan"), mfu=None, breakdown={}, memory={})),
        (start(peak=None), events.Validation(0, 9.0, {}, 0.1), step(1, mfu=None)),
        (start(), *holdings()),
        (events.Sample(1, "a", "b"), events.Checkpoint(1, "x", 1, 0.1, 0.1), spans(1)),
    ],
    ids=lambda written: "+".join(event.kind for event in written[:3]),
)
def test_a_run_with_few_events_still_has_a_page(tmp_path, written):
    parsed(write(log(tmp_path, *written)).read_text(encoding="utf-8"))


def test_an_unknown_peak_is_said_and_not_guessed(tmp_path):
    page = write(log(tmp_path, start(peak=None), step(1, mfu=None))).read_text(encoding="utf-8")
    assert "No peak known: cpu is not in the catalogue." in page


def test_lines_that_hold_no_event_are_counted_at_the_foot(page, tmp_path):
    assert "without an event" not in page
    with (log(tmp_path, start(), step(1)) / events.FILE).open("a") as file:
        file.write("3\n")
    assert "Skipped 1 line of the log without an event." in write(tmp_path).read_text(encoding="utf-8")


def test_writing_again_replaces_the_page(tmp_path):
    write(tmp_path)
    page = write(log(tmp_path, start(), step(1))).read_text(encoding="utf-8")
    assert "records no start of a run" not in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "report.html"]


@pytest.mark.slow
def test_the_prediction_stands_on_the_best_costs_there_are(tmp_path):
    bare = history(log(tmp_path / "a", start()))
    assert predict(bare)[0].end == 3 * (8 + 1)
    stepped = history(log(tmp_path / "b", start(), step(1)))
    assert predict(stepped)[0].end == pytest.approx((0.12 + 0.3) / 8 * (8 + 1))
    seen = history(log(tmp_path / "c", start(), step(1), spans(1)))
    assert predict(seen)[0].end == pytest.approx(0.03 * (8 + 1))


@pytest.mark.slow
def test_activations_that_leave_the_device_are_timed_and_drawn(tmp_path):
    """The last block of a stage moves in an action of its own, at the rate of the cluster file."""
    (tmp_path / "slow.toml").write_text('accelerator = "cpu"\ncount = 2\n[host]\nlink = 1e12\ndisk_bandwidth = 1e7\n')
    moved = tiny_run(plan={"pipeline": 2, "retain": {"blocks": "disk"}}, model={"layers": 4}, train={"precision": "bf16"})
    moved = moved.model_copy(update={"cluster": str(tmp_path / "slow.toml")})
    folder = log(tmp_path / "run", replace(start(plan=moved.plan), spec=moved.model_dump(mode="json")), step(1))
    found, basis, _ = predict(history(folder))
    assert basis.endswith(", and transfers of activations at the cluster's rates")
    load = workload_of(moved)
    seconds = parts(load).blocks[0].leaves * load.cluster.host_devices / 1e7
    for kind in ("OFFLOAD", "FETCH"):
        lengths = [span.end - span.start for span in found.spans if isinstance(span.action, Action) and span.action.kind == kind]
        assert lengths == pytest.approx([seconds] * 2 * 8), "each of two stages and eight microbatches"
    page = write(folder).read_text(encoding="utf-8")
    assert "activations leave the device" in page and "activations are fetched" in page
    gone = replace(start(plan=moved.plan), spec=moved.model_dump(mode="json") | {"model": "of another version"})
    assert "rates" not in predict(history(log(tmp_path / "gone", gone, step(1))))[1]


def test_a_very_long_pipeline_is_drawn_in_part(tmp_path):
    plan = Plan(pipeline=16, schedule="interleaved", chunks=8)
    wide = start(plan=plan)
    wide.spec["train"]["global_batch"] = 512
    run = history(log(tmp_path, wide))
    timeline, _, microbatches = predict(run)
    assert microbatches < 512
    assert len(timeline.spans) <= 4000 + 2 * 16 * 128


def test_smoothing_keeps_a_straight_line_and_its_ends():
    line = [(i, 4.0 * i) for i in range(50)]
    assert smoothed(line, reach=5) == line


def test_smoothing_leaves_out_what_is_not_finite():
    assert smoothed([(0, 1.0), (1, float("nan")), (2, 3.0)], reach=1) == [(0, 1.0), (2, 3.0)]


def test_leaves_are_named_by_dotted_keys():
    assert flat({"a": {"b": 1, "c": {}}, "d": [1, "x"]}) == [("a.b", "1"), ("a.c", "{}"), ("d", '[1, "x"]')]


def test_the_merges_of_sites(tmp_path):
    """The section has totals, the saving, and each site's loss under its own number, even if a site was away. Without merges
    there is no section."""
    write_run(tmp_path)
    assert "Sites" not in parsed(write(tmp_path).read_text()).headings
    sizes = {"bytes_sent": 1 << 20, "bytes_received": 1 << 20, "seconds": 0.5}
    made = [
        events.Merge(step=10 * i, sent=10 * i - 2, fragment=i % 2, sites=2, losses=[3.5, None if i == 1 else 3.25], waited=0.25,
                     norm=1.0 / i, spread=0.5 / i, merged=[0, 2], **sizes)
        for i in range(1, 5)
    ]  # fmt: skip
    page = write(log(tmp_path, *made)).read_text()
    assert "Sites" in parsed(page).headings
    assert "4 merges of 2 sites in 2 rounds. The first site sent 4 MiB" in page
    saved = 4 * start().parameters * 40 / (4 << 20)
    assert f"{saved:,.3g} times less than if it sent fp32 gradients after each step" in page
    assert "waited 1 s for other sites, 500 ms a round" in page
    left = write(log(tmp_path, replace(made[-1], step=50, sites=1, count=2, merged=[0], losses=[3.5]))).read_text()
    assert "5 merges of 2 sites" in left and "times less" in left and ", 0 times less" not in left, "one of them never came back"
    moved = [replace(made[0], number=7, step=60, left=[2]), replace(made[0], number=8, step=70, joined=[2])]
    said = write(log(tmp_path, *moved[:1], *moved)).read_text()
    assert (
        "Sites that left and joined: site 2 left at step 60, site 2 joined at step 70." in said and "left and joined" not in page
    )
    named = write(log(tmp_path, *(replace(one, names=["oslo", "bergen", "turku"]) for one in made))).read_text()
    assert "turku" in named and "bergen" not in named
    assert "site 0" in page and "site 2" in page and "site 1<" not in page and "merged weights&#x27; validation loss" in page


def test_errors_of_gradients_are_drawn_up_to_where_a_run_resumes(tmp_path):
    """A comparison after the resumed step is repeated."""
    looks = [
        events.PrecisionWatched(step=at, errors={"blocks.1": 0.5, "head": None}, seconds=1.0, limit=0.1, raised=part)
        for at, part in ((2, "blocks.1"), (4, "blocks.2"))
    ]
    log(tmp_path, start(), step(1), step(2), looks[0], step(3), step(4), looks[1], start(resumed_step=4))
    assert [one.step for one in history(tmp_path).watched] == [2]
    page = write(tmp_path).read_text()
    parsed(page)
    assert "Relative error of gradients compared with wide products (not in 8 or 4 bits); 1 block made wide" in page
    assert "all matrix products of blocks.1 are in bf16 from step 3 on" in page


def test_the_heading_distinguishes_runs(tmp_path):
    folder = write_run(tmp_path / "second")
    found = {"host": "node1", "command": "megalith train a.toml --set name='<b>'", "commit": "0123456789ab"}
    (folder / "provenance.json").write_text(json.dumps({f"started.{key}": value for key, value in found.items()}))
    page = write(folder).read_text(encoding="utf-8")
    assert "<h1>first light · second</h1>" in page
    assert f"host node1 · folder {folder} · commit 0123456789ab" in page
    assert "<code>megalith train a.toml --set name=&#x27;&lt;b&gt;&#x27;</code>" in page
    (folder / "provenance.json").write_text("[1")
    assert "<code>" not in write(folder).read_text(encoding="utf-8")


def test_perplexity_stands_beside_the_loss(page):
    assert "perplexity 59.7, mean of 10 steps" in page  # exp(4.0898)
    assert "perplexity 54.6, best" in page  # exp(4)


def test_losses_in_bits_a_byte_follow_from_the_manifest_of_the_data(tmp_path):
    """austen's tokens are 4 bytes long, python's 2. Without the manifest there is no such figure."""
    sizes = {"austen": (100, 400), "python": (300, 600)}
    domains = {name: {"validation": {"tokens": tokens, "bytes": size}} for name, (tokens, size) in sizes.items()}
    (tmp_path / "manifest.json").write_text(json.dumps({"domains": domains}))
    known = spec() | {"data": {"path": str(tmp_path)}}
    losses = {"austen": 4 * math.log(2), "python": 3 * math.log(2)}
    folder = log(tmp_path / "run", replace(start(), spec=known), step(1), events.Validation(1, 2.5 * math.log(2), losses, 0.1))
    page = write(folder).read_text(encoding="utf-8")
    assert "1.0000 bits a byte, best" in page  # 2.5 bits a token, 0.4 tokens a byte
    assert "Validation loss (bits a byte)" in page
    assert of_folder(folder).bits_per_byte == pytest.approx(1.0)
    rates = tokens_a_byte(known)
    assert [bits_a_byte(losses[name], rates[name]) for name in losses] == pytest.approx([1.0, 1.5])
    (folder / "run.toml").write_text('name = "first"\n')
    assert "1.0000 in validation" in call("report", str(folder)).stdout
    (tmp_path / "manifest.json").unlink()
    assert "bits a byte" not in write(folder).read_text(encoding="utf-8")
    assert of_folder(folder).bits_per_byte is None


def test_the_steps_of_a_run_with_skipped_updates_are_as_many_as_it_needs(tmp_path):
    page = write(log(tmp_path, start(), step(43, updates=40))).read_text(encoding="utf-8")
    assert "<strong>43</strong><small>of 43</small>" in page


def test_a_footnote_says_what_mfu_is_relative_to(page):
    assert "MFU is relative to the peak of 4 ranks: 2.5 TFLOP/s (measured matrix product)." in page


def test_memory_that_would_lie_on_zero_is_named_and_not_drawn(tmp_path):
    sizes = {"weights": 1 << 20, "gradients": 0, "resident": 900 << 20, "peak": 901 << 20}
    page = write(log(tmp_path, start(), *(step(i, memory=sizes) for i in range(1, 4)))).read_text(encoding="utf-8")
    assert "Memory over the run; not drawn (below 1% of the largest): weights" in page
    assert 'aria-label="resident, peak"' in page


def test_a_run_of_one_stage_has_no_pipeline(tmp_path):
    plan = Plan(data=2)
    written = log(tmp_path, start(plan=plan), step(1), spans(1, plan))
    assert "Pipeline" not in parsed(write(written).read_text(encoding="utf-8")).headings


def test_checkpoints_that_were_deleted_are_counted_and_not_listed(tmp_path):
    saved = [events.Checkpoint(i, f"checkpoints/step-{i}", 123 << 20, 0.9, 0.04) for i in (10, 20)]
    written = log(tmp_path, start(), *saved)
    (tmp_path / "checkpoints" / "step-20").mkdir(parents=True)
    page = write(written).read_text(encoding="utf-8")
    assert "2 checkpoints saved, 1 still in the folder." in page
    assert "checkpoints/step-20<" in page and "checkpoints/step-10<" not in page
