"""Rules about the model's own sizes."""

from megalith.check.case import Case, Found, advice, divisors, error
from megalith.spec.model import AttentionSpec, LatentAttentionSpec, MoeSpec


def heads_make_up_the_width(case: Case) -> Found:
    """Attention heads divide the width evenly, and rotated channels come in pairs."""
    model = case.spec.model
    implied = getattr(model, "head_dim", 0) is None  # the heads' width follows from dim
    if implied and model.dim % model.heads:
        way_out = divisors("heads", model.dim, model.heads)
        yield error("model.heads", model.heads, f"does not divide model.dim = {model.dim}", way_out)
    # blocks of one model differ in other things
    attention = next((block.attention for block in case.blocks if block.attention), None)
    if isinstance(attention, AttentionSpec) and attention.rope and attention.head_dim % 2:
        name = "heads" if implied else "head_dim"
        reason = f"gives heads of {attention.head_dim} channels, but rotary positions rotate channels in pairs"
        yield error(f"model.{name}", getattr(model, name), reason, f"Use an even head_dim, such as {attention.head_dim + 1}.")
    elif isinstance(attention, AttentionSpec) and attention.rope_dim is not None and attention.rope_dim % 2:
        reason = (
            f"rotates {attention.rope_dim} of the {attention.head_dim} channels of a head, but rotary positions "
            "rotate channels in pairs"
        )
        share = min(1.0, (attention.rope_dim + 1.5) / attention.head_dim)  # half a channel more, which rounding may take
        yield error("model.rotated", getattr(model, "rotated", None), reason, f"Use {share:.3g}, say.")
    if isinstance(attention, LatentAttentionSpec) and attention.rope_dim % 2:
        reason = "is odd, but rotary positions rotate channels in pairs"
        yield error("model.rope_dim", attention.rope_dim, reason, f"Use {attention.rope_dim + 1}, say.")
    groups, mamba_heads = getattr(model, "mamba_groups", 1), getattr(model, "mamba_heads", 1)
    if mamba_heads % groups:
        reason = f"does not divide model.mamba_heads = {mamba_heads}, so groups would have unequal numbers of heads"
        yield error("model.mamba_groups", groups, reason, divisors("mamba_groups", mamba_heads, groups))


def heads_share_keys_evenly(case: Case) -> Found:
    """Every key head serves the same number of query heads."""
    kv_heads = getattr(case.spec.model, "kv_heads", None)  # some families have none
    if kv_heads is not None and case.spec.model.heads % kv_heads:
        heads = case.spec.model.heads
        reason = f"does not divide model.heads = {heads}, so key heads would serve unequal numbers of query heads"
        yield error("model.kv_heads", kv_heads, reason, divisors("kv_heads", heads, kv_heads))


def sequences_fit_the_context(case: Case) -> Found:
    """Sequences are no longer than the model's context, or than its table of learned positions."""
    length, context = case.spec.train.seq_len, case.spec.model.context
    learned = case.model.embedding.positions if case.model else None
    if learned is not None and length > learned:
        reason = f"is more than the {learned} positions for which this model has a learned vector"
        yield error("train.seq_len", length, reason, f"Use seq_len <= {learned}, or set model.context = {length}.")
    elif length > context:
        reason = f"is more than model.context = {context}, the longest sequence for which the model's positions are made"
        yield advice("train.seq_len", length, reason, f"Use seq_len <= {context}, or set model.context = {length}.")


def routing_is_learnt(case: Case) -> Found:
    """The router chooses experts: tokens that are sent to experts in turn do not train it."""
    if any(isinstance(block.mlp, MoeSpec) and block.mlp.router.balanced for block in case.blocks):
        reason = "sends tokens to experts in turn and ignores the router's scores: this measures speed, but trains no routing"
        yield advice("model.balanced", True, reason, "Leave this key out unless the run is a benchmark.")
