"""Additional cost of an update, compared with one pass over the state: moments of another update rule, updates of whole matrices, and
messages for these matrices. No torch."""

from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from megalith.cost import network
from megalith.cost.time import Setting, line
from megalith.cost.workload import Workload
from megalith.mesh import Mesh
from megalith.spec.model import BlockSpec, Growth
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import OptimizerSpec
from megalith.spec.sizes import Parameter, block_parameters, part_parameters
from megalith.spec.state import GRADIENT, LOWER, PIECES, Category, Moments, bytes_each
from megalith.spec.treatment import is_matrix, slots_of, treatment

if TYPE_CHECKING:
    from megalith.cost.memory import RankParts
    from megalith.cost.parts import Parts

WIDTH = 2
"""Bytes of a number of a matrix in messages and in the iteration: bf16, the default."""
WIDE_BYTES = 4
"""Bytes of a number in fp32."""
ROUNDING = {"fp8": 33, "bf16": 15, "int16": 12, "int8": 23}
"""Stored format -> peak bytes of temporary tensors while one number is rounded to it: a moment (`kernels.moments`), or the lower half of
a master weight (`kernels.halves`)."""
JOINING = 12
"""Bytes of the fp32 number into which two halves are joined, and of the temporary tensors for it."""
ITERATIONS = 5
"""Default number of steps of the iteration that orthogonalises a matrix."""


class Matrices(NamedTuple):
    """The matrices of a block that an update needs whole."""

    numbers: int
    """The number of elements of the matrices."""
    work: float
    """FLOPs of the iteration on all these matrices."""
    largest: tuple[int, int]
    """Rows and columns of the matrix whose iteration takes the most FLOPs."""


def matrices(block: BlockSpec, dim: int) -> Matrices:
    """Return the matrices of a block of width `dim`."""
    return _kept_matrices(block, dim)  # pyright: ignore[reportArgumentType]  # frozen specs have hashes, which pyright does not see


@lru_cache(maxsize=1024)
def _kept_matrices(block: BlockSpec, dim: int) -> Matrices:
    mine = [one for one in block_parameters(block, dim) if is_matrix(one)]
    sizes = [(one.shape[-2], one.shape[-1], one.numel // (one.shape[-2] * one.shape[-1])) for one in mine]
    numbers = sum(one.numel for one in mine)
    largest = max(((rows, columns) for rows, columns, _ in sizes), key=lambda size: work(*size), default=(0, 0))
    return Matrices(numbers, sum(work(m, n) * times for m, n, times in sizes), largest)


def work(rows: int, columns: int) -> float:
    """Return the FLOPs of the iteration on one matrix: each step has two products that involve its long side, and one product of its
    short sides only."""
    least, most = sorted((rows, columns))
    return ITERATIONS * (4.0 * least * least * most + 2.0 * least**3)


def rest_bytes(workload: Workload, parts: "Parts", here: "RankParts", category: Category = "optimizer") -> float:
    """Return the bytes on one rank in addition to the usual state: for parameters that another rule updates, and for small parameters whose
    moments stay in fp32; or, for `category` = "weights", for vectors that keep more bits of split master weights."""
    one_rule = OPTIMIZERS[workload.optimizer].rest is None and workload.moments.number == "fp32"
    nothing = one_rule if category == "optimizer" else workload.master != "split8"
    if nothing or workload.frozen or workload.software_profile.moment_bytes is not None:
        return 0.0
    model, how = workload.model, _Kept(workload.optimizer, workload.moments, workload.master, category)
    each = {parameter.role: how.beyond(parameter) for parameter in part_parameters(model, "embedding")}
    held = float(sum(_beyond_block(_block(workload, kind), model.dim, how) * n for kind, n in here.blocks))
    held += parts.embedding.weights * each["table"] if here.embedding or (here.head and parts.ahead) else 0
    if here.head:
        norm = [one for one in part_parameters(model, "head") if one.name.startswith("norm.")]
        held += sum(one.numel * how.beyond(one) for one in norm)
        if not (model.head.tied and here.embedding):
            output = Parameter("head.output.weight", (model.embedding.vocab, model.dim), "table" if model.head.tied else "matrix")
            held += (parts.head.weights - sum(one.numel for one in norm)) * how.beyond(output)
    return held / _shards(workload)


class _Kept(NamedTuple):
    """The rules for the state of a category that is kept for a parameter."""

    kind: str
    moments: Moments
    master: str
    category: Category

    def beyond(self, parameter: Parameter) -> float:
        """Additional bytes for each element of a parameter, compared with the usual state."""
        optimizer = _optimizer(self.kind, self.moments, self.master)
        slots = (slot for slot in treatment(parameter, optimizer, Growth()).slots if slot.category == self.category)
        return bytes_each(slots) - bytes_each(slots_of(optimizer) if self.category == "optimizer" else [LOWER[self.master]])


@lru_cache(maxsize=1024)
def _optimizer(kind: str, moments: Moments, master: str = "fp32") -> OptimizerSpec:
    small = {"moments": moments.number, "moment_block": moments.block, "moment_least": moments.least}
    return OptimizerSpec.model_validate({"kind": kind, "master": master} | small)


def _beyond_block(block: BlockSpec, dim: int, how: _Kept) -> float:
    return _kept_beyond(block, dim, how)  # pyright: ignore[reportArgumentType]  # see `matrices`


@lru_cache(maxsize=1024)
def _kept_beyond(block: BlockSpec, dim: int, how: _Kept) -> float:
    """Additional bytes for all elements of a block, compared with the usual state."""
    return sum(one.numel * how.beyond(one) for one in block_parameters(block, dim))


def home_bytes(workload: Workload, here: "RankParts") -> float:
    """Return the bytes of an update on the rank with the most whole matrices: shares and send buffers, receive buffers and
    the matrices joined from them, and the iteration's buffers for the largest matrix."""
    found = _whole(workload, here)
    if found is None:
        return 0.0
    share, (rows, columns) = found.numbers / _ranks(workload), found.largest
    home = max(share, rows * columns)
    return WIDTH * (2 * share + 2 * home + 2 * rows * columns + 2 * min(rows, columns) ** 2)


def opened_bytes(workload: Workload) -> float:
    """Return the largest temporary bytes of an update on the device that expands a piece of a parameter's state from few bits
    to fp32, and rounds it again."""
    wide = workload.moments.number == "fp32" and not workload.halved and workload.gradient_bytes == bytes_each([GRADIENT])
    if wide or workload.frozen or not workload.software_profile.ours or workload.plan.state.away == 1:
        return 0.0
    plan, mesh = workload.plan, Mesh.of(workload.plan)
    dense = plan.tensor * (workload.shards[0] if plan.zero else 1)
    experts = mesh.experts[3] * mesh.experts[4] * (workload.shards[1] if plan.zero else 1)
    most = PIECES[workload.cluster.accelerator.kind] if OPTIMIZERS[workload.optimizer].unit == "element" else inf
    how = workload.optimizer, workload.moments, workload.master, workload.gradient_bytes
    parts = {part_parameters(workload.model, part) for part in workload.model.part_names}
    opened = (each for part in parts for each in _opened(part, *how))
    return max(each * min(most, one.numel / (experts if one.role == "experts" else dense)) for one, each in opened)


@lru_cache(maxsize=1024)
def _opened(
    parameters: tuple[Parameter, ...], kind: str, moments: Moments, master: str, gradient_bytes: float
) -> tuple[tuple[Parameter, float], ...]:
    """Return each parameter with the bytes per number that its update takes to expand state to fp32 and round it again."""
    optimizer, found = _optimizer(kind, moments, master), []
    gradient = 0 if gradient_bytes == WIDE_BYTES else WIDE_BYTES
    for parameter in parameters:
        slots = [slot for slot in treatment(parameter, optimizer, Growth()).slots if slot.number in ROUNDING]
        near = WIDE_BYTES * sum(slot.category == "optimizer" for slot in slots)
        opened, halved = gradient + WIDE_BYTES * len(slots), any(slot.category == "weights" for slot in slots)
        rounds = max((ROUNDING[slot.number] for slot in slots), default=0)
        following = near + (JOINING if halved else gradient)  # the next piece is opened while this one is still held
        found.append((parameter, opened + max(rounds, following)))
    return tuple(found)


def seconds(workload: Workload, setting: Setting, here: "RankParts") -> float:
    """Return the seconds that whole matrices add to an update: the iteration on the rank with the most matrices, and two
    all-to-alls."""
    found = _whole(workload, here)
    if found is None:
        return 0.0
    ranks = _ranks(workload)
    iteration = max(found.work / ranks, work(*found.largest)) / (setting.accelerator.wide * setting.device.wide)
    if ranks == 1:
        return iteration
    share = max(found.numbers / ranks, found.largest[0] * found.largest[1])
    holders = line("dp", workload)
    way = network.Line(workload.shards[0] * workload.plan.tensor, 1 if workload.plan.tensor > 1 else holders.stride)
    return iteration + 2 * network.all_to_all(WIDTH * share, way, setting.wires)


def _whole(workload: Workload, here: "RankParts") -> Matrices | None:
    """All matrices of a pipeline rank; None if the optimizer needs no whole matrices."""
    if OPTIMIZERS[workload.optimizer].unit != "matrix" or workload.frozen or not here.blocks:
        return None
    each = [(matrices(_block(workload, kind), workload.model.dim), times) for kind, times in here.blocks]
    return Matrices(
        sum(one.numbers * times for one, times in each),
        sum(one.work * times for one, times in each),
        max((one.largest for one, _ in each), key=lambda size: work(*size)),
    )


def _block(workload: Workload, kind: int) -> BlockSpec:
    return workload.model.blocks[kind]


def _shards(workload: Workload) -> int:
    return workload.shards[0] if workload.plan.zero else 1


def _ranks(workload: Workload) -> int:
    """The number of ranks that together hold one copy of a pipeline rank's state."""
    mesh = Mesh.of(workload.plan)
    return mesh.state[2] * mesh.state[3]
