"""Names of settings in other trainers, each with the corresponding key of a run file and that key's meaning. A name is looked up
here only if no key or option has it, so a later version may use any name of this table as a key.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Meaning(NamedTuple):
    """The key of a run file for a foreign name, and a note for users of that name. `key` is "" if Megalith has
    no such key."""

    key: str
    note: str = ""

    def way_out(self) -> str:
        """Return a sentence that tells the user what to write instead."""
        return " ".join(filter(None, (f"Use {self.key}{': ' if self.note else '.'}" if self.key else "", self.note))).replace(
            "  ", " "
        )


STEPS = "the number of updates."
EPOCH = "the number of updates. An epoch has tokens / (train.global_batch x train.seq_len) steps; `megalith data inspect` counts tokens."
BATCH = "the number of sequences per step, over all ranks. plan.microbatch is the number that a rank computes at once."
MICROBATCH = "the number of sequences that a data rank computes at once. train.global_batch is the number in a whole step."
ACCUMULATION = (
    "the number of sequences per step, over all ranks. A data rank accumulates the gradients of global_batch / (plan.data x "
    "plan.microbatch) "
    "microbatches."
)
RANKS = "the ranks of a run are plan.data x plan.context x plan.tensor x plan.pipeline. plan.data = N uses N ranks."
WARMUP = 'the number of warm-up updates, or a share of train.steps such as "2%".'
ZERO = "the state that data ranks shard. 0: nothing, 1: optimizer state, 2: also gradients, 3: also weights (as FSDP does)."
FOLDER = "a folder made by `megalith data prepare`."

_GROUPS: dict[str, tuple[str, str]] = {
    # training
    "max_steps num_steps train_steps training_steps total_steps train_iters max_iters num_iterations iterations iters": (
        "train.steps",
        STEPS,
    ),
    "epochs epoch num_epochs max_epochs num_train_epochs": ("train.steps", EPOCH),
    "tokens max_tokens train_tokens total_tokens": (
        "train.steps",
        'the number of updates, or a text such as "500M tokens".',
    ),
    "train_samples": ("train.steps", 'the number of updates, or a text such as "2M samples".'),
    "batch batch_size global_batch_size train_batch_size": ("train.global_batch", BATCH),
    "rampup_batch_size batch_size_rampup batch_size_schedule": (
        "train.batch_ramp",
        "a list of tables with `begin` and `global_batch`, one for each change of the global batch. See docs/guide/batch.md.",
    ),
    "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps accumulate_grad_batches num_microbatches": (
        "train.global_batch",
        ACCUMULATION,
    ),
    "sequence_length seq_length max_seq_len max_seq_length block_size context_length max_length seqlen": (
        "train.seq_len",
        "the number of tokens in a sequence. model.context is the longest sequence that the model takes.",
    ),
    "dtype torch_dtype mixed_precision bf16 fp16 amp param_dtype": (
        "train.precision",
        'a number format such as "bf16", "fp16" or "fp32".',
    ),
    "random_seed": ("train.seed", ""),
    "z_loss_weight zloss": ("train.z_loss", ""),
    "pretrained init_from_checkpoint finetune_from load_weights": (
        "train.init_from",
        "a checkpoint whose weights a new run starts from; `megalith import` converts a Hugging Face folder to a checkpoint.",
    ),
    "resume resume_from resume_from_checkpoint load_checkpoint": (
        "",
        "A run resumes when the same `megalith train` command is run again, or by `megalith resume RUN_DIR`.",
    ),
    # optimizer
    "learning_rate max_lr peak_lr base_lr lr_max": ("optimizer.lr", "the highest learning rate."),
    "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style decay_style": ("optimizer.schedule", ""),
    "warmup_steps num_warmup_steps lr_warmup_steps warmup_iters lr_warmup_iters warmup_ratio lr_warmup_fraction": (
        "optimizer.warmup",
        WARMUP,
    ),
    "adam_beta1": ("optimizer.beta1", ""),
    "adam_beta2": ("optimizer.beta2", ""),
    "betas adam_betas": (
        "optimizer.beta1",
        "the first of two betas; optimizer.beta2 is the second. Megalith has one key for each beta.",
    ),
    "adam_eps adam_epsilon epsilon": ("optimizer.eps", ""),
    "wd": ("optimizer.weight_decay", ""),
    "max_grad_norm grad_clip clip_grad clip_grad_norm gradient_clipping gradient_clip_val max_norm": (
        "optimizer.clip",
        "the largest norm of the whole gradient; a gradient with a larger norm is scaled down.",
    ),
    "optim optimizer_name optimizer_type": ("optimizer.kind", ""),
    # plan
    "micro_batch_size micro_batch microbatch_size mbs local_batch_size per_device_batch_size per_device_train_batch_size "
    "train_micro_batch_size_per_gpu": ("plan.microbatch", MICROBATCH),
    "tp tp_size tp_degree tensor_parallel tensor_parallelism tensor_parallel_size tensor_parallel_degree "
    "tensor_model_parallel_size": ("plan.tensor", "the number of ranks that split each matrix product."),
    "pp pp_size pp_degree pipeline_parallel pipeline_parallelism pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size": ("plan.pipeline", "the number of pipeline ranks, each of which holds consecutive layers."),
    "dp dp_size dp_degree ddp data_parallel data_parallelism data_parallel_size data_parallel_degree": (
        "plan.data",
        "the number of data ranks, which read different sequences.",
    ),
    "cp cp_size cp_degree context_parallel context_parallelism context_parallel_size context_parallel_degree": (
        "plan.context",
        "the number of ranks that split each sequence.",
    ),
    "ep ep_size ep_degree expert_parallel expert_parallelism expert_parallel_size expert_parallel_degree "
    "expert_model_parallel_size": (
        "plan.expert",
        "the number of ranks that divide the experts; these are also data, context and tensor ranks.",
    ),
    "etp expert_tensor_parallel_size": ("plan.expert_tensor", "the number of ranks that split each expert's matrix products."),
    "sp sequence_parallel": ("plan.sequence", "true or false; plan.sequence has an effect only if plan.tensor > 1."),
    "fsdp zero_stage zero_level sharding_strategy": ("plan.zero", ZERO),
    "hsdp dp_replicate num_replicas data_parallel_replicate_degree": (
        "plan.replicate",
        "the number of groups of data ranks that each hold a full copy of the state (HSDP).",
    ),
    "vpp virtual_stages virtual_pipeline_model_parallel_size num_model_chunks": (
        "plan.chunks",
        "the number of stages on each pipeline rank.",
    ),
    "gpus num_gpus n_gpus ngpus devices num_devices world_size nproc nproc_per_node ranks num_ranks nodes": ("plan.data", RANKS),
    "gradient_checkpointing activation_checkpointing activation_checkpoint remat recompute_granularity ac": (
        "plan.recompute",
        'what backward recomputes, such as "none", "selective" or "full".',
    ),
    "torch_compile": ("plan.compile", ""),
    # model
    "hidden_size d_model n_embd embed_dim model_dim hidden_dim embedding_size": (
        "model.dim",
        "the width of the residual stream.",
    ),
    "num_hidden_layers num_layers n_layer n_layers": ("model.layers", ""),
    "num_attention_heads n_head n_heads num_heads": ("model.heads", ""),
    "num_key_value_heads n_kv_heads n_kv_head num_kv_heads num_query_groups": ("model.kv_heads", ""),
    "intermediate_size ffn_hidden_size ffn_dim d_ff mlp_dim n_inner": ("model.ffn", "the hidden width of a block's MLP."),
    "vocab_size padded_vocab_size n_vocab": ("model.vocab", ""),
    "max_position_embeddings n_positions n_ctx": ("model.context", "the longest sequence that the model takes, in tokens."),
    "tie_word_embeddings tie_embeddings tied_embeddings": ("model.tied", ""),
    "rms_norm_eps layer_norm_eps layer_norm_epsilon": ("model.norm_eps", ""),
    "rope_base rotary_base": ("model.rope_theta", ""),
    "num_experts n_experts n_routed_experts num_local_experts": ("model.experts", ""),
    "num_experts_per_tok moe_topk moe_router_topk router_topk": (
        "model.active",
        "the number of experts that each token goes to.",
    ),
    "sliding_window": ("model.window", ""),
    "mtp mtp_depth mtp_num_layers num_mtp_modules num_nextn_predict_layers": (
        "model.ahead",
        "the depth of multi-token prediction (MTP), in the deepseek family.",
    ),
    "mtp_weight mtp_loss_weight mtp_loss_coeff mtp_loss_scaling_factor": (
        "model.ahead_weight",
        "the weight of the losses of multi-token prediction.",
    ),
    "model_type architecture arch": ("model.family", ""),
    "model_name name_or_path model_name_or_path": ("model.preset", "the name of a model in `megalith models`."),
    # data, checkpoints, logs
    "dataset dataset_name dataset_path data_path data_dir train_data train_data_path": ("data.path", FOLDER),
    "save_every save_steps save_interval checkpoint_every checkpoint_interval ckpt_interval": (
        "checkpoint.every",
        "the number of steps between saves.",
    ),
    "save_total_limit keep_last max_to_keep": ("checkpoint.keep", ""),
    "eval_every eval_steps eval_interval eval_freq val_check_interval": (
        "validation.every",
        "the number of steps between validations.",
    ),
    "eval_iters eval_samples limit_val_batches": (
        "validation.samples",
        "the number of held-out sequences read from each domain.",
    ),
    "output_dir out_dir run_dir save_dir checkpoint_dir": (
        "",
        "The run folder is an option of the command line, --run-dir FOLDER; its default is runs/NAME.",
    ),
    "logging_steps log_every log_interval log_freq": ("", "Every step is logged, in events.jsonl of the run folder."),
    "run_name experiment experiment_name": ("name", "the run's name."),
    # tables
    "parallel parallelism distributed": ("plan", "the table of settings that split the work over ranks."),
    "trainer": ("train", "the table of length, batch and precision."),
    "eval evaluation val": ("validation", "the table of settings for the held-out loss."),
}
"""Names of the same setting -> Megalith's key and a note."""

MEANINGS: dict[str, Meaning] = {name: Meaning(*found) for names, found in _GROUPS.items() for name in names.split()}
"""Each foreign name -> its meaning in Megalith."""

NEVER_NARROW = "never computed in a narrow format. precision.wide names layers of blocks that stay in bf16 too."

MEANINGS_IN: dict[str, dict[str, Meaning]] = {
    "model": {
        name: Meaning("model.context", "the longest sequence that the model takes, in tokens.")
        for name in ("max_seq_len", "max_seq_length", "seq_len", "sequence_length", "block_size", "context_length")
    },
    "precision": {
        **dict.fromkeys(("master", "masters", "master_weights"), Meaning("optimizer.master", "the form of the master weights.")),
        **dict.fromkeys(("moment", "moments"), Meaning("optimizer.moments", "the number format of the optimizer's moments.")),
        **dict.fromkeys(("head", "lm_head", "output"), Meaning("", f"The head is {NEVER_NARROW}")),
        **dict.fromkeys(("embedding", "embeddings"), Meaning("", f"Embeddings are {NEVER_NARROW}")),
        **dict.fromkeys(("router", "routers"), Meaning("", f"Routers are {NEVER_NARROW}")),
        **dict.fromkeys(("norm", "norms"), Meaning("", f"Norms are {NEVER_NARROW}")),
    },
    "sites": dict.fromkeys(
        ("names", "name", "site", "sites", "plans", "shares", "clusters"),
        Meaning(
            "sites.each",
            "write a table [[sites.each]] for each site, in the order of the sites' numbers, with name, plan, share or cluster.",
        ),
    ),
}
"""Meanings of the names that differ under a table."""


def meaning(word: str, *, table: str = "") -> Meaning | None:
    """Return the meaning of a foreign name under the table `table` of a run file; None for an unknown name."""
    name = word.lower().replace("-", "_")
    return MEANINGS_IN.get(table, {}).get(name) or MEANINGS.get(name)


def keys() -> Iterator[str]:
    """Yield every key of a run file that MEANINGS and MEANINGS_IN contain."""
    inside = (each for meanings in MEANINGS_IN.values() for each in meanings.values())
    yield from (each.key for each in (*MEANINGS.values(), *inside) if each.key)
