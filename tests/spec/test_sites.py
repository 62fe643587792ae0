"""The fragments of a model, the steps at which they are due, and their bytes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalith.spec import files
from megalith.spec.sites import (
    Fragment,
    SitesSpec,
    at_site,
    encoded_bytes,
    fragments,
    kept,
    part_of,
    sent_after,
    wire_bytes,
    within,
)
from megalith.spec.sites.terms import terms, unequal
from megalith.spec.sizes import model_parameters
from tests.specs import tiny_run

MODELS = {"plain": {}, "tied": {"tied": True}, "experts": {"preset": "deepseek-tiny"}}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_is_in_one_fragment_whole(model: str, count: int) -> None:
    shapes = {name: each.shape for name, each in model_parameters(tiny_run(model=MODELS[model]).model.build()).items()}
    cut = fragments(shapes, SitesSpec(fragments=count, bits=4))
    names = [piece.name for fragment in cut for piece in fragment.pieces]
    assert sorted(names) == sorted(shapes) and len(cut) == count
    assert all(piece.shape == shapes[piece.name] for fragment in cut for piece in fragment.pieces)
    assert all(fragment.pieces for fragment in cut)
    homes = {part_of(piece.name): fragment.number for fragment in cut for piece in fragment.pieces}
    assert all(homes[part_of(piece.name)] == fragment.number for fragment in cut for piece in fragment.pieces)
    assert fragments(dict(reversed(shapes.items())), SitesSpec(fragments=count, bits=4)) == cut, (
        "the order of names must not matter"
    )


def test_equal_blocks_are_dealt_out_in_turn() -> None:
    shapes = {f"blocks.{number}.up.weight": (8, 8) for number in range(12)}
    cut = fragments(shapes, SitesSpec(fragments=3))
    assert [[int(part_of(piece.name)[7:]) for piece in fragment.pieces] for fragment in cut] == [
        sorted(range(start, 12, 3), key=lambda number: f"blocks.{number}.") for start in range(3)
    ]


def test_vectors_are_sent_in_full() -> None:
    (cut,) = fragments({"head.norm.weight": (8,), "head.output.weight": (16, 8)}, SitesSpec(bits=2))
    assert {piece.name: piece.bits for piece in cut.pieces} == {"head.norm.weight": 32, "head.output.weight": 2}
    assert cut.bytes == 4 * 8 + 4 + 128 * 2 // 8


def test_bytes() -> None:
    assert encoded_bytes(129, 4) == 2 * 4 + 65
    assert encoded_bytes(129, 32) == 4 * 129
    assert wire_bytes(Fragment(0, ())) == 48 + 44


def test_two_bits_send_as_many_times_fewer_bytes_than_gradients_as_the_guide_says() -> None:
    """All counts: codes, scales, vectors in fp32, and what authentication adds."""
    model = model_parameters(files.load(Path("recipes/quickstart.toml")).spec.model.build())
    cut = fragments({name: each.shape for name, each in model.items()}, SitesSpec(inner_steps=30, fragments=5, overlap=5, bits=2))
    numbers, sent = sum(each.numel for each in model.values()), sum(map(wire_bytes, cut))
    wide, half = (30 * width * numbers / sent for width in (4, 2))
    assert wide > 256
    said = f"quickstart's model are {sent:,} in a round: {wide:.0f} times fewer than gradients in fp32 after each step, {half:.0f} times"
    assert said in " ".join(Path("docs/guide/sites.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("steps", "count"), [(6, 1), (6, 3), (7, 3), (5, 5), (1, 1)])
def test_each_fragment_is_due_once_a_round(steps: int, count: int) -> None:
    spec = SitesSpec(inner_steps=steps, fragments=count)
    for begin in range(steps, 4 * steps):
        due = [number for step in range(begin, begin + steps) for number in sent_after(step, spec)]
        assert sorted(due) == list(range(count))
    assert not list(sent_after(0, spec))


def test_a_site_has_its_share_of_the_batch() -> None:
    run = tiny_run(sites={"count": 2}, plan={"data": 2})
    assert (run.ranks, run.microbatches) == (2, within(run).microbatches) == (2, 2)
    assert within(run).train.global_batch == 4 and within(run).sites is None


def test_own_share_follows_the_overlap() -> None:
    assert [SitesSpec(overlap=0).own_share, SitesSpec(overlap=2).own_share, SitesSpec(overlap=2, mixing=0.0).own_share] == [
        0.0,
        0.5,
        0.0,
    ]


@pytest.mark.parametrize("every", [1, 3, 10, 40])
def test_sites_that_are_apart_hold_a_checkpoint_in_common(every: int) -> None:
    """One site is as far ahead as possible, and the other's newest save is still being written."""
    sites = {"count": 2, "inner_steps": 30, "fragments": 4, "overlap": 5}
    run = tiny_run(sites=sites, checkpoint={"every": every, "keep": 2})
    assert run.sites is not None and run.sites.lead == 8 + 5
    for behind in range(2 * every, 5 * every):
        saved = [set(range(every, step + 1, every)) for step in (behind + run.sites.lead, behind)]
        assert set(sorted(saved[0])[-kept(run) :]) & set(sorted(saved[1])[:-1][-kept(run) :])
    assert kept(tiny_run(sites=sites, checkpoint={"every": every, "keep": 20})) == 20
    assert (
        kept(tiny_run(checkpoint={"every": every, "keep": 2}))
        == 2
        == kept(tiny_run(sites=sites, checkpoint={"every": 0, "keep": 2}))
    )


def test_each_site_has_its_cluster_also_in_a_file_beside_the_run_s(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    sites = '[sites]\ncount = 3\n[[sites.each]]\ncluster = "mine.toml"\n[[sites.each]]\n[[sites.each]]\ncluster = "t4:2"\n'
    train = "[train]\nsteps = 3\nglobal_batch = 12\nseq_len = 32\n"
    (tmp_path / "mine.toml").write_text('accelerator = "h100"\ncount = 4\n')
    file.write_text(f'cluster = "h100:8"\n[model]\npreset = "tiny"\n[data]\npath = "unused"\n{train}{sites}')
    runs = [files.load(file, overrides=[f"sites.site={site}"]) for site in range(3)]
    assert [run.spec.cluster for run in runs] == [str((tmp_path / "mine.toml").resolve()), "h100:8", "t4:2"]
    saved = tmp_path / "saved.toml"
    saved.write_text(files.dump(runs[2]))
    assert [files.load(saved, overrides=[f"sites.site={site}"]).spec.cluster for site in range(3)] == [
        run.spec.cluster for run in runs
    ]


def test_a_run_file_gives_each_site_its_plan(tmp_path: Path) -> None:
    """This includes the file saved by one site and used by another."""
    file, saved = tmp_path / "run.toml", tmp_path / "saved.toml"
    sites = "[sites]\ncount = 2\n[[sites.each]]\nplan = { data = 2, zero = 3 }\n[[sites.each]]\nshare = 1\n"
    train = "[train]\nsteps = 3\nglobal_batch = 12\nseq_len = 32\n"
    file.write_text(f'[model]\npreset = "tiny"\n[data]\npath = "unused"\n[plan]\ntensor = 2\n{train}{sites}')
    runs = [files.load(file, overrides=[f"sites.site={site}"]) for site in range(2)]
    assert [(run.spec.plan.data, run.spec.plan.tensor, within(run.spec).train.global_batch) for run in runs] == [
        (2, 1, 8),
        (1, 2, 4),
    ]
    for run in runs:
        saved.write_text(files.dump(run))
        for site, other in enumerate(runs):
            assert files.load(saved, overrides=[f"sites.site={site}"]).spec == other.spec
    assert files.load(file, overrides=["plan.tensor=1", "sites.site=1"]).spec.plan.ranks == 1
    (problem,) = files.read(saved, overrides=["plan.tensor=1"], saved=True).problems
    assert (problem.key, problem.value) == ("plan.tensor", 1) and "each table of sites.each has a plan" in problem.reason


@pytest.mark.parametrize("wrong", ["share = 0", 'nmae = "oslo"', "plan = { tensor = 0 }"])
def test_an_invalid_value_of_a_site_is_a_problem_and_nothing_else(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "run.toml"
    train = "[train]\nsteps = 3\nglobal_batch = 12\nseq_len = 32\n"
    file.write_text(f'[model]\npreset = "tiny"\n[data]\npath = "unused"\n{train}[[sites.each]]\n{wrong}\n[[sites.each]]\n')
    (problem,) = files.read(file).problems
    assert problem.key.startswith("sites.each.0.")


def test_a_mistake_elsewhere_leaves_the_table_of_sites_whole(tmp_path: Path) -> None:
    """Values that follow from others are filled in."""
    file = tmp_path / "run.toml"
    train = "[train]\nsteps = 0\nglobal_batch = 12\nseq_len = 32\n"
    file.write_text(f'[model]\npreset = "tiny"\n[data]\npath = "unused"\n{train}[sites]\nmethod = "data-parallel"\n')
    reading = files.read(file)
    sites = reading.resolved.spec.sites
    assert sites is not None and sites.inner_steps == 1 and [one.key for one in reading.problems] == ["train.steps"]


def _terms(data: dict[str, Any] | None = None, **parts: dict[str, Any]) -> dict[str, Any]:
    fingerprint = {"manifest": "abc", "tokenizer": "bytes", "seq_len": 32, "seed": 0, "weights": [0.5, 0.5], "split": "train"}
    run = at_site(tiny_run(**{"sites": {"count": 2}} | parts))
    return json.loads(json.dumps(terms(run, fingerprint | (data or {}), version=1)))


def _apart(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    return unequal(mine, theirs, "oslo", "site 1")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"sites": {"count": 2, "lr": 0.5}}, "sites.lr is 0.7 on oslo and 0.5 on site 1"),
        ({"sites": {"count": 3}}, "sites.count is 2 on oslo and 3 on site 1"),
        ({"sites": {"count": 2, "decides": 0}}, 'sites.decides is "none" on oslo and 0 on site 1'),
        ({"sites": {"count": 2, "each": [{"share": 2}, {}]}}, r"sites.each.share is \[\] on oslo and \[2, 1\] on site 1"),
        ({"train": {"seed": 2, "global_batch": 24}}, "train.global_batch is 8 on oslo and 24 on site 1; train.seed is 0"),
        ({"optimizer": {"lr": 0.5}}, "optimizer.lr is 0.001 on oslo and 0.5 on site 1"),
        ({"model": {"layers": 3}}, "model.layers is 4 on oslo and 3 on site 1"),
        ({"data": {"weights": [0.1, 0.9]}}, r"data.weights is \[0.5, 0.5\] on oslo and \[0.1, 0.9\] on site 1"),
        ({"data": {"manifest": "def", "weights": [1.0]}}, "run: the data differ. Start .* copy of the same prepared data$"),
    ],
)
def test_what_two_sites_must_have_in_common_is_named(parts: dict[str, Any], said: str) -> None:
    text = _apart(_terms(), _terms(**{name: table for name, table in parts.items() if name != "data"}, data=parts.get("data")))
    assert re.search(said, text), text


def test_what_concerns_one_site_may_differ() -> None:
    parts: dict[str, Any] = {"plan": {"data": 2}, "fleet": {"spares": 1, "nodes": 3}, "checkpoint": {"every": 3}}
    own = {"site": 1, "grace": 9.0, "place": "host", "addresses": ["a:1", "b:2"], "each": [{}, {"name": "bergen"}]}
    parts |= {"sites": {"count": 2} | own, "train": {"device": "cpu", "init_from": "elsewhere"}}
    assert _apart(_terms(), _terms(**parts)) == ""
    together = {"count": 2, "method": "data-parallel"}
    away = {"state": {"optimizer": "disk", "folder": "/nvme"}, "retain": {"folder": "/scratch"}}
    near = {"state": {"optimizer": "disk"}}
    assert _apart(_terms(sites=together, plan=away), _terms(sites=together, plan=near)) == ""
    assert "plan.data is 1 on oslo and 2" in _apart(_terms(sites=together), _terms(sites=together, plan={"data": 2}))
    assert "different versions" in _apart(_terms() | {"format": 2}, _terms())


def _read(text: str, folder: Path) -> list[str]:
    """Return the problems of a run file with these tables of sites."""
    (folder / "run.toml").write_text(
        f'[model]\npreset = "tiny"\n[data]\npath = "x"\n[train]\nsteps = 9\nglobal_batch = 6\nseq_len = 32\n{text}'
    )
    return [str(problem) for problem in files.read(folder / "run.toml").problems]


def test_the_tables_of_sites_count_them(tmp_path: Path) -> None:
    """The number may be left out; another number is refused by `check`."""
    tables = "[[sites.each]]\n" * 3
    assert not _read(tables, tmp_path) and files.load(tmp_path / "run.toml").spec.sites.count == 3  # type: ignore[union-attr]
    assert SitesSpec(each=()).count == 2 and SitesSpec(count=2, each=({}, {}, {})).count == 2  # type: ignore[arg-type]
    for text in ('[sites]\nnames = ["oslo", "bergen"]\n', '[[sites.site]]\nname = "oslo"\n'):
        (found,) = _read(text, tmp_path)
        assert "Use sites.each: write a table [[sites.each]] for each site" in found
    assert "write a whole number" in _read('[sites]\nsite = "1"\n', tmp_path)[0].lower()
