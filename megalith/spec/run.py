"""The spec of one training run: one class for each table of a run file."""

from contextlib import suppress
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megalith import own
from megalith.spec.alerts import AlertsSpec
from megalith.spec.base import Spec
from megalith.spec.families import Model
from megalith.spec.fleet import FleetSpec
from megalith.spec.forward import Change
from megalith.spec.numbers import PrecisionSpec, Trained
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.parts import OwnPart, named_by
from megalith.spec.plan import Plan
from megalith.spec.quantity import Thousand
from megalith.spec.sites import SitesSpec, own_batch
from megalith.spec.state import MasterForm, Moments

Begin = Annotated[
    NonNegativeInt,
    Thousand(1000),
    Field(description='number of samples before this change, or a text such as "20B tokens" or "5000 steps"'),
]


class PhaseSpec(Spec):
    """A phase of the data: values that apply from sample `begin` on. A value that the phase leaves out does not change."""

    begin: Begin
    weights: dict[str, NonNegativeFloat] | None = Field(default=None, description="share of each domain in the mixture")
    seq_len: Annotated[PositiveInt | None, Thousand(1024)] = None
    global_batch: Annotated[PositiveInt | None, Thousand(1024)] = None


class RampSpec(Spec):
    """A point of the batch ramp: the global batch from sample `begin` on."""

    begin: Begin
    global_batch: Annotated[PositiveInt, Thousand(1024)]


class DataSpec(Spec):
    """Prepared data (`megalith data prepare`) and how it is read."""

    path: str = Field(description="folder with manifest.json")
    copies: tuple[str, ...] = Field(
        default=(),
        description="folders with copies of the data, preferably on other disks; a damaged block is read from the next folder",
    )
    weights: dict[str, NonNegativeFloat] | None = Field(
        default=None, description="share of each domain in the mixture; default: proportional to the domain's tokens"
    )
    document_mask: bool = Field(
        default=True, description="a token attends only to its own document, and positions restart in each document"
    )
    phases: tuple[PhaseSpec, ...] = Field(
        default=(),
        description="changes of mixture, sequence length and batch: a list of tables with begin, weights, seq_len, global_batch",
    )
    source: OwnPart | None = Field(
        default=None, description="your own source of training samples, as `module:object`, which is given the prepared data"
    )


class TrainSpec(Spec):
    """Length, batch and numerics."""

    steps: Annotated[PositiveInt, Thousand(1000)] = Field(
        description='number of updates, or a text such as "500M tokens" or "2M samples"'
    )
    global_batch: Annotated[PositiveInt, Thousand(1024)] = Field(description="number of sequences per step, over all ranks")
    batch_ramp: tuple[RampSpec, ...] = Field(
        default=(), description="changes of the global batch: a list of tables with begin and global_batch"
    )
    seq_len: Annotated[PositiveInt, Thousand(1024)]
    precision: Trained = Field(
        default="bf16",
        description="number format of the computation. With all formats, master weights, moments and reductions of gradients are in "
        "fp32 by default. 8- and 4-bit formats apply to the inputs of matrix products; by default the trainer emulates them exactly",
    )
    gradients: Literal["fp32", "bf16"] = Field(
        default="fp32", description="number format in which gradients are kept, and added up over microbatches and ranks"
    )
    vocab_tile: NonNegativeInt = Field(
        default=0,
        description="number of rows of the vocabulary for which the head computes the loss at once; 0: all rows. It is rounded up until a "
        "tile has a multiple of 65,536 numbers",
    )
    seed: NonNegativeInt = 0
    z_loss: NonNegativeFloat = Field(default=0.0, description="weight of mean(logsumexp^2), which keeps logits from drifting")
    loss: OwnPart | None = Field(
        default=None, description="your own per-token loss, as `module:object`, in place of cross-entropy"
    )
    callbacks: tuple[OwnPart, ...] = Field(
        default=(), description="your own callbacks, each as `module:object`, which are called after every step, on every rank"
    )
    init_from: str | None = Field(default=None, description="checkpoint folder whose weights the run starts from")
    init_from_changes: tuple[Change, ...] = Field(
        default=(),
        description="values of the model that may differ from the checkpoint's: ahead, context, layers, rope_scaling, "
        "rope_theta, tokenizer, vocab",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"


def _has_a_row(kind: str | None) -> str | None:
    """Return `kind` if it names an optimizer. OPTIMIZERS is read at each call, because a program may add rows to it."""
    if kind is not None and kind not in OPTIMIZERS and not own.is_own(kind):
        known = " or ".join(f"'{name}'" for name in [*OPTIMIZERS, "module:object"])
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": known})
    return kind


def _warmup(value: Any) -> int | str:
    if isinstance(value, str) and value.endswith("%"):
        with suppress(ValueError):
            share = float(value[:-1])
            if isfinite(share) and 0 <= share <= 100:
                return value
    elif isinstance(value, int) and not isinstance(value, bool):
        if value >= 0:
            return value
        raise PydanticCustomError("greater_than_equal", "Input should be at least {ge}", {"ge": 0})
    raise PydanticCustomError(
        "updates_or_share",
        "a whole number of updates is needed, or a share of the steps such as '2%', or a length such as '2M samples'",
    )


class GroupSpec(Spec):
    """Settings of the update for parameters whose names match a pattern."""

    pattern: str = Field(min_length=1, description="names of parameters, in which * matches any characters, as in `*.experts.*`")
    lr: PositiveFloat = Field(default=1.0, description="factor by which optimizer.lr is multiplied")
    weight_decay: NonNegativeFloat | None = Field(
        default=None, description="weight decay of these parameters, vectors included; default: optimizer.weight_decay"
    )
    kind: str | None = Field(default=None, description="replaces optimizer.kind")

    _row = field_validator("kind")(_has_a_row)


class OptimizerSpec(Spec):
    """The optimizer and its learning-rate schedule. Weight decay is not applied to vectors, unless a group sets it."""

    kind: str = Field(
        default="adamw", description="optimizer: a name from the table of optimizers, or your own as `module:object`"
    )
    lr: PositiveFloat = 3e-4
    schedule: Literal["cosine", "linear", "wsd", "1-sqrt", "constant"] = "cosine"
    warmup: Annotated[int | str, PlainValidator(_warmup), Thousand(1000)] = Field(
        default="2%",
        description="number of updates in which the learning rate rises linearly from lr / warmup to lr, or a share of train.steps "
        "such as `2%`",
    )
    decay: NonNegativeFloat = Field(
        default=0.2,
        description="wsd, 1-sqrt: length of the decay phase at the end, as a share of all updates or, above 1, as a number of updates",
    )
    min_lr_ratio: NonNegativeFloat = Field(
        default=0.1,
        le=1.0,
        # Descriptions that earlier versions saved have `min_lr`, which was this ratio; run files with it are refused (`spec.renamed`).
        validation_alias=AliasChoices("min_lr_ratio", "min_lr"),
        description="lowest learning rate, as a share of lr",
    )
    beta1: NonNegativeFloat = Field(default=0.9, lt=1.0)
    beta2: NonNegativeFloat = Field(default=0.95, lt=1.0)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip: NonNegativeFloat = Field(
        default=1.0, description="largest global gradient norm: a larger gradient is scaled down to it; 0: no clipping"
    )
    adaptive_clip: NonNegativeFloat = Field(
        default=0.0,
        description="largest norm of a parameter's gradient, in multiples of the running mean of that norm (AdaGC); 0: no limit",
    )
    adaptive_clip_after: NonNegativeInt = Field(
        default=100, description="number of updates before adaptive clipping begins; `clip` applies only to these updates"
    )
    adaptive_clip_decay: NonNegativeFloat = Field(
        default=0.98, lt=1.0, description="decay, per update, of the running mean that adaptive_clip uses"
    )
    qk_clip: NonNegativeFloat = Field(
        default=0.0,
        description="largest attention logit; in a head that exceeds it, the weights of queries and keys are scaled down "
        "(QK-clip); 0: no limit",
    )
    momentum: NonNegativeFloat = Field(
        default=0.95, lt=1.0, description="sgd, muon: factor of the previous moment in each update"
    )
    nesterov: bool = Field(default=True, description="sgd, muon: Nesterov momentum")
    relative_step: bool = Field(
        default=False,
        description="adafactor: limit the learning rate to 1 / sqrt(number of updates), and multiply it by each matrix's root mean square",
    )
    iteration: Literal["bf16", "fp32"] = Field(
        default="bf16", description="muon: number format in which matrices are orthogonalised"
    )
    coefficients: Literal["newton-schulz", "polar-express"] = Field(
        default="newton-schulz", description="muon: coefficients of the orthogonalising iteration"
    )
    iterations: PositiveInt = Field(default=5, le=20, description="muon: number of steps of the orthogonalising iteration")
    split_heads: bool = Field(default=False, description="muon: orthogonalise queries, keys and values separately for each head")
    master: MasterForm = Field(
        default="fp32",
        description="form of the master weights: fp32, or bf16 compute weights that are extended by 16 bits (exact) or by 8 bits",
    )
    moments: Literal["fp32", "bf16", "fp8"] = Field(
        default="fp32", description="number format in which the moments of matrices are kept between two updates"
    )
    moment_block: PositiveInt = Field(
        default=128, description="fp8 moments: how many numbers along a matrix's last dimension share a scale"
    )
    moment_least: NonNegativeInt = Field(
        default=4096, description="bf16 and fp8 moments: parameters with fewer elements than this keep fp32 moments"
    )
    groups: tuple[GroupSpec, ...] = Field(
        default=(),
        description="groups of parameters with other settings; if several groups match a parameter, the last one applies",
    )

    _row = field_validator("kind")(_has_a_row)

    @property
    def small(self) -> Moments:
        """The number format of the moments of large matrices."""
        return Moments(self.moments, self.moment_block, self.moment_least)

    def warmup_updates(self, steps: int) -> int:
        """Return the number of warm-up updates in a run of `steps` steps. A warm-up share above 0 gives at least one warm-up
        update."""
        if isinstance(self.warmup, int):
            return self.warmup
        share = float(self.warmup[:-1]) / 100
        return max(1, round(share * steps)) if share else 0


ANSWERS = ("skip", "rewind", "lower", "stop")
"""Responses to a spike, mildest first."""


class StabilitySpec(Spec):
    """A run's response to a step whose loss or gradients are not finite, or far outside their usual range."""

    not_finite: Literal["stop", "skip"] = Field(
        default="stop", description="response to a loss or gradient that is NaN or infinite: stop the run, or skip the update"
    )
    skips: PositiveInt = Field(
        default=10, description="total number of updates that a run may skip; one more skipped update ends the run"
    )
    watch: bool = Field(default=True, description="warn of spikes of the loss or the gradient norm")
    extremes_every: NonNegativeInt = Field(
        default=10, description="steps between measurements of the largest block outputs and attention logits; 0: never"
    )
    window: int = Field(default=64, ge=8, le=1024, description="number of newest updates from which the bands are computed")
    width: PositiveFloat = Field(
        default=8.0,
        description="distance of a band's limit from the median of the newest 16 updates, in standard deviations of the "
        "logarithm, which are estimated from the median change between updates",
    )
    answers: tuple[Literal["skip", "rewind", "lower", "stop"], ...] = Field(
        default=(), description="responses to a spike of the loss or gradient norm, mildest first; empty: only warn"
    )
    patience: PositiveInt = Field(
        default=12, description="skip: number of updates skipped in one spike before the next response in answers"
    )
    rewinds: PositiveInt = Field(default=5, description="number of times that a run may rewind or lower its learning rate")
    margin: NonNegativeInt = Field(
        default=2,
        description="rewind: a copy is used if it is at least this many steps older than the first loss or norm outside its band",
    )
    keep_every: PositiveInt = Field(
        default=20, description="rewind: steps between the copies in memory to which a run can return"
    )
    lower_by: PositiveFloat = Field(default=0.5, lt=1.0, description="lower: factor by which the learning rate is multiplied")
    lower_for: PositiveInt = Field(default=200, description="lower: number of updates for which the learning rate stays lower")


class LossScaleSpec(Spec):
    """Loss scale of fp16 (`train.precision = "fp16"`): a power of two by which the loss, and so the gradients, are multiplied."""

    initial: PositiveInt = Field(default=65_536, le=2**40, description="scale of the first step, a power of two")
    growth_interval: PositiveInt = Field(
        default=1000, le=2**20, description="number of updates without an overflow after which the scale doubles"
    )
    hysteresis: PositiveInt = Field(
        default=2,
        le=2**10,
        description="the scale is halved at the overflow with this number since the scale last grew, and at each later overflow",
    )
    floor: PositiveInt = Field(
        default=1, le=2**40, description="smallest scale, a power of two; an overflow does not lower the scale further"
    )


class BranchSpec(Spec):
    """Origin of a branch: the whole state of another run, from one of its checkpoints. `megalith train --branch` fills it in."""

    checkpoint: str = Field(description="folder of the checkpoint")
    updates: NonNegativeInt = Field(description="number of updates before the checkpoint")
    samples: NonNegativeInt = Field(description="samples consumed before the checkpoint")
    steps: PositiveInt = Field(
        description="train.steps of the run that saved the checkpoint, which is the length of that run's schedule"
    )
    decay: NonNegativeInt = Field(
        default=0,
        description="number of updates after the checkpoint in which the learning rate falls to its lowest value; 0: the "
        "original schedule continues",
    )
    skip: NonNegativeInt = Field(default=0, description="number of samples after the checkpoint that the branch skips")


class ValidationSpec(Spec):
    """Loss on the held-out part of each domain."""

    every: NonNegativeInt = Field(default=0, description="steps between validations; 0: never")
    samples: PositiveInt = Field(default=64, description="number of held-out sequences read from each domain")


class CheckpointSpec(Spec):
    """When checkpoints are saved and how many are kept."""

    every: NonNegativeInt = Field(default=0, description="steps between saves; 0: only at the end")
    keep: PositiveInt = Field(default=2, description="newest checkpoints kept")
    asynchronous: bool = Field(default=True, description="save a copy of the state in the background while training continues")


SERVED = ("wandb", "trackio", "mlflow")
"""Experiment trackers with a server. A tracker's key in `[log]`, its package and Megalith's extra have the same name."""
SINKS = ("tensorboard", *SERVED)
"""All programs to which a run can log besides its event log."""


class LogSpec(Spec):
    """Output in addition to the event log."""

    tensorboard: bool = Field(default=False, description="also log to TensorBoard (needs the extra `tensorboard`)")
    wandb: bool = Field(default=False, description="also log to Weights & Biases (needs the extra `wandb`)")
    trackio: bool = Field(default=False, description="also log to trackio (needs the extra `trackio`)")
    mlflow: bool = Field(default=False, description="also log to MLflow (needs the extra `mlflow`)")
    project: str = Field(
        default="megalith",
        min_length=1,
        description="name of the project (mlflow: experiment) to which wandb, trackio and mlflow assign the run",
    )
    online: bool = Field(
        default=False,
        description="let wandb, trackio and mlflow send data to their servers; false: they write only to the run folder",
    )


class LaunchSpec(Spec):
    """Time limits and threads of ranks."""

    start_timeout: PositiveFloat = Field(default=120.0, description="seconds within which all ranks must connect at start-up")
    timeout: PositiveFloat = Field(
        default=600.0,
        description="seconds that a collective, or a phase without a known duration, may take. A timeout above 600 also "
        "increases, in proportion, the defaults of launch.start_timeout, fleet.node_timeout, fleet.hang_floor and "
        "fleet.wait_limit",
    )
    threads: NonNegativeInt = Field(
        default=0, description="compute threads of each rank; 0: this machine's cores divided by its ranks"
    )


FOLLOWING: dict[type[Spec], tuple[str, ...]] = {
    LaunchSpec: ("start_timeout",),
    FleetSpec: ("node_timeout", "hang_floor", "wait_limit"),
}
"""Limits that scale with `launch.timeout` unless they are set: a doubled timeout doubles their defaults. A `launch.timeout` below
its default does not shrink these limits, because the longest normal silence on a busy machine stays the same."""


class RunSpec(Spec):
    """A whole run. What a run computes depends only on the keys of this class."""

    name: str = "run"
    cluster: str = Field(
        default="local",
        description="accelerator of the run, for MFU, predictions and checks of memory: a name from the catalogue, or `local` to detect it",
    )
    model: Model
    plan: Plan = Plan()
    data: DataSpec
    train: TrainSpec
    precision: PrecisionSpec = PrecisionSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    sites: SitesSpec | None = None
    branch: BranchSpec | None = None
    stability: StabilitySpec = StabilitySpec()
    loss_scale: LossScaleSpec = LossScaleSpec()
    validation: ValidationSpec = ValidationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    log: LogSpec = LogSpec()
    alerts: AlertsSpec = AlertsSpec()
    launch: LaunchSpec = LaunchSpec()
    fleet: FleetSpec = Field(default=FleetSpec(), validate_default=True)

    @field_validator("launch", "fleet", mode="after")
    @classmethod
    def _follow_the_timeout(cls, table: Spec, info: ValidationInfo) -> Spec:
        launch = table if isinstance(table, LaunchSpec) else info.data.get("launch")  # not there where it is wrong itself
        times = launch.timeout / LaunchSpec.model_fields["timeout"].default if isinstance(launch, LaunchSpec) else 1.0
        unset = [name for name in FOLLOWING[type(table)] if name not in table.model_fields_set]
        return table.model_copy(update={name: times * getattr(table, name) for name in unset}) if times > 1.0 else table

    @property
    def microbatches(self) -> int:
        """Number of microbatches that a data rank computes in one step."""
        return own_batch(self) // (self.plan.data * self.plan.microbatch)

    @property
    def ranks(self) -> int:
        """Number of ranks of the plan; in a run with sites, those of one site."""
        return self.plan.ranks

    @property
    def own_parts(self) -> dict[str, str]:
        """The names of the user's own parts in the run, by their keys in the run file."""
        optimizer, train = self.optimizer, self.train
        named = {"data.source": self.data.source, "train.loss": train.loss, "optimizer.kind": optimizer.kind}
        named |= {f"train.callbacks.{number}": name for number, name in enumerate(train.callbacks)}
        named |= {f"optimizer.groups.{number}.kind": group.kind for number, group in enumerate(optimizer.groups)}
        named |= named_by(self.model)
        return {key: name for key, name in named.items() if name and own.is_own(name)}
