"""A part that a trace splits equals the part that the trainer's own `Builder` makes, for every family and every class of the
layout table.

The trainer's part is rank 0's of a fake world, on the meta device. Both run the same kernels. The tests compare the local shapes of
all parameters, the matrix products, the bytes kept for backward, and every collective and message by phase, axis, kind and bytes. A
trace leaves out the copies that pack and unpack messages, and the expert counts, which are a few bytes.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork

from megalith.cost import trace
from megalith.cost.cores import FusedCore
from megalith.cost.exchanges import split
from megalith.cost.other_software import swap_kernels
from megalith.cost.predicted import KINDS
from megalith.cost.profile import Layout, Profile
from megalith.cost.recorder import Recorder, bytes_of, leaves
from megalith.mesh import Mesh
from megalith.models.head import MtpModule
from megalith.models.stage import Stage
from megalith.parallel.apply import Builder
from megalith.parallel.context import ContextCore
from megalith.parallel.groups import Groups
from megalith.parallel.tensor import LAYOUT, Split
from megalith.prove import meter
from megalith.prove.fake import groups_of
from megalith.spec.families import read
from megalith.spec.families.llama import Llama
from megalith.spec.model import ModelSpec, MoeSpec
from megalith.spec.plan import Plan
from megalith.spec.presets import presets
from tests.models.families import DENSE

SEQ, MICROBATCH = 48, 2

SMALL = {known.values["family"]: read(known.values).small(layers=4, unit=4, heads_unit=4).build() for known in presets().values()}
"""A small model of each family."""

ODD = {name: model.build() for name, model in DENSE.items()} | {
    "few heads of keys, a vocabulary that does not divide": Llama(
        layers=1, dim=36, heads=8, kv_heads=2, head_dim=6, ffn=40, vocab=97, context=64
    ).build()
}
MODELS = SMALL | ODD
MIXTURES = [name for name, model in MODELS.items() if any(isinstance(block.mlp, MoeSpec) for block in model.blocks)]

TENSOR = [
    Plan(tensor=2, zero=0),
    Plan(tensor=4, zero=0, recompute="full"),
    Plan(tensor=2, sequence=False, zero=0, recompute="selective", recompute_parts=("mlp.activation",)),
    Plan(data=2, tensor=2, zero=0, recompute="selective", recompute_parts=("attend", "mlp_norm")),
    Plan(tensor=2, zero=0, recompute="selective", recompute_parts=("attention.up", "mlp.experts.activation")),
]
EXPERT = [
    Plan(data=4, expert=4, zero=0),
    Plan(data=2, tensor=2, expert=2, expert_tensor=2, zero=0),
    Plan(data=2, tensor=2, expert=2, sequence=False, zero=0),
]
CONTEXT = [
    Plan(context=4, zero=0),
    Plan(context=4, context_method="gather", zero=0),
    Plan(context=4, context_method="gather", ulysses=2, zero=0, recompute="full"),
    Plan(context=4, ulysses=4, zero=0),
    Plan(context=4, ulysses=2, zero=0, recompute="full"),
    Plan(context=2, tensor=2, zero=0),
]


def _words(plan: Plan) -> str:
    return " ".join(f"{key}={value}" for key, value in plan.model_dump(exclude_defaults=True).items())


Sends = Counter[tuple[str, str, str, float]]
"""(phase, axis, kind, bytes of the whole tensor) -> calls."""


class Found(NamedTuple):
    """A part on a rank."""

    shapes: dict[str, tuple[int, ...]]
    profile: Profile
    sends: Sends


class Listening(Recorder):
    """Collects the messages of a rank in a fake world without sending them."""

    def __init__(self, width: int, groups: Groups) -> None:
        super().__init__(width)
        self.axes, self.sends = meter.Axes(groups), Sends()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        self._hear(
            meter.KINDS[name], self.axes.of(group), [leaf for arg in args for leaf in leaves(arg) if isinstance(leaf, Tensor)]
        )
        work = FakeWork().boxed()  # pyright: ignore[reportAttributeAccessIssue]
        return work if name == "alltoall_base_" else (args[0], work)

    def messages(self, operations: list[dist.P2POp]) -> list[Any]:
        """Replaces `dist.batch_isend_irecv`, which does not support the meta device."""
        sent = [operation.tensor for operation in operations if operation.op is dist.isend]
        self._hear("send", ("context",), sent)
        return []

    def _hear(self, kind: str, axes: tuple[str, ...], tensors: list[Tensor]) -> None:
        if not all(tensor.is_floating_point() for tensor in tensors):
            return
        wanted = ("expert", "expert_tensor") if kind == "all-to-all" and "context" not in axes else ("tensor", "context")
        axis = next(axis for axis in wanted if axis in axes)
        self.sends[self.phase, axis, kind, max(map(bytes_of, tensors))] += 1


def _layout(plan: Plan, width: int) -> Layout:
    """The trainer's own software: plain PyTorch, and a loss that is computed a few rows at a time."""
    recompute = ",".join(plan.recompute_parts) if plan.recompute == "selective" else plan.recompute
    return Layout(
        MICROBATCH, SEQ, tensor=plan.tensor, sequence=plan.sequence, context=plan.context, ulysses=plan.ulysses,
        context_method=plan.context_method, expert=plan.expert, expert_tensor=plan.expert_tensor, recompute=recompute, fused=False,
        loss="chunked", width=width, kept=width,
    )  # fmt: skip


def traced(model: ModelSpec, part: int, layout: Layout) -> Found:
    """Return part `part` as the planner sees it."""
    if part == 0:
        profile = trace.trace_embedding(model, layout)
    elif part == len(model.part_names) - 1:
        profile = trace.trace_head(model, layout)
    else:
        profile = trace.trace_block(model, part - 1, layout)
    with torch.device("meta"):
        ((_, module),) = Stage(model, part, part + 1).parts()
        split(module, Recorder(layout.width), layout)
    sends: Sends = Counter()
    for one in profile.exchanges:
        sends[one.phase, one.axis, "ring" if one.kind == "ring" else KINDS[one.kind], one.size] += one.times
    return Found(_shapes(module), profile, sends)


def trained(model: ModelSpec, part: int, plan: Plan, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Found:
    """Return part `part` as the trainer builds it, run with the kernels of a trace."""
    number = part - 1 if 0 < part < len(model.part_names) - 1 else None
    with ExitStack() as stack:
        stack.enter_context(groups_of(plan.ranks, rank=0))
        groups = Groups.build(Mesh.of(plan), device="cpu")
        stack.enter_context(torch.device("meta"))
        stack.enter_context(trace._default(layout.width))
        recorder = Listening(layout.width, groups)
        monkeypatch.setattr(dist, "batch_isend_irecv", recorder.messages)
        precision = "fp32" if layout.width == 4 else "bf16"
        meta = torch.device("meta")
        with pytest.MonkeyPatch.context() as patch:
            if number is not None:  # recomputation wraps the kernels that it finds: a trace's kernels must be set before
                patch.setattr("megalith.parallel.apply.apply_recompute", _swapping(model, number, recorder, layout))
            runner = Builder(model, plan=plan, groups=groups, precision=precision, device=meta, seed=None).build(part, part + 1)
        (module,) = runner.parts
        if number is None:
            swap_kernels(module, layout)
        shapes = _shapes(module)
        inputs = None if part == 0 else trace._activation(layout, model.dim)
        return Found(shapes, trace._run(runner.stage, module, recorder, layout, model, inputs=inputs, block=None), recorder.sends)


def _swapping(model: ModelSpec, number: int, recorder: Recorder, layout: Layout) -> Callable[..., None]:
    from megalith.parallel.recompute import apply_recompute

    def swap(block: nn.Module, *args: Any, **kwargs: Any) -> None:
        core = getattr(getattr(block, "attention", None), "core", None)
        if not isinstance(core, ContextCore):
            trace._swap_mixers(block, model.blocks[number], recorder, layout)
        elif core.groups.outer.size == 1:
            core.causal = FusedCore(lambda *_: None)  # pyright: ignore[reportAttributeAccessIssue]
        swap_kernels(block, layout)
        apply_recompute(block, *args, **kwargs)

    return swap


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """A trace's kernel for Mamba-2 contains the core that it replaces."""
    named = module.named_parameters(remove_duplicate=False)
    return {name.replace(".core.core.", ".core."): tuple(parameter.shape) for name, parameter in named}


def _bare(model: ModelSpec) -> ModelSpec:
    """Return the model without multi-token prediction, which a trace knows by its block, and without ties."""
    blocks = tuple(dict.fromkeys(model.blocks))
    return model.model_copy(update={"head": model.head.model_copy(update={"ahead": None, "tied": False}), "blocks": blocks})


def _agree(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch, *, width: int = 4, blocks_only: bool = False) -> list[Found]:
    """Assert that trace and trainer agree on all parts of a model; return the results of the traces."""
    model, layout, found = _bare(MODELS[name]), _layout(plan, width), []
    for part in range(blocks_only, len(model.part_names) - blocks_only):
        ours, theirs = traced(model, part, layout), trained(model, part, plan, layout, monkeypatch)
        assert ours.shapes == theirs.shapes
        assert ours.profile.saved == theirs.profile.saved - _orders(model, part, plan)
        if plan.context == 1:
            assert ours.sends == theirs.sends
            assert Counter(ours.profile.products) == Counter(theirs.profile.products)
            assert (ours.profile.weights, ours.profile.output) == (theirs.profile.weights, theirs.profile.output)
            assert ours.profile.expert_weights == theirs.profile.expert_weights
        else:
            assert _handed_on(ours.sends, plan) == _handed_on(theirs.sends, plan)
        found.append(ours)
    return found


def _orders(model: ModelSpec, part: int, plan: Plan) -> int:
    """Return the bytes that the trainer keeps and a trace does not: two integers for each received row if rows are sorted by expert."""
    mlp = model.blocks[part - 1].mlp if 0 < part < len(model.part_names) - 1 else None
    if (
        not isinstance(mlp, MoeSpec)
        or mlp.experts == plan.expert
        or plan.expert * plan.expert_tensor == 1
        or plan.recompute == "full"
    ):
        return 0
    tokens = MICROBATCH * SEQ // (plan.context * plan.tensor)
    return 2 * 8 * tokens * mlp.router.active * plan.expert_tensor


def _handed_on(sends: Sends, plan: Plan) -> dict[tuple[str, str, str], float]:
    """Return the bytes of messages and collectives in each phase. A ring passes its block on to all other ranks."""
    hops = plan.context // plan.ulysses - 1
    found: Counter[tuple[str, str, str]] = Counter()
    for (phase, axis, kind, size), times in sends.items():
        messages = kind in ("ring", "send")
        found[phase, axis, "send" if messages else kind] += times * size * (hops if kind == "ring" else 1)  # pyright: ignore
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("plan", TENSOR, ids=_words)
@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_rank_holds_computes_keeps_and_sends_the_same(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(found.sends for found in _agree(name, plan, monkeypatch))


@pytest.mark.parametrize("plan", EXPERT, ids=_words)
@pytest.mark.parametrize("name", MIXTURES)
def test_an_expert_rank_holds_computes_keeps_and_sends_the_same(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    sends = [send for found in _agree(name, plan, monkeypatch) for send in found.sends]
    assert "expert" in {axis for _, axis, _, _ in sends}


@pytest.mark.slow
@pytest.mark.parametrize("width", [4, 2], ids=["fp32", "bf16"])
@pytest.mark.parametrize("plan", CONTEXT, ids=_words)
@pytest.mark.parametrize(
    "name", ["llama", "palm", "gemma2", "deepseek", "bloom", "nemotron"]
)  # every kind of attention in any family
def test_a_context_rank_keeps_and_sends_the_same(name: str, plan: Plan, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sends = [send for found in _agree(name, plan, monkeypatch, width=width, blocks_only=True) for send in found.sends]
    assert "context" in {axis for _, axis, _, _ in sends}


def test_every_class_of_the_layout_table_is_compared() -> None:
    """Every class with a row in the table needs a model here. `MtpModule` itself is not traced, but its block is."""
    with torch.device("meta"):
        met = {type(module) for model in MODELS.values() for module in Stage(_bare(model)).modules()}
    assert set(LAYOUT) - {MtpModule} <= met


class Scaled(nn.Module):
    """A module of a new kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        return x * self.scale


def _sends_by_itself(module: nn.Module, split: Split, owner: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, out: dist.all_reduce(out, group=split.group) or out)


def test_a_style_that_sends_past_its_split_is_refused_by_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a new row of the table could send messages that no plan's cost includes."""
    monkeypatch.setitem(LAYOUT, Scaled, {"": _sends_by_itself})
    layout = _layout(Plan(tensor=2, zero=0), 4)
    with torch.device("meta"):
        part = nn.Sequential(Scaled())
        part[0].register_module("inner", nn.Identity())
        split(part, Recorder(4), layout)
        with pytest.raises(TypeError, match="allreduce_ reached a trace"), Recorder(4):
            part[0](torch.empty(2, 8, 64), None)


def test_a_class_without_a_row_is_refused_by_a_trace() -> None:
    with torch.device("meta"), pytest.raises(TypeError, match="covers the parameters of Scaled"):
        split(nn.Sequential(Scaled()), Recorder(4), _layout(Plan(tensor=2, zero=0), 4))
