"""How a run's optimizer updates each parameter: the optimizer's kind, the learning rate, the weight decay, and the formats. No
torch."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from megalith.spec.families.parametrization import is_hidden
from megalith.spec.model import AttentionSpec, Growth, LatentAttentionSpec, ModelSpec
from megalith.spec.numbers import PRECISIONS
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.plan import Plan, StateSpec
from megalith.spec.run import GroupSpec, OptimizerSpec, RunSpec
from megalith.spec.sizes import Parameter, model_parameters
from megalith.spec.state import LOWER, MASTER, WIDE, Moments, Slot, bytes_each, kept

NOT_MATRICES = ("head.output.weight", "*router.weight", "*shared_gate.weight")
"""Names of parameters that are not updated as matrices, because each row computes the score of one token or expert, independently
of other rows."""


class Treatment(NamedTuple):
    """Settings with which one parameter is updated."""

    kind: str
    """A row of `spec.optimizers`."""
    lr: float = 1.0
    """Factor by which the learning rate is multiplied."""
    weight_decay: float = 0.0
    eps: float = 1.0
    """Factor by which the optimizer's epsilon is multiplied."""
    moments: Moments = WIDE
    """Number format of the parameter's moments."""
    master: str = "fp32"
    """Form of the parameter's master weights (`spec.state.LOWER`)."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Tensors kept for the parameter between two updates."""
        lower = (LOWER[self.master],) if self.master in LOWER else ()
        return (*lower, *self.moments.of(OPTIMIZERS[self.kind].slots))


def treatments(model: ModelSpec, optimizer: OptimizerSpec) -> dict[str, Treatment]:
    """Return the treatment of each parameter, by its name in the whole model."""
    return {name: treatment(each, optimizer, model.scaling) for name, each in model_parameters(model).items()}


def treatment(parameter: Parameter, optimizer: OptimizerSpec, scaling: Growth) -> Treatment:
    """Return the treatment of a parameter, which must have its name in the whole model. `scaling`: the model's sizes relative to
    the base sizes."""
    group = group_of(parameter.name, optimizer) or GroupSpec(pattern="*")
    kind = group.kind or optimizer.kind
    rest = OPTIMIZERS[kind].rest
    usual = optimizer.weight_decay if len(parameter.shape) >= 2 else 0.0
    found = Treatment(
        kind=kind if rest is None or is_matrix(parameter) else rest,
        lr=group.lr,
        weight_decay=usual if group.weight_decay is None else group.weight_decay,
        moments=optimizer.small if takes_small_moments(parameter, optimizer) else WIDE,
        master="split16" if optimizer.master == "split8" and len(parameter.shape) < 2 else optimizer.master,
    )
    return found if scaling == Growth() else _scaled(found, parameter, scaling)


def _scaled(usual: Treatment, parameter: Parameter, scaling: Growth) -> Treatment:
    power = (OPTIMIZERS[usual.kind].width or 0.0) if is_hidden(parameter) else 0.0
    factor, deep = scaling.width**power, scaling.depth if parameter.name.startswith("blocks.") else 1.0
    return usual._replace(lr=usual.lr * factor, weight_decay=usual.weight_decay / factor, eps=1 / (scaling.width * deep))


def group_of(name: str, optimizer: OptimizerSpec) -> GroupSpec | None:
    """Return the last group whose pattern matches a parameter's whole name; None if no group does."""
    return next((each for each in reversed(optimizer.groups) if fnmatchcase(name, each.pattern)), None)


def is_matrix(parameter: Parameter) -> bool:
    """Return True if the parameter is a linear map from vectors to vectors, or one such map per expert, so that orthogonalising
    it makes sense."""
    outside = any(fnmatchcase(parameter.name, pattern) for pattern in NOT_MATRICES)
    return parameter.role in ("matrix", "experts") and not outside


def takes_small_moments(parameter: Parameter, optimizer: OptimizerSpec) -> bool:
    """Return True if the parameter's moments have the format `optimizer.moments` instead of fp32: for matrices and experts with
    enough elements. Embeddings have fp32 moments, because most rows have no gradient in a step."""
    return parameter.role in ("matrix", "experts") and parameter.numel >= optimizer.moment_least


def kinds(optimizer: OptimizerSpec) -> tuple[str, ...]:
    """Return the names of all optimizers that a run uses, beginning with `optimizer.kind`."""
    named = [optimizer.kind, *(group.kind for group in optimizer.groups if group.kind)]
    found = (kind for name in named for kind in (name, OPTIMIZERS[name].rest) if kind)
    return tuple(dict.fromkeys(found))


def rows_in_tiles(model: ModelSpec, plan: Plan, used: Iterable[str], *, tile: int) -> int:
    """Return the number of a rank's rows of the embedding and of the output, if these tables are read in tiles of `tile` rows and never
    gathered (`parallel.tables`); otherwise 0. `used`: the optimizers of the tables."""
    rows, whole = model.embedding.vocab // plan.tensor, any(OPTIMIZERS[kind].unit != "element" for kind in used)
    return rows if plan.cuts_tables and not whole and not model.head.tied and 0 < tile < rows else 0


def table_kinds(optimizer: OptimizerSpec) -> tuple[str, ...]:
    """Return the names of the optimizers that update the embedding and the output."""
    groups = (group_of(name, optimizer) for name in ("embedding.weight", "head.output.weight"))
    named = [(group and group.kind) or optimizer.kind for group in groups]
    return tuple(OPTIMIZERS[kind].rest or kind for kind in named)  # neither is updated as a matrix


def why_not_ahead(plan: Plan, used: Iterable[str], *, qk_clip: float = 0.0) -> str:
    """Return the key of the run file, with its value, because of which state off the device is not updated while the next forward computes;
    empty if it is. `used`: the optimizers of the run."""
    whole = next((kind for kind in used if OPTIMIZERS[kind].unit != "element"), None)
    if plan.post_validation:
        return "plan.post_validation = true"
    if plan.state.release:
        return "plan.state.release = true"
    if qk_clip:  # weights of heads change after the update
        return f"optimizer.qk_clip = {qk_clip:g}"
    return f'optimizer.kind = "{whole}"' if whole else ""


def can_undo_on_disk(state: StateSpec, precision: str, master: str) -> bool:
    """Return True if all that an update changes is on disk, in slots of which the previous state keeps its own, so that an update can be
    undone without copies. `master`: the run's `optimizer.master`."""
    narrow = PRECISIONS[precision].compute.name != MASTER.number
    return state.optimizer == "disk" and state.share == 1 and narrow and master not in LOWER


def copied_each_step(spec: RunSpec) -> bool:
    """Return True if the state in memory is copied after each step, which waits for the whole update."""
    return spec.fleet.recover and spec.fleet.memory_every == 1 and spec.sites is None


def exact_clipping(spec: RunSpec) -> str:
    """Describe how the run clips exactly although the norm is known late: when it updates, and how it undoes a wrong update. Empty if all
    parts are updated on the device once the norm is known."""
    plan, optimizer = spec.plan, spec.optimizer
    undo = f"copies of {bytes_each([*masters_of(optimizer), *slots_of(optimizer)]):g} bytes a parameter"
    if plan.state.optimizer == "disk" and plan.state.share == 1:
        undo = "the slots on disk that are not in use"
    if plan.state.release and can_undo_on_disk(plan.state, spec.train.precision, optimizer.master):
        return f"each part is updated inside the backward, before the norm is known; {undo} undo it, and a clipped step is computed again"
    if plan.state.release:
        return "each step is computed twice: first only the norm is measured, then each part is updated inside the backward"
    if plan.post_validation:
        return f"weights are updated before the norm is known, and validated in the next step; {undo} undo a wrong update"
    if not plan.state.away:
        return ""
    waits = "the update waits for the norm"
    if reason := why_not_ahead(plan, kinds(optimizer), qk_clip=optimizer.qk_clip):
        return f"{waits}, and ends before the next step begins, because {reason} needs all parts at once"
    if plan.state.optimizer == "host" and copied_each_step(spec):
        return f"{waits}, and ends before the next step begins, because fleet.memory_every = 1 copies the state after each step"
    return f"{waits}, then runs while the next forward computes; an update before the norm would need {undo} to undo it"


def amplifies(optimizer: OptimizerSpec) -> bool:
    """Return True if rounding in a gradient can visibly change a later update: because the update rule amplifies it, or because
    an 8- or 16-bit moment may round to another number."""
    return optimizer.moments != "fp32" or any(OPTIMIZERS[kind].amplifies for kind in kinds(optimizer))


def slots_of(optimizer: OptimizerSpec) -> tuple[Slot, ...]:
    """Return the optimizer's slots for a large matrix, as nearly all of a model's elements are in large matrices."""
    return optimizer.small.of(OPTIMIZERS[optimizer.kind].slots)


def masters_of(optimizer: OptimizerSpec) -> tuple[Slot, ...]:
    """Return the slots that keep a large matrix's master weights in addition to its compute weights."""
    return (LOWER.get(optimizer.master, MASTER),)


def kept_of(optimizer: OptimizerSpec, compute: str, *, gradients: str = "fp32", released: bool = False) -> str:
    """Return the bytes of state per element of a large matrix, as text with all terms of the sum. `compute`: the format of the
    compute weights; if it is fp32, the master weights are the compute weights. `gradients`: the format in which gradients are
    added up; `released`: True if gradients are freed inside the backward, and so do not count."""
    words = {"compute": "compute", "weights": "master", "lower": "correction", "gradients": "gradient"}
    found: dict[str, float] = {}
    for slot in kept(compute, slots_of(optimizer), master=optimizer.master, gradients=gradients):
        if (slot.name != "compute" or compute != MASTER.number) and not (released and slot.category == "gradients"):
            word = words.get(slot.name, "moments")
            found[word] = found.get(word, 0.0) + bytes_each([slot])
    return f"{sum(found.values()):.4g} bytes ({' + '.join(f'{word} {size:.4g}' for word, size in found.items())})"


class ParameterSet(NamedTuple):
    """Parameters of a model that are updated in the same way."""

    pattern: str
    """Pattern of the group that matches the parameters; empty: no group."""
    treatment: Treatment
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        """The number of elements of these parameters."""
        return sum(each.numel for each in self.parameters)


def summary(model: ModelSpec, optimizer: OptimizerSpec) -> list[ParameterSet]:
    """Return a model's parameters in sets with the same group and treatment; parameters without a group come last."""
    order = {each.pattern: number for number, each in enumerate(optimizer.groups)}
    found: dict[tuple[str, Treatment], list[Parameter]] = {}
    for each in model_parameters(model).values():
        group = group_of(each.name, optimizer)
        found.setdefault((group.pattern if group else "", treatment(each, optimizer, model.scaling)), []).append(each)
    rows = [ParameterSet(pattern, treated, tuple(parameters)) for (pattern, treated), parameters in found.items()]
    return sorted(rows, key=lambda row: order.get(row.pattern, len(order)))


Runs: TypeAlias = tuple[tuple[int, int], ...]
"""A set of rows of a parameter, as contiguous ranges: the first row and the number of rows of each range."""


def true_matrices(parameter: Parameter, *, split_heads: bool) -> tuple[Runs, ...]:
    """Return the rows of each matrix that is stacked in a parameter, or in each of its experts. Latent attention stacks several
    matrices in one parameter: the down-projections to keys and values and to rotated keys, and the up-projections to each head's
    keys and values. With `split_heads`, the rows of each head are a separate matrix.
    """
    rows, heads = parameter.shape[-2], parameter.heads
    sizes = parameter.stacked or (rows // heads,)
    found: list[Runs] = []
    for number, size in enumerate(sizes):
        runs = tuple((head * sum(sizes) + sum(sizes[:number]), size) for head in range(heads))
        found += [(run,) for run in runs] if split_heads else [runs]
    return tuple(found)


class Rows(NamedTuple):
    """Rows of one head in a weight, or elements of one head in a bias. Each of `runs` is a number of rows and an exponent p;
    QK-clip multiplies these rows by f^p, where f is the head's factor."""

    runs: tuple[tuple[int, float], ...]

    @property
    def size(self) -> int:
        """The number of rows of a head."""
        return sum(rows for rows, _ in self.runs)


class Heads(NamedTuple):
    """One layer of attention."""

    name: str
    """Name of the attention layer in the whole model."""
    queries: int
    keys: int
    """Number of key heads; queries / keys query heads share each of them."""
    rows: dict[str, Rows]
    """The rows of a head that its factor scales in each parameter that computes queries or keys, by the parameter's name in the
    whole model."""


def heads_of(model: ModelSpec) -> list[Heads]:
    """Return all attention layers to which QK-clip applies, in order: those that do not normalise queries and keys.

    A factor f of a head's scores is split as in QK-clip (Kimi K2, arXiv:2507.20534, section 2.1): queries and keys are each
    multiplied by sqrt(f). A key that several query heads share is not scaled, and their queries are multiplied by f instead: in
    grouped-query attention, and for the rotated channels of latent attention.
    """
    return [found for name, attention in attentions(model) if (found := _heads(name, attention)) is not None]


def attentions(model: ModelSpec) -> Iterator[tuple[str, AttentionSpec | LatentAttentionSpec]]:
    """Yield the name in the whole model and the spec of each attention layer, in order."""
    for number, block in enumerate(model.blocks):
        if block.attention is not None:
            yield f"blocks.{number}.attention", block.attention
    ahead = model.head.ahead
    if ahead is not None and ahead.block.attention is not None:
        yield from ((f"head.ahead.{depth}.block.attention", ahead.block.attention) for depth in range(ahead.depth))


def _heads(name: str, attention: AttentionSpec | LatentAttentionSpec) -> Heads | None:
    if isinstance(attention, LatentAttentionSpec):
        queries = f"{name}.q.weight" if attention.q_rank is None else f"{name}.q_up.weight"
        nope, rope, values = attention.nope_dim, attention.rope_dim, attention.v_dim
        rows = {queries: Rows(((nope, 0.5), (rope, 1.0))), f"{name}.kv_up.weight": Rows(((nope, 0.5), (values, 0.0)))}
        return Heads(name, attention.heads, attention.heads, rows)
    if attention.qk_norm is not None:
        return None
    alone = attention.heads == attention.kv_heads
    powers = {"q": 0.5, "k": 0.5} if alone else {"q": 1.0}
    ends = ("weight", "bias") if attention.bias else ("weight",)
    rows = {f"{name}.{one}.{end}": Rows(((attention.head_dim, power),)) for one, power in powers.items() for end in ends}
    return Heads(name, attention.heads, attention.kv_heads, rows)
