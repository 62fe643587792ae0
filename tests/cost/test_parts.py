"""Profiles of parts are traced once and kept, in memory and in the folder that an environment variable names."""

import ast
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.cost import parts as known
from megalith.cost.kept import CACHE
from megalith.cost.parts import Parts, _seen, parts, prepare
from megalith.cost.profile import Layout, Profile
from megalith.cost.software import TRAINER
from megalith.cost.trace import trace_block, trace_embedding, trace_head
from megalith.spec.model import BlockSpec, LatentAttentionSpec, MambaSpec, ModelSpec, MtpSpec
from megalith.spec.plan import Plan
from tests.cost.models import dense, mixture, workload


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_known", {})


def _figures(found: Parts) -> tuple[object, ...]:
    return found.embedding, found.head, found.blocks, found.ahead


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_what_was_traced_for_one_folder_is_kept_in_the_next_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a second process would repeat this one's traces."""
    load, kept = workload(dense(), Plan()), []
    for name in ("one", "other"):
        monkeypatch.setenv(CACHE, str(tmp_path / name))
        parts(load)
        kept.append(_files(tmp_path / name))
    assert kept[0] == kept[1] != set()


def test_a_file_that_was_cut_off_is_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    load = workload(dense(), Plan())
    whole = _figures(parts(load))
    for path in tmp_path.rglob("*.json"):
        path.write_text(path.read_text()[:100])
    monkeypatch.setattr(known, "_known", {})
    assert _figures(parts(load)) == whole
    monkeypatch.setattr(known, "_known", {})
    monkeypatch.setattr(known, "_trace", None)  # the file on disk is now complete
    assert _figures(parts(load)) == whole


def test_another_torch_is_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    load, found = workload(dense(), Plan()), []
    for release in ("2.11.0", "2.15.0"):
        monkeypatch.setattr(known, "_known", {})
        monkeypatch.setattr(known, "_torch", lambda release=release: release)
        parts(load)
        found.append(_files(tmp_path))
    assert len(found[1]) == 2 * len(found[0]) > 0


def test_a_change_of_any_module_that_a_trace_runs_is_traced_again() -> None:
    """Specs need not be hashed: the key contains their values."""
    package = Path(known.__file__).parents[1]
    named = {path for pattern in known.TRACED for path in package.glob(pattern)}
    wanted, seen = [package / "cost/trace.py"], set[Path]()
    while wanted:
        path = wanted.pop()
        if path not in seen and path.parent.name != "spec" and path.name != "__init__.py":
            seen.add(path)
            wanted += _imports(path, package)
    assert seen - named == set()


def _imports(path: Path, package: Path) -> Iterator[Path]:
    """Return the package's files that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megalith"):
            inside = package.joinpath(*node.module.split(".")[1:])
            yield from (
                file for name in node.names for file in (inside.with_suffix(".py"), inside / f"{name.name}.py") if file.exists()
            )


PLANS = [
    Plan(microbatch=micro, tensor=tensor, recompute=recompute)
    for micro in (1, 2, 3, 4, 8) for tensor in (1, 2) for recompute in ("none", "full", "every:2")
]  # fmt: skip
"""If there are more than MANY parts, several processes trace them."""


@pytest.mark.slow
def test_many_parts_traced_by_several_processes_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = [workload(mixture(), plan) for plan in PLANS]
    found, ticks = [], list[tuple[int, int]]()
    for cores, folder in ((2, "several"), (1, "one")):
        with monkeypatch.context() as patch:
            patch.setattr(known, "_known", {})
            patch.setenv(CACHE, str(tmp_path / folder))
            patch.setattr(known, "_cores", lambda cores=cores: cores)
            prepare(loads, lambda done, total: ticks.append((done, total)))
            patch.setattr(known, "_trace", None)  # nothing is left to trace
            traced = len(_files(tmp_path / folder))
            found.append([_figures(parts(load)) for load in loads])
            assert traced > known.MANY
            assert len(_files(tmp_path / folder)) == traced * 5 // 4  # microbatches of eight were not traced
            assert ticks == [(done, traced) for done in range(traced + 1)]
            ticks.clear()
    assert found[0] == found[1]
    assert _files(tmp_path / "several") == _files(tmp_path / "one")


def test_what_is_known_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "")
    loads = [workload(dense(), plan) for plan in PLANS[:2]]
    prepare(loads)
    monkeypatch.setattr(known, "_trace", None)
    ticks: list[tuple[int, int]] = []
    prepare(loads, lambda done, total: ticks.append((done, total)))
    assert ticks == []


def test_an_error_in_another_process_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "")
    monkeypatch.setattr(known, "_cores", lambda: 2)
    monkeypatch.setattr("megalith.cost.trace.trace_block", _breaks)
    with pytest.raises(RuntimeError, match="no such block") as raised:
        prepare([workload(mixture(), plan) for plan in PLANS])
    assert str(os.getpid()) not in str(raised.value)


def _breaks(*_: object) -> None:
    raise RuntimeError(f"no such block in process {os.getpid()}")


@pytest.mark.slow
def test_where_no_other_process_can_be_had_this_one_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "")
    monkeypatch.setattr(known, "_cores", lambda: 2)
    monkeypatch.setattr("megalith.cost.parts._helper", _dies)
    loads = [workload(mixture(), plan) for plan in PLANS]
    prepare(loads)
    monkeypatch.setattr(known, "_trace", None)
    assert len([parts(load) for load in loads]) == len(PLANS)


def _dies(parent: int) -> None:
    os._exit(1)


def test_a_folder_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    assert parts(workload(dense(), Plan())).blocks


MAMBA = BlockSpec(mamba=MambaSpec(heads=4, head_dim=64, state=16, groups=2))

ASKED = Layout(
    microbatch=2, seq_len=256, tensor=2, context=2, ulysses=2, expert=4, expert_tensor=2, recompute="full", attention="plain",
    rotary=False, permute=False, loss="whole", regather=True,
)  # fmt: skip


BLOCKS = {"llama": dense().blocks[0], "gpt": dense(gated=False).blocks[0], "mixture": mixture().blocks[0], "mamba": MAMBA}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_what_a_block_does_not_see_of_a_layout_changes_none_of_its_figures(block: BlockSpec) -> None:
    model = dense().model_copy(update={"blocks": (block,)})
    assert _seen(block, ASKED) != ASKED
    assert trace_block(model, 0, _seen(block, ASKED)) == trace_block(model, 0, ASKED)


LATENT = LatentAttentionSpec(heads=4, q_rank=64, kv_rank=32, nope_dim=64, rope_dim=32, v_dim=64)
BLOCKS |= {"latent": mixture().blocks[0].model_copy(update={"attention": LATENT})}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize(
    "layout",
    [
        replace(ASKED, recompute="none"),
        Layout(microbatch=2, seq_len=256),
        Layout(microbatch=2, seq_len=256, recompute="mlp", kept=1, low_precision_kept=True),
        Layout(microbatch=2, seq_len=256, tensor=2, sequence=False, fused=False, recompute="full"),
    ],
)
def test_a_large_microbatch_s_figures_lie_on_the_line_through_two_smaller_ones(block: BlockSpec, layout: Layout) -> None:
    model = dense().model_copy(update={"blocks": (block,)})
    two, four, eight, twelve = (trace_block(model, 0, replace(layout, microbatch=size)) for size in (2, 4, 8, 12))
    for times, traced in ((3, eight), (5, twelve)):
        found = two.extrapolate(four, times)
        assert found is not None
        # of two nearly equal peaks the other can be the larger one if the gradients of biases weigh less
        assert found.working == pytest.approx(traced.working, rel=1e-3)
        assert found.beside + found.formed == pytest.approx(traced.beside + traced.formed, rel=1e-3)
        assert replace(found, working=traced.working, beside=traced.beside, formed=traced.formed) == traced
    assert two != four != eight


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_plain_operations_give_what_torch_says_they_do(block: BlockSpec, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = dense().model_copy(update={"blocks": (block,)}), replace(ASKED, recompute=recompute)
    quick = trace_block(model, 0, layout), trace_head(model, layout)
    monkeypatch.setattr("megalith.cost.recorder.PLAIN", frozenset())
    assert quick == (trace_block(model, 0, layout), trace_head(model, layout))


@pytest.mark.parametrize("trace", [trace_embedding, trace_head])
@pytest.mark.parametrize("loss", ["copied", "whole", "fused", "chunked"])
def test_so_do_those_of_the_ends(trace: Callable[..., Profile], loss: Any) -> None:
    two, four, eight = (trace(dense(), Layout(microbatch=size, seq_len=256, tensor=2, loss=loss)) for size in (2, 4, 8))
    assert two.extrapolate(four, 3) == eight


CHUNKED = Layout(microbatch=2, seq_len=2048, loss="chunked", fused=False)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"microbatch": 1, "seq_len": 3900},
        {"microbatch": 8, "context": 2},
        {"microbatch": 3, "seq_len": 2500, "tensor": 2, "sequence": False},
        {"tensor": 3, "seq_len": 6144},
        {"width": 4},
    ],
    ids=str,
)
def test_a_head_s_loss_in_many_chunks_lies_on_the_line_through_two_of_few(
    change: dict[str, Any], softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds if the last chunk is short, and if tensor ranks divide several chunks evenly, but not a single one."""
    monkeypatch.setenv(CACHE, "")
    layout = replace(CHUNKED, **change)
    key = known.Key("head", _with_vocab(129_024, softcap), None, layout, "")
    on = known._line(key)
    assert on is not None
    assert known._found(key) == trace_head(key.model, layout)
    few = sum(one.layout.microbatch * one.layout.seq_len for one in (on.one, on.other))
    assert few < layout.microbatch * layout.seq_len // layout.context


def _with_vocab(vocab: int, softcap: float | None = None) -> ModelSpec:
    return dense().model_copy(update={"head": dense().head.model_copy(update={"vocab": vocab, "softcap": softcap})})


def test_no_chunk_of_a_large_microbatch_has_less_than_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have 2,048 tokens, sequences 1,774. The last chunk of two sequences has 1,500 rows, that of four 952; a line through both
    would give -144 for eight."""
    monkeypatch.setenv(CACHE, "")
    model = _with_vocab(16_384)
    load = workload(model, Plan(microbatch=8), seq_len=1774, software_profile=TRAINER)
    found = parts(load).head
    assert min(product.rows for product in found.products) == 8 * 1774 % 2048 == 1904
    assert found == trace_head(model, load.layout)


def test_profiles_of_other_operations_have_nothing_beyond() -> None:
    one, other = (trace_block(dense(), 0, Layout(microbatch=2, seq_len=256, tensor=tensor)) for tensor in (1, 2))
    assert one.extrapolate(other, 3) is None


@pytest.mark.parametrize("trace", [trace_embedding, trace_head])
def test_what_the_ends_do_not_see_of_a_layout_changes_none_of_their_figures(trace: Callable[..., Profile]) -> None:
    assert trace(dense(), _seen(None, ASKED)) == trace(dense(), ASKED)


def test_a_block_of_an_mtp_module_is_recomputed_by_its_own_number() -> None:
    """Its number follows that of the model's last block, as in `parallel.apply`. Of four blocks, the first and the third are
    recomputed."""
    model = dense(4)
    further = model.model_copy(
        update={"head": model.head.model_copy(update={"ahead": MtpSpec(block=model.blocks[0], depth=1, weight=0.1)})}
    )
    found = parts(workload(further, Plan(recompute="every:2")))
    assert found.ahead is not None
    assert found.ahead.saved == found.blocks[0].saved < found.blocks[3].saved
