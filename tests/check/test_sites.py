"""Rules about sites."""

import re
from pathlib import Path
from typing import Any

import pytest

from megalith.check import all_ranks, check
from megalith.check.remedies import changes
from megalith.check.resume import check_resume
from megalith.spec.sites import at_site
from tests.specs import tiny_run


def _keys(severity: str = "error", **parts: Any) -> list[str]:
    run = tiny_run(**({"sites": {"inner_steps": 2}, "checkpoint": {"every": 2}} | parts))
    return [problem.key for problem in check(run, files=False) if problem.severity == severity and "data" not in problem.key]


def test_asynchronous_merges_without_a_smaller_quorum_are_advised_against() -> None:
    assert "sites.staleness" in _keys("advice", sites={"inner_steps": 2, "staleness": 1})
    assert "sites.staleness" in _keys("advice", sites={"inner_steps": 2, "staleness": 1, "count": 1})
    for more in ({"decides": 0}, {"count": 3}):
        assert "sites.staleness" not in _keys("advice", sites={"inner_steps": 2, "staleness": 1} | more)


def test_a_run_with_sites_is_valid() -> None:
    assert _keys() == [] == _keys(plan={"data": 2, "zero": 3})
    assert _keys(sites={"inner_steps": 2, "addresses": ("a:29400", "a:29401")}) == []


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("sites.overlap", {"sites": {"inner_steps": 2, "overlap": 2}}),
        ("sites.fragments", {"sites": {"inner_steps": 2, "fragments": 3}}),
        ("sites.error_feedback", {"sites": {"inner_steps": 2, "top_k": 64, "error_feedback": False}}),
        ("sites.eager", {"sites": {"inner_steps": 2, "eager": True}}),
        ("sites.mixing", {"sites": {"inner_steps": 2, "overlap": 1, "eager": True, "mixing": 0.5}}),
        ("sites.eager", {"sites": {"inner_steps": 2, "overlap": 1, "eager": True, "staleness": 1}}),
        ("sites.staleness", {"sites": {"method": "data-parallel", "staleness": 1}}),
        ("sites.fragments", {"sites": {"inner_steps": 20, "fragments": 7}}),
        ("sites.addresses", {"sites": {"inner_steps": 2, "addresses": ("127.0.0.1:29400",)}}),
        ("sites.addresses", {"sites": {"inner_steps": 2, "addresses": ("127.0.0.1", "127.0.0.1:29400")}}),
        ("sites.addresses", {"sites": {"inner_steps": 2, "addresses": ("a:29400", "b:99999")}}),
        ("sites.addresses", {"sites": {"inner_steps": 2, "addresses": ("a:0", "b:29400")}}),
        ("sites.addresses", {"sites": {"inner_steps": 2, "addresses": ("a:29400", "a:29400")}}),
        ("sites.inner_steps", {"sites": {"method": "data-parallel", "inner_steps": 2}}),
        ("sites.overlap", {"sites": {"method": "data-parallel", "overlap": 1}}),
        ("sites.bits", {"sites": {"method": "data-parallel", "bits": 8}}),
        ("sites.top_k", {"sites": {"method": "data-parallel", "top_k": 64}}),
        ("sites.momentum", {"sites": {"method": "data-parallel", "momentum": 0.9}}),
        ("sites.decides", {"sites": {"method": "data-parallel", "decides": 0}}),
        ("sites.place", {"sites": {"method": "data-parallel", "place": "host"}}),
        ("sites.grace", {"sites": {"method": "data-parallel", "grace": 5.0}}),
        ("sites.nesterov", {"sites": {"method": "data-parallel", "nesterov": False}}),
        ("sites.error_feedback", {"sites": {"method": "data-parallel", "error_feedback": False}}),
        ("sites.feedback_decay", {"sites": {"method": "data-parallel", "feedback_decay": 0.5}}),
        ("fleet.verify_every", {"sites": {"method": "data-parallel"}, "fleet": {"verify_every": 2}}),
        ("sites.method", {"sites": {"method": "data-parallel"}, "model": {"preset": "deepseek-tiny"}}),
        ("optimizer.qk_clip", {"sites": {"method": "data-parallel"}, "optimizer": {"qk_clip": 100.0}}),
        ("sites.site", {"sites": {"inner_steps": 2, "site": 2}}),
        ("sites.decides", {"sites": {"inner_steps": 2, "decides": 2}}),
        ("train.global_batch", {"sites": {"count": 3}}),
        ("stability.answers", {"stability": {"answers": ("skip",)}}),
        ("stability.not_finite", {"stability": {"not_finite": "skip"}}),
        ("train.precision", {"train": {"precision": "fp16"}}),
        ("plan.post_validation", {"plan": {"pipeline": 2, "schedule": "zb-h1", "post_validation": True}}),
        ("fleet.fallback", {"plan": {"data": 2}, "fleet": {"nodes": 2, "fallback": {"data": 1}}}),
    ],
)
def test_what_sites_cannot_do_is_refused(key: str, parts: dict[str, Any]) -> None:
    assert key in _keys(**parts)


@pytest.mark.parametrize("own", [{"site": 1}, {}])
def test_certificates_that_are_not_there_are_named(own: dict[str, Any], tmp_path: Path) -> None:
    """On several nodes another machine may lead the site, and have the files."""
    names = {key: str(tmp_path / f"{key}.pem") for key in ("certificate", "key", "authority")}
    (tmp_path / "key.pem").write_text("key")

    def found(*, files: bool = True, nodes: int = 1) -> list[tuple[str, str]]:
        run = tiny_run(sites={"tls": names} | own, plan={"data": 2}, fleet={"nodes": nodes})
        return [(one.severity, one.key) for one in check(run, files=files) if one.key.startswith("sites.tls")]

    assert found() == [("error", "sites.tls.certificate"), ("error", "sites.tls.authority")] and not found(files=False)
    assert {severity for severity, _ in found(nodes=2)} == {"advice"}
    for name in ("certificate", "authority"):
        (tmp_path / f"{name}.pem").write_text("certificate")
    assert not found()


def test_a_launcher_starts_the_ranks_of_one_site() -> None:
    run = tiny_run(sites={"count": 2, "site": 1}, plan={"data": 2}, checkpoint={"every": 2})
    assert not [
        problem for problem in check(run, world=2, files=False) if problem.severity == "error" and "data" not in problem.key
    ]
    (found,) = [problem for problem in check(run, world=4, files=False) if "were started" in problem.reason]
    assert found.reason == "data 2 x tensor 1 x pipeline 1 = 2 ranks are needed in each site, but 4 were started"
    unnamed = tiny_run(sites={"count": 2}, plan={"data": 2})
    assert "sites.site" in [problem.key for problem in check(unnamed, world=2, files=False)]
    assert all_ranks(unnamed) == 4 and all_ranks(run) == 2


OWN = [{"plan": {"data": 2}}, {"plan": {"tensor": 2}, "share": 1}]


def test_a_site_with_a_plan_of_its_own_is_valid() -> None:
    run = at_site(tiny_run(sites={"inner_steps": 2, "each": OWN}, checkpoint={"every": 2}, train={"global_batch": 12}))
    assert run.sites is not None and run.sites.shares == (2, 1) and run.microbatches == 4 and all_ranks(run) == 4
    assert at_site(run, 1).ranks == 2 and at_site(run) == run, "the table of each site says it all"
    assert not [one for one in check(run, files=False) if one.severity == "error"]


def test_names_of_sites_tell_them_apart() -> None:
    """A name may be given to some sites only. Tables that only name sites leave the run's plan and batch as they are."""
    run = tiny_run(sites={"each": [{"name": "oslo"}, {}]})
    assert at_site(run) == run and run.sites is not None and run.sites.names == ("oslo", "site 1")
    assert (
        tiny_run(sites={"each": [{}, {}]}).sites.names == ()
        and _keys(sites={"inner_steps": 2, "each": [{"name": "oslo"}, {}]}) == []
    )
    for first, second, key in (
        ("oslo", "oslo", 1),
        ("site 1", None, 1),
        (" ", "oslo", 0),
        ("two\nlines", None, 0),
        ("o" * 41, None, 0),
    ):
        each = [{"name": first}, {"name": second}]
        assert _keys(sites={"inner_steps": 2, "each": each}) == [f"sites.each.{key}.name"]
    own = at_site(
        tiny_run(sites={"each": [{"name": "oslo", "plan": {"data": 2}}, {"name": "bergen"}]}, train={"global_batch": 12}), 1
    )
    assert own.sites is not None and own.sites.names == ("oslo", "bergen") and own.plan.data == 1


@pytest.mark.parametrize(
    ("key", "each", "batch"),
    [
        ("sites.each", [{"share": 2}], 12),
        ("sites.each", [{"plan": {"data": 1}}], 12),
        ("train.global_batch", OWN, 16),
        ("train.global_batch", [{"plan": {"data": 2}}, {"plan": {"data": 3}, "share": 2}], 16),
        ("sites.each.1.plan.tensor", [{}, {"plan": {"tensor": 3}}], 12),
        ("sites.each.0.plan.tensor", [{"plan": {"tensor": 3}}, {}], 12),
    ],
)
def test_what_a_site_cannot_have_is_refused(key: str, each: list[dict[str, Any]], batch: int) -> None:
    run = tiny_run(sites={"count": 2, "inner_steps": 2, "site": 1, "each": each}, train={"global_batch": batch})
    run = at_site(run) if len(each) == 2 else run
    found = {one.key for one in check(run, files=False) if one.severity == "error"}
    assert key in found and not any(one.startswith("plan") for one in found)


def test_the_cluster_of_each_site_is_known_and_has_its_ranks() -> None:
    each = [{"cluster": "h100:2", "plan": {"data": 2}}, {"cluster": "2xt4", "plan": {"data": 4}}, {"cluster": "h1000"}]
    for site in range(3):
        sites = {"count": 3, "inner_steps": 2, "each": each, "site": site}
        found = check(at_site(tiny_run(sites=sites, train={"global_batch": 28})), files=False)
        assert {one.key for one in found if one.severity == "error"} == {"sites.each.1.cluster", "sites.each.2.cluster"}


def test_sparse_differences_need_no_momentum() -> None:
    sparse = {"inner_steps": 2, "top_k": 64}
    assert "sites.momentum" in _keys("advice", sites=sparse)
    assert not {"sites.momentum", "sites.feedback_decay"} & {
        *_keys("advice", sites=sparse | {"momentum": 0.0, "feedback_decay": 0.95})
    }
    assert "sites.feedback_decay" in _keys("advice", sites={"inner_steps": 2, "feedback_decay": 0.95})


@pytest.mark.parametrize(("fragments", "overlap"), [(4, 0), (1, 5), (1, 0)])
def test_the_suggested_inner_steps_are_valid(fragments: int, overlap: int) -> None:
    """The suggestion leaves room for the fragments and the overlap."""
    given = {"inner_steps": 50, "fragments": fragments, "overlap": overlap}
    [problem] = [one for one in check(tiny_run(sites=given, train={"steps": 20}), files=False) if one.key == "sites.inner_steps"]
    [number] = re.findall(r"inner_steps = (\d+)", problem.way_out)
    asked = {"sites": given | {"inner_steps": int(number)}, "train": {"steps": 20}}
    assert not {"sites.fragments", "sites.overlap", "sites.inner_steps"} & {*_keys(**asked), *_keys("advice", **asked)}


def test_faults_go_back_to_checkpoints() -> None:
    assert "checkpoint.every" in _keys("advice", checkpoint={"every": 0})
    often = [
        problem.way_out
        for problem in check(
            tiny_run(sites={"method": "data-parallel"}, train={"steps": 200}, checkpoint={"every": 0}), files=False
        )
        if problem.key == "checkpoint.every"
    ]
    assert "checkpoint.every = 20." in often[0], "not each step, although sites exchange gradients in each"
    assert "checkpoint.every" not in _keys("advice")


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
def test_state_and_activations_of_a_site_may_be_elsewhere(place: str, precision: str) -> None:
    state, train = {"optimizer": place}, {"precision": precision}
    assert _keys(plan={"state": state}, train=train) == _keys(plan={"retain": {"blocks": place}}, train=train) == []
    if precision != "fp32":
        assert _keys(plan={"zero": 3, "state": state | {"weights": place}}, train=train) == []


@pytest.mark.parametrize(
    ("plan", "key", "sites"),
    [
        ({"pipeline": 2, "schedule": "zb-h1", "post_validation": True}, "plan.post_validation", {}),
        ({"state": {"optimizer": "disk", "release": True}}, "plan.state.release", {"method": "data-parallel", "inner_steps": 1}),
    ],
)
def test_the_plan_of_another_site_follows_the_rules_of_sites(plan: dict[str, Any], key: str, sites: dict[str, Any]) -> None:
    each = ({"plan": {"data": 2}}, {"plan": plan})
    run = at_site(tiny_run(sites={"inner_steps": 2, "each": each} | sites, checkpoint={"every": 2}, train={"precision": "bf16"}))
    assert f"sites.each.1.{key}" in [problem.key for problem in check(run, files=False) if problem.severity == "error"]


def test_gradients_may_be_exchanged() -> None:
    assert _keys(sites={"method": "data-parallel"}, plan={"data": 2, "zero": 3}) == []
    own = at_site(tiny_run(sites={"method": "data-parallel", "each": OWN}, checkpoint={"every": 2}, train={"global_batch": 12}))
    assert "sites.each" in [problem.key for problem in check(own, files=False) if problem.severity == "error"]


@pytest.mark.parametrize(
    ("clusters", "refused"),
    [
        (("h100:2", "t4:2"), True),
        (("h100:2", "8xh100"), False),
        (("h100:2", None), False),
        (("h100:2", "no-such"), False),
    ],
)
def test_other_devices_cannot_make_the_same_update(clusters: tuple[str | None, str | None], refused: bool) -> None:
    """Sites have the same plan. A `local` cluster's devices are known only on site; unknown clusters are another
    rule's."""
    each = [{"cluster": one, "plan": {"data": 2}} for one in clusters]
    run = at_site(tiny_run(sites={"method": "data-parallel", "each": each}, checkpoint={"every": 2}))
    reasons = [one.reason for one in check(run, files=False) if one.severity == "error" and one.key == "sites.each"]
    assert bool(reasons) is refused, reasons
    if refused:
        assert "different devices (h100, t4), whose kernels round differently" in reasons[0]
    merges = at_site(tiny_run(sites={"inner_steps": 2, "each": each}, checkpoint={"every": 2}))
    assert "sites.each" not in [one.key for one in check(merges, files=False)]


def test_a_schedule_need_not_take_the_few_samples_of_another_site() -> None:
    """A step that reads them is filled up to the site's own part, which the schedule takes: here one microbatch would be too few."""
    plan = {"pipeline": 2, "schedule": "dualpipe", "zero": 1, "microbatch": 4}
    each = [{"plan": plan, "share": 3}, {"plan": plan, "share": 2}]
    run = at_site(tiny_run(sites={"inner_steps": 2, "each": each}, checkpoint={"every": 2}, train={"global_batch": 20}))
    assert not [problem for problem in check(run, files=False) if problem.severity == "error"]


def test_sites_that_exchange_gradients_stay_as_many() -> None:
    two, three = (tiny_run(sites={"method": "data-parallel", "count": count}, train={"global_batch": 12}) for count in (2, 3))
    assert [problem.key for problem in check_resume(two, three)] == ["sites.count"]
    assert check_resume(two, two) == []
    merges = tiny_run(sites={"count": 2}, train={"global_batch": 12})
    assert "sites.method" in [problem.key for problem in check_resume(merges, two)]


def test_a_run_that_does_not_fit_may_keep_anchors_on_the_host() -> None:
    def named(**sites: Any) -> bool:
        return any("sites.place" in one.values for some in changes(tiny_run(sites=sites)) for one in some)

    assert named() and named(bits=4)
    assert not named(place="host") and not named(method="data-parallel")
