"""Narrow precisions: tiles inside shards, and choices with an effect."""

import re

import pytest

from tests.check.runs import HYBRID, advice, errors, found

FP8 = ("train.precision=fp8", "model.preset=llama3.2-1b", "train.seq_len=4096")


def reasons(*settings: str) -> dict[str, str]:
    return {problem.key: f"{problem.reason}. {problem.way_out}" for problem in errors(*settings)}


def test_a_model_whose_shares_are_whole_tiles_is_valid() -> None:
    assert not errors(*FP8, "plan.tensor=4", "plan.context=2")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("plan.tensor=8",), "plan.tensor"),  # each rank has one key head of 64 channels
        (("plan.tensor=2", "model.ffn=8000"), "plan.tensor"),
        (("train.seq_len=4160",), "train.seq_len"),
        (("train.seq_len=4224", "plan.context=4"), "train.seq_len"),
        (("precision.wide_first=8", "precision.wide_last=8"), "precision.wide_first"),
        (("plan.compile=true",), "plan.compile"),
    ],
    ids=str,
)
def test_what_a_tile_would_lie_across_is_refused(settings: tuple[str, ...], key: str) -> None:
    assert {problem.key for problem in errors(*FP8, *settings)} == {key}


def test_each_way_out_is_one() -> None:
    said = reasons(*FP8, "plan.tensor=8")["plan.tensor"]
    assert "leaves a rank 64 of the 512 channels of blocks.1.attention.k, not a multiple of a tile's 128" in said
    assert 'Use tensor = 4, precision.tile = 64, or precision.wide = ["*.attention.k", "*.attention.v"].' in said
    assert not errors(*FP8, "plan.tensor=8", "precision.tile=64")
    assert not errors(*FP8, "plan.tensor=8", 'precision.wide=["*.attention.k", "*.attention.v"]')
    assert "plan.tensor" not in reasons("train.precision=mxfp8", *FP8[1:], "plan.tensor=8")
    assert "Use seq_len = 4224, say" in reasons(*FP8, "train.seq_len=4160")["train.seq_len"]
    assert not errors(*FP8, "train.seq_len=4160", "precision.weight_gradient=wide")


@pytest.mark.parametrize("wide", [(), ('precision.wide=["*.mlp.up"]',)])
def test_each_way_out_of_uneven_tiles_is_one(wide: tuple[str, ...]) -> None:
    """13,824 channels are 108 tiles, which six ranks could share, but six ranks do not divide 40 heads."""
    asked = ("train.precision=fp8", "model.preset=llama2-13b", "train.seq_len=4096", "plan.tensor=8", *wide)
    (problem,) = errors(*asked)
    found = re.fullmatch(r"Use tensor = (\d+), (precision.tile = \d+), or (precision.wide = .+)\.", problem.way_out)
    assert found is not None and found[1] == "4"
    for way_out in (f"plan.tensor={found[1]}", found[2].replace(" = ", "="), found[3].replace(" = ", "=")):
        assert not errors(*asked, way_out)


MIXTURE = ("model.preset=deepseek-tiny", "train.seq_len=128")


@pytest.mark.parametrize(
    ("settings", "cut", "size"),
    [
        (("plan.tensor=2", "model.ffn=202"), "plan.tensor", "model.ffn = 256"),
        ((*MIXTURE, "plan.data=2", "plan.expert_tensor=2", "model.expert_ffn=38"), "plan.expert_tensor", "model.expert_ffn = 256"),
        (("plan.tensor=16", "precision.tile=9", "train.seq_len=4095", "model.ffn=8208"), "plan.tensor",
         "576 channels instead of 512"),  # eight heads of keys, each on two ranks
    ],
    ids=str,
)  # fmt: skip
def test_the_next_size_of_whole_tiles_is_named(settings: tuple[str, ...], cut: str, size: str) -> None:
    said = [problem.way_out for problem in errors(*FP8, *settings) if problem.key == cut]
    assert any(f"= 1, {size}, or " in way_out for way_out in said), said
    if size.startswith("model."):
        assert not errors(*FP8, *settings, size.replace(" ", ""))


def test_a_smaller_tile_is_no_way_out_for_products_of_codes() -> None:
    codes = (*FP8, "precision.multiply=codes", "cluster=h100:8")
    (way_out,) = {problem.way_out for problem in errors(*codes, "plan.tensor=8") if problem.key == "plan.tensor"}
    assert "precision.tile" not in way_out and "instead of" in way_out
    for cluster, tiles in (("h100:8", True), ("b200:8", False)):
        asked = (
            *FP8,
            "precision.multiply=codes",
            f"cluster={cluster}",
            "precision.granularity=tensor",
            "plan.tensor=2",
            "plan.compile=true",
        )
        (way_out,) = (problem.way_out for problem in errors(*asked) if problem.key == "plan.compile")
        assert ("granularity" in way_out) == tiles


def test_experts_are_cut_by_their_own_axis() -> None:
    experts = ("train.precision=fp8", "model.preset=deepseek-tiny", "train.seq_len=128", "plan.data=2", "plan.expert_tensor=2")
    assert "channels of blocks.1.mlp.experts" in reasons(*experts)["plan.expert_tensor"]
    assert "plan.expert_tensor" not in reasons(*experts, 'precision.wide=["*.experts"]')


def test_states_are_cut_by_groups() -> None:
    assert any("mamba" in problem.reason for problem in errors(*HYBRID, "train.precision=fp8", "plan.tensor=2"))


def test_scales_of_rows_and_tensors_lie_across_ranks() -> None:
    """Any width is allowed if ranks share their maxima."""
    for granularity in ("row", "tensor"):
        wide = (*FP8, f"precision.granularity={granularity}", "plan.tensor=8", "plan.context=4", "train.seq_len=4160")
        assert not errors(*wide)
    assert "precision.tile" in advice(*FP8, "precision.granularity=row", "precision.tile=16")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("precision.granularity=row", "train.precision=mxfp8"), "precision.granularity"),
        (("precision.granularity=tensor", "plan.tensor=2", "plan.overlap_tensor=2"), "plan.overlap_tensor"),
        (("precision.granularity=row", "model.preset=deepseek-tiny", "train.seq_len=128", "plan.data=2", "plan.expert_tensor=2"),
         "plan.expert_tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_a_maximum_that_no_ranks_share_is_refused(settings: tuple[str, ...], key: str) -> None:
    assert {problem.key for problem in errors(*FP8, *settings)} == {key}


def test_a_choice_that_changes_nothing_is_named() -> None:
    assert advice("precision.tile=16", "precision.scale=ocp").count("precision.tile") == 1
    assert not [problem for problem in found("train.precision=bf16") if problem.key.startswith("precision.")]


def test_what_is_emulated_is_said() -> None:
    assert "train.precision" in advice(*FP8)
    assert "train.precision" not in advice("train.precision=bf16")


FP4 = ("train.precision=nvfp4", *FP8[1:])


def test_four_bits_are_valid_where_their_tiles_are() -> None:
    for precision in ("nvfp4", "mxfp4"):
        assert not errors(f"train.precision={precision}", *FP8[1:], "plan.tensor=4", "plan.context=2")
    assert "not a multiple of a tile's 16 tokens" in reasons(*FP4, "train.seq_len=4104")["train.seq_len"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("train.precision=nvfp4", "plan.tensor=2", "plan.overlap_tensor=2"), "plan.overlap_tensor"),
        (("train.precision=mxfp4", "plan.tensor=2", "plan.overlap_tensor=2"), "plan.overlap_tensor"),
        (("train.precision=nvfp4", "precision.granularity=row", "precision.hadamard=false"), "precision.granularity"),
        (("train.precision=mxfp8", "precision.scale=fp32"), "precision.scale"),
        (("train.precision=mxfp4", "precision.scale=fp32"), "precision.scale"),
        (("precision.history=16",), "precision.history"),
        (("precision.granularity=row", "precision.history=16"), "precision.history"),
        (("precision.granularity=row", "precision.hadamard=true"), "precision.hadamard"),
        (("precision.tile=96", "precision.hadamard=true", "train.seq_len=4128"), "precision.tile"),
        (("precision.rounding=stochastic", "plan.tensor=2", "plan.overlap_tensor=2"), "plan.overlap_tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_format_a_draw_or_a_rotation_leaves_no_room_for_is_refused(settings: tuple[str, ...], key: str) -> None:
    assert {problem.key for problem in errors(*FP8, *settings)} == {key}


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4", "mxfp4"])
def test_the_way_out_of_a_history_is_one(precision: str) -> None:
    asked = (f"train.precision={precision}", *FP8[1:], "precision.history=16")
    way_out = 'Use granularity = "tensor"' if precision == "fp8" else 'Use train.precision = "fp8" with granularity = "tensor"'
    assert f"{way_out}, or history = 0." in reasons(*asked)["precision.history"]
    assert not errors(*asked, "train.precision=fp8", "precision.granularity=tensor")
    assert not errors(*asked, "precision.history=0")


@pytest.mark.parametrize(
    ("change", "late"),
    [
        (
            'train.batch_ramp=[{ begin = "8 steps", global_batch = 64 }]',
            "0.125 times as large, and their scales adapt 16 steps later",
        ),
        ("data.phases=[{ begin = 64, seq_len = 2048 }]", "2 times as large, and their scales adapt one step later"),
        ("data.phases=[{ begin = 64, seq_len = 2048, global_batch = 16 }]", ""),
    ],
    ids=str,
)
def test_scales_of_steps_of_another_size_are_named(change: str, late: str) -> None:
    run = ("train.precision=fp8", "precision.granularity=tensor", "train.seq_len=4096", "train.global_batch=8", change)
    said = [p for p in found(*run, "precision.history=16") if p.key == "precision.history"]
    assert [(p.severity, late in p.reason) for p in said] == [("advice", True)] * bool(late)
    assert not [p for p in found(*run) if p.key == "precision.history"]


def test_cut_experts_have_no_shared_scale_and_no_place() -> None:
    cut = ("model.preset=deepseek-tiny", "train.seq_len=128", "plan.data=2", "plan.expert_tensor=2", "precision.tile=16")
    said = [f"{p.reason}. {p.way_out}" for p in errors("train.precision=nvfp4", *cut) if p.key == "plan.expert_tensor"]
    assert any("a scale for each tensor" in one for one in said) and any(
        "does not know the positions of its outputs" in one for one in said
    )
    assert not errors("train.precision=nvfp4", *cut, 'precision.wide=["*.experts"]')
    assert not errors("train.precision=mxfp4", *cut, "precision.rounding=nearest")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("train.precision=mxfp4", "precision.gradients=e5m2"), "precision.gradients"),
        (("train.precision=nvfp4", "precision.scale=ocp"), "precision.scale"),
        (("train.precision=nvfp4", "precision.wide_decay=true", "optimizer.schedule=cosine"), "precision.wide_decay"),
    ],
    ids=str,
)
def test_a_choice_that_a_format_leaves_no_room_for_is_named(settings: tuple[str, ...], key: str) -> None:
    assert key in advice(*FP8, *settings)
    assert "precision.wide_decay" not in advice(*FP4, "precision.wide_decay=true", "optimizer.schedule=wsd")


WIDE = ("precision.input_gradient=wide", "precision.weight_gradient=wide")


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (("precision.hadamard=true", WIDE[1]), ["precision.hadamard"]),
        (("precision.gradients=e5m2", "precision.rounding=stochastic", *WIDE), ["precision.gradients", "precision.rounding"]),
        (("precision.gradients=e5m2", "precision.rounding=stochastic", WIDE[0]), []),
        (("precision.gradients=e5m2", "precision.rounding=stochastic", WIDE[1]), []),
        (("train.precision=nvfp4", "precision.rounding=nearest", "precision.gradients=e5m2", *WIDE),
         ["precision.gradients", "precision.rounding"]),
        (("model.preset=deepseek-tiny", "train.seq_len=128", "precision.gradients=e5m2", "precision.combine_gradients=fp8", *WIDE),
         []),
    ],
    ids=str,
)  # fmt: skip
def test_a_choice_that_wide_gradients_leave_no_room_for_is_named_once(settings: tuple[str, ...], keys: list[str]) -> None:
    said = [key for key in advice(*FP8, *settings) if key.startswith("precision.")]
    assert sorted(said) == sorted(keys)


def test_narrow_weight_gradients_of_experts_are_said_to_follow_the_plan() -> None:
    key, experts = "precision.expert_weight_gradient", ("model.preset=deepseek-tiny", "train.seq_len=128", "train.precision=fp8")
    said = {problem.key: problem for problem in found(*experts, f"{key}=narrow")}[key]
    assert (said.severity, "another plan gives other bits" in said.reason) == ("advice", True)
    assert key not in advice(*experts) and not errors(*experts, f"{key}=narrow", "precision.granularity=row")
    dense = {problem.key: problem.reason for problem in found(*FP8, f"{key}=narrow")}[key]
    assert dense == "changes nothing: no experts multiply in fp8"
    assert key in advice("train.precision=bf16", f"{key}=narrow")
    rotated = (*experts, "precision.hadamard=true", "precision.weight_gradient=wide")
    assert "precision.hadamard" in advice(*rotated) and "precision.hadamard" not in advice(*rotated, f"{key}=narrow")
    assert [*reasons(*rotated, f"{key}=narrow", "precision.granularity=row")] == ["precision.hadamard"]


def test_blocks_become_wide_by_comparisons_alone() -> None:
    asked = (*FP8, "precision.auto=0.1")
    assert "Use watch_every = 100, for example, or auto = 0." in reasons(*asked)["precision.auto"]
    assert not errors(*asked, "precision.watch_every=100")
    assert (
        "each site would make different blocks wide"
        in reasons(*asked, "precision.watch_every=100", "sites.count=2")["precision.auto"]
    )
    assert "precision.watch_every" in advice("train.precision=bf16", *FP8[1:], "precision.watch_every=100")


def test_tokens_are_sent_as_experts_round_them() -> None:
    asked = ("model.preset=deepseek-tiny", "train.seq_len=128", "precision.dispatch=fp8")
    assert not errors(*asked, "train.precision=fp8") and "precision.dispatch" not in advice(*asked, "train.precision=fp8")
    assert 'or train.precision = "fp8"' in reasons(*asked, "train.precision=mxfp8")["precision.dispatch"]
    assert 'Use scale = "up"' in reasons(*asked, "train.precision=fp8", "precision.scale=fp32")["precision.dispatch"]
    assert 'or forward = "narrow"' in reasons(*asked, "train.precision=fp8", "precision.forward=wide")["precision.dispatch"]
    assert "precision.dispatch" in advice(*asked, "train.precision=fp8", 'precision.wide=["*.experts"]')
    assert "precision.dispatch" in advice(*FP8, "precision.dispatch=fp8")


def test_gradients_of_results_are_sent_in_8_bits_where_they_are_rounded_to_nearest() -> None:
    key, model = (
        "precision.combine_gradients",
        ("model.preset=deepseek-tiny", "train.seq_len=128", "precision.combine_gradients=fp8"),
    )
    fp8 = (*model, "train.precision=fp8")
    assert not errors(*fp8) and key not in advice(*fp8)
    assert 'or train.precision = "fp8"' in reasons(*model, "train.precision=mxfp8")[key]
    every = (*fp8, "precision.scale=fp32", "precision.rounding=stochastic", "plan.compile=true", "plan.data=2", "plan.expert=2")
    assert len([problem for problem in errors(*every) if problem.key == key]) == 3
    assert key in advice(*FP8, f"{key}=fp8") and key in advice(*fp8, 'precision.wide=["*.experts"]')


def test_weights_are_gathered_as_products_round_them() -> None:
    asked = (*FP8, "plan.data=2", "plan.zero=3", "precision.gather=fp8")
    assert not errors(*asked) and "precision.gather" not in advice(*asked)
    every = (*asked, "precision.granularity=row", "precision.input_gradient=wide", "precision.forward=wide")
    assert len([problem for problem in errors(*every) if problem.key == "precision.gather"]) == 3
    for scale in ("fp32", "ocp"):
        assert not errors(*asked, f"precision.scale={scale}")
    assert 'or train.precision = "fp8"' in reasons(*asked, "train.precision=mxfp8")["precision.gather"]
    for plan in (("plan.zero=0",), ("plan.data=1",), ("plan.replicate=2",)):
        said = {problem.key: problem.reason for problem in found(*asked, *plan)}
        assert "no weights are gathered" in said["precision.gather"]
    experts = ("model.preset=deepseek-tiny", "train.precision=fp8", "precision.tile=16", "precision.gather=fp8", "plan.zero=3")
    assert "precision.gather" in advice(*experts)
    assert "precision.gather" not in advice(*experts, "plan.tensor=2"), "tensor ranks hold shards of the experts"


def test_shards_that_would_cut_a_tile_are_named() -> None:
    """Keys and values have 512 rows, 64 on each of 8 shards."""
    asked = (*FP8, "plan.data=8", "plan.zero=3", "precision.gather=fp8")
    assert not errors(*asked)
    problems = [problem for problem in found(*asked) if problem.key == "precision.gather"]
    assert len(problems) == 2 and "64 of the 512 rows of blocks.1.attention.k," in problems[0].reason
    assert "Use 4 shards (plan.replicate) or precision.tile = 64 to gather the layer in 8 bits" in problems[0].way_out
    for other in ("plan.replicate=2", "precision.tile=64", 'precision.wide=["*.attention.k", "*.attention.v"]'):
        assert "precision.gather" not in advice(*asked, other)
    odd = next(problem for problem in found(*asked, "model.ffn=8008") if "of the 8008 rows" in problem.reason)
    assert odd.way_out == "Use 8192 rows instead of 8008 to gather the layer in 8 bits."
    halves = {problem.key for problem in found(*asked, "plan.tensor=2", "plan.replicate=2")}
    assert "precision.gather" in halves, "a tensor rank's 256 rows on each of 4 shards"


def test_inputs_are_kept_in_8_bits_where_products_round_to_these() -> None:
    assert not errors(*FP8, "precision.kept=fp8") and not errors("train.precision=mxfp8", *FP8[1:], "precision.kept=fp8")
    every = (
        *FP8[1:],
        "precision.kept=fp8",
        "train.precision=fp8",
        "precision.scale=fp32",
        "plan.tensor=2",
        "plan.overlap_tensor=2",
    )
    assert [problem.key for problem in errors(*every)].count("precision.kept") == 2
    assert "do not round to 8 bits" in reasons("train.precision=nvfp4", *FP8[1:], "precision.kept=fp8")["precision.kept"]
    assert "precision.kept" in advice("train.precision=fp32", *FP8[1:], "precision.kept=fp8")


@pytest.mark.parametrize(
    ("cluster", "settings", "key"),
    [
        ("h100:8", (), None),
        ("h100:8", ("plan.compile=true",), None),
        ("h100:8", ("precision.tile=64",), "precision.multiply"),
        ("h100:8", ("precision.rounding=stochastic",), "precision.multiply"),
        ("h100:8", ("precision.granularity=tile", "precision.hadamard=true"), "precision.multiply"),
        ("h100:8", ("precision.kept=fp8",), "precision.kept"),
        ("a100:8", (), "precision.multiply"),
        ("local", (), "precision.multiply"),
        ("b200:8", (), "precision.multiply"),
        ("b200:8", ("precision.granularity=row",), None),
        ("h100:8", ("train.precision=mxfp8",), "precision.multiply"),
        ("h100:8", ("precision.granularity=tensor", "plan.tensor=2", "plan.compile=true"), "plan.compile"),
        ("h100:8", ("precision.granularity=tensor", "precision.history=4", "plan.compile=true"), "plan.compile"),
    ],
    ids=str,
)
def test_codes_are_multiplied_where_a_device_has_products_for_them(
    cluster: str, settings: tuple[str, ...], key: str | None
) -> None:
    asked = (*FP8, f"cluster={cluster}", "precision.multiply=codes", *settings)
    problems = errors(*asked)
    assert {problem.key for problem in problems} == ({key} if key else set())
    assert all((cluster == "local") == problem.way_out.startswith("Set cluster to") for problem in problems)
    assert "train.precision" not in advice(*asked)  # it is no rehearsal


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (("precision.tile=64", "precision.rounding=stochastic"), ("precision.multiply", "precision.kept")),
        (("precision.granularity=tensor", "precision.history=4"), ("precision.kept", "plan.compile")),
    ],
    ids=str,
)
def test_codes_are_refused_for_all_reasons_at_once(settings: tuple[str, ...], keys: tuple[str, ...]) -> None:
    asked = (*FP8, "cluster=h100:1", "precision.multiply=codes", "precision.kept=fp8", "plan.compile=true", *settings)
    assert tuple(problem.key for problem in errors(*asked)) == keys
    if "precision.multiply" in keys:
        assert 'with precision.rounding = "stochastic", precision.tile = 64.' in reasons(*asked)["precision.multiply"]
