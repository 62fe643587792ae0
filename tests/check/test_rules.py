"""The table of rules, and the check that applies all of them."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.check import RULES, Case, check
from megalith.check.case import Found
from megalith.check.rules import each_site_can_train, fallback_can_be_run
from megalith.schedule.table import build
from megalith.spec.files import Layer, read_setting, resolve
from megalith.spec.plan import Plan
from tests.check.runs import BASE, found, spec


def test_a_plain_run_has_no_problems(data: Path):
    assert check(spec()) == []


def test_every_rule_says_what_it_wants():
    assert all(rule.find.__doc__ for rule in RULES)


def test_every_rule_has_a_row_of_its_own_subject():
    """Every function from a Case to problems is a rule."""
    rows = {(rule.subject, rule.find.__name__) for rule in RULES}
    modules = {rule.subject: import_module(f"megalith.check.{rule.subject}") for rule in RULES}
    written = {
        (subject, name)
        for subject, module in modules.items()
        for name, rule in inspect.getmembers(module, inspect.isfunction)
        if rule.__module__ == module.__name__ and rule.__annotations__ == {"case": Case, "return": Found}
    }
    assert rows == written | {("fleet", fallback_can_be_run.__name__), ("sites", each_site_can_train.__name__)}
    assert len(rows) == len(RULES)


def test_all_problems_come_at_once_errors_first():
    problems = found(
        "plan.tensor=3", "plan.data=5", "plan.schedule=x", "optimizer.warmup=200", "train.steps=150", "train.seq_len=512"
    )
    assert {"plan.tensor", "train.global_batch", "plan.schedule", "optimizer.warmup", "train.seq_len"} <= {
        p.key for p in problems
    }
    severities = [problem.severity for problem in problems]
    assert severities == sorted(severities, key=lambda severity: severity != "error")


def test_a_problem_knows_where_its_value_came_from():
    resolved = resolve([Layer(BASE, "file run.toml"), read_setting("plan.data=3")])
    problems = check(resolved.spec, files=False, provenance=resolved.provenance)
    assert [(p.key, p.source) for p in problems] == [("train.global_batch", "file run.toml")]


@pytest.mark.slow
@given(
    plan=st.builds(
        Plan,
        data=st.sampled_from([1, 2, 3, 4, 8]),
        replicate=st.sampled_from([1, 2, 3]),
        zero=st.sampled_from([0, 1, 2, 3]),
        tensor=st.sampled_from([1, 2, 3, 4, 8]),
        pipeline=st.sampled_from([1, 2, 4, 5]),
        chunks=st.sampled_from([1, 2]),
        schedule=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
        microbatch=st.sampled_from([1, 2, 3]),
    )
)
@settings(deadline=None, max_examples=150)
def test_a_plan_without_errors_can_be_carried_out(plan: Plan):
    """All splits are even, and the schedule can be built."""
    run = spec().model_copy(update={"plan": plan})
    if any(problem.severity == "error" for problem in check(run, files=False)):
        return
    attention, ffn = run.model.build().blocks[0].attention, run.model.ffn
    assert plan.data % plan.replicate == 0
    assert attention.kv_heads % plan.tensor == 0 or plan.tensor % attention.kv_heads == 0
    assert (ffn % plan.tensor, run.model.vocab % plan.tensor, attention.heads % plan.tensor) == (0, 0, 0)
    assert run.microbatches * plan.data * plan.microbatch == run.train.global_batch
    assert len(plan.bounds(run.model.layers)) == plan.stages
    assert build(plan.schedule, ranks=plan.pipeline, microbatches=run.microbatches, chunks=plan.chunks).stages == plan.stages


FP8 = ("train.precision=fp8", "precision.tile=16", "plan.data=4")
PIECES = "plan={data=2,tensor=2,overlap_tensor=2,sequence=false}"


@pytest.mark.parametrize(
    ("others", "name"),
    [
        (("fleet.nodes=2", "fleet.fallback={tensor=2,overlap_tensor=2,sequence=false}"), "fleet.fallback"),
        (("sites.count=2", f"sites.each=[{{share=1}},{{share=1,{PIECES}}}]"), "sites.each.1.plan"),
    ],
    ids=["fallback", "site"],
)
def test_precision_that_another_plan_cannot_have_is_named(others: tuple[str, ...], name: str) -> None:
    asked = (*FP8, "precision.kept=fp8", *others)
    (problem,) = (each for each in found(*asked) if each.severity == "error")
    assert problem.key == "precision.kept" and problem.reason.endswith(f"are kept wide in {name}")
    assert not [each for each in found(*asked[:-1]) if each.severity == "error"]
    assert not [each for each in found(*FP8, *others) if each.severity == "error"]
    wrong = (*FP8, "precision.kept=fp8", "precision.scale=fp32", *others)  # under either plan
    assert len([each for each in found(*wrong) if "rounded inputs are not bf16 numbers" in each.reason]) == 1


def test_the_batch_of_a_site_is_not_named_beside_the_whole_batch() -> None:
    asked = ("train.global_batch=16", "sites.count=2", "sites.each=[{share=2},{share=1,plan={data=2}}]")
    (problem,) = (each for each in found(*asked) if each.severity == "error")
    assert (problem.key, problem.value) == ("train.global_batch", 16) and problem.way_out == "Use 12 or 18."
    assert not [each for each in found(*asked, "train.global_batch=18") if each.severity == "error"]
