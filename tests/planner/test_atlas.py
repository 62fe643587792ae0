from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalith.cli import app
from megalith.cost.software import OURS
from megalith.planner.atlas import MAXIMUM, SPACE, Atlas, atlas, columns
from megalith.planner.plan_result import short
from megalith.planner.request import PlanRequest
from megalith.planner.search import search
from megalith.report.atlas import page
from megalith.spec.cluster import load
from megalith.spec.presets import presets
from megalith.spec.problem import SpecErrors


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Atlas:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGALITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        request = PlanRequest(cluster="h100:16", seq_len=128, global_batch=16)
        return atlas(request, ("tiny", "dense-2t"))


@pytest.mark.parametrize("nodes", [1, 2, 3, 32, 100, 2048, 4096])
def test_columns_go_from_one_node_to_all(nodes: int):
    found = columns(nodes)
    assert (found[0], found[-1]) == (1, nodes)
    assert len(found) <= MAXIMUM
    assert sorted(set(found)) == list(found)


@pytest.mark.slow
def test_every_square_has_a_layout_of_its_devices_or_a_reason(found: Atlas):
    assert [(square.model, square.nodes) for square in found.squares] == [
        ("tiny", 1), ("tiny", 2), ("dense-2t", 1), ("dense-2t", 2),
    ]  # fmt: skip
    for square in found.squares:
        assert (square.choice is None) == bool(square.why)
        if square.choice is not None:
            assert square.choice.plan.ranks == square.devices == 8 * square.nodes
    assert [square.choice is None for square in found.squares] == [False, False, True, True]


@pytest.mark.slow
def test_the_page_needs_nothing_from_outside_and_shows_every_square(found: Atlas):
    words = page(found)
    parser = HTMLParser()
    parser.feed(words)
    assert "http:" not in words and "https:" not in words
    assert words.count("<svg") == 3
    assert words.count("does not fit") == 3 * 2
    for square in found.squares:
        if square.choice is not None:
            assert short(square.choice.plan) in words


def test_models_that_are_not_known_are_named_all_at_once():
    with pytest.raises(SpecErrors) as caught:
        atlas(PlanRequest(cluster="h100:8", seq_len=128, global_batch=8), ("tinny", "larma"))
    assert [problem.value for problem in caught.value.problems] == ["tinny", "larma"]


def test_a_map_is_of_the_software_that_it_names():
    request = PlanRequest(cluster="h100:8", seq_len=128, global_batch=16)
    ours, other = (atlas(replace(request, software=name), ("tiny",)).squares[0].choice for name in (OURS, "torchtitan"))
    assert ours is not None and other is not None
    assert other.estimate.time.step != ours.estimate.time.step
    alone = search(
        presets()["tiny"].build().build(), load("h100:8"), seq_len=128, global_batch=16, software="torchtitan", top=1, space=SPACE
    ).best
    assert alone is not None and other.estimate.time.step == alone.estimate.time.step


def test_figures_of_the_cluster_can_be_given_for_a_map(tmp_path: Path):
    words = ["plan", "--atlas", "--model", "tiny", "--cluster", "rtx-4090:16", "--seq-len", "128", "--global-batch", "16"]
    words += ["--out", str(tmp_path / "map.html")]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2 and "--set cluster.scale_out=25e9" in " ".join(refused.stderr.split())
    drawn = CliRunner().invoke(app, [*words, "--set", "cluster.scale_out=25e9"])
    assert drawn.exit_code == 0, drawn.output


def test_options_that_a_map_does_not_use_are_refused():
    words = ["plan", "run.toml", "--atlas", "--cluster", "h100:8", "--tokens", "1B", "--top", "3", "--offload"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "does not use RUN.toml or --tokens or --top or --offload." in " ".join(done.stderr.replace("│", "").split())


@pytest.mark.slow
def test_the_command_draws_it_and_leaves_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGALITH_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "map.html"
    words = [
        "plan",
        "--atlas",
        "--model",
        "tiny",
        "--cluster",
        "h100:8",
        "--seq-len",
        "128",
        "--global-batch",
        "8",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert out.read_text().startswith("<!doctype html>")
    assert CliRunner().invoke(app, words).exit_code == 1
