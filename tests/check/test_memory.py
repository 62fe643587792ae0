"""State, activations and recomputation."""

import re
import shutil
from pathlib import Path

import pytest

from megalith.check import check
from megalith.check.case import Case, format_bytes
from megalith.check.memory import disk_bytes, rank_bytes
from megalith.check.remedies import changed_by, cheapest
from megalith.check.retain import activation_bytes, saved_numbers
from megalith.cost.parts import parts
from megalith.cost.predicted import predict, workload_of
from megalith.cost.workload import Workload
from megalith.spec.cluster import load
from megalith.spec.plan import Plan
from megalith.spec.presets import presets
from megalith.spec.toml import literal
from tests.check.runs import HYBRID, advice, errors, found, is_named, is_small, spec

RELEASED = ["plan.state.optimizer=disk", "plan.state.release=true", "train.precision=bf16", "train.global_batch=1"]
"""Settings with which gradients can be released."""
COMPRESSED = '{"attention.core" = "compress"}'
AWAY = ["plan.state.optimizer=disk", "plan.state.weights=disk", "plan.zero=3", "train.precision=bf16"]
"""Settings with which weights can be elsewhere."""


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["plan.recompute=every:9"], "plan.recompute", "Use every:N with N <= 4."),
        (
            ["plan.recompute=segments:5"],
            "plan.recompute",
            "the longest stage has 4. Use segments:auto, or segments:K with K <= 4.",
        ),
        (["plan.recompute=selective", "plan.recompute_parts=[]"], "plan.recompute_parts", "names no part"),
        (["plan.recompute_parts=['mpl']"], "plan.recompute_parts", 'Did you mean "mlp"?'),
        (["cluster=h100", "model.preset=llama3-70b"], "plan.zero", "has 80.0 GiB"),
        (
            ["cluster=h100", "optimizer.kind=muon", "plan.state.optimizer=host"],
            "plan.state.optimizer",
            "updates the state of each GPU in pieces, but muon needs each whole matrix",
        ),
        ([*RELEASED, "train.global_batch=4"], "plan.state.release", "saves nothing with 4 microbatches a step"),
        ([*RELEASED, "optimizer.kind=muon"], "plan.state.release", "muon needs each whole matrix from all ranks"),
        ([*RELEASED, "optimizer.adaptive_clip=1.05"], "plan.state.release", "optimizer.adaptive_clip = 1.05 needs all gradients"),
        (
            [*RELEASED, "train.precision=fp8", "precision.watch_every=50"],
            "plan.state.release",
            "precision.watch_every = 50 needs all gradients",
        ),
        ([*RELEASED, "optimizer.qk_clip=100"], "plan.state.release", "optimizer.qk_clip = 100.0 needs all gradients"),
        ([*RELEASED, "fleet.verify_every=10"], "plan.state.release", "fleet.verify_every = 10 needs all gradients"),
        ([*AWAY, "plan.state.optimizer=host"], "plan.state.weights", 'Use plan.state.optimizer = "disk", or weights = "device".'),
        ([*AWAY, "plan.zero=2"], "plan.state.weights", "plan.zero = 2 keeps all weights on each rank. Use plan.zero = 3"),
        ([*AWAY, "train.precision=fp32"], "plan.state.weights", "the weights are the master weights and stay"),
        ([*AWAY, "optimizer.master=split16"], "plan.state.weights", "makes the master weights from the compute weights"),
        (["train.vocab_tile=64", "train.loss=mine:loss"], "train.vocab_tile", "mine:loss (train.loss) needs whole rows"),
        (
            ["train.vocab_tile=64", "model.preset=deepseek-v3"],
            "train.vocab_tile",
            "multi-token prediction computes several losses",
        ),
        ([*RELEASED, "plan.post_validation=true"], "plan.state.release", "plan.post_validation = true needs all gradients"),
        (
            ["plan.retain.blocks=host", "plan.retain.share=0.5", "plan.recompute=segments:2"],
            "plan.retain.share",
            "only inputs of segments are kept. Use share = 1",
        ),
        (["plan.retain.blocks=disk", "plan.retain.share=0.2"], "plan.retain.share", "less than 1 of 4 blocks, so nothing"),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str):
    is_named(settings, key, said)


@pytest.mark.parametrize(
    "more", ["plan.state.share=0.5", "train.precision=fp32", "optimizer.master=split16", "plan.state.optimizer=host"]
)
def test_released_gradients_without_an_undo_take_two_passes(more: str) -> None:
    """With all that an update changes on disk, only clipped steps do."""
    assert errors(*RELEASED) == errors(*RELEASED, more) == []
    assert "plan.state.release" in advice(*RELEASED, more) and "plan.state.release" not in advice(*RELEASED)


def test_weights_may_be_elsewhere_on_one_data_rank_too():
    for settings in (AWAY, [*AWAY, "plan.state.share=0.5"], [*AWAY, "plan.data=2"]):
        assert errors(*settings) == []


@pytest.mark.parametrize("settings", [["model.tied=true"], ["optimizer.kind=adafactor"], ["model.vocab=1500"]])
def test_tables_that_would_stay_whole_are_not_advised_to_be_cut(settings: list[str]) -> None:
    """They stay whole if they are tied, if their update needs each whole table, and if one tile has all rows."""
    large = [*AWAY, "model.vocab=100000", *settings]
    assert "train.vocab_tile" not in advice(*large)
    whole, asked = (rank_bytes(Case(spec(*large, f"train.vocab_tile={rows}"), None, False)) for rows in (0, 2048))
    assert asked == whole


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["plan.data=2", "plan.zero=0"], "plan.zero"),
        (["train.seq_len=32768"], "plan.recompute"),
        (["train.seq_len=32768", "plan.retain.blocks=host", "plan.retain.share=0.25"], "plan.recompute"),
        (["plan.state.share=0.5"], "plan.state.share"),
        ([*AWAY, "model.vocab=100000"], "train.vocab_tile"),
        (["plan.retain.share=0.5"], "plan.retain.share"),
        (["plan.retain.blocks=host", "plan.retain.folder=here"], "plan.retain.folder"),
        (["plan.state.optimizer=disk"], "plan.state.optimizer"),
        (["plan.state.folder=here"], "plan.state.folder"),
        (["plan.state.optimizer=host", "plan.state.chunk=32"], "plan.state.chunk"),
        (["plan.recompute=selective", "plan.recompute_parts=['attention','attention.core']"], "plan.recompute_parts"),
        (["plan.recompute=selective", "plan.recompute_parts=['mlp_norm','attend']"], "plan.recompute_parts"),
        (["plan.recompute=selective", "plan.recompute_parts=['mlp.activation','mlp.shared']"], "plan.recompute_parts"),
        (["plan.recompute=selective", "plan.recompute_parts=['mlp.activation']", "plan.compile=true"], "plan.recompute_parts"),
        (["plan.recompute=selective", "plan.recompute_parts=['attention.up']"], "plan.recompute_parts"),
    ],
)
def test_what_is_valid_but_unwise_is_advice(settings: list[str], key: str):
    assert errors(*settings) == []
    assert key in advice(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["train.seq_len=256", "plan.recompute=full"],
        ["train.seq_len=32768", "model.context=32768", "plan.retain.blocks=host"],
        ["train.seq_len=32768", "model.context=32768", 'plan.retain.parts={attend="recompute", mlp="recompute"}'],
        ["plan.state.optimizer=host", "plan.state.share=0.5"],
        ["plan.state.optimizer=disk", "fleet.memory_every=0"],
        ["plan.state.optimizer=disk", "fleet.memory_every=0", "plan.data=2", "plan.zero=0"],
        [*RELEASED, "fleet.memory_every=0"],
        ["optimizer.kind=muon", "plan.state.optimizer=host"],
        ["plan.retain.blocks=host", "plan.recompute=sqrt"],
        ["plan.retain.blocks=host", "plan.compile=true"],
        ["plan.retain.blocks=disk", "plan.retain.share=0.25", "plan.recompute=full"],
    ],
)
def test_what_is_valid_and_wise_is_let_be(settings: list[str]):
    assert found(*settings) == []


def test_zero_1_is_not_named_where_it_saves_nothing():
    assert advice("plan.data=4", "plan.replicate=4", "plan.zero=0") == ["plan.replicate"]


def test_a_folder_for_activations_that_cannot_be_written_to_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    settings = ["plan.retain.blocks=disk", f"plan.retain.folder={tmp_path / 'file' / 'below'}"]
    named = [p for p in check(spec(*settings)) if p.key == "plan.retain.folder"]
    assert [p.severity for p in named] == ["error"] and "is not a folder" in named[0].reason


def test_a_context_rank_keeps_activations_of_its_share_of_a_sequence():
    whole, share = (
        next(problem.reason.partition(" at ")[0] for problem in found(*settings) if problem.key == "plan.recompute")
        for settings in (["train.seq_len=32768"], ["train.seq_len=65536", "plan.context=2"])
    )
    assert whole == share


def test_zb_h2_keeps_activations_of_nearly_twice_as_many_microbatches():
    one, two = (
        next(
            p.reason
            for p in found("train.seq_len=32768", "plan.pipeline=4", f"plan.schedule={name}")
            if p.key == "plan.recompute"
        )
        for name in ("zb-h1", "zb-h2")
    )
    kept = [float(reason.partition("about ")[2].split()[0]) for reason in (one, two)]
    assert kept[1] / kept[0] == pytest.approx(7 / 4, rel=0.05)


def test_a_copied_optimizer_is_said_in_bytes():
    """In bf16 the blocks have 18 bytes a parameter, and two data ranks could keep half of master weights and moments each."""
    (problem,) = [
        p for p in found("plan.data=2", "plan.zero=0", "model.preset=llama2-7b", "train.seq_len=64") if p.key == "plan.zero"
    ]
    blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert f"{18 * blocks / 2**30:.1f} GiB" in problem.reason
    assert f"{12 * blocks / 2**30:.1f} GiB" in problem.way_out


LARGE = ["train.seq_len=8192", "train.precision=bf16", "plan.recompute=full", "train.global_batch=8"]
DEEP = ["cluster=h100:1", "model.preset=llama3.2-1b", "model.layers=114", "model.context=147456", *LARGE, "train.global_batch=1"]
SMALL = ["cluster=rtx4090:1", "model.preset=llama3-8b", *LARGE, "train.global_batch=1"]
TOO_LARGE: dict[str, list[str]] = {
    "copies": ["cluster=h100:8", "model.preset=llama3-8b", "plan.data=8", "plan.zero=0", *LARGE],
    "one device": ["cluster=h100:1", "model.preset=llama3-8b", *LARGE],
    "a small device": ["cluster=rtx4090:1", "model.preset=llama3-8b", *LARGE],
    "a small device, one microbatch": SMALL,
    "long sequences": [*DEEP, "train.seq_len=98304", "plan.recompute=none"],
    "longer sequences": [*DEEP, "train.seq_len=147456"],
    "70B on eight devices": ["cluster=h100:8", "model.preset=llama3-70b", "plan.data=8", "plan.zero=1", *LARGE],
    "state on disk": [*SMALL, "plan.state.optimizer=disk"],
    "part of the state on the host": [*SMALL, "plan.state.optimizer=host", "plan.state.share=0.5"],
    "weights on the host": [*SMALL, "plan.state.optimizer=host", "plan.state.weights=host", "plan.zero=3"],
    "split weights": [*SMALL, "optimizer.master=split16"],
    "few activations on the host": [*DEEP, "train.seq_len=147456", "plan.retain.blocks=host", "plan.retain.share=0.1"],
    "parts on the host": [*DEEP, "train.seq_len=147456", "plan.recompute=none", 'plan.retain.parts={mlp="host"}'],
    "many microbatches": ["cluster=h100:1", "model.preset=llama3.1-70b", *LARGE],
}


def _named(way_out: str) -> list[str]:
    """Return the settings of the change that an error names."""
    first = way_out.partition("The cheapest change that fits: ")[2].partition(". ")[0].partition(" (")[0]
    return [word.replace(" = ", "=") for word in re.split(", | and ", first)]


@pytest.mark.parametrize("settings", TOO_LARGE.values(), ids=TOO_LARGE)
def test_the_cheapest_change_that_is_named_fits_when_it_is_applied(settings: list[str]):
    """`check` then accepts the run, and the prediction of its memory leaves some of the device free."""
    (problem,) = [problem for problem in errors(*settings) if problem.key == "plan.zero"]
    named = _named(problem.way_out)
    replaced = tuple(one.partition("=")[0] + "=" for one in named)
    changed = [*(one for one in settings if not one.startswith(replaced)), *named]
    assert errors(*changed) == []
    run = workload_of(spec(*changed))
    memory = run.cluster.accelerator.memory
    assert memory is not None and sum(predict(run, rank=0).memory.values()) < 0.97 * memory


def test_activations_leave_the_device_where_nothing_cheaper_is_enough():
    long, longer = (_named(errors(*TOO_LARGE[name])[0].way_out)[0] for name in ("long sequences", "longer sequences"))
    assert (long, longer) == ('plan.recompute="sqrt"', 'plan.retain.blocks="host"')


@pytest.mark.parametrize(
    "other", [["train.steps=3", "optimizer.warmup=10"], ['plan.recompute_parts=["mlp.foo"]'], ["plan.layers=[3]"]]
)
def test_an_error_that_no_change_caused_refuses_no_change(other: list[str]):
    alone, beside = (
        next(problem.way_out for problem in errors(*TOO_LARGE["one device"], *more) if problem.key == "plan.zero")
        for more in ([], other)
    )
    assert beside == alone and _named(alone)


def test_a_change_that_costs_nothing_is_preferred():
    (problem,) = [problem for problem in errors(*TOO_LARGE["copies"]) if problem.key == "plan.zero"]
    assert _named(problem.way_out) in (["plan.zero=1"], ["plan.zero=2"], ["plan.zero=3"])


@pytest.mark.slow
def test_a_model_that_nothing_makes_fit_needs_more_ranks():
    (problem,) = [
        problem for problem in errors("cluster=rtx4090:1", "model.preset=llama3.1-405b", *LARGE) if problem.key == "plan.zero"
    ]
    assert problem.way_out.startswith(
        "No combination of ZeRO, recomputation, fewer bits and offloading is enough. Raise plan.tensor, plan.pipeline or plan.data"
    )


@pytest.mark.parametrize(("late", "each"), [("false", 12 + 4 + 2), ("true", 12 + 16 + 2)])
def test_what_undoing_an_update_takes_counts_as_state(late: str, each: int):
    """With post-validation, copies of weights and moments are kept in addition to the usual state and the gradients."""
    blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    (problem,) = errors("cluster=h100", "model.preset=llama2-7b", f"plan.post_validation={late}", "plan.zero=0")
    assert f"at least {format_bytes(each * blocks)}" in problem.reason


def test_half_blocks_may_be_computed_again_in_parts():
    parts = 'plan.recompute_parts=["mamba.core", "attention.core", "mlp.experts"]'
    assert errors(*HYBRID, "plan.recompute=selective", parts) == []


@pytest.mark.parametrize("preset", ["tiny", "gpt2", "palm-8b", "deepseek-tiny", "switch-base-8", "nemotron-h-tiny"])
def test_the_activations_counted_are_about_those_that_a_trace_finds(preset: str):
    """The count is that of plain kernels: fused kernels recompute activation(gate), and PaLM's MLP shares a norm with its
    attention."""
    model = presets()[preset].build().build()
    traced = parts(Workload(model, Plan(), load("h100:1"), seq_len=512, global_batch=1))
    for block, profile in zip(model.blocks, traced.blocks, strict=True):
        counted = 2 * 512 * saved_numbers(block, model.dim)
        assert 0.7 < profile.saved / counted < 1.05


@pytest.mark.parametrize("preset", ["llama3-8b", "mixtral-8x7b", "gpt3-2.7b"])
def test_what_8_bits_spare_is_near_to_what_is_traced(preset: str):
    def case(*settings: str) -> Case:
        return Case(
            spec(f"model.preset={preset}", "train.precision=bf16", "precision.wide_first=0", "precision.wide_last=0", *settings),
            None,
            False,
        )

    wide, kept, both = (
        case(*settings) for settings in ((), ("precision.kept=fp8",), ("precision.kept=fp8", f"plan.retain.parts={COMPRESSED}"))
    )
    named = [{"mlp": "compress"}, {"attend": "compress"}, {"attend": "compress", "mlp": "compress"}]
    others = [case("plan.retain.parts=" + literal(one)) for one in named]
    saved = [parts(workload_of(one.spec)).blocks[0].saved for one in (wide, kept, both, *others)]
    counted = [activation_bytes(one).near for one in (wide, kept, both, *others)]
    for traced, rough in zip(saved, counted, strict=True):
        assert rough / counted[0] == pytest.approx(traced / saved[0], abs=0.1)
    assert counted[:3] == sorted(counted[:3], reverse=True) and len(set(counted[:3])) == 3


def test_keeping_in_8_bits_is_named_where_nothing_cheaper_is_enough():
    """Changes that compute again are cheaper, and so tried before; one that waits on a host is not."""
    asked = spec(
        "model.preset=llama3-8b", "train.precision=bf16", "train.seq_len=8192", "plan.microbatch=1", "train.global_batch=1"
    )

    def fits(least: frozenset[str]) -> str:
        return cheapest(
            asked,
            lambda changed: least <= {f"{changed.precision.kept} {changed.plan.recompute}"} | {*changed.plan.actions.values()},
        )

    assert 'plan.recompute = "full" and precision.kept = "fp8" (precision.kept rounds, so results change)' in fits(
        frozenset({"fp8 full"})
    )
    assert 'plan.retain.parts = { "attention.core" = "compress" } (precision.kept and plan.retain.parts round' in fits(
        frozenset({"fp8 none", "compress"})
    )
    asked = changed_by(asked, {"precision.kept": "fp8"})
    assert ': plan.retain.parts = { "attention.core" = "compress" } (' in fits(frozenset({"fp8 none", "compress"}))


def test_a_folder_that_cannot_hold_the_state_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["plan.state.optimizer=disk", "fleet.memory_every=0"]
    taken = tmp_path / "taken"
    taken.write_text("a file")
    assert "is not a folder" in _said_of_the_folder(*settings, f"plan.state.folder={taken}")
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert f"but {tmp_path} has 1.0 MiB free" in _said_of_the_folder(*settings, f"plan.state.folder={tmp_path}/new")


@pytest.mark.parametrize(
    ("settings", "key"),
    [(["plan.state.optimizer=disk"], "plan.state.folder"), (["plan.retain.blocks=disk"], "plan.retain.folder")],
)
def test_the_disk_that_counts_is_that_of_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], key: str
) -> None:
    """The run folder need not exist yet. Activations on disk need space too."""
    small, large, run = tmp_path / "small", tmp_path / "large", spec(*settings, "model.layers=64", "train.seq_len=128")
    small.mkdir()
    is_small(small, monkeypatch)
    for here in (small, tmp_path):
        monkeypatch.chdir(here)
        assert key in [problem.key for problem in check(run, folder=small / "run") if problem.severity == "error"]
        assert key not in [problem.key for problem in check(run, folder=large / "run")]
    monkeypatch.chdir(small)
    assert key in [problem.key for problem in check(run)]


@pytest.mark.parametrize(
    ("slots", "settings", "severity"),
    [
        (1.5, [], "error"),
        (2.5, [], "advice"),
        (2.5, ["checkpoint.every=0"], None),
        (4.5, [], "advice"),
        (5.5, [], None),
        (4.5, ["checkpoint.keep=1"], None),
    ],
)
def test_room_for_what_checkpoints_hold_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, slots: float, settings: list[str], severity: str | None
) -> None:
    """Training needs two files, and `checkpoint.keep` + 3 during a save beside the checkpoints."""
    run = spec("plan.state.optimizer=disk", "fleet.memory_every=0", "checkpoint.every=5", "checkpoint.keep=2", *settings)
    free = int(slots * disk_bytes(Case(run, None, files=True), run.plan))
    full = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    found = [problem.severity for problem in check(run) if problem.key == "plan.state.folder"]
    assert found == ([severity] if severity else [])


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(("more", "severity"), [(0.9, "error"), (1.1, None)])
def test_room_for_master_weights_is_asked_for_while_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, more: float, severity: str | None, share: float
) -> None:
    """All weights wait in a file until the state is there: a third of one of AdamW's two slots, if all state is on disk."""
    run = spec(*AWAY, "fleet.memory_every=0", "checkpoint.every=0", f"plan.state.share={share}")
    free = int((2 + more / 3 / share) * disk_bytes(Case(run, None, files=True), run.plan))
    full = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert [problem.severity for problem in check(run) if problem.key == "plan.state.folder"] == ([severity] if severity else [])


def _said_of_the_folder(*settings: str) -> str:
    (found,) = [problem for problem in check(spec(*settings)) if problem.key == "plan.state.folder"]
    assert found.severity == "error"
    return found.reason


def test_state_elsewhere_leaves_its_room_on_the_device() -> None:
    """8 billion parameters in bf16: 16 bytes for each do not fit into 80 GiB, but 6 do."""
    run = ["cluster=h100", "model.preset=llama3-8b", "train.precision=bf16", "train.seq_len=8192"]
    assert "plan.zero" in [problem.key for problem in errors(*run)]
    assert not errors(*run, "plan.state.optimizer=host")


SMALL_HOST = """
count = 1
per_node = 1
[accelerator]
name = "made-up"
title = "made up"
vendor = "any"
device_names = ["made up"]
peak = { bf16 = 989e12, fp32 = 67e12 }
memory = 85_899_345_920
per_node = 1
source = { peak = "made up", memory = "made up" }
[host]
memory = 17_179_869_184
disk = 10_737_418_240
"""


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["plan.state.optimizer=host"], "plan.state.optimizer", "134.6 GiB a rank, but training state may take 8.0 GiB, half of"),
        (["plan.state.optimizer=disk"], "plan.state.optimizer", "a rank, but training state may take 10.0 GiB, a device's share"),
        (
            ["plan.retain.blocks=host", "train.seq_len=131072"],
            "plan.retain.blocks",
            "a rank, but training state may take 8.0 GiB",
        ),
    ],
)
def test_a_host_of_the_cluster_that_is_too_small_is_named(tmp_path: Path, settings: list[str], key: str, said: str) -> None:
    """No change is named that needs more of the host or of its disk than they have."""
    (tmp_path / "small.toml").write_text(SMALL_HOST)
    run = [f'cluster="{tmp_path / "small.toml"}"', "model.preset=llama3.1-8b", *LARGE, *settings]
    named = {problem.key: str(problem) for problem in errors(*run)}
    assert said in named[key]
    assert not any(f'= "{place}"' in text.partition("The cheapest")[2] for text in named.values() for place in ("host", "disk"))


def test_a_host_that_is_assumed_is_advice() -> None:
    run = ["cluster=h100", "model.preset=llama2-13b", *LARGE, "plan.state.optimizer=host"]
    assert not errors(*run)
    assert "half of the 256.0 GiB assumed" in next(p.reason for p in found(*run) if p.key == "plan.state.optimizer")
