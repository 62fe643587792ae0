"""Run files: the precedence of layers, all problems at once, and reading the resolved run back."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalith.spec import files
from megalith.spec.base import AbsentError
from megalith.spec.families import FAMILIES
from megalith.spec.families.gemma2 import Gemma2
from megalith.spec.families.llama import Llama
from megalith.spec.files import ResolvedRun, load
from megalith.spec.model import RopeScaling
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.run import DataSpec, GroupSpec, OptimizerSpec, RunSpec, TrainSpec
from megalith.spec.toml import dotted
from megalith.spec.validate import leaves

GOLDEN = Path(__file__).parent / "golden" / "quickstart.toml"
RUN = """
name = "first"
[model]
preset = "quickstart"
[data]
path = "data/austen"
[train]
steps = 300
global_batch = 16
seq_len = 256
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    return Path("run.toml")


def problems(text: str, *overrides: str) -> dict[str, Problem]:
    """Return the problems of a run file, by key."""
    Path("wrong.toml").write_text(text)
    with pytest.raises(SpecErrors) as caught:
        load("wrong.toml", overrides=overrides)
    found = {problem.key: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems)
    return found


def test_the_resolved_quickstart_is_as_in_the_golden_file(run: Path):
    """A changed default shows here as a diff."""
    assert files.dump(load(run)) == GOLDEN.read_text()


def test_the_file_lies_over_the_preset_and_the_command_line_over_both(run: Path):
    run.write_text(RUN.replace("[data]", "layers = 3\ndim = 128\n[data]"))
    resolved = load(run, overrides=["model.dim=64"])
    model = resolved.spec.model
    assert (model.layers, model.dim, model.ffn) == (3, 64, 704)
    assert [resolved.provenance[f"model.{key}"] for key in ("layers", "dim", "ffn", "tied")] == [
        "file run.toml",
        "command line",
        "preset quickstart",
        "default",
    ]


@pytest.mark.parametrize(("timeout", "times"), [(60, 1), (600, 1), (1500, 2.5)])
def test_one_timeout_raises_the_limits_that_nobody_sets(run: Path, timeout: int, times: float):
    """It never lowers them either."""
    spec = load(run, overrides=[f"launch.timeout={timeout}", "fleet.hang_floor=7.0"]).spec
    assert spec.launch.start_timeout == 120.0 * times
    assert (spec.fleet.node_timeout, spec.fleet.wait_limit, spec.fleet.hang_floor) == (3.0 * times, 3600.0 * times, 7.0)
    assert load(run, overrides=[f"launch.timeout={timeout}"]).spec.fleet.hang_floor == times


def test_a_preset_on_the_command_line_lies_under_the_files_sizes(run: Path):
    run.write_text(RUN.replace("[data]", "layers = 3\n[data]"))
    model = load(run, overrides=["model.preset=tiny"]).spec.model
    assert (model.name, model.layers, model.dim) == ("tiny", 3, 128)


def test_every_value_has_an_origin(run: Path):
    resolved = load(run)
    assert set(resolved.provenance) == {dotted(leaf.path) for leaf in leaves(resolved.spec)}


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("train.steps=7", "train", 7),
        ("optimizer.lr=1e-4", "optimizer", 1e-4),
        ("plan.recompute=every:2", "plan", "every:2"),
        ("plan.layers=[1,2,3]", "plan", (1, 2, 3)),
        ("plan.compile=true", "plan", True),
        ("name=a b", "", "a b"),
        ('name="42"', "", "42"),
        ("data.weights.austen=0.5", "data", {"austen": 0.5}),
        ('data.weights={"a b"=1}', "data", {"a b": 1.0}),
        ("train.init_from=none", "train", None),
    ],
)
def test_settings_are_toml_values_or_bare_words(run: Path, setting: str, key: str, value: object):
    spec = load(run, overrides=[setting]).spec
    part = getattr(spec, key) if key else spec
    assert getattr(part, setting.partition("=")[0].split(".")[1 if key else 0]) == value


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["optimizer.min_lr=3e-5", "optimizer.lr=3e-4"],
            "3e-05 times optimizer.lr = 0.0003 would be a lowest learning rate of 9e-09. "
            "Write min_lr_ratio = 0.1 for a lowest learning rate of 3e-05, or min_lr_ratio = 3e-05 for a lowest learning rate of 9e-09.",
        ),
        (["optimizer.min_lr=0.1", "optimizer.lr=3e-4"], "Write min_lr_ratio = 0.1 for a lowest learning rate of 3e-05."),
        (["optimizer.min_lr=0"], "Write min_lr_ratio = 0 for a lowest learning rate of 0."),
        (["optimizer.min_lr=low"], "is now called min_lr_ratio, because it is a share of optimizer.lr. Write min_lr_ratio."),
    ],
)
def test_a_lowest_learning_rate_is_refused_with_both_readings(settings: list[str], said: str, run: Path):
    """A6: in every other trainer `min_lr` is a learning rate."""
    (problem,) = problems(RUN, *settings).values()
    assert problem.key == "optimizer.min_lr"
    assert said in str(problem)
    assert problem.source == "command line"


def test_descriptions_of_runs_that_exist_are_read_with_the_ratio_that_it_was(run: Path):
    saved = RunSpec.model_validate_json(json.dumps(load(run).spec.model_dump(mode="json")).replace("min_lr_ratio", "min_lr"))
    assert saved == load(run).spec
    run.write_text(files.dump(load(run, overrides=["optimizer.min_lr_ratio=0.02"])).replace("min_lr_ratio", "min_lr"))
    assert files.read(run, saved=True).whole().spec.optimizer.min_lr_ratio == 0.02
    assert [problem.key for problem in files.read(run).problems] == ["optimizer.min_lr"]


def test_later_settings_win(run: Path):
    assert load(run, overrides=["train.steps=1", "train.steps=2"]).spec.train.steps == 2


def test_none_takes_a_presets_value_away(run: Path):
    assert load(run, overrides=["model.preset=llama3.1-8b"]).spec.model.rope_scaling is not None
    assert load(run, overrides=["model.preset=llama3.1-8b", "model.rope_scaling=none"]).spec.model.rope_scaling is None


def test_a_part_of_a_presets_table_can_be_set(run: Path):
    scaling = load(run, overrides=["model.preset=llama3.1-8b", "model.rope_scaling.factor=4"]).spec.model.rope_scaling
    assert scaling == RopeScaling(factor=4.0)


def test_unknown_keys_are_refused_with_the_nearest(run: Path):
    found = problems(RUN.replace("steps =", "stepz ="))
    assert list(found) == ["train.stepz"]  # train.steps is not reported as missing too
    assert found["train.stepz"].way_out == "Did you mean train.steps?"
    assert found["train.stepz"].source == "file wrong.toml"


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("train.lr=1", "optimizer.lr"),
        ("steps=1", "train.steps"),
        ("plann.data=2", "plan"),
        ("model.presett=tiny", "model.preset"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_the_right_one(run: Path, setting: str, meant: str):
    found = problems(RUN, setting)
    assert [problem.way_out for problem in found.values()] == [f"Did you mean {meant}?"]


@pytest.mark.parametrize("size", ["layers = 3", "kv_rank = 16", "active = 2"])
def test_a_misspelt_preset_is_the_only_problem_it_makes(run: Path, size: str):
    """This holds for every intended family."""
    found = problems(RUN.replace("quickstart", "quickstrat").replace("[data]", f"{size}\n[data]"))
    assert list(found) == ["model.preset"]
    assert 'Did you mean "quickstart"?' in found["model.preset"].way_out


def sound(text: str, *overrides: str) -> set[str]:
    """Return the valid part of a run file that has faults."""
    Path("wrong.toml").write_text(text)
    reading = files.read("wrong.toml", overrides=overrides)
    assert reading.problems
    return {dotted(leaf.path) for leaf in leaves(reading.resolved.spec)}


@pytest.mark.parametrize(
    ("overrides", "absent"),
    [
        (["train.seed=many"], {"train.seed"}),
        (["train.sed=1"], {"train.seed"}),
        (["train.stepz=1"], set()),  # the intended value was given
        (["train.tensor=2"], {"plan.tensor"}),
        (["plan.layers=[1,-1]", "data.weights.austen=much"], {"plan.layers", "data.weights"}),
        (["model.ffn=none"], {"model.ffn"}),
        (["optimizer=3"], set(OptimizerSpec.model_fields)),
        (["model.family=lama"], set(Llama.model_fields)),
    ],
)
def test_what_is_faulty_or_in_doubt_is_not_read_and_the_rest_is(run: Path, overrides: list[str], absent: set[str]):
    whole = {dotted(leaf.path) for leaf in leaves(load(run).spec)}
    found = sound(RUN, *overrides)
    tables = {"optimizer=3": "optimizer", "model.family=lama": "model"}
    assert whole - found == {f"{tables[overrides[0]]}.{name}" if overrides[0] in tables else name for name in absent}
    assert found <= whole


def test_a_value_that_is_not_there_cannot_be_read(run: Path):
    Path("wrong.toml").write_text('plan = { tensor = "2", layers = [2, 2] }' + RUN.replace("quickstart", "quickstrat"))
    spec = files.read("wrong.toml").resolved.spec
    assert spec.plan.layers == (2, 2)
    for read in (lambda: spec.plan.tensor, lambda: spec.plan.ranks, lambda: spec.model.dim, lambda: spec.model.tied):
        with pytest.raises(AbsentError):
            read()
    with pytest.raises(AttributeError, match="tenser"):
        spec.plan.tenser  # type: ignore[attr-defined]  # noqa: B018  # what no spec has is another mistake


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("train.steps=many", "a whole number is needed"),
        ("train.steps=1.5", "a whole number is needed"),
        ("train.steps=true", "a whole number is needed"),
        ('train.steps="4"', "a whole number is needed"),
        ("train.steps=0", "it must be more than 0"),
        ("optimizer.lr=fast", "a number is needed"),
        ("optimizer.lr=nan", "a finite number is needed"),
        ("optimizer.beta1=1.0", "it must be less than 1"),
        ("optimizer.min_lr_ratio=2", "it must be at most 1"),
        ("optimizer.warmup=-1", "it must be at least 0"),
        ("plan.compile=maybe", "true or false is needed"),
        ("name=1", 'text is needed, in "quotes"'),
        ("plan.layers=3", "a list is needed, in [brackets]"),
        ("plan=3", "a table is needed"),
        ("data.weights=3", "a table is needed"),
        ("optimizer.schedule=cosin", "it must be 'cosine', 'linear', 'wsd', '1-sqrt' or 'constant'"),
        ("plan.zero=4", "it must be 0, 1, 2 or 3"),
        ("plan.recompute=some", "the text does not have one of the known forms"),
    ],
)
def test_wrong_values_are_told_what_is_needed(run: Path, setting: str, reason: str):
    (problem,) = problems(RUN, setting).values()
    assert (problem.key, problem.reason, problem.source) == (setting.partition("=")[0], reason, "command line")
    assert problem.way_out


def test_the_nearest_of_a_few_words_is_suggested(run: Path):
    assert 'Did you mean "cosine"?' in problems(RUN, "optimizer.schedule=cosin")["optimizer.schedule"].way_out


def test_the_keys_of_a_model_are_those_of_its_family(run: Path):
    model = load(run, overrides=["model.preset=gemma2-2b", "model.window=128", "model.logit_softcap=none"]).spec.model
    assert isinstance(model, Gemma2)
    assert (model.window, model.logit_softcap, model.attention_softcap) == (128, None, 50.0)
    found = problems(RUN, "model.preset=gpt2", "model.head=3", "model.rope_theta=1e4")
    assert found["model.head"].way_out == "Did you mean model.heads?"
    assert found["model.rope_theta"].way_out.startswith(
        "Known here: parametrization, base_dim, base_layers, base_head_dim, attention, mlp, norm, family, name, layers,"
    )
    assert found["model.rope_theta"].source == "command line"


def test_a_family_nobody_knows_is_told_the_nearest(run: Path):
    found = problems(RUN, "model.family=gema2", "train.stepz=1")
    assert set(found) == {"model.family", "train.stepz"}
    problem = found["model.family"]
    assert (problem.value, problem.reason, problem.source) == ("gema2", "no family has this name", "command line")
    assert problem.way_out.startswith('Did you mean "gemma2"? Known: llama, ')
    assert all(family in problem.way_out for family in FAMILIES)


def test_a_family_that_is_no_word_is_one_nobody_knows(run: Path):
    assert problems(RUN, "model.family=[1]")["model.family"].reason == "no family has this name"


def test_the_kind_of_a_stretch_that_a_family_has_not_is_refused(run: Path):
    found = problems(RUN, "model.preset=llama3.1-8b", "model.rope_scaling.kind=llama33")
    assert found["model.rope_scaling.kind"].way_out == 'Did you mean "llama3"? Known: llama3, yarn, linear.'


def test_a_stretch_that_names_no_kind_is_llama_3_s(run: Path):
    found = problems(RUN, "model.preset=llama3.1-8b", "model.rope_scaling.factr=2")
    assert found["model.rope_scaling.factr"].way_out == "Did you mean model.rope_scaling.factor?"


def test_sizes_that_contradict_each_other_are_told_as_the_family_tells_it(run: Path):
    (problem,) = problems(RUN, "model.preset=deepseek-v3", "model.dense_layers=99").values()
    assert (problem.key, problem.value) == ("model", None)
    assert problem.reason.startswith("dense_layers = 99, but the model has only 61 layers")


def test_missing_keys_are_those_of_the_family(run: Path):
    found = problems(RUN.replace('preset = "quickstart"', 'family = "gpt"'))
    assert set(found) == {f"model.{key}" for key in ("layers", "dim", "heads", "vocab")}


def test_missing_keys_are_all_named(run: Path):
    found = problems('name = "empty"\n')
    sizes = {f"model.{key}" for key in ("layers", "dim", "heads", "ffn", "vocab")}
    assert set(found) == sizes | {"data.path", "train.steps", "train.global_batch", "train.seq_len"}
    assert "preset" in found["model.dim"].way_out
    assert "[train]" in found["train.steps"].way_out


def test_a_preset_is_proposed_only_for_sizes_that_presets_have(run: Path):
    found = problems(RUN, "model.rope_scaling={kind='yarn'}")
    assert set(found) == {"model.rope_scaling.factor", "model.rope_scaling.original_context"}
    assert not any("preset" in problem.way_out for problem in found.values())


def test_problems_of_all_kinds_come_together(run: Path):
    found = problems(
        RUN.replace("quickstart", "quik").replace("seq_len = 256", "seq_len = 1.5"), "plan.dat=2", "nonsense", "x.=1"
    )
    assert set(found) == {"model.preset", "train.seq_len", "plan.dat", "--set nonsense", "--set x.=1"}


def test_a_wrong_value_says_key_value_reason_and_way_out_in_one_line(run: Path):
    (problem,) = problems(RUN, "train.steps=many").values()
    assert str(problem).startswith('train.steps = "many": a whole number is needed. ')


def test_broken_toml_names_the_line(run: Path):
    (problem,) = problems('name = "x"\n[model\n').values()
    assert problem.key == "wrong.toml:2"
    assert "[model" in problem.reason


def test_a_missing_file_names_its_neighbour(run: Path):
    with pytest.raises(SpecErrors, match=r"no such file.*Did you mean run\.toml"):
        load("rum.toml")


def _with_cluster(folder: Path, text: str) -> Path:
    """Write a run file in `folder` that names a cluster file."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(f'cluster = "{text}"\n{RUN}')
    return folder / "run.toml"


@pytest.mark.parametrize("place", ["beside", "here"])
def test_a_clusters_file_is_looked_for_beside_the_run_file_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    path = _with_cluster(tmp_path / "beside", "large.toml")
    (tmp_path / "here").mkdir()
    for folder in ("beside", "here") if place == "beside" else ("here",):
        (tmp_path / folder / "large.toml").write_text('accelerator = "h100"\ncount = 8\n')
    monkeypatch.chdir(tmp_path / "here")
    found = load(path)
    assert (Path.cwd() / found.spec.cluster).resolve() == (tmp_path / place / "large.toml").resolve()
    files.save(found, tmp_path / "saved")
    assert load(tmp_path / "saved/run.toml").spec == found.spec


def test_a_clusters_file_that_is_nowhere_is_told_both_places_and_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = _with_cluster(tmp_path / "beside", "large.toml")
    monkeypatch.chdir(tmp_path)
    (problem,) = files.read(path).problems
    assert problem.key == "cluster"
    assert str(tmp_path / "beside") in problem.reason and f"{tmp_path}, the current" in problem.reason
    assert not files.read(path, overrides=["cluster=h100:8"]).problems


def test_a_folder_is_no_run_file(run: Path):
    with pytest.raises(SpecErrors, match=r"a folder.*run\.toml"):
        load(".")


@pytest.mark.parametrize("setting", ["train.steps", "train.steps=", "=3", "a b=3", "plan.layers=[1", 'name="x'])
def test_settings_that_are_none_are_refused(run: Path, setting: str):
    with pytest.raises(SpecErrors) as caught:
        load(run, overrides=[setting])
    (problem,) = caught.value.problems
    assert (problem.key, problem.source) == (f"--set {setting}", "command line")


def test_a_setting_cannot_smuggle_in_a_second_one(run: Path):
    assert load(run, overrides=["name=x\ntrain.steps=1"]).spec.train.steps == 300


def test_saving_writes_the_run_for_people_and_for_programs(run: Path):
    resolved = load(run, overrides=["train.steps=9"])
    files.save(resolved, Path("out"))
    assert load("out/run.toml").spec == resolved.spec
    assert RunSpec.model_validate_json(Path("out/spec.json").read_text()) == resolved.spec
    assert json.loads(Path("out/provenance.json").read_text()) == resolved.provenance
    assert "steps = 9" in Path("out/run.toml").read_text()
    assert sorted(path.name for path in Path("out").iterdir()) == ["provenance.json", "run.toml", "spec.json"]


WORDS = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text != "none")
POSITIVE = st.integers(1, 2**40)
RATES = st.floats(min_value=1e-300, max_value=1e300)
LLAMAS = st.builds(
    Llama,
    name=WORDS,
    layers=POSITIVE,
    dim=POSITIVE,
    heads=POSITIVE,
    kv_heads=st.none() | POSITIVE,
    ffn=POSITIVE,
    vocab=POSITIVE,
    rope_theta=RATES,
    rope_scaling=st.none() | st.builds(RopeScaling, factor=RATES),
    tied=st.booleans(),
)
GEMMAS = st.builds(
    Gemma2,
    name=WORDS,
    layers=POSITIVE,
    dim=POSITIVE,
    heads=POSITIVE,
    kv_heads=POSITIVE,
    ffn=POSITIVE,
    vocab=POSITIVE,
    query_scalar=st.none() | POSITIVE,
    logit_softcap=st.none() | RATES,
)
RUNS = st.builds(
    RunSpec,
    name=WORDS,
    model=LLAMAS | GEMMAS,
    plan=st.builds(
        Plan,
        data=POSITIVE,
        zero=st.sampled_from([0, 1, 2, 3]),
        schedule=WORDS,
        layers=st.none() | st.lists(POSITIVE, max_size=3).map(tuple),
        recompute=st.sampled_from(["none", "full", "every:3"]),
        recompute_parts=st.lists(WORDS, max_size=2).map(tuple),
    ),
    data=st.builds(DataSpec, path=WORDS, weights=st.none() | st.dictionaries(WORDS, st.floats(0, 1e9), max_size=3)),
    train=st.builds(TrainSpec, steps=POSITIVE, global_batch=POSITIVE, seq_len=POSITIVE, init_from=st.none() | WORDS),
    optimizer=st.builds(
        OptimizerSpec,
        lr=RATES,
        beta1=st.floats(0, 0.999),
        schedule=st.sampled_from(["wsd", "linear"]),
        groups=st.lists(st.builds(GroupSpec, pattern=st.text(min_size=1), lr=RATES, kind=st.sampled_from([None, "sgd"]))).map(
            tuple
        ),
    ),
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(spec=RUNS, origin=WORDS)
def test_any_run_written_out_loads_to_the_equal_run(tmp_path: Path, spec: RunSpec, origin: str):
    resolved = ResolvedRun(spec, {dotted(leaf.path): origin for leaf in leaves(spec)})
    (tmp_path / "run.toml").write_text(files.dump(resolved), encoding="utf-8")
    assert load(tmp_path / "run.toml").spec == spec


def test_a_brief_file_keeps_sites_that_are_all_defaults_and_what_was_said_of_them(run: Path) -> None:
    """Keys that the file leaves out can be chosen for a link."""
    run.write_text(run.read_text() + "\n[sites]\nbits = 32\n")
    before = files.load(run)
    brief = run.with_name("brief.toml")
    brief.write_text(files.dump(before, brief=True))
    after = files.load(brief)
    assert after.spec == before.spec and after.spec.sites is not None
    assert "bits" in after.spec.sites.model_fields_set and "overlap" not in after.spec.sites.model_fields_set
