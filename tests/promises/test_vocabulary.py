"""Names and public text use the field's words: private ones that were replaced do not come back.

Stored names are formats and stay: names of parameters (`head.ahead.0`), keys of spec.json, events and manifests.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.promises.test_english import PACKAGE, PAGES, ROOT, _docstrings, _messages

GONE: dict[str, str] = {
    "TokenDispatcher, LocalDispatcher, AllToAllDispatcher": "Exchange ByExpert Dealing Travel",
    "BlockComputations, BlockGraphs, dispatches_tokens": "Journey Lines travels",
    "permute, unpermute": "spread_plain collect_plain",
    "MtpSpec, MtpModule": "Ahead AheadSpec",
    "MaskBlock, MaskRows, SegmentLengths": "attend_pieces visible",
    "RecomputeChoice": "Again runs_again",
    "GradientVerifier, UpdateVerifier, GradientProbe": "Recomputer Updates",
    "StepHook, HookPoint, StateGuard": "Watcher Guard",
    "StepResult, StepTotals, StepGradients and the like": "Stepped Totals Gathering Computed Accumulated Executed Arrived Advised Checked "
    "Launched Trained Swept Counted Ended Calibrated Compared Joined Examined Resolved Treated Loaded Imported Written Learnt Declared "
    "Covered Expressed Judged Linked Named Merged Prepared Simulated Tried Ran Spent Foreseen Dried",
    "SoftwareProfile": "Practice",
    "predict, PredictedStep": "foresee",
    "DryRunReport, ParityCase, ParityResult": "Draw Proof EFFORT",
    "checksum": "Digest",
    "update_router_biases, run_all": "take_in_loads drain",
    "memory_timeline, worst_ranks, headroom": "course fullest spare",
    "representative_microbatches, schedule_problems, extrapolate": "enough Misfit misfits refusals further",
    "PlanRequest, ResolvedRequest, PlanResult, SearchResult": "Question",
    "is_valid": "legal",
    "Observation, RankInfo, SupervisedAgents": "Seat Crew",
}
"""The field's names -> private names that no class, function or variable of a module has any more."""

HERE: dict[str, str] = {
    "models/moe.py": "Here Deal",
    "kernels/mask.py": "Pair Rows Runs Run",
    "kernels/permute.py": "spread collect",
    "parallel/data.py": "kept computes take collect",
    "parallel/tensor.py": "apart whole inner",
    "train/step_hooks.py": "Moment tell",
    "train/reexecution.py": "Probe",
    "checkpoint/memory.py": "words digest",
    "planner/request.py": "Asked",
    "planner/answer.py": "Answer",
    "planner/search.py": "Choice Found",
    "planner/compared.py": "beside",
    "cost/predicted.py": "of_run",
    "prove/axes.py": "key_of",
    "fleet/observations.py": "Sign",
    "spec/plan.py": "holders copies shards",
}
"""Module -> names that have another, common meaning elsewhere."""

FILES = (
    "parallel/travel kernels/pairs train/recompute train/watchers cost/foreseen cost/course planner/beside planner/asked planner/refused "
    "fleet/signs fleet/seat fleet/letters fleet/standing train/standing rehearse/crew machine/lifeline"
)
"""Modules that have another name now."""

WORDS = re.compile(
    r"\b(journeys?|further tokens?|two faces|fullest|foreseen?|misfits?|(il)?legal(?! memory access)|travel(s|led|ling)?"
    r"|unreadable letter)\b",
    re.IGNORECASE,
)
"""Private words of public text: README, pages, help, messages, docstrings."""


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of classes, functions, methods and fields, and of the attributes that methods set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                    yield target.attr
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_no_private_name_is_defined() -> None:
    gone = {name: instead for instead, names in GONE.items() for name in names.split()}
    wrong = []
    for path in PACKAGE:
        here = HERE.get(str(path.relative_to(ROOT / "megalith")), "").split()
        for name in sorted(set(_defined(ast.parse(path.read_text(encoding="utf-8"))))):
            if name in gone or name in here:
                wrong.append(f"{path.relative_to(ROOT)}: {name}" + (f", use {gone[name]}" if name in gone else ""))
    assert not wrong, "\n".join(["use the field's names:", *wrong])
    assert all((ROOT / "megalith" / file).is_file() for file in HERE)


def test_no_module_has_a_private_name() -> None:
    assert [name for name in FILES.split() if (ROOT / "megalith" / f"{name}.py").exists()] == []


def test_messages_help_and_docstrings_have_no_private_word() -> None:
    wrong, seen = [], 0
    for path in PACKAGE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, text in [*_docstrings(tree), *_messages(tree)]:
            seen += 1
            if found := WORDS.search(text):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {found[0]!r} in {text[:80]!r}")
    assert seen > 6000
    assert not wrong, "\n".join(["use the field's words:", *wrong])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_no_private_word(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    assert [f"{number}: {found[0]!r}" for number, line in lines if (found := WORDS.search(line))] == []


def test_private_names_and_words_would_be_found() -> None:
    assert {"Journey", "kept", "SIGNS"} <= set(_defined(ast.parse("class Journey:\n  def f(self): self.kept = 1\nSIGNS = 2\n")))
    for text in ("rows travel to experts", "a legal plan", "of further tokens", "the fullest rank"):
        assert WORDS.search(text)
    assert not WORDS.search("an illegal memory access")
