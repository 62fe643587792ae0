"""Sites on different clusters: shares, plans, and the written run file."""

from pathlib import Path

import pytest

from megalith.check import check
from megalith.planner import site_plans
from megalith.planner.plan_result import PlanResult, best_plans
from megalith.planner.request import PlanRequest, resolve
from megalith.planner.run_file import as_run
from megalith.report import plans
from megalith.spec import files
from megalith.spec.problem import SpecErrors
from megalith.spec.sites import own_batch

LINK = "link = { megabits = 10000, milliseconds = 20 }"


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITH_CACHE", "")


def _file(folder: Path, *clusters: str, batch: int = 64, more: str = "") -> Path:
    path = folder / "sites.toml"
    each = "".join(f'[[sites.each]]\ncluster = "{one}"\n' for one in clusters)
    path.write_text(
        f'model.preset = "tiny"\ndata.path = "my/data"\n[sites]\ncount = {len(clusters)}\n{LINK}\n{more}{each}'
        f"[train]\nsteps = 50\nglobal_batch = {batch}\nseq_len = 128\n"
    )
    return path


def _answer(path: Path, **said: str) -> PlanResult:
    return best_plans(resolve(PlanRequest(path=path, overrides=tuple(f"{key}={value}" for key, value in said.items()))), top=1)


@pytest.mark.parametrize(
    ("rates", "batch", "shares"),
    [
        ([1.0, 1.0], 64, (1, 1)),
        ([3.0, 1.0], 64, (3, 1)),
        ([2.0, 1.0], 12, (2, 1)),
        ([2.0, 1.0, 1.0], 64, (2, 1, 1)),
        ([100.0, 1.0], 4, (3, 1)),
        ([2.0, 1.0], 7, (5, 2)),
    ],
)
def test_shares_follow_speed_as_far_as_whole_parts_do(rates: list[float], batch: int, shares: tuple[int, ...]) -> None:
    assert site_plans.share_out(rates, batch, lambda part: True) == shares


def test_shares_have_parts_that_all_can_deal_out() -> None:
    assert site_plans.share_out([3.0, 1.0], 64, lambda part: part % 32 == 0) == (1, 1)
    assert site_plans.share_out([3.0, 1.0], 64, lambda part: part % 64 == 0) is None


@pytest.mark.slow
def test_alike_sites_share_evenly_and_have_the_plan_of_one(tmp_path: Path) -> None:
    found = _answer(_file(tmp_path, "h100:4", "h100:4")).site_plans
    assert found is not None and found.sites.shares == ()
    assert len({one.choices[0].plan for one in found.found}) == 1 and len(set(found.steps)) == 1


@pytest.mark.slow
def test_a_faster_site_reads_more_and_no_step_is_longer_than_with_even_shares(tmp_path: Path) -> None:
    path = _file(tmp_path, "h100:8", "a100:2", more="bits = 4\n")
    answered = _answer(path)
    found = answered.site_plans
    assert found is not None and answered.linked is not None
    first, second = found.sites.shares
    assert first > second
    batches = [one.run.train.global_batch for one in found.asks]
    assert sum(batches) == 64 and batches[0] * second == batches[1] * first
    even = _answer(_file(tmp_path, "a100:2", "a100:2")).site_plans
    assert even is not None and max(found.steps) < max(even.steps)
    assert answered.linked.gain == pytest.approx(
        min(one.estimate.time.step for one in (_alone(path, site) for site in range(2)))
        * (answered.linked.proposed or answered.linked.said).use
        / max(found.steps)
    )
    path = _file(tmp_path, "h100:8", "a100:2", more="bits = 4\n")
    other = _answer(path, **{"sites.site": "1"}).linked
    assert other is not None and other.gain == pytest.approx(answered.linked.gain), "whichever site the command is for"
    drawn = plans.sites(found)
    assert drawn.row_count == 2


def _alone(path: Path, site: int):
    """Return the best choice for a site that trains everything alone."""
    cluster = ("h100:8", "a100:2")[site]
    text = path.read_text()
    alone = path.with_name(f"alone-{site}.toml")
    alone.write_text(f'cluster = "{cluster}"\n{text.partition("[sites]")[0]}[train]{text.partition("[train]")[2]}')
    best = best_plans(resolve(PlanRequest(path=alone)), top=1).found.best
    assert best is not None
    return best


@pytest.mark.slow
@pytest.mark.parametrize("site", [0, 1])
def test_what_is_written_is_valid_at_every_site(tmp_path: Path, site: int) -> None:
    found, path = _answer(_file(tmp_path, "h100:8", "a100:2"), **{"sites.site": str(site)}), tmp_path / "planned.toml"
    path.write_text(as_run(found))
    assert found.site_plans is not None and found.found.best is not None
    assert found.found.best.plan == found.site_plans.sites.each[site].plan
    for number, cluster in enumerate(("h100:8", "a100:2")):
        spec = files.load(path, overrides=[f"sites.site={number}"]).spec
        assert spec.cluster == cluster and spec.plan == found.site_plans.sites.each[number].plan
        assert own_batch(spec) == found.site_plans.asks[number].run.train.global_batch
        assert [one for one in check(spec, files=False) if one.severity == "error"] == []


@pytest.mark.slow
def test_a_site_without_a_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecErrors) as raised:
        _answer(_file(tmp_path, "h100:1", "a100:1"), **{"model.preset": "llama3.1-8b", "train.seq_len": "8192"})
    assert {one.key for one in raised.value.problems} == {"sites.each.0.cluster", "sites.each.1.cluster"}


def test_a_batch_that_cannot_be_shared_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecErrors, match="without samples"):
        _answer(_file(tmp_path, "h100:4", "h100:4", batch=1))


@pytest.mark.parametrize("said", [{"cluster": "h100:8"}, {"global_batch": 32}])
def test_options_for_one_site_are_refused(tmp_path: Path, said: dict) -> None:
    with pytest.raises(SpecErrors) as raised:
        resolve(PlanRequest(path=_file(tmp_path, "h100:4", "a100:2"), **said))
    assert [one.key for one in raised.value.problems] == [f"--{next(iter(said)).replace('_', '-')}"]


def test_devices_that_cannot_compute_in_the_run_s_format_are_named_by_site(tmp_path: Path) -> None:
    with pytest.raises(SpecErrors) as raised:
        _answer(_file(tmp_path, "h100:4", "t4:2"))
    assert [(one.key, one.value) for one in raised.value.problems] == [("sites.each.1.cluster", "t4:2")]


def test_a_ramp_of_the_batch_is_refused(tmp_path: Path) -> None:
    """Otherwise shares would be chosen for the batch of one phase."""
    path = _file(tmp_path, "h100:4", "a100:2")
    path.write_text(
        path.read_text().replace("global_batch = 64", "global_batch = 64\nbatch_ramp = [{ begin = 640, global_batch = 128 }]")
    )
    with pytest.raises(SpecErrors) as raised:
        resolve(PlanRequest(path=path))
    assert "sites.each" in {one.key for one in raised.value.problems}


@pytest.mark.slow
def test_shares_that_leave_a_site_without_a_plan_lose_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tried = site_plans._planned, list[tuple[int, ...]]()

    def planned(asked, shares, *others):
        tried.append(tuple(shares))
        if len(tried) > 1:
            raise SpecErrors([])
        return whole(asked, shares, *others)

    monkeypatch.setattr(site_plans, "_planned", planned)
    monkeypatch.setattr(site_plans, "share_out", lambda rates, batch, able: (1, 1) if not tried else (3, 1))
    found = _answer(_file(tmp_path, "h100:4", "h100:4")).site_plans
    assert found is not None and found.sites.shares == () and tried == [(1, 1), (3, 1)]
