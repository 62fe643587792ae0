"""Every rule of legality and advice, each by a run that breaks it; and what is advised instead is legal."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.check import MAY_CHANGE, RULES, Problem, _parameters, _size, check, check_resume
from megalith.checkpoint import folder as checkpoints
from megalith.models.stage import Stage
from megalith.schedule.lower import lower
from megalith.schedule.simulate import simulate
from megalith.schedule.table import build
from megalith.spec.files import Layer, read_setting, resolve
from megalith.spec.plan import Plan
from megalith.spec.presets import presets
from megalith.spec.run import RunSpec
from tests.prepared import hollow_data

BASE = {
    "model": {"preset": "tiny"},
    "data": {"path": "data"},
    "train": {"steps": 100, "global_batch": 64, "seq_len": 128},
    "optimizer": {"warmup": 10},
}


def spec(*settings: str) -> RunSpec:
    """A legal run, with some values changed: "plan.tensor=2"."""
    return resolve([Layer(BASE, "file"), *map(read_setting, settings)]).spec


def found(*settings: str, world: int | None = None) -> list[Problem]:
    return check(spec(*settings), world=world, files=False)


def errors(*settings: str, world: int | None = None) -> list[Problem]:
    return [problem for problem in found(*settings, world=world) if problem.severity == "error"]


def advice(*settings: str) -> list[str]:
    return [problem.key for problem in found(*settings) if problem.severity == "advice"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepared data, but for what it says."""
    monkeypatch.chdir(tmp_path)
    hollow_data(Path("data"), "austen", "code")
    return Path("data")


def test_a_plain_run_has_no_problems(data: Path):
    assert check(spec()) == []


def test_every_rule_says_what_it_wants():
    assert all(rule.__doc__ for rule in RULES)


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["model.heads=6"], "model.heads", "does not divide model.dim = 128. Use heads = 1, 2, 4 or 8."),
        (["model.kv_heads=3"], "model.kv_heads", "does not divide model.heads = 8"),
        (["model.head_dim=15"], "model.head_dim", "rotary"),
        (["model.heads=256", "model.kv_heads=256"], "model.heads", "does not divide model.dim"),
        (["plan.data=4", "plan.replicate=3"], "plan.replicate", "does not divide plan.data = 4. Use replicate = 1, 2 or 4."),
        (["plan.data=4", "fleet.nodes=3"], "fleet.nodes", "does not divide the plan's 4 ranks. Use fleet.nodes = 1, 2 or 4."),
        (
            ["plan.tensor=4", "model.heads=24", "model.kv_heads=3", "model.head_dim=16"],
            "plan.tensor",
            "neither divides kv_heads = 3",
        ),
        (["plan.context=2", "train.seq_len=126"], "train.seq_len", "Use seq_len = 128"),
        (["plan.context=2", "plan.tensor=2", "train.seq_len=124"], "train.seq_len", "2 x context 2 x tensor 2 = 8"),
        (["plan.context=4", "plan.ulysses=3"], "plan.ulysses", "does not divide plan.context = 4. Use ulysses = 1, 2 or 4."),
        (["plan.context=16", "plan.ulysses=16"], "plan.ulysses", "does not divide heads = 8"),
        (["plan.expert=2", "plan.data=2"], "plan.expert", "the model has none"),
        (
            ["plan.expert=3", "plan.data=2", "model.preset=mixtral-8x7b"],
            "plan.expert",
            "= 3 does not divide data x context x tensor = 2",
        ),
        (["plan.expert=16", "plan.data=16", "model.preset=mixtral-8x7b"], "plan.expert", "does not divide the 8 experts"),
        (
            ["plan.expert=4", "plan.zero=0", "cluster=h100", "model.preset=mixtral-8x7b"],
            "plan.expert",
            "does not divide data x context x tensor = 1",
        ),
        (["plan.pipeline=2", "plan.schedule=dualpipe", "plan.data=2", "plan.zero=2"], "plan.zero", "Use zero <= 1"),
        (["plan.pipeline=2", "plan.schedule=zb-v"], "plan.chunks", "Use chunks = 2"),
        (["plan.tensor=3", "model.vocab=1026"], "plan.tensor", "does not divide heads = 8"),
        (["plan.tensor=2", "model.ffn=351"], "plan.tensor", "does not divide ffn = 351 (blocks.0.mlp). Use tensor = 1."),
        (["plan.tensor=2", "model.vocab=1023"], "plan.tensor", "does not divide vocab = 1023"),
        (["plan.tensor=2", "train.seq_len=127"], "plan.tensor", "does not divide seq_len = 127"),
        (["train.global_batch=65", "plan.data=4", "plan.microbatch=8"], "train.global_batch", "Use 64 or 96"),
        (["train.global_batch=3", "plan.data=4"], "train.global_batch", "Use 4"),
        (["plan.pipeline=8"], "plan.pipeline", "makes 8 stages, and the model has 4 blocks"),
        (["plan.pipeline=2", "plan.layers=[3,2]"], "plan.layers", "places 5 blocks, and the model has 4. Use [2, 2]"),
        (["plan.pipeline=2", "plan.layers=[4]"], "plan.layers", "names 1 stages"),
        (["plan.schedule=1f1"], "plan.schedule", "Did you mean '1f1b'?"),
        (["plan.pipeline=2", "plan.chunks=2"], "plan.chunks", "'interleaved'"),
        (["plan.recompute=every:9"], "plan.recompute", "Use every:N with N <= 4."),
        (["plan.recompute=selective", "plan.recompute_parts=[]"], "plan.recompute_parts", "names nothing"),
        (["plan.recompute_parts=['mpl']"], "plan.recompute_parts", 'Did you mean "mlp"?'),
        (["optimizer.warmup=101"], "optimizer.warmup", "Use warmup <= 100"),
        (["optimizer.schedule=wsd", "optimizer.decay=0.95"], "optimizer.decay", "Use decay <= 0.9,"),
        (["cluster=h10"], "cluster", "Did you mean 'h100'?"),
        (["cluster=h100:2", "plan.data=4"], "cluster", "Use h100:4"),
        (["cluster=cpu", "train.device=cuda"], "train.device", "contradicts"),
        (["data.weights={austen=0}"], "data.weights", "gives no domain a share"),
        (["cluster=h100", "model.preset=llama3-70b"], "plan.zero", "has 80.0 GiB"),
        (
            ["cluster=h100:2", "plan.data=2", "train.precision=bf16", "fleet.verify_every=4"],
            "fleet.verify_every",
            "same bits twice",
        ),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str):
    problems = errors(*settings)
    assert key in [problem.key for problem in problems]
    assert any(said in str(problem) for problem in problems if problem.key == key), [*map(str, problems)]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["train.seq_len=512"], "train.seq_len"),
        (["plan.pipeline=4", "plan.microbatch=16"], "plan.pipeline"),
        (["plan.data=2", "plan.zero=0"], "plan.zero"),
        (["plan.data=2", "plan.zero=0", "plan.replicate=2"], "plan.replicate"),
        (["plan.pipeline=2", "model.tied=true"], "model.tied"),
        (["plan.pipeline=2", "plan.schedule=interleaved"], "plan.chunks"),
        (["plan.pipeline=2", "plan.schedule=zb-h2"], "plan.schedule"),
        (["plan.pipeline=2", "plan.schedule=zb-h1", "plan.compile=true"], "plan.compile"),
        (["train.seq_len=32768"], "plan.recompute"),
        (["cluster=h100:64", "plan.tensor=16", "model.heads=16", "model.kv_heads=16"], "plan.tensor"),
        (["cluster=h100", "model.preset=switch-base-16", "plan.data=16", "plan.expert=16"], "plan.expert"),
        (["cluster=v100-32gb"], "train.precision"),
        (["plan.recompute=selective", "plan.recompute_parts=['attention','attention.core']"], "plan.recompute_parts"),
        (["plan.recompute=selective", "plan.recompute_parts=['mlp_norm','attend']"], "plan.recompute_parts"),
        (["train.steps=1000"], "checkpoint.every"),
        (["fleet.verify_every=10"], "fleet.verify_every"),
        (["plan.data=2", "plan.expert=2", "model.preset=deepseek-tiny", "fleet.verify_every=10"], "fleet.verify_every"),
        (["model.preset=deepseek-tiny", "model.balanced=true"], "model.balanced"),
        (["plan.pipeline=2", "plan.schedule=dualpipe"], "plan.schedule"),
    ],
)
def test_what_is_legal_but_unwise_is_advice(settings: list[str], key: str):
    assert errors(*settings) == []
    assert key in advice(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["plan.data=2", "plan.zero=1"],
        ["plan.pipeline=2"],
        ["plan.tensor=4", "cluster=h100"],
        ["plan.pipeline=2", "plan.chunks=2", "plan.schedule=interleaved"],
        ["train.seq_len=256", "plan.recompute=full"],
        ["plan.tensor=4", "plan.data=8", "plan.zero=3"],
        ["plan.tensor=2", "train.seq_len=127", "plan.sequence=false"],
        ["optimizer.schedule=wsd", "optimizer.decay=0.9"],
        ["plan.pipeline=2", "plan.layers=[1,3]"],
        ["plan.data=2", "fleet.verify_every=10"],
        ["plan.data=2", "fleet.verify_every=10", "train.precision=bf16", "train.device=cpu"],
        ["plan.data=2", "fleet.verify_every=10", "cluster=h100:2", "train.precision=fp32"],
    ],
)
def test_what_is_legal_and_wise_is_let_be(settings: list[str]):
    assert found(*settings) == []


@pytest.mark.parametrize("split", ["tensor", "context"])
def test_what_an_older_compiler_computes_wrongly_is_refused_there(split: str, monkeypatch: pytest.MonkeyPatch):
    asked = ("plan.compile=true", f"plan.{split}=2")
    for installed, wrong in (("2.15.0", []), ("2.16.1+cu130", []), ("2.11.0+cu130", ["plan.compile"])):
        monkeypatch.setattr("megalith.check.version", lambda package, installed=installed: installed)
        assert [problem.key for problem in errors(*asked)] == wrong
        assert errors("plan.compile=true", "plan.data=2") == []


def test_a_context_rank_keeps_activations_of_its_share_of_a_sequence():
    whole, share = (
        next(problem.reason.partition(" at ")[0] for problem in found(*settings) if problem.key == "plan.recompute")
        for settings in (["train.seq_len=32768"], ["train.seq_len=65536", "plan.context=2"])
    )
    assert whole == share


def test_the_bubble_is_said_as_a_number():
    """(p - 1) / m of the useful time: 3 / 4."""
    (problem,) = [p for p in found("plan.pipeline=4", "plan.microbatch=16") if p.key == "plan.pipeline"]
    assert "over 4 microbatches leaves each rank idle for 75.0%" in problem.reason


def test_the_interleaved_bubble_is_divided_by_the_chunks():
    (problem,) = [
        p
        for p in found("plan.pipeline=2", "plan.chunks=2", "plan.microbatch=16", "plan.schedule=interleaved")
        if p.key == "plan.pipeline"
    ]
    assert "12.5%" in problem.reason


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 10), (8, 16)])
def test_dualpipe_is_priced_against_its_half(ranks: int, microbatches: int):
    """A stage's weights in bf16 and its gradients in fp32; idle times as simulated where F = I = W and nothing is hidden."""
    sizes = (f"plan.pipeline={ranks}", f"model.layers={2 * ranks}", f"train.global_batch={microbatches}")
    asked = ("plan.schedule=dualpipe", *sizes)
    (problem,) = [p for p in found(*asked) if p.key == "plan.schedule"]
    (block,) = set(spec(*asked).model.build().blocks)
    assert f"about {_size(2 * _parameters(block, 128) * (2 + 4))} a rank" in problem.reason
    idle = [
        simulate(lower(build(name, ranks=ranks, microbatches=microbatches, chunks=chunks), 0), dict.fromkeys("FIW", 1) | {"B": 2})
        for name, chunks in (("dualpipe", 1), ("dualpipev", 2))
    ]
    assert [f"{timeline.bubble:.1%}" for timeline in idle] == re.findall(r"idles for (\S+%)", problem.reason)


def test_dualpipe_is_let_be_where_its_half_has_too_few_blocks():
    assert "plan.schedule" not in advice("plan.schedule=dualpipe", "plan.pipeline=4")


def test_a_copied_optimizer_is_said_in_bytes():
    """8 bytes of moments a parameter of the blocks, of which two data ranks each could keep half."""
    (problem,) = [
        p for p in found("plan.data=2", "plan.zero=0", "model.preset=llama2-7b", "train.seq_len=64") if p.key == "plan.zero"
    ]
    blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert f"{8 * blocks / 2**30:.1f} GiB" in problem.reason
    assert f"{4 * blocks / 2**30:.1f} GiB" in problem.way_out


def test_state_that_fits_when_sharded_is_said_to():
    (problem,) = [
        p for p in errors("cluster=h100:64", "model.preset=llama3-8b", "plan.data=8", "plan.zero=0") if p.key == "plan.zero"
    ]
    assert "plan.zero = 3 would keep" in problem.way_out
    assert errors("cluster=h100:64", "model.preset=llama3-8b", "plan.data=8", "plan.zero=3") == []


@pytest.mark.parametrize(("late", "each"), [("false", 12 + 4 + 2), ("true", 12 + 16 + 2)])
def test_what_undoing_an_update_takes_counts_as_state(late: str, each: int):
    """Copies of weights and moments, and gradients, beside what is there anyway."""
    blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    (problem,) = errors("cluster=h100", "model.preset=llama2-7b", f"plan.post_validation={late}", "plan.zero=0")
    assert f"at least {_size(each * blocks)}" in problem.reason


def test_started_ranks_are_compared_with_the_plan():
    assert errors("plan.data=2", "plan.tensor=2", world=4) == []
    (problem,) = errors("plan.data=2", "plan.tensor=2", world=8)
    assert "data 2 x tensor 2 x pipeline 1 = 4 ranks are needed, and 8 were started" in problem.reason
    assert "Use plan.data = 4" in problem.way_out


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


def test_data_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = check(spec())
    assert str(tmp_path / "data") in problem.reason
    assert "megalith data prepare" in problem.way_out
    Path("data").mkdir()
    (problem,) = check(spec())
    assert "no manifest.json" in problem.reason
    assert "--tokenizer TOKENIZER --out data" in problem.way_out
    for text in ("{", "{}", "[]"):
        Path("data/manifest.json").write_text(text)
        (problem,) = check(spec())
        assert "is not a manifest this version reads" in problem.reason


def keys(*settings: str, begun: bool = False) -> list[str]:
    return [problem.key for problem in check(spec(*settings), begun=begun)]


def test_every_file_of_the_data_is_there_in_its_length_or_in_a_copy(data: Path):
    Path("data/austen-train.bin").unlink()
    Path("data/code-train.idx").write_bytes(b"")
    hollow_data(Path("copy"), "austen", "code")
    missing, short = check(spec())
    assert (missing.key, short.key) == ("data.path", "data.path")
    assert "austen-train.bin is missing (4000000 bytes)" in missing.reason
    assert "code-train.idx has 0 bytes, the manifest says 16" in short.reason
    assert check(spec("data.copies=['copy']")) == []


def test_of_many_missing_files_a_few_are_named_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    hollow_data(Path("data"), "austen", "code")
    for path in (*Path("data").glob("*.bin"), *Path("data").glob("*.idx")):
        path.unlink()
    *named, counted = check(spec())
    assert ["is missing" in problem.reason for problem in named] == [True] * 5
    assert "3 more of its files" in counted.reason


def test_a_copy_is_there_and_of_the_same_data(data: Path):
    hollow_data(Path("other"), "austen")
    gone, other = check(spec("data.copies=['gone', 'other']"))
    assert (gone.key, gone.reason) == ("data.copies", "gone does not exist")
    assert (other.key, other.reason) == ("data.copies", "other holds other data than data")
    assert keys("data.path=nowhere", "data.copies=['gone', 'other']") == ["data.path", "data.copies"]


def test_the_tokenizer_is_that_of_the_data(data: Path):
    Path("data/tokenizer.json").write_text('{"other": 1}')
    (problem,) = check(spec())
    assert "fingerprint" in problem.reason
    Path("data/tokenizer.json").unlink()
    (problem,) = check(spec())
    assert (problem.key, problem.reason) == ("data.path", "data/tokenizer.json is missing")


def test_a_domain_that_is_read_has_a_token_and_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    hollow_data(Path("data"), "note", train=1)
    assert keys("train.steps=1", "optimizer.warmup=1") == ["data.weights.note", "train.steps"]


def first_weights(folder: str, *settings: str) -> Path:
    """A checkpoint, but for its tensors."""
    path = Path(folder, checkpoints.name(0))
    path.mkdir(parents=True)
    index = checkpoints.write_index(path, {})
    meta = {"spec": {"model": spec(*settings).model.model_dump(mode="json")}}
    checkpoints.write_manifest(path, checkpoints.Manifest(0, 1, meta, {checkpoints.INDEX: index}))
    return path


def test_weights_to_start_from_are_whole_and_of_the_runs_sizes(data: Path):
    path = first_weights("first", "model.context=64", "model.layers=5")
    fits, other = "train.init_from=first", ["train.init_from=first", "model.dim=64", "model.ffn=96"]
    assert keys(fits) == []  # nor need it be longer, or as deep
    assert keys(fits, "model.layers=6") == ["train.init_from"]
    (problem,) = check(spec(*other))
    assert "dim = 128" in problem.reason.partition("and the run's")[0]
    assert "dim = 64" in problem.reason.partition("and the run's")[2]
    (path / checkpoints.INDEX).unlink()
    (problem,) = check(spec(fits))
    assert (problem.key, f"{path.name}/{checkpoints.INDEX}" in problem.reason) == ("train.init_from", True)
    (path / checkpoints.MANIFEST).unlink()
    assert keys(fits) == ["train.init_from"]
    path.rmdir()
    (problem,) = check(spec(fits))
    assert "no checkpoint here" in problem.reason


def test_a_run_that_has_begun_does_not_need_its_first_weights_any_more(data: Path):
    assert keys("train.init_from=nowhere") == ["train.init_from"]
    assert keys("train.init_from=nowhere", begun=True) == []


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["model.vocab=900"], "model.vocab", "vocabulary of 1000 tokens. Use 1000"),
        (["model.vocab=900", "plan.tensor=4", "plan.data=4"], "model.vocab", "Use 1008"),
        (["data.weights={austn=1}"], "data.weights.austn", "Did you mean austen? It has: austen, code."),
        (["validation.every=5", "train.seq_len=4096"], "validation.every", "holds out 2000 tokens"),
        (["train.steps=10000"], "train.steps", "81,920,000 tokens, 20.5 times the data's 4,000,000"),
        (["train.init_from=nowhere"], "train.init_from", "no such checkpoint"),
    ],
)
def test_the_run_must_fit_the_data(data: Path, settings: list[str], key: str, said: str):
    problems = {problem.key: problem for problem in check(spec(*settings))}
    assert said in str(problems[key])


def test_only_the_weighted_domains_tokens_count(data: Path):
    """200 steps of 64 x 1024 are 3.3 passes over both domains, but 6.6 over one."""
    assert "train.steps" not in {p.key for p in check(spec("train.seq_len=1024", "train.steps=200"))}
    assert "train.steps" in {p.key for p in check(spec("train.seq_len=1024", "train.steps=200", "data.weights={code=1}"))}


def test_copies_on_disk_need_a_folder_and_copies_in_memory(data: Path, tmp_path: Path):
    every, file = "fleet.disk_every=8", tmp_path / "file"
    file.touch()
    assert check(spec(every, f"fleet.disk={tmp_path / 'new' / 'folder'}")) == check(spec())
    (found,) = check(spec(every, f"fleet.disk={file / 'folder'}"))
    assert (found.key, f"{file} is no folder" in found.reason) == ("fleet.disk", True)
    assert check(spec(every, f"fleet.disk={file}"), files=False) == check(spec(f"fleet.disk={file}"), files=False) == []
    (found,) = errors(every, "fleet.memory_every=0")
    assert (found.key, found.way_out) == ("fleet.disk_every", "Use fleet.memory_every = 8, say.")


def test_nothing_on_disk_is_looked_at_when_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert check(spec(), files=False) == []


@given(batch=st.integers(1, 300), data_ranks=st.integers(1, 12), microbatch=st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_the_batches_advised_are_legal(batch: int, data_ranks: int, microbatch: int):
    plan = [f"plan.data={data_ranks}", f"plan.microbatch={microbatch}", "plan.zero=3"]
    for problem in errors(f"train.global_batch={batch}", *plan):
        advised = re.search(r"Use ([\d or]+)", problem.way_out)
        assert advised
        for other in re.findall(r"\d+", advised[1]):
            assert errors(f"train.global_batch={other}", *plan) == []


@given(tensor=st.integers(2, 12), heads=st.sampled_from([4, 8, 16]), ffn=st.sampled_from([96, 352, 360]))
@settings(deadline=None, max_examples=40)
def test_the_tensor_sizes_advised_are_legal(tensor: int, heads: int, ffn: int):
    model = [f"model.heads={heads}", f"model.ffn={ffn}"]
    for problem in errors(f"plan.tensor={tensor}", *model):
        for other in re.findall(r"\d+", problem.way_out):
            assert errors(f"plan.tensor={other}", *model) == []


@given(blocks=st.integers(1, 12), pipeline=st.integers(1, 6), layers=st.lists(st.integers(1, 4), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_the_split_advised_is_legal(blocks: int, pipeline: int, layers: list[int]):
    sizes = [f"model.layers={blocks}", f"plan.pipeline={pipeline}"]
    for problem in errors(*sizes, f"plan.layers={layers}"):
        if problem.key == "plan.layers":
            advised = re.search(r"\[.*?\]", problem.way_out)
            assert advised
            assert errors(*sizes, f"plan.layers={advised[0]}") == []


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
    """Everything that is split comes out even, and the schedule can be built."""
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
    """Mixtral balances microbatch i of all data ranks: as many sequences in every plan that the run goes on under."""
    before = spec("model.preset=mixtral-8x7b", "plan.data=2", "plan.microbatch=2")

    def refused(*settings: str) -> list[tuple[str, object]]:
        return [(p.key, p.value) for p in check_resume(before, spec("model.preset=mixtral-8x7b", *settings))]

    assert refused("plan.data=4", "plan.zero=3") == refused("plan.microbatch=4", "plan.expert=1") == []
    assert refused("plan.data=4", "plan.microbatch=2") == [("plan.data", 4)]
    assert refused("plan.data=2", "plan.tensor=2") == [("plan.microbatch", 1)]
    (problem,) = check_resume(before, spec("model.preset=mixtral-8x7b", "plan.data=8"))
    assert "sets of 8 sequences, and the run over sets of 4" in problem.reason
    assert "plan.data x plan.microbatch = 4" in problem.way_out
    for free in ("model.balance_set=sequence", "model.balance_set=global", "model.balance_weight=0"):
        sets = ["model.preset=mixtral-8x7b", free]
        assert check_resume(spec(*sets, "plan.data=2"), spec(*sets, "plan.data=4")) == []


def test_the_plan_that_a_run_falls_back_on_keeps_them_too():
    mixtral = ["model.preset=mixtral-8x7b", "plan.data=4", "fleet.fallback.data=2"]
    assert [p.key for p in errors(*mixtral)] == ["fleet.fallback.data"]
    assert errors(*mixtral, "fleet.fallback.microbatch=2") == errors(*mixtral, "model.balance_set=sequence") == []


def test_the_plan_that_a_run_falls_back_on_is_legal_and_fits_whole_nodes():
    run = ["plan.data=4", "fleet.nodes=2"]
    assert errors(*run, "fleet.fallback.data=2") == []
    (ranks,) = errors(*run, "fleet.fallback.data=3", "train.global_batch=12")
    assert (ranks.key, ranks.way_out) == ("fleet.fallback", "Use a plan of 2 to 2 ranks, a multiple of 2.")
    (more,) = errors(*run, "fleet.fallback.data=4")
    assert "fewer than the run's 2" in more.reason
    three = ["plan.data=6", "fleet.nodes=2", "train.global_batch=60"]
    assert "fleet.fallback.tensor" in {p.key for p in errors(*three, "fleet.fallback.tensor=3")}


def test_what_may_change_exists():
    for name in MAY_CHANGE:
        value: object = spec()
        for part in name.split("."):
            value = getattr(value, part)


def test_a_mixture_says_the_share_of_every_domain(data: Path):
    said = [p for p in check(spec("data.weights={austen=1}")) if p.severity == "error"]
    assert [(p.key, p.value) for p in said] == [("data.weights.code", None)]
    assert "code = 0" in said[0].way_out
    assert not [p for p in check(spec("data.weights={austen=1, code=0}")) if p.severity == "error"]


def test_an_extra_that_is_asked_for_must_be_installed(data: Path, monkeypatch: pytest.MonkeyPatch):
    assert not [p for p in check(spec("log.tensorboard=true")) if p.key == "log.tensorboard"]
    monkeypatch.setattr("megalith.check.find_spec", lambda name: None)
    assert [p.key for p in check(spec("log.tensorboard=true")) if p.severity == "error"] == ["log.tensorboard"]


def test_a_cluster_file_with_too_few_devices_is_an_error(tmp_path: Path):
    small = tmp_path / "small.toml"
    small.write_text('accelerator = "h100"\ncount = 2\n')
    assert "cluster" in {p.key for p in errors(f"cluster={small}", "plan.data=4")}
    assert "cluster" not in {p.key for p in errors(f"cluster={small}", "plan.data=2")}


@pytest.mark.parametrize("name", presets())
def test_blocks_have_the_parameters_that_the_rules_count(name: str):
    model = presets()[name].build().build()
    for block, number in {block: number for number, block in enumerate(model.blocks)}.items():
        with torch.device("meta"):
            made = Stage(model, number + 1, number + 2)
        assert _parameters(block, model.dim) == sum(parameter.numel() for parameter in made.parameters())


def test_learned_positions_end_and_rotary_ones_only_advise():
    assert [p.key for p in errors("model.preset=gpt2", "train.seq_len=2048")] == ["train.seq_len"]
    assert errors("model.preset=llama2-7b", "train.seq_len=8192", "plan.zero=0") == []
    assert "train.seq_len" in advice("model.preset=llama2-7b", "train.seq_len=8192")


def test_heads_that_do_not_rotate_may_be_odd():
    assert errors("model.preset=gpt2", "model.dim=36", "model.heads=12") == []
    assert [p.key for p in errors("model.preset=gemma2-2b", "model.head_dim=15")] == ["model.head_dim"]


def test_a_single_key_head_is_split_by_no_number_of_ranks():
    assert errors("model.preset=palm-8b", "plan.tensor=8") == []


HYBRID = ("model.preset=nemotron-h-tiny", "train.seq_len=128")


def test_mamba_works_on_whole_sequences():
    (problem,) = errors(*HYBRID, "plan.context=2")
    assert problem.key == "plan.context" and "blocks.0.mamba" in problem.reason and "Use context = 1" in problem.way_out


def test_mamba_is_split_by_its_groups():
    assert errors(*HYBRID, "plan.tensor=4") == []
    assert "groups = 4 (blocks.0.mamba)" in str(errors(*HYBRID, "plan.tensor=8"))


def test_heads_of_mamba_come_in_even_groups():
    assert [p.key for p in errors(*HYBRID, "model.mamba_groups=3")] == ["model.mamba_groups"]


def test_half_blocks_may_be_computed_again_in_parts():
    parts = 'plan.recompute_parts=["mamba.core", "attention.core", "mlp.experts"]'
    assert errors(*HYBRID, "plan.recompute=selective", parts) == []
