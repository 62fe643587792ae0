from dataclasses import replace

from megalith import events
from megalith.report.history import gather, history
from tests.report.run_folder import STEPS, holdings, start, step, write_run


def told(*written: events.Event):
    return gather(written)


def test_a_folder_without_events_has_an_empty_history(tmp_path):
    run = history(tmp_path)
    assert (run.steps, run.starts, run.plan, run.state) == ([], [], None, "not started")


def test_a_resumed_run_has_every_step_once_and_the_last_wins(tmp_path):
    run = history(write_run(tmp_path))
    assert [s.step for s in run.steps] == list(range(1, STEPS + 1))
    assert [s.step for s in run.repeated] == [21, 22, 23, 24, 25]
    assert [s.loss for s in run.steps[:20]] == [9.0] * 20
    assert all(s.loss < 5 for s in run.steps[20:])


def test_what_lay_beyond_the_checkpoint_is_gone_before_it_is_done_again():
    run = told(start(), *(step(i) for i in range(1, 9)), events.Validation(8, 3.0, {}, 0.1), start(5), step(6))
    assert [s.step for s in run.steps] == [1, 2, 3, 4, 5, 6]
    assert run.validations == []
    assert len(run.repeated) == 3


def test_a_new_start_reopens_a_failed_run():
    failed = (start(), step(1), events.RunFinished("failed", 1))
    assert told(*failed).state == "failed"
    assert told(*failed, start(1)).state.startswith("running")


def test_ranks_that_a_fault_ended_do_not_end_a_run_that_starts_them_again():
    lost = (start(), step(1), events.RunFinished("lost", -1))
    incident = lambda kind: events.Incident(1, 0.0, 1, "rank_failed", "killed", "a", 3, {}, [{"kind": kind}])  # noqa: E731
    assert told(*lost, incident("restart")).state.startswith("running")
    assert told(*lost, incident("check_health")).state == "lost" == told(*lost, incident("stop")).state


def test_a_start_on_fewer_ranks_forgets_the_ranks_that_are_gone():
    run = told(start(), *holdings(), start(), *holdings()[:2])
    assert [h.rank for h in run.holdings] == [0, 1]


def test_a_site_computes_the_microbatches_of_its_share():
    def of(sites: dict | None) -> int | None:
        return told(replace(start(), spec=start().spec | {"sites": sites})).microbatches

    alone = of(None)
    assert alone and of({"count": 2}) == alone // 2
    each = [{"share": 3}, {"share": 1}]
    assert [of({"count": 2, "site": site, "each": each}) for site in (None, 0, 1)] == [alone * 3 // 4, alone * 3 // 4, alone // 4]
    assert of({"count": "many"}) is None, "a foreign log"


def rate(step: events.Step) -> float:
    return step.tokens_per_second


def test_the_usual_value_leaves_out_the_first_steps():
    slow = [step(1, tokens_per_second=1.0), step(2, tokens_per_second=2.0)]
    assert told(start(), *slow, *(step(i) for i in range(3, 6))).usual(rate) == 8192.0
    assert told(start(), *slow).usual(rate) == 1.5
    assert told(start(), step(1, mfu=None)).usual(lambda step: step.mfu) is None


def test_each_skipped_update_makes_a_run_one_step_longer():
    assert told(start(), step(43, updates=40)).total_steps == STEPS + 3


def test_the_plan_is_read_from_the_newest_start(tmp_path):
    run = history(write_run(tmp_path))
    assert run.plan is not None
    assert (run.plan.zero, run.plan.ranks, run.microbatches, run.total_steps) == (3, 4, 8, STEPS)
