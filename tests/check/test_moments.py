"""Moments in few bits: blocks inside shards, and choices with an effect."""

import pytest

from megalith.check import check_resume
from megalith.spec.model import MlpSpec
from megalith.spec.parts import PARTS, Cut, ModelPart, Tensor
from megalith.spec.treatment import treatments
from tests.check.runs import advice, errors, found, spec

FP8 = ("optimizer.moments=fp8", "model.preset=llama3.2-1b", "train.seq_len=4096")


def test_a_model_whose_shares_are_whole_blocks_is_valid() -> None:
    assert not errors(*FP8, "plan.tensor=8", "plan.data=2", "plan.zero=3")
    assert not errors(*FP8, "plan.tensor=2", "model.ffn=8000", "optimizer.moments=bf16")


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (
            (*FP8, "plan.tensor=2", "model.ffn=8000"),
            "plan.tensor",
            "leaves a rank 4000 of the 8000 numbers in a row of blocks.0.mlp.down.weight, which is not a multiple of optimizer",
        ),
        (
            ("optimizer.moments=fp8", "model.preset=deepseek-tiny", "plan.data=2", "plan.expert_tensor=2"),
            "plan.expert_tensor",
            "in a row of blocks.1.mlp.experts.down",
        ),
        (
            ("optimizer.moments=fp8", "model.preset=deepseek-tiny", "plan.data=2"),
            "plan.data",
            "in a row of blocks.1.mlp.experts.gate",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_a_block_would_lie_across_is_refused(settings: tuple[str, ...], key: str, said: str) -> None:
    problem = next(problem for problem in errors(*settings) if problem.key == key)
    assert said in problem.reason and 'optimizer.moments = "bf16".' in problem.way_out
    block = problem.way_out.removeprefix("Use optimizer.moment_block = ").partition(",")[0]
    assert key not in {problem.key for problem in errors(*settings, f"optimizer.moment_block={block}")}


@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("preset", ["tiny", "quickstart", "gpt2-xl"])
def test_a_smaller_block_that_is_named_is_accepted(preset: str, tensor: int) -> None:
    settings = ["optimizer.moments=fp8", f"model.preset={preset}", f"plan.tensor={tensor}", "train.precision=bf16"]

    def refused(*more: str) -> list[str]:
        found = errors(*settings, *more)
        return [problem.way_out for problem in found if "share a scale of the moments" in problem.reason]

    for said in refused():
        block = said.partition("optimizer.moment_block = ")[2].partition(",")[0]
        assert not refused(f"optimizer.moment_block={block}" if block else "optimizer.moments=bf16")


@pytest.mark.parametrize(("cut", "last", "refused"), [("inputs", "back", True), (None, "down", False)])
def test_matrices_of_a_users_own_mlp_are_cut_as_declared(
    monkeypatch: pytest.MonkeyPatch, cut: Cut | None, last: str, refused: bool
) -> None:
    """Their names say nothing."""

    def tensors(dim: int, mlp: MlpSpec) -> list[Tensor]:
        return [Tensor("up.weight", (mlp.hidden, dim), cut and "outputs"), Tensor(f"{last}.weight", (dim, mlp.hidden), cut)]

    monkeypatch.setitem(PARTS, f"mine:{last}", ModelPart("mlp", "mine:Part", tensors))
    said = [problem.reason for problem in errors(*FP8, "plan.tensor=2", "model.ffn=8000", f"model.mlp=mine:{last}")]
    assert ["in a row of blocks.0.mlp.back.weight" in reason for reason in said] == [True] * refused


def test_a_choice_that_changes_nothing_is_named() -> None:
    assert "optimizer.moment_block" in advice("optimizer.moment_block=64")
    assert "optimizer.moment_block" in advice("optimizer.moments=bf16", "optimizer.moment_block=64")
    assert "optimizer.moment_block" not in advice("optimizer.moments=bf16")
    assert "optimizer.moments" in advice("optimizer.moments=fp8", "optimizer.kind=adafactor")
    assert "optimizer.moments" in advice("optimizer.moments=fp8", "optimizer.moment_least=100000000")
    assert "optimizer.moments" not in advice("optimizer.moments=fp8")


def test_updates_of_small_moments_are_not_verified() -> None:
    verified = ("fleet.verify_every=10", "plan.data=2", "fleet.memory_every=1")
    assert "fleet.verify_every" not in advice(*verified)
    assert "fleet.verify_every" in advice(*verified, "optimizer.moments=bf16")


def test_a_resumed_run_may_change_them() -> None:
    wide, small = spec(), spec("optimizer.moments=fp8")
    assert check_resume(wide, small) == check_resume(small, wide) == []
    (problem,) = check_resume(small, spec("plan.tensor=4"))
    assert problem.key == "plan.tensor" and "whose moments the checkpoint has in blocks of 128" in problem.reason
    assert [p.key for p in check_resume(spec("sites.count=2"), spec("sites.count=2", "optimizer.moments=bf16"))] == [
        "optimizer.moments"
    ]


def test_embeddings_vectors_and_few_elements_keep_fp32() -> None:
    run = spec("optimizer.moments=fp8")
    kept = {name: each.moments.number for name, each in treatments(run.model.build(), run.optimizer).items()}
    assert kept["embedding.weight"] == kept["head.norm.weight"] == kept["blocks.0.mlp_norm.weight"] == "fp32"
    assert kept["blocks.0.mlp.down.weight"] == kept["head.output.weight"] == "fp8"
    assert not found("optimizer.moments=fp8", "plan.state.optimizer=host")


def test_halves_need_weights_in_bf16_and_no_sites() -> None:
    """All problems are reported at once."""
    wrong = errors("optimizer.master=split16", "train.precision=fp16", "sites.count=2")
    assert [problem.reason for problem in wrong if problem.key == "optimizer.master"] == [
        "needs compute weights in bf16, the upper half of an fp32 weight, but the compute weights are in fp16",
        "keeps no fp32 weights, but sites merge weights in fp32",
    ]
    assert not errors("optimizer.master=split8", "train.precision=fp8")


def test_halves_that_save_nothing_are_told() -> None:
    said = [problem.reason for problem in found("optimizer.master=split16", "plan.data=2") if problem.key == "optimizer.master"]
    assert said == ["saves nothing over 2 shards: a rank keeps 2 + 2 bytes for each weight of its share, as many as in fp32"]
    for settings in (("optimizer.master=split8", "plan.data=2"), ("optimizer.master=split16",)):
        assert "optimizer.master" not in advice(*settings)
    assert "optimizer.master" not in advice("optimizer.master=split16", "plan.data=2", "plan.zero=0")
    experts = "optimizer.master=split16", "model.preset=deepseek-tiny", "plan.data=2"
    assert "optimizer.master" in advice(*experts)
    assert "optimizer.master" not in advice(*experts, "plan.expert=2"), "each rank keeps all of its experts' state"


def test_sums_in_bf16_are_of_gradients_in_bf16() -> None:
    assert [problem.key for problem in errors("train.gradients=bf16", "train.precision=fp32")] == ["train.gradients"]
    assert not errors("train.gradients=bf16", "train.precision=fp8")
