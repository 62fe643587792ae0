from pathlib import Path

import pytest

from megalith.cost.constants import calibration
from megalith.cost.memory import memory
from megalith.cost.parts import parts
from megalith.cost.workload import SoftwareProfile, Workload
from megalith.planner.request import PlanRequest, resolve
from megalith.planner.varied import vary
from megalith.spec.plan import Plan
from megalith.spec.problem import SpecErrors
from megalith.spec.quantity import quantity
from megalith.spec.sizes import active_parameters

GOOD = {"model": "tiny", "cluster": "h100:8", "seq_len": 128, "global_batch": 16}


def wrong(**words):
    with pytest.raises(SpecErrors) as caught:
        resolve(PlanRequest(**words))
    return {problem.key: problem for problem in caught.value.problems}


@pytest.mark.parametrize(("text", "number"), [("15T", 15e12), ("1.5e9", 1.5e9), ("2Ki", 2048), ("300b", 300e9), ("1_000", 1000)])
def test_amounts_have_letters(text: str, number: float):
    assert quantity(text) == number


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "1.5.2", "3Q", "1e999x"])
def test_what_is_no_amount_is_none(text: str):
    assert quantity(text) is None


def test_lengths_of_a_what_if_count_in_powers_of_two():
    assert vary(PlanRequest(**GOOD), "seq_len=1k").run.train.seq_len == 1024


def test_every_mistake_is_said_at_once_with_the_nearest_name():
    found = wrong(model="tinny", cluster="h10:8", format="fp9", tokens="many", overrides=("plan.tensor=2",))
    assert set(found) == {"--model", "cluster", "--format", "--tokens", "--set"}
    assert "'tiny'" in found["--model"].way_out
    assert "'h100'" in found["cluster"].way_out


def test_a_batch_that_no_layout_deals_out_names_those_that_one_does():
    found = wrong(**{**GOOD, "cluster": "h100:4096", "global_batch": 33})["--global-batch"]
    numbers = [int(word) for word in found.way_out.split() if word.isdigit()]
    assert numbers
    for batch in numbers:
        resolve(PlanRequest(**{**GOOD, "cluster": "h100:4096", "global_batch": batch}))


def test_a_batch_in_tokens_is_rounded_to_whole_sequences_and_says_so():
    asked = resolve(PlanRequest(model="tiny", cluster="h100:8", seq_len=128, global_batch_tokens="2100"))
    assert asked.run.train.global_batch == 16
    assert "rounded to whole sequences: 16 of 128 = 2,048 tokens" in asked.notes[0]
    exact = resolve(PlanRequest(model="llama3.1-8b", cluster="h100:64", seq_len=8192, global_batch_tokens="16M"))
    assert exact.run.train.global_batch == 2048
    assert "rounded" not in exact.notes[0]


def test_a_batch_is_said_once():
    assert set(wrong(**GOOD, global_batch_tokens="4K")) == {"--global-batch-tokens"}


def test_a_device_without_bf16_is_planned_for_in_fp16():
    v100 = {**GOOD, "cluster": "v100-32gb:8"}
    assert set(wrong(**v100)) == {"--format"}
    asked = resolve(PlanRequest(**v100, format="fp16", out=True))
    assert (asked.format, asked.run.train.precision, asked.cluster.accelerator.half) == ("fp16", "fp16", "fp16")


def test_a_format_that_the_runs_other_formats_do_not_allow_is_refused(tmp_path: Path):
    path = tmp_path / "run.toml"
    train = 'precision = "bf16"\ngradients = "bf16"\nglobal_batch = 8\nsteps = 10\nseq_len = 32\n'
    tables = f'[plan]\ndata = 2\n[train]\n{train}[optimizer]\nmaster = "split16"\n'
    path.write_text(f'cluster = "h100:2"\n[model]\npreset = "tiny"\n{tables}[data]\npath = "none"\n')
    assert set(wrong(path=path, format="fp16")) == {"optimizer.master", "train.gradients"}
    assert resolve(PlanRequest(path=path, format="bf16")).format == "bf16"
    assert "precision.wide_first" in wrong(path=path, format="fp8", overrides=("model.layers=2", "optimizer.master=fp32"))


def test_a_site_trains_its_part_of_the_tokens_of_all_phases(tmp_path: Path):
    path = tmp_path / "run.toml"
    phases = "[[data.phases]]\nbegin = 1200\nseq_len = 256\n"
    train = "[train]\nsteps = 100\nglobal_batch = 24\nseq_len = 128\n"
    path.write_text(f'cluster = "h100:2"\n[model]\npreset = "tiny"\n[data]\npath = "none"\n{phases}{train}')
    whole = resolve(PlanRequest(path=path))
    assert whole.tokens == 1200 * 128 + 1200 * 256
    site = resolve(PlanRequest(path=path, overrides=("sites.count=2",)))
    assert site.tokens == whole.tokens / 2 and any("was not checked" in note for note in site.notes)


LARGE = {"model": "llama3.1-8b", "cluster": "h100:8", "seq_len": 8192, "global_batch": 64}


@pytest.mark.parametrize(
    ("cluster", "granularity"), [("h100:8", "tile"), ("b200:8", "tensor"), ("l4:8", "tensor"), ("a100-80gb:8", None)]
)
def test_fp8_is_multiplied_in_8_bits_where_the_device_can_and_rehearsed_elsewhere(cluster: str, granularity: str | None):
    asked = resolve(PlanRequest(**{**LARGE, "cluster": cluster}, format="fp8", out=True))
    choices = asked.run.precision
    assert (asked.format, asked.run.train.precision, asked.chosen) == ("fp8", "fp8", True)
    assert choices.multiply == ("codes" if granularity else "wide")
    assert asked.compiles == (granularity is not None)
    assert ("is emulated on" in " ".join(asked.notes)) == (granularity is None)
    if granularity:
        assert choices.granularity == granularity
        assert "*.attention.k" in choices.wide or granularity == "tensor"


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp4"])
def test_other_narrow_formats_are_rehearsed_and_other_software_is_named_where_it_multiplies_in_them(format: str):
    notes = {
        cluster: " ".join(resolve(PlanRequest(**{**LARGE, "cluster": cluster}, format=format, out=True)).notes)
        for cluster in ("a100-80gb:8", "b200:8")
    }
    assert all(f"{format} is emulated on" in note for note in notes.values())
    assert [("--software megatron-te" in note) for note in notes.values()] == [False, True]


def test_a_narrow_format_needs_a_device_that_computes_in_it_or_in_the_wide_one():
    v100 = {**GOOD, "cluster": "v100-32gb:8"}
    assert set(wrong(**v100, format="fp8")) == {"--format"}
    other = {**GOOD, "cluster": "a100-80gb:8", "software": "megatron-te"}
    assert set(wrong(**other, format="fp8")) == {"--format"}  # that software has no rehearsal


@pytest.mark.slow
def test_choices_of_a_run_file_are_kept_and_what_no_plan_avoids_is_said(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(
        RUN.replace("fp32", "fp8").replace('"tiny"', '"llama3.1-8b"') + 'precision.multiply = "codes"\nprecision.history = 4\n'
    )
    with pytest.raises(SpecErrors) as caught:
        resolve(PlanRequest(path=path))
    assert {problem.key for problem in caught.value.problems} == {"precision.history"}
    asked = resolve(PlanRequest(path=path, overrides=("precision.granularity=tensor", "precision.wide=['*.attention.q']")))
    assert (asked.run.precision.history, asked.run.precision.wide, asked.chosen) == (4, ("*.attention.q",), False)
    assert asked.widened(Plan(data=8)) is None


def test_a_device_without_published_figures_is_named():
    assert "memory_bandwidth" in wrong(**{**GOOD, "cluster": "cpu:4"})["--cluster"].reason


def test_a_fabric_that_nobody_published_is_given_by_its_user():
    unknown = {"model": "llama3.1-8b", "cluster": "tpu-v4:8192", "seq_len": 2048, "global_batch": 8192}
    assert "--set cluster.scale_out=25e9" in wrong(**unknown)["--cluster"].way_out
    settings = ("cluster.scale_out=20e9", "cluster.pod=8192", "cluster.oversubscription=4")
    found = resolve(PlanRequest(**unknown | {"cluster": "tpu-v4:16384", "global_batch": 16384}, overrides=settings, out=True))
    assert (found.cluster.scale_out, found.cluster.pod, found.cluster.oversubscription) == (20e9, 8192, 4)
    assert found.run.cluster == "tpu-v4:16384" and any(settings[0] in note for note in found.notes)


@pytest.mark.parametrize(
    ("setting", "key", "words"),
    [
        ("cluster.scale_uot=1", "cluster.scale_uot", "Did you mean 'scale_out'?"),
        ("cluster.pod=3", "cluster", "pod = 3 is not a multiple"),
        ("train.steps=3", "--set", "needs a run file"),
    ],
)
def test_settings_of_a_cluster_need_no_run_file(setting: str, key: str, words: str):
    (found,) = wrong(**GOOD, overrides=(setting,)).values()
    assert found.key == key and words in f"{found.reason} {found.way_out}"


def test_an_odd_length_is_refused_with_even_ones_that_are_not():
    assert wrong(**{**GOOD, "seq_len": 1})["train.seq_len"].way_out == "Use 2."
    assert wrong(**{**GOOD, "seq_len": 127})["train.seq_len"].way_out == "Use 128 or 126."


def test_positions_that_were_not_learned_are_an_error():
    assert "train.seq_len" in wrong(**{**GOOD, "model": "gpt2", "seq_len": 4096})


RUN = """
name = "mine"
cluster = "h100"
model.preset = "tiny"
plan = { data = 4, tensor = 2 }
data.path = "data"
train = { steps = 100, global_batch = 64, seq_len = 128, precision = "fp32" }
optimizer.warmup = 10
"""


def test_a_run_file_says_it_all_and_options_override_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    asked = resolve(PlanRequest(path=path))
    assert (asked.cluster.count, asked.format, asked.own) == (8, "fp32", Plan(data=4, tensor=2))
    assert asked.tokens == 100 * 64 * 128
    other = resolve(PlanRequest(path=path, cluster="h200:16", seq_len=256, format="bf16", overrides=("train.global_batch=32",)))
    assert (other.cluster.count, other.run.train.seq_len, other.run.train.global_batch, other.own) == (16, 256, 32, None)


def test_a_run_on_this_machine_must_say_a_cluster(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace('cluster = "h100"', ""))
    assert set(wrong(path=path)) == {"--cluster"}


def test_what_check_refuses_is_not_valid():
    asked = resolve(PlanRequest(**GOOD))
    assert asked.is_valid(Plan(data=8))
    assert not asked.is_valid(Plan(data=1, tensor=7))


@pytest.mark.slow
def test_a_compute_optimal_training_has_20_tokens_a_parameter_that_a_token_meets(monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")
    asked = resolve(PlanRequest(**GOOD, compute_optimal=True))
    parameters = 2 * 1024 * 128 + 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128) + 128
    assert asked.tokens == pytest.approx(20 * parameters, rel=0.005)
    assert "20 tokens for each" in asked.notes[-1]
    mixture = resolve(PlanRequest(model="mixtral-8x7b", cluster="h100:64", seq_len=4096, global_batch=64, compute_optimal=True))
    assert mixture.tokens == pytest.approx(20 * 12.9e9, rel=0.02)


def test_a_training_has_one_length():
    assert set(wrong(**GOOD, tokens="1B", compute_optimal=True)) == {"--tokens"}


@pytest.mark.slow
def test_two_trillion_parameters_take_what_is_said_of_them(monkeypatch):
    """The estimate takes 16 bytes and 20 tokens a parameter, 6 FLOPs for each parameter and token, 40 % of an H100's peak, and
    $2.2 an hour."""
    monkeypatch.setenv("MEGALITH_CACHE", "")
    asked = resolve(PlanRequest(model="dense-2t", cluster="h100:16384", seq_len=8192, global_batch=2048, compute_optimal=True))
    assert asked.tokens is not None
    work = Workload(asked.model, Plan(zero=0), asked.cluster, 8192, 16384, software_profile=SoftwareProfile(gradient_bytes=2))
    traced = parts(work)
    held = memory(work, traced, calibration().overheads["fused"])
    assert held.weights + held.gradients + held.optimizer == pytest.approx(32e12, rel=0.05)
    flop = 6 * active_parameters(asked.model) * asked.tokens
    assert flop == pytest.approx(4.8e26, rel=0.05)
    hours = flop / (0.4 * asked.cluster.accelerator.peak["bf16"]) / 3600
    assert hours == pytest.approx(3.4e8, rel=0.05)
    assert hours * 2.2 == pytest.approx(750e6, rel=0.05)


def test_lengths_and_batches_that_nobody_said_are_what_trainings_mostly_have_and_noted():
    asked = resolve(PlanRequest(model="llama3.1-8b", cluster="h100:8"))
    assert (asked.run.train.seq_len, asked.run.train.global_batch) == (8192, 512)
    assert (
        "--seq-len was not given: planned with 8,192" in asked.notes[0]
        and "--global-batch was not given: planned with 512" in asked.notes[1]
    )
    assert resolve(PlanRequest(model="tiny", cluster="h100:8")).run.train.seq_len == 256


@pytest.mark.slow
def test_short_names_of_devices_and_models_are_understood_or_answered_with_what_they_may_be():
    assert resolve(PlanRequest(model="405b", cluster="A100:64")).cluster.accelerator.name == "a100-80gb"
    assert resolve(PlanRequest(model="405b", cluster="h100:64")).run.model.name == "llama3.1-405b"
    assert resolve(PlanRequest(model="405b", cluster="64xh100")).cluster.count == 64
    size = resolve(PlanRequest(model="7b", cluster="h100:8"))
    assert size.run.model.name == "llama2-7b"
    assert any(note.startswith("--model 7b: means llama2-7b; other models of this size: llama1-7b") for note in size.notes)
    several = wrong(model="gemma2", cluster="h100:8")["--model"]
    assert "gemma2-27b" in several.reason and several.way_out.startswith("Name one of these models, such as --model ")
    assert "megalith models" in wrong(model="zebra", cluster="h100:8")["--model"].way_out


@pytest.mark.parametrize("cluster", ["rx7900:8", "gaudi3:8", "cpu:4"])
def test_a_device_that_nobody_described_is_told_the_cluster_file(cluster: str):
    problems = wrong(model="tiny", cluster=cluster)
    (problem,) = problems.values()
    assert "clusters/own-accelerator.toml" in problem.way_out
    assert "Did you mean" not in problem.way_out


def test_a_plan_for_one_site_is_not_written_for_a_run_whose_sites_differ(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "recipes/cpu-sites-unequal.toml").read_text()
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SpecErrors, match="--out"):
        resolve(PlanRequest(path=tmp_path / "run.toml", cluster="cpu:2", out=True))


@pytest.mark.parametrize("each", ["", "[[sites.each]]\nshare = 2\n[[sites.each]]\nshare = 1\n"])
def test_the_way_out_of_a_batch_ramp_is_not_refused_in_turn(tmp_path: Path, each: str) -> None:
    """Clusters in sites.each are refused because of the ramp."""
    path = tmp_path / "run.toml"
    ramp = "global_batch = 12\nbatch_ramp = [{ begin = 640, global_batch = 24 }]"
    path.write_text(
        f'model.preset = "tiny"\ndata.path = "d"\n[sites]\ncount = 2\n{each}[train]\nsteps = 500\nseq_len = 128\n{ramp}\n'
    )
    with pytest.raises(SpecErrors) as raised:
        resolve(PlanRequest(path=path, cluster="h100:4", out=True))
    (found,) = raised.value.problems
    assert found.key == "--out" and "ramp" in found.reason and "cluster" not in found.way_out


@pytest.mark.parametrize(
    ("lines", "key", "way_out"),
    [
        ("global_batch = 1024", "train.global_batch", "Use 1023 or 1026."),
        ("global_batch = 2", "train.global_batch", "Use 3 or more."),
        (
            "global_batch = 12\nbatch_ramp = [{ begin = 640, global_batch = 16 }]",
            "train.batch_ramp[0].global_batch",
            "Use 15 or 18.",
        ),
    ],
)
def test_a_batch_that_sites_cannot_divide_is_refused_and_not_changed(tmp_path: Path, lines: str, key: str, way_out: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'model.preset = "tiny"\ndata.path = "d"\n[sites]\ncount = 3\n[train]\nsteps = 500\nseq_len = 128\n{lines}\n')
    with pytest.raises(SpecErrors) as raised:
        resolve(PlanRequest(path=path, cluster="h100:4"))
    assert [(one.key, one.way_out) for one in raised.value.problems] == [(key, way_out)]
    assert resolve(PlanRequest(path=path, cluster="h100:4", global_batch=32)).run.train.global_batch == 32
