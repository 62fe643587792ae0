"""Changes that are allowed when a run is resumed."""

from megalith.check import check_resume
from megalith.check.resume import MAY_CHANGE, check_checkpoint
from megalith.spec.run import RunSpec
from megalith.spec.sites.deal import Deal, Share
from megalith.spec.validate import examine
from tests.check.runs import spec


def test_a_resumed_run_may_change_where_and_how_long_but_not_what():
    before = spec()
    assert (
        check_resume(before, spec("plan.data=2", "train.steps=500", "launch.threads=1", "validation.every=3", "cluster=cpu"))
        == []
    )
    changed = check_resume(before, spec("optimizer.lr=1e-5", "model.ffn=96", "data.weights={austen=1}", "train.seed=3"))
    assert {p.key for p in changed} == {"optimizer.lr", "model.ffn", "data.weights.austen", "train.seed"}
    (rate,) = [p for p in changed if p.key == "optimizer.lr"]
    assert "0.0003" in rate.reason


def test_a_run_keeps_the_sets_of_tokens_over_which_it_balances():
    """Mixtral balances over microbatch i of all data ranks, so later plans of the run must have the same number of sequences
    in it."""
    before = spec("model.preset=mixtral-8x7b", "plan.data=2", "plan.microbatch=2")

    def refused(*settings: str) -> list[tuple[str, object]]:
        return [(p.key, p.value) for p in check_resume(before, spec("model.preset=mixtral-8x7b", *settings))]

    assert refused("plan.data=4", "plan.zero=3") == refused("plan.microbatch=4", "plan.expert=1") == []
    assert refused("plan.data=4", "plan.microbatch=2") == [("plan.data", 4)]
    assert refused("plan.data=2", "plan.tensor=2") == [("plan.microbatch", 1)]
    (problem,) = check_resume(before, spec("model.preset=mixtral-8x7b", "plan.data=8"))
    assert "sets of 8 sequences, but the run over sets of 4" in problem.reason
    assert "plan.data x plan.microbatch = 4" in problem.way_out
    for free in ("model.balance_set=sequence", "model.balance_set=global", "model.balance_weight=0"):
        sets = ["model.preset=mixtral-8x7b", free]
        assert check_resume(spec(*sets, "plan.data=2"), spec(*sets, "plan.data=4")) == []


def test_a_run_keeps_what_it_rounds_for_backward():
    host, packed = (f'plan.retain.parts={{"attention.core" = "{action}"}}' for action in ("host", "compress"))
    assert check_resume(spec(host), spec()) == check_resume(spec(packed), spec(packed, "plan.data=2")) == []
    for before, now in ((host, packed), (packed, host)):
        (problem,) = check_resume(spec(before), spec(now))
        assert problem.key == "plan.retain.parts" and "in 8 bits" in problem.reason


def test_a_description_that_lost_values_differs_in_them():
    """Here run.toml was cut short within its model."""
    cut = examine({"model": {"family": "llama", "layers": 2}}, RunSpec, source=lambda key: "").spec
    assert "model.heads" in {problem.key for problem in check_resume(cut, spec("plan.data=2"))}


def test_sites_may_come_and_go_and_move_but_not_merge_in_another_way():
    before = spec("sites.count=2")
    assert check_resume(before, spec("sites.count=3", 'sites.addresses=["a","b","c"]')) == []
    files = [f"sites.tls.{name}={name}.pem" for name in ("certificate", "key", "authority")]
    assert check_resume(before, spec("sites.count=2", *files)) == []
    assert check_resume(before, spec("sites.count=2", "sites.place=host")) == []
    assert [p.key for p in check_resume(before, spec("sites.count=2", "sites.bits=4"))] == ["sites.bits"]
    assert check_resume(spec(), before), "a run without sites"
    together = ("sites.count=2", "sites.method=data-parallel")
    for idle in ("sites.nesterov=false", "sites.error_feedback=false", "sites.feedback_decay=0.9"):
        assert check_resume(spec(*together, idle), spec(*together)) == [], "earlier versions let it be set"


def test_a_plan_need_not_divide_the_shares_of_before():
    """Only gradients that are released inside the backward need a step of one microbatch, and so no larger share than the site's own."""
    before = spec("sites.count=2", "train.global_batch=12", "plan.data=2")
    assert not check_resume(before, spec("sites.count=1", "train.global_batch=12", "plan.data=4"))
    each = [f"sites.each=[{{ share = {share} }}, {{ share = 1 }}]" for share in (2, 1)]
    assert not check_resume(*(spec("train.global_batch=12", "plan.data=3", one) for one in each))
    release = ("train.global_batch=12", "plan.data=2", "plan.state.release=true")
    (problem,) = check_resume(before, spec("sites.count=3", "plan.microbatch=2", *release))
    assert problem.key == "plan.state.release" and "steps of 4 samples on this site, but until the next merge" in problem.reason
    assert not check_resume(before, spec("sites.count=3", "sites.site=2", "plan.microbatch=2", *release)), "it does not train yet"
    assert not check_resume(before, spec("sites.count=1", "plan.microbatch=6", *release))


def test_the_shares_that_count_are_those_of_the_newest_merge():
    """The run was resumed with three sites and saved before a merge, so it still reads as two sites."""
    release = ("train.global_batch=12", "plan.data=2", "sites.count=3", "plan.microbatch=2")
    meta = {"spec": spec(*release).model_dump(mode="json"), "position": {"samples": 12, "updates": 1, "step": 1}}
    now, deal = spec(*release, "plan.state.release=true"), Deal.first(2)
    for deal.count, wrong in ((2, ["plan.state.release"]), (3, [])):
        asked = check_checkpoint("here", meta | {"sites": {"deal": deal.record()}}, now)
        assert [problem.key for problem in asked] == wrong


def test_a_phase_may_not_change_where_a_lost_site_had_read():
    """36 samples were assigned, and 12 of them returned: all before the 36th keep their phases."""
    run = ("sites.count=2", "train.global_batch=12")
    deal = Deal.first(2)
    deal.next, deal.returned = 36, [Share(18, 6), Share(30, 6)]
    meta = {"spec": spec(*run).model_dump(mode="json"), "position": {"samples": deal.dealt}, "sites": {"deal": deal.record()}}
    for begin, wrong in ((24, 1), (36, 0)):
        now = spec(*run, f"train.batch_ramp=[{{ begin = {begin}, global_batch = 24 }}]")
        assert len(check_checkpoint("here", meta, now)) == wrong


def test_what_may_change_exists():
    tables = [f"sites.tls.{name}={name}.pem" for name in ("certificate", "key", "authority")]
    tables += ["sites.link.megabits=10", "sites.link.milliseconds=100"]
    run = spec("sites.count=2", *tables)  # optional tables
    for name in MAY_CHANGE:
        value: object = run
        for part in name.split("."):
            value = getattr(value, part)
