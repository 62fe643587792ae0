import pytest

from megalith.cost.profile import DENSE_MLP, Layout, Profile
from megalith.cost.trace import trace_block, trace_embedding, trace_head
from megalith.spec.model import BlockSpec, LatentAttentionSpec, MambaSpec
from megalith.spec.plan import EXPERTS_ACTIVATION, UP_PROJECTION
from tests.cost.models import DIM, HEADS, HIDDEN, VOCAB, dense, mixture

SEQ = 256
LAYOUT = Layout(microbatch=2, seq_len=SEQ)
TOKENS = 2 * SEQ


def changed(layout: Layout = LAYOUT, **values) -> Layout:
    return Layout(**{**vars(layout), **values})


def matrices(profile: Profile) -> int:
    """Return the number of weights in a Llama block's matrices."""
    return profile.weights - 2 * DIM


def test_each_phase_is_two_operations_a_weight_and_token():
    profile = trace_block(dense(), 0, LAYOUT)
    for phase in ("F", "I", "W"):
        products = sum(product.flops for product in profile.products if product.phase == phase)
        assert products == 2 * matrices(profile) * TOKENS


def test_the_head_is_six_operations_a_weight_and_token():
    profile = trace_head(dense(), LAYOUT)
    assert profile.flops() == 6 * VOCAB * DIM * TOKENS


def test_attention_in_full_is_four_operations_a_score_and_channel():
    (forward, _) = trace_block(dense(), 0, LAYOUT).cores
    assert forward.flops == 4 * TOKENS * SEQ * DIM


@pytest.mark.parametrize("model", [dense(), dense(gated=False)], ids=["llama", "gpt"])
def test_tensor_parallelism_divides_the_products(model):
    whole, share = trace_block(model, 0, LAYOUT), trace_block(model, 0, changed(tensor=4))
    assert share.flops() == whole.flops() / 4


def test_sequence_parallelism_moves_the_bytes_of_two_all_reduces_each_way():
    activation = TOKENS * DIM * 2
    exchanges = trace_block(dense(), 0, changed(tensor=4)).exchanges
    assert {(e.phase, e.kind, e.size, e.times) for e in exchanges} == {
        (phase, kind, activation, 2) for phase in ("F", "I") for kind in ("gather", "scatter")
    }
    plain = trace_block(dense(), 0, changed(tensor=4, sequence=False)).exchanges
    assert {(e.phase, e.kind, e.size, e.times) for e in plain} == {(phase, "sum", activation, 2) for phase in ("F", "I")}


def test_full_recomputation_keeps_the_input_alone():
    assert trace_block(dense(), 0, changed(recompute="full")).saved == TOKENS * DIM * 2


def test_full_recomputation_runs_forward_again():
    kept, again = (trace_block(dense(), 0, changed(recompute=policy)) for policy in ("none", "full"))
    forward = sum(product.flops for product in kept.products if product.phase == "F")
    # the last product's output is not needed in backward, so it is not recomputed
    assert 0.7 * forward < sum(p.flops for p in again.products) - sum(p.flops for p in kept.products) <= forward


def test_scores_kept_by_plain_attention_are_five_bytes_each_and_go_with_selective_recomputation():
    model = dense(gated=False)
    plain = trace_block(model, 0, changed(attention="plain"))
    selective = trace_block(model, 0, changed(attention="plain", recompute="attention.core"))
    scores = 2 * HEADS * SEQ * SEQ
    outputs = TOKENS * DIM * 2  # of attention: the output projection keeps it in either case
    assert plain.saved - selective.saved == pytest.approx(5 * scores, abs=outputs)


def test_a_gpt_block_keeps_about_34_bytes_a_token_and_channel():
    """Korthikanti et al. 2022 count 34, of which 2 are dropout masks that this block does not have. Fused attention keeps one sum
    a row."""
    saved = trace_block(dense(gated=False), 0, LAYOUT).saved
    assert saved / (TOKENS * DIM) == pytest.approx(32, abs=1.0)


def test_experts_are_divided_among_ranks_and_tokens_dispatched():
    model = mixture()
    whole, share = trace_block(model, 0, LAYOUT), trace_block(model, 0, changed(expert=4))
    assert share.expert_weights == whole.expert_weights / 4
    assert share.weights == whole.weights
    assert share.flops() == whole.flops()
    rows = TOKENS * 2 * DIM * 2  # two experts a token, two bytes a number
    assert {(e.phase, e.axis, e.size, e.times) for e in share.exchanges} == {(p, "expert", rows, 2) for p in ("F", "I")}


def test_context_parallelism_halves_the_queries_and_keeps_the_keys():
    core = trace_block(dense(), 0, changed(context=2)).cores[0]
    assert (core.queries, core.keys) == (SEQ // 2, SEQ)


def test_the_embedding_multiplies_nothing():
    profile = trace_embedding(dense(), LAYOUT)
    assert profile.products == ()
    assert profile.weights == VOCAB * DIM


def test_a_profile_survives_json():
    profile = trace_block(mixture(), 0, changed(expert=2, tensor=2))
    assert Profile.from_json(profile.to_json()) == profile


def test_a_fused_block_s_forward_moves_what_its_few_kernels_read_and_write():
    """Two norms and two rotations take a read and a write each. Activation with gate, and two sums, take two reads and a write each.
    Views take nothing."""
    moved = trace_block(dense(), 0, LAYOUT).moved["F"] / (2 * TOKENS)
    assert moved == pytest.approx((4 + 4 + 6) * DIM + 3 * HIDDEN, rel=0.01)


@pytest.mark.parametrize("model", [dense(), mixture()], ids=["dense", "experts"])
def test_fused_software_starts_fewer_kernels_and_moves_fewer_bytes(model):
    fused, eager = (trace_block(model, 0, changed(fused=fused)) for fused in (True, False))
    for phase in ("F", "I"):
        assert fused.kernels[phase] < eager.kernels[phase]
        assert fused.moved[phase] < eager.moved[phase]
    assert fused.flops() == eager.flops()


def test_only_what_lies_between_dispatch_and_return_is_apart():
    assert trace_block(dense(), 0, LAYOUT).apart == {"F": 0, "I": 0, "W": 0}
    experts = trace_block(mixture(), 0, LAYOUT)
    for phase in ("F", "I"):
        assert 3 <= experts.apart[phase] < experts.kernels[phase]  # two products and what is between them, without attention


def test_fused_experts_form_gate_and_up_in_one_product():
    paired, apart = (trace_block(mixture(), 0, changed(fused=fused)) for fused in (True, False))
    numbers = [sum(p.times for p in one.products if p.expert and p.phase == "F") for one in (paired, apart)]
    assert numbers == [2, 3]
    assert paired.expert_weights == apart.expert_weights
    for phase in ("F", "I", "W"):
        assert paired.flops(phase) == apart.flops(phase)


def test_a_rotation_that_is_not_fused_is_several_kernels():
    fused, plain = (trace_block(dense(), 0, changed(rotary=rotary)) for rotary in (True, False))
    assert plain.kernels["F"] > fused.kernels["F"]
    assert plain.moved["F"] > fused.moved["F"]
    assert plain.flops() == fused.flops()


def test_the_router_ends_where_tokens_leave_for_their_experts():
    assert trace_block(dense(), 0, LAYOUT).routed == {"F": 0, "I": 0, "W": 0}
    experts = trace_block(mixture(), 0, LAYOUT)
    for phase in ("F", "I"):
        assert 0 < experts.routed[phase] <= experts.kernels[phase] - experts.apart[phase]


def test_experts_activation_alone_is_one_kernel_again_and_no_product():
    kept, again = (trace_block(mixture(), 0, changed(recompute=policy)) for policy in ("none", EXPERTS_ACTIVATION))
    rows, hidden = 2 * TOKENS, 128  # two experts a token
    assert kept.saved - again.saved == rows * hidden * 2
    assert again.moved["I"] - kept.moved["I"] == 3 * rows * hidden * 2
    assert again.flops() == kept.flops()


def test_the_dense_feed_forward_half_alone_leaves_experts_be():
    assert trace_block(mixture(), 0, changed(recompute=DENSE_MLP)) == trace_block(mixture(), 0, LAYOUT)
    assert trace_block(dense(), 0, changed(recompute=DENSE_MLP)) == trace_block(dense(), 0, changed(recompute="mlp"))


def test_products_in_a_narrow_format_keep_their_factors_in_it():
    """Narrow are both norms' outputs and the inner activation. Attention keeps its output, as wide as the model, for its own
    backward; the product after it keeps a narrow copy."""
    wide, narrow = (trace_block(dense(), 0, changed(kept=kept)) for kept in (2, 1))
    assert wide.saved - narrow.saved == TOKENS * (2 * DIM + HIDDEN - DIM)
    assert wide.working == narrow.working


def test_activations_can_be_kept_more_sparingly_still():
    """Attention's output takes 12 bits for both uses instead of 24; gate and up of a token's two experts take 8."""
    each, fewer = (trace_block(mixture(), 0, changed(kept=1, low_precision_kept=low)) for low in (False, True))
    assert each.saved - fewer.saved == TOKENS * (1.5 * DIM + 2 * 2 * 128)


def test_recomputed_up_projections_free_queries_keys_and_values():
    latent = LatentAttentionSpec(heads=HEADS, q_rank=64, kv_rank=32, nope_dim=64, rope_dim=32, v_dim=64)
    model = dense().model_copy(update={"blocks": (dense().blocks[0].model_copy(update={"attention": latent}),)})
    kept, again = (trace_block(model, 0, changed(recompute=policy)) for policy in ("none", UP_PROJECTION))
    assert kept.saved - again.saved >= TOKENS * HEADS * (96 + 96 + 64) * 2
    up = 2 * TOKENS * HEADS * (64 * 96 + 32 * 128)
    assert again.flops() - kept.flops() == up


def test_an_embedding_s_output_is_summed_in_forward_and_its_gradient_gathered_in_backward():
    profile = trace_embedding(dense(), changed(tensor=2))
    assert {(e.phase, e.kind, e.size) for e in profile.exchanges} == {
        ("F", "scatter", TOKENS * DIM * 2),
        ("I", "gather", TOKENS * DIM * 2),
    }


MAMBA = MambaSpec(heads=8, head_dim=32, state=16, groups=4, chunk=64)
HYBRID = dense(1).model_copy(update={"blocks": (BlockSpec(mamba=MAMBA),)})
INNER, SHARED = 8 * 32, 4 * 16


def test_mamba_s_forward_is_its_weights_and_the_products_of_its_chunks():
    profile = trace_block(HYBRID, 0, LAYOUT)
    matrices = DIM * (3 * INNER + 2 * SHARED + 8)
    chunks = 2 * 64 * SHARED + INNER * (2 * 64 + 4 * 16)
    assert profile.flops("F") == TOKENS * (2 * matrices + chunks)
    assert profile.flops("W") == TOKENS * 2 * matrices
    assert profile.weights == matrices + DIM + (INNER + 2 * SHARED) * 5 + 3 * 8 + INNER


def test_mamba_keeps_what_its_projections_give_and_what_its_state_does():
    """This counts mamba_ssm's fused kernel, the norm's input and output, and one number per row for each of the two norms."""
    kept = 2 * (2 * INNER + 2 * SHARED + 8) + 2 * 2 * INNER + 2 * 2 * DIM + 2 * 4
    assert trace_block(HYBRID, 0, LAYOUT).saved == TOKENS * kept
    assert trace_block(HYBRID, 0, changed(recompute="full")).saved == TOKENS * 2 * DIM


def test_mamba_is_split_by_its_groups():
    whole, half = (trace_block(HYBRID, 0, changed(tensor=tensor)) for tensor in (1, 2))
    assert half.flops() == whole.flops() / 2
    assert {(e.kind, e.axis) for e in half.exchanges} == {("gather", "tensor"), ("scatter", "tensor")}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_trace_is_the_same_each_time(recompute: str):
    """A freed tensor is not mistaken for a later one at the same address."""
    layout = changed(tensor=2, recompute=recompute, regather=True, kept=1, expert=2)
    model = mixture(1, 16, hidden=512)
    assert len({trace_block(model, 0, layout).saved for _ in range(40)}) == 1
