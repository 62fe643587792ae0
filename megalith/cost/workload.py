"""The subject of a prediction: one step of one model under one plan on one cluster, and the software that runs it. No torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from megalith.cost.profile import Layout
from megalith.kernels.chunks import tile_rows
from megalith.mesh import Mesh
from megalith.schedule import representative_microbatches
from megalith.schedule.table import kind
from megalith.spec.cluster import ClusterSpec
from megalith.spec.model import ModelSpec
from megalith.spec.numbers import BF16, PRECISIONS, PrecisionSpec, is_narrow, kept_tile, packed_tile, packs, tile_of
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.plan import BLOCK, Action, Plan, place_of
from megalith.spec.sizes import is_packed, layer_of, multiplied, stays_wide
from megalith.spec.state import GRADIENT, LOWER, MASTER, WIDE, Moments, Place, Slot, bytes_each, gradient
from megalith.spec.treatment import can_undo_on_disk, rows_in_tiles


@dataclass(frozen=True)
class SoftwareProfile:
    """Properties of the software that affect time or memory. Each field is a fact about a program, never a fitted number."""

    overheads: str = "fused"
    """Row of `calibration.toml` with the software's overheads."""
    attention: Literal["fused", "plain"] = "fused"
    """`plain` writes the scores to memory (before FlashAttention)."""
    flash: Literal[1, 2] = 2
    """Generation of the fused kernel: the first has half the speed of the second (Dao 2023, arXiv:2307.08691, section 4)."""
    gradient_bytes: float = bytes_each([GRADIENT])
    """Bytes of the accumulated gradient of one parameter."""
    moment_bytes: float | None = None
    """Bytes that the optimizer keeps for a parameter, without its copy of the weight; None: as in the optimizer's row."""
    master_bytes: float = bytes_each([MASTER])
    """Bytes of the optimizer's own copy of a parameter: 2 if the optimizer keeps only the bits that bf16 leaves out (Apex's distributed
    Adam)."""
    microbatch_gradient_bytes: float = 0.0
    """Bytes per parameter of a microbatch's own gradients, which are kept beside the accumulated gradients until the next backward."""
    update_bytes: float = 0.0
    """Bytes of the temporary tensors of an update, for each parameter that a rank updates."""
    loss: Literal["copied", "whole", "fused", "chunked"] = "fused"
    """Memory of the loss. If logits of all tokens exist at once, they are in fp32 with copies (`copied`: torch), in fp32 in place
    (`whole`: Megatron-LM), or in 16 bits, overwritten by their gradient (`fused`). If only the logits of a few rows exist at a time:
    `chunked` (Megalith)."""
    gathers: Literal["block", "module", "rank"] = "block"
    """The unit of weights that ZeRO 3 gathers at a time: `block`, which prefetches the next block, or `module` (DeepSpeed). `rank` is for
    ZeRO 1: before the next step, the ranks broadcast their updated weights one after the other (InternEvo)."""
    reduces: Literal["microbatch", "run"] = "microbatch"
    """When ZeRO 2 reduces a stage's gradients: after each microbatch, or after each group of microbatches that the stage
    computes in succession, during which gradients stay whole (Llama 3)."""
    adds_gradients: bool = False
    """True if a kernel for each weight adds the gradients of a microbatch to those of earlier ones; False: the product that computes
    the gradients also adds them."""
    overlap_data: bool = True
    """True if gradient reductions and weight gathers overlap computation."""
    overlap_tensor: bool = True
    """True if the collectives of the tensor axis are pipelined with their matrix products."""
    overlap_expert: bool = False
    """True if the experts' all-to-all of one microbatch overlaps another microbatch's computation (DualPipe, combined 1F1B)."""
    senders: int = 0
    """Number of a device's processors (SMs) that only send and receive tokens."""
    deduplicated: bool = True
    """True if a token for several experts of one rank or node is sent only once to this rank or node (DeepEP, HybridEP)."""
    permute: bool = True
    """True if one kernel sorts rows by expert."""
    rotary: bool = True
    """True if one kernel rotates queries and keys, in fused software."""
    grouped: bool = False
    """True if the products of all experts are one kernel; False: one kernel for each expert, launched in turn (Transformer
    Engine's grouped linear)."""
    router: Literal["fused", "plain"] = "fused"
    """`fused`: few kernels compute the router's arithmetic; `plain`: each step of this arithmetic is one torch operation."""
    quantise_kernels: int = 0
    """Additional kernels to convert one tensor to a format with scales of blocks: they zero the scales, and reorder them for
    products."""
    graphs: Literal["none", "router", "parts", "whole"] = "none"
    """Kernels that CUDA graphs launch: of the whole step (`whole`), all except the experts' (`parts`), or only the router's."""
    waits: bool = True
    """True if the host waits in each expert layer for the number of arriving tokens. The host need not wait if each expert takes
    a fixed number of tokens."""
    causal_half: bool = True
    """True if the attention kernel skips scores that the causal mask hides."""
    keeps_outputs: bool = False
    """A stage's output stays on its rank until the backward of its microbatch, although it was sent."""
    low_precision_kept: bool = False
    """True if inputs of the experts' activations are also kept in the products' low precision, and the output of attention is
    kept once, in 12 bits, for attention and for the next product (DeepSeek-V3, arXiv:2412.19437, section 3.3.3)."""

    @property
    def ours(self) -> bool:
        """True for Megalith's trainer."""
        return self.loss == "chunked"


EXPERTS = "mlp.experts"
"""The name of a block's experts, as a layer."""

USUAL = PrecisionSpec()
"""The `[precision]` of a run that sets none of its keys."""


class Narrow(NamedTuple):
    """The narrow precision of Megalith's trainer, or bf16 with choices for tensors that are kept in 8 bits. All other tensors have the
    format `Workload.format`."""

    precision: str
    """A name from PRECISIONS."""
    choices: PrecisionSpec
    """The run's `[precision]`, which also decides which layers stay wide."""

    @property
    def tile(self) -> int:
        """How many numbers along each dim share a scale; 0: whole rows or tensors have a scale."""
        return tile_of(self.choices, self.precision) or packed_tile(self.choices, self.precision)

    def layers(self, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
        """Return for each block the names, within the block, of the layers that multiply in the narrow format."""
        return self._named(model) if is_narrow(self.precision) else ((),) * len(model.blocks)

    def packed(self, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
        """Return for each block the names, within the block, of the layers that keep their inputs in 8 bits."""
        return self._named(model) if self.choices.kept != "wide" else ((),) * len(model.blocks)

    def _named(self, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
        """Return for each block the names of the layers that the choices apply to."""
        known = (id(model), self)
        if known not in _layers:
            _layers[known] = model, tuple(self._layers_of(number, model) for number in range(len(model.blocks)))
        return _layers[known][1]

    def _layers_of(self, number: int, model: ModelSpec) -> tuple[str, ...]:
        names, blocks = dict.fromkeys(map(layer_of, multiplied(model.blocks[number], model.dim))), len(model.blocks)
        how = {"blocks": blocks, "choices": self.choices}
        if packs(self.choices, self.precision):
            return tuple(name for name in names if is_packed(f"blocks.{number}.{name}", **how))
        return tuple(name for name in names if not stays_wide(f"blocks.{number}.{name}", **how))


# by identity, of models kept with it: hashing whole ones takes long, and a search asks for each of thousands of plans
_layers: dict[tuple[int, Narrow], tuple[ModelSpec, tuple[tuple[str, ...], ...]]] = {}


def computed(precision: str, choices: PrecisionSpec) -> tuple[str, Narrow | None]:
    """Return the compute format of this project's trainer for a run's precision and choices, and a `Narrow` with both (None: the trainer
    rounds nothing to fewer bits)."""
    if packs(choices, precision) or (choices.tile and precision == BF16.name):
        return precision, Narrow(precision, choices)
    if not is_narrow(precision):
        return precision, None
    return PRECISIONS[precision].compute.name, Narrow(precision, choices)


@dataclass(frozen=True)
class Workload:
    """One training step to be predicted."""

    model: ModelSpec
    plan: Plan
    cluster: ClusterSpec
    seq_len: int
    global_batch: int
    """Sequences a step."""
    format: str = "bf16"
    """A name from PRECISIONS."""
    software_profile: SoftwareProfile = SoftwareProfile()
    optimizer: str = "adamw"
    """A row of `spec.optimizers`."""
    moments: Moments = WIDE
    """The number format of the optimizer's moments."""
    master: str = "fp32"
    """The form of the master weights, see `spec.state.LOWER`."""
    gradients: str = "fp32"
    """The number format in which gradients are added up. With fp32, the software's profile gives the bytes of a sum."""
    narrow: Narrow | None = None
    """The narrow precision of Megalith's trainer, or bf16 with settings for tensors kept in 8 bits; None: wide formats only."""
    frozen: bool = False
    """True if the weights get no gradient (LoRA adapters on frozen weights)."""
    outer: tuple[Slot, ...] = ()
    """Tensors that merges with other sites keep for each weight (`spec.sites.outer_slots`)."""
    vocab_tile: int = 0
    """The run's `train.vocab_tile`."""
    tables: tuple[str, ...] = ()
    """The optimizers of the embedding and of the output (`spec.treatment.table_kinds`); empty: those that `optimizer` brings."""
    copied: bool = False
    """True if the state in memory is copied after each step (`spec.treatment.copied_each_step`)."""

    @cached_property
    def tile(self) -> int:
        """Number of rows of the vocabulary for which the head computes the loss at once; 0: all rows."""
        return tile_rows(self.vocab_tile, self.model.dim) if self.software_profile.ours else 0

    @cached_property
    def cut(self) -> int:
        """Number of a rank's weights in the embedding's table, and in the head's, if these tables are read in tiles and never gathered
        (`parallel.tables`); otherwise 0."""
        used = self.tables or [OPTIMIZERS[self.optimizer].rest or self.optimizer]
        if self.halved or self.width == bytes_each([MASTER]):
            return 0
        return self.model.dim * rows_in_tiles(self.model, self.plan, used, tile=self.tile)

    @property
    def tile_numbers(self) -> int:
        """Number of weights in a tile of a table that is read in tiles; 0 if there is no such table."""
        return self.tile * self.model.dim if self.cut else 0

    @cached_property
    def merged_bytes(self) -> dict[Place, float]:
        """Bytes for each weight of the tensors of `outer`, by place."""
        places: tuple[Place, ...] = ("device", "host")
        return {place: bytes_each(slot for slot in self.outer if slot.place == place) for place in places}

    @property
    def microbatches(self) -> int:
        """Number of microbatches that a data rank computes in one step."""
        return self.global_batch // (self.plan.data * self.plan.microbatch)

    @property
    def representative_microbatches(self) -> int:
        """The smallest number of microbatches with the same steady state as the full count (`schedule.representative_microbatches`)."""
        return representative_microbatches(self.plan.schedule, ranks=self.plan.pipeline, microbatches=self.microbatches)

    @property
    def passes(self) -> int:
        """Number of passes (forwards and backwards) over a step: two if gradients are released, but an update could not be undone."""
        state = self.plan.state
        return 1 if not state.release or can_undo_on_disk(state, self.format, self.master) else 2

    @property
    def reductions(self) -> int:
        """Number of times in a step that ZeRO 2 reduces a stage's gradients. Under an interleaved schedule, a stage computes groups
        of successive microbatches, each with as many microbatches as there are pipeline ranks."""
        if self.software_profile.reduces == "microbatch":
            return self.microbatches
        return 1 if self.plan.chunks == 1 else -(-self.microbatches // self.plan.pipeline)

    @cached_property
    def width(self) -> int:
        """Bytes of a weight on the device."""
        return int(PRECISIONS[self.format].compute.width)

    @cached_property
    def gradient_bytes(self) -> float:
        """Bytes of the accumulated gradient of one parameter."""
        return self.software_profile.gradient_bytes if self.gradients == "fp32" else bytes_each([gradient(self.gradients)])

    @cached_property
    def moment_bytes(self) -> float:
        """Bytes of optimizer state for a parameter, without the master weight."""
        own = self.software_profile.moment_bytes
        return bytes_each(self.moments.of(OPTIMIZERS[self.optimizer].slots)) if own is None else own

    @cached_property
    def master_bytes(self) -> float:
        """Bytes of the optimizer's copy of a weight; only of its lower half if the compute weight is the upper half."""
        return bytes_each([LOWER[self.master]]) if self.halved else self.software_profile.master_bytes

    @property
    def halved(self) -> bool:
        """True if the compute weights are the upper half of the master weights."""
        return self.master in LOWER

    @cached_property
    def state_bytes(self) -> float:
        """Bytes that the optimizer keeps for a parameter, including its copy of the weight if compute weights are narrower."""
        return self.moment_bytes + (self.master_bytes if self.width < 4 else 0)

    @cached_property
    def lasting(self) -> float:
        """Share of the compute weights (under ZeRO 3, of a rank's shard) that stays in memory. Each gather casts the
        other compute weights from master weights."""
        if self.plan.zero < 3 or not self.software_profile.ours or self.width == 4 or self.halved:
            return 1.0
        return 0.0 if self.plan.state.weights_away else self.plan.state.away

    @cached_property
    def shards(self) -> tuple[int, int]:
        """The numbers of ranks over which ZeRO shards dense weights and experts; at least 1."""
        mesh = Mesh.of(self.plan)
        return mesh.state[2], max(1, mesh.experts[2])

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len

    @property
    def watched(self) -> bool:
        """True if the run sometimes compares gradients with the gradients of wide products (`precision.watch_every`), which takes a
        second copy of the gradients."""
        return self.narrow is not None and is_narrow(self.narrow.precision) and self.narrow.choices.watch_every > 0

    @cached_property
    def narrow_layers(self) -> tuple[tuple[str, ...], ...]:
        """The names of each block's narrow layers, within the block."""
        return self.narrow.layers(self.model) if self.narrow is not None else ((),) * len(self.model.blocks)

    @cached_property
    def packed_layers(self) -> tuple[tuple[str, ...], ...]:
        """The names of each block's layers that keep their inputs in 8 bits, within the block."""
        return self.narrow.packed(self.model) if self.narrow is not None else ((),) * len(self.model.blocks)

    @property
    def _defers(self) -> Literal["none", "others", "all"]:
        """See `Layout.defers`. With ZeRO 2 and 3, a gradient that is not deferred would wait for the second half of the backward."""
        if kind(self.plan.schedule).splits_backward:
            return "all" if self.plan.zero >= 2 else "others"
        return "none" if self.software_profile.ours else "all"

    @cached_property
    def layout(self) -> Layout:
        """The properties of the workload that change a part's figures."""
        plan, software_profile = self.plan, self.software_profile
        only = plan.retain.places[0] if len(plan.retain.places) == 1 else None  # the same trace is for either place
        of: dict[str, Action] = {part: "host" if action == only else action for part, action in plan.actions.items()}
        actions: tuple[tuple[str, Action], ...] = tuple(
            (part, action) for part, action in of.items() if part != BLOCK and action != "recompute"
        )
        return Layout(
            microbatch=plan.microbatch,
            seq_len=self.seq_len,
            tensor=plan.tensor,
            sequence=plan.sequence,
            context=plan.context,
            ulysses=plan.ulysses,
            context_method="ring" if plan.ulysses == plan.context else plan.context_method,
            summed=software_profile.ours and plan.ulysses < plan.context,
            expert=plan.expert,
            expert_tensor=plan.expert_tensor,
            weighs_away=software_profile.ours and plan.expert * plan.expert_tensor > 1 and not plan.compile,
            recompute=",".join(plan.recomputed_parts) or "none",
            defers=self._defers,
            actions=actions,
            rounded_tile=kept_tile(self.narrow.choices if self.narrow is not None and plan.rounding else USUAL),
            rest=place_of(of[BLOCK]) if plan.retain.places else "host",
            attention=software_profile.attention,
            regather=software_profile.overheads not in ("eager", "compiled") and plan.tensor > 1,
            fused=software_profile.overheads in ("fused", "packaged"),
            rotary=software_profile.rotary,
            permute=software_profile.permute,
            loss=software_profile.loss,
            width=self.width,
            kept=PRECISIONS[self.format].factors.width,
            low_precision_kept=software_profile.low_precision_kept,
            tile=self.tile,
            cut=self.cut > 0,
        )
