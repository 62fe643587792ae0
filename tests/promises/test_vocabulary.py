"""Names and public text use the field's words: private ones that were replaced do not come back.

Stored names are formats and stay: names of parameters (`head.ahead.0`), keys of spec.json, events and manifests.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalith.mesh import EXPERTS, STATE
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
    "WatchHelpers, RunHealth, HealthMessage, TrackedRun": "Beside Alive Say Subject",
    "ScalingLaw, LossCurve, WhatIfAnswer": "Law Without",
    "OffDeviceShare, ShareSnapshot, ImmutableFile": "Laid Stored Frozen Placed Unchanging",
    "ObjectCollectives": "Party",
    "VerifiedFiles, BlockChecksums, PhaseChange, SkippedFiles, TiktokenEncoder": "Sums Stretch LeftOut Bulk",
    "BalanceSets, LocalBalanceSets, DistributedBalanceSets": "Sets OneProcess ByRank",
    "dispatched_as, PendingUnpack, StepRouting, RoutingRecord": "travels_as gradients_travel_as Unpacking Routed start_return",
    "conflicts, LiveLine, PoisonedStream, BitFlips": "objections effort_of Follow Poisoned Flips",
    "RankInspection, StepExtremes, FirstRise, SampleLoss, RecomputedWindow, OutputGrowth": "Look Risen Sampled Moved Jump",
    "StopResponse, TimedObservation": "Seen",
    "RuleOfThumb, Confidence, SlowdownReport, SitesResult, SiteRequest": "Thumb Sure Slower Apart OfSite",
    "SoftwareOverheads, overheads_of": "generation_of",
    "JoinReply, FragmentValues, MergePoint, CheckpointOffer, SiteMessenger, SiteRoster": "Told Stand Correspondence Roll",
    "SynchronousSites, AllSitesCouncil, ReplayedCouncil, WholeTensors, MergeResult, StepShare": "Together All Wholes Made Turn",
    "GlobalTensors, GlobalSum, PackedState": "Whole Small",
    "PendingFetch, OffloadedCopy, OffloadShelf": "Coming Away",
    "InitRequest, MultipliedWeight, QuantisedTensor": "Wish Multiplied Narrowed Encrypted",
    "TrackedMaxima, PendingBlock, PendingGather": "Noted Arriving Arrival",
}
"""The field's names -> private names that no class, function or variable of a module has any more."""

HERE: dict[str, str] = {
    "models/moe.py": "Here Deal deal spread collect common",
    "kernels/mask.py": "Pair Rows Runs Run",
    "kernels/permute.py": "spread collect",
    "parallel/data.py": "kept computes take collect",
    "parallel/tensor.py": "apart whole inner",
    "train/step_hooks.py": "Moment tell reduced updated skipped resting",
    "train/reexecution.py": "Probe",
    "checkpoint/memory.py": "words digest",
    "planner/request.py": "Asked",
    "planner/plan_result.py": "Answer answer",
    "planner/search.py": "Choice Found Waiting",
    "planner/compared.py": "beside",
    "cost/predicted.py": "of_run",
    "prove/axes.py": "key_of only",
    "fleet/observations.py": "Sign SIGNS",
    "spec/plan.py": "holders copies shards",
    "watch/causes.py": "Found",
    "train/stability/findings.py": "Replayed tell heard",
    "watch/what_if.py": "Steps",
    "checkpoint/checkpointer.py": "Saved Failed told",
    "checkpoint/shares.py": "whole_of at_hand can_wait frozen",
    "data/verified_files.py": "Files",
    "models/router.py": "Record dealt",
    "parallel/moe_overlap.py": "lines common deal",
    "parallel/parcel.py": "deal collect",
    "report/plans.py": "beaten gained",
    "report/goodput.py": "tried simulated",
    "report/style.py": "whole",
    "prove/draw.py": "refusal",
    "control/stop_response.py": "Answer",
    "report/live.py": "say",
    "data/progress.py": "say",
    "commands/shared/runs.py": "tell",
    "planner/named.py": "Replayed",
    "cost/exchanges.py": "Recorded",
    "cost/constants.py": "Generation generations",
    "cost/software.py": "practice",
    "cost/workload.py": "practice generation",
    "train/sites/messages.py": "Held Cut",
    "parallel/retain.py": "Copy Saved taken",
    "train/offload/retained.py": "Here Returning Reading",
    "train/offload/release.py": "Asked",
    "schedule/action.py": "Slot",
    "fleet/heartbeat.py": "Measured",
    "fleet/messages.py": "Unreadable",
    "parallel/passes.py": "Kept",
    "parallel/gradients.py": "Shared",
    "parallel/overlap.py": "Moving Overlapped",
    "rehearse/judge.py": "Asked",
}
"""Module -> names that have another, common meaning elsewhere."""

FILES = (
    "parallel/travel kernels/pairs train/recompute train/watchers cost/foreseen cost/course planner/beside planner/asked planner/refused "
    "fleet/signs fleet/seat fleet/letters fleet/standing train/standing rehearse/crew machine/lifeline "
    "watch/beside watch/alive watch/law watch/whatif watch/without "
    "checkpoint/party train/offload/stored "
    "data/whole data/bulk "
    "report/dried report/treated "
    "control/answer control/seen "
    "planner/answer planner/apart planner/sure planner/slower planner/thumb planner/written planner/published/judged "
    "cost/practices "
    "train/sites/cuts train/sites/together train/sites/whole train/sites/roll train/sites/correspondence "
    "train/optimizers/whole"
)
"""Modules that have another name now."""

PARAMETERS: dict[str, str] = {
    "rank_info, agents": "seat crew",
    "step_hooks": "watchers",
    "notify": "say",
    "observation": "sign signs",
}
"""The field's names -> private names that no parameter and no attribute has any more. (`torch.sign` is a call.)"""

WORDS = re.compile(
    r"\b(journeys?|further tokens?|two faces|fullest|foreseen?|misfits?|(il)?legal(?! memory access)|travel(s|led|ling)?"
    r"|unreadable letter)\b",
    re.IGNORECASE,
)
"""Private words of public text: README, pages, help, messages, docstrings."""


TEST_NAMES = re.compile(
    r"def (test_\w*_(?:legal|foreseen?|journeys?|travels?|hears?|heard|seats?|misfits?|crew|told_apart)(?=_|\()\w*)"
)


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
            if name in gone or name in here or re.match(r"_?(MOST|LEAST)(_|$)", name):  # MAX_ and MIN_
                wrong.append(f"{path.relative_to(ROOT)}: {name}" + (f", use {gone[name]}" if name in gone else ""))
    assert not wrong, "\n".join(["use the field's names:", *wrong])
    assert all((ROOT / "megalith" / file).is_file() for file in HERE)


def test_no_parameter_or_attribute_has_a_private_name() -> None:
    gone = {name: instead for instead, names in PARAMETERS.items() for name in names.split()}
    wrong, seen = [], 0
    for path in (path for path in PACKAGE if path.parent.name != "watch"):  # the sign of an alert is a key of its JSON
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.arg if isinstance(node, ast.arg) else node.attr if isinstance(node, ast.Attribute) else None
            seen += name is not None
            owner = node.value if isinstance(node, ast.Attribute) else None  # (x - y).sign() and torch.sign are torch's
            if name in gone and (owner is None or (isinstance(owner, ast.Name) and owner.id != "torch")):
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}, use {gone[name]}")
    assert seen > 20000
    assert not wrong, "\n".join(["use the field's names:", *wrong])


def test_axes_of_the_state_have_the_names_of_hsdp() -> None:
    assert STATE[1:3] == EXPERTS[1:3] == ("dp_replicate", "dp_shard")


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


def test_no_name_of_a_test_has_a_private_word() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    assert sum(text.count("def test_") for text in texts.values()) > 2000
    assert [f"{path.name}: {found}" for path, text in texts.items() for found in TEST_NAMES.findall(text)] == []


def test_private_names_and_words_would_be_found() -> None:
    name = "test_a_plan_is_legal"
    assert TEST_NAMES.findall(f"def {name}(): pass") == [name]
    assert {"Journey", "kept", "SIGNS"} <= set(_defined(ast.parse("class Journey:\n  def f(self): self.kept = 1\nSIGNS = 2\n")))
    for text in ("rows travel to experts", "a legal plan", "of further tokens", "the fullest rank"):
        assert WORDS.search(text)
    assert not WORDS.search("an illegal memory access")
