"""Axes that do not divide the sizes that they split, and the advice for such plans."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.check.runs import HYBRID, advice, errors, found, is_named


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["plan.data=4", "plan.replicate=3"], "plan.replicate", "does not divide plan.data = 4. Use replicate = 1, 2 or 4."),
        (
            ["plan.tensor=4", "model.heads=24", "model.kv_heads=3", "model.head_dim=16"],
            "plan.tensor",
            "neither divides kv_heads = 3",
        ),
        (["plan.context=2", "train.seq_len=126"], "train.seq_len", "Use seq_len = 128"),
        (["plan.context=2", "plan.tensor=2", "train.seq_len=124"], "train.seq_len", "2 x context 2 x tensor 2 = 8"),
        (["plan.context=4", "plan.ulysses=3"], "plan.ulysses", "does not divide plan.context = 4. Use ulysses = 1, 2 or 4."),
        (["plan.context=16", "plan.ulysses=16"], "plan.ulysses", "does not divide heads = 8"),
        (["plan.expert=2", "plan.data=2"], "plan.expert", "the model has no experts"),
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
        (["plan.tensor=3", "model.vocab=1026"], "plan.tensor", "does not divide heads = 8"),
        (["plan.tensor=2", "model.ffn=351"], "plan.tensor", "does not divide ffn = 351 (blocks.0.mlp). Use tensor = 1."),
        (["plan.tensor=2", "model.vocab=1023"], "plan.tensor", "does not divide vocab = 1023"),
        (["plan.tensor=2", "train.seq_len=127"], "plan.tensor", "does not divide seq_len = 127"),
        (["train.global_batch=65", "plan.data=4", "plan.microbatch=8"], "train.global_batch", "Use 64 or 96"),
        (["train.global_batch=3", "plan.data=4"], "train.global_batch", "Use 4"),
        (["cluster=h100:2", "plan.data=4"], "cluster", "Use h100:4"),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str):
    is_named(settings, key, said)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["plan.data=2", "plan.zero=0", "plan.replicate=2"], "plan.replicate"),
    ],
)
def test_what_is_valid_but_unwise_is_advice(settings: list[str], key: str):
    assert errors(*settings) == []
    assert key in advice(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["plan.data=2", "plan.zero=1"],
        ["plan.tensor=4", "plan.data=8", "plan.zero=3"],
        ["plan.tensor=2", "train.seq_len=127", "plan.sequence=false"],
    ],
)
def test_what_is_valid_and_wise_is_let_be(settings: list[str]):
    assert found(*settings) == []


def test_started_ranks_are_compared_with_the_plan():
    assert errors("plan.data=2", "plan.tensor=2", world=4) == []
    (problem,) = errors("plan.data=2", "plan.tensor=2", world=8)
    assert "data 2 x tensor 2 x pipeline 1 = 4 ranks are needed, but 8 were started" in problem.reason
    assert "Use plan.data = 4" in problem.way_out


def test_a_cluster_file_with_too_few_devices_is_an_error(tmp_path: Path):
    small = tmp_path / "small.toml"
    small.write_text('accelerator = "h100"\ncount = 2\n')
    assert "cluster" in {p.key for p in errors(f"cluster={small}", "plan.data=4")}
    assert "cluster" not in {p.key for p in errors(f"cluster={small}", "plan.data=2")}


def test_a_single_key_head_is_split_by_no_number_of_ranks():
    assert errors("model.preset=palm-8b", "plan.tensor=8") == []


def test_mamba_works_on_whole_sequences():
    (problem,) = errors(*HYBRID, "plan.context=2")
    assert problem.key == "plan.context" and "blocks.0.mamba" in problem.reason and "Use context = 1" in problem.way_out


def test_mamba_is_split_by_its_groups():
    assert errors(*HYBRID, "plan.tensor=4") == []
    assert "groups = 4 (blocks.0.mamba)" in str(errors(*HYBRID, "plan.tensor=8"))


@pytest.mark.slow
@given(batch=st.integers(1, 300), data_ranks=st.integers(1, 12), microbatch=st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_the_batches_advised_are_valid(batch: int, data_ranks: int, microbatch: int):
    plan = [f"plan.data={data_ranks}", f"plan.microbatch={microbatch}", "plan.zero=3"]
    for problem in errors(f"train.global_batch={batch}", *plan):
        advised = re.search(r"Use ([\d or]+)", problem.way_out)
        assert advised
        for other in re.findall(r"\d+", advised[1]):
            assert errors(f"train.global_batch={other}", *plan) == []


@pytest.mark.slow
@given(tensor=st.integers(2, 12), heads=st.sampled_from([4, 8, 16]), ffn=st.sampled_from([96, 352, 360]))
@settings(deadline=None, max_examples=40)
def test_the_tensor_sizes_advised_are_valid(tensor: int, heads: int, ffn: int):
    model = [f"model.heads={heads}", f"model.ffn={ffn}"]
    for problem in errors(f"plan.tensor={tensor}", *model):
        for other in re.findall(r"\d+", problem.way_out):
            assert errors(f"plan.tensor={other}", *model) == []


def test_sites_that_differ_only_in_their_names_get_the_usual_way_out():
    plan = ("sites.count=2", "sites.inner_steps=5", "plan.microbatch=4", "train.global_batch=12")
    named, plain = (
        [p for p in errors(*plan, *more) if p.key == "train.global_batch"]
        for more in (('sites.each=[{name="a"},{name="b"}]',), ())
    )
    assert named == plain and "sites.count 2 x plan.data 1" in named[0].reason and "or plan.microbatch = 3" in named[0].way_out
