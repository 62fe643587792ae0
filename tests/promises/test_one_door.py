"""Every matrix product with a weight goes through one interface, so a new recipe for products is one class and one row."""

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.kernels.multiply import OUTSIDE, Multiply
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.parallel.precision import RECIPES, apply_precision
from megalith.prove.compare import Recording, compare
from megalith.prove.parity import record, reference, shrink
from megalith.spec.families import FAMILIES, family_of
from megalith.spec.presets import presets
from megalith.spec.run import RunSpec
from tests.full import sampled
from tests.parallel.running import CPU, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

# --- the recipe ---


def rounded(x: Tensor) -> Tensor:
    """Round fp32 to 16 bits of mantissa, to nearest."""
    return ((x.view(torch.int32) + 64) & ~127).view(torch.float32)


class Rounded(Multiply):
    """Products of rounded factors."""

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        return super().fprop(rounded(x), rounded(weight), bias, **how)

    def dgrad(self, grad: Tensor, weight: Tensor, **how: Any) -> Tensor:
        return super().dgrad(rounded(grad), rounded(weight), **how)

    def wgrad(self, grad: Tensor, x: Tensor, **how: Any) -> Tensor:
        return super().wgrad(rounded(grad), rounded(x), **how)


class Silent(Rounded):
    """A recipe that gives weights no gradient, so that a gradient computed elsewhere shows."""

    def wgrad(self, grad: Tensor, x: Tensor, **how: Any) -> Tensor:
        return torch.zeros_like(super().wgrad(grad, x, **how))


# --- the witness ---

PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "convolution", "_grouped_mm", "_scaled_mm"}
    | {"_scaled_dot_product_flash_attention_for_cpu"}
)
LOOKUPS = frozenset({"embedding", "embedding_dense_backward"})
"""Operations that take rows of a table without multiplying."""


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters whose products must go through the interface, by name."""
    found = {}
    for path, module in model.named_modules():
        if type(module).__name__ not in OUTSIDE:
            found |= {f"{path}.{name}".lstrip("."): p for name, p in module.named_parameters(recurse=False) if p.dim() > 1}
    return found


@dataclass
class Seen:
    """The products of a rank, and their callers."""

    names: set[str]  # the number of its matrices
    through: dict[str, set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )  # product of the recipe -> matrices that used it
    past: list[str] = field(default_factory=list)  # products with a matrix that bypassed the interface
    elsewhere: set[str] = field(default_factory=set)  # classes whose forward multiplies something else


class Witness(TorchDispatchMode):
    """Sees every product, and tracks each matrix, its views, its copies and whatever else was computed from it."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        found = {name: matrix for model in models for name, matrix in matrices(model).items()}
        self.seen = Seen(set(found))
        self._names: dict[int, frozenset[str]] = {}  # storage -> the matrices from which it was computed
        self._kept: list[torch.UntypedStorage] = []  # keeps these alive, so that no other storage gets their address
        self._modules: list[str] = []
        for name, matrix in found.items():
            self._mark(matrix, frozenset({name}))

    def __enter__(self) -> "Witness":
        before = register_module_forward_pre_hook(lambda module, _: self._modules.append(type(module).__name__))
        after = register_module_forward_hook(self._left, always_call=True)
        self._hooks = before, after
        return super().__enter__()

    def _left(self, *_: Any) -> None:
        self._modules.pop()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made_of = frozenset().union(*(self._names.get(_storage(t), frozenset()) for t in _tensors((args, kwargs))))
        if name in PRODUCTS:
            product = _recipe_product()
            if product is None:
                self.seen.past += [f"{name} with {', '.join(sorted(made_of))}"] if made_of else []
                self.seen.elsewhere |= set(self._modules) & OUTSIDE.keys() or set(self._modules)
            else:
                self.seen.through[product] |= made_of
        elif made_of and name not in LOOKUPS:
            for tensor in _tensors(out):
                self._mark(tensor, made_of)
        return out

    def _mark(self, tensor: Tensor, names: frozenset[str]) -> None:
        key = _storage(tensor)
        if key not in self._names:
            self._kept.append(tensor.untyped_storage())
        self._names[key] = self._names.get(key, frozenset()) | names


def _recipe_product() -> str | None:
    """Return the recipe's product that is being computed, if any, from the call stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in ("fprop", "dgrad", "wgrad") and isinstance(frame.f_locals.get("self"), Rounded):
            return frame.f_code.co_name
        frame = frame.f_back
    return None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if type(value) in (Tensor, nn.Parameter) else []


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# --- runs ---


def run_of(preset: str, plan: dict[str, Any]) -> RunSpec:
    """A small run with an untied output, since a tied embedding's gradient also includes the look-up's."""
    spec = shrink(tiny_run(plan=plan, train={"global_batch": 8}, model={"preset": preset}), steps=2)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"tied": False})})


def witnessed(rank: int, spec: RunSpec) -> tuple[Recording, Seen]:
    """Return the recording of the run under its plan, and the products seen."""
    trainer = trainer_of(spec)
    with Witness(*trainer.stages.values()) as witness:
        return record(trainer), witness.seen


def silent(rank: int, spec: RunSpec) -> Recording:
    """The same, if no product at the interface gives a weight a gradient."""
    RECIPES["plain"] = Silent
    return record(trainer_of(spec))


def check_silence(loud: Recording, quiet: Recording, names: set[str]) -> None:
    """Every matrix gets its gradient through the interface, and from nowhere else."""
    for name in names:
        assert loud.gradients[0][name].any(), f"{name} has no gradient at all"
        assert not quiet.gradients[0][name].any(), f"{name} has a gradient from outside the door"


def check(preset: str, plan: dict[str, Any]) -> list[Seen]:
    """Every product goes through the interface on every rank, and the plan trains like one process."""
    spec = run_of(preset, plan)
    runs = run_ranks(witnessed, spec.plan.ranks, spec)
    for _, seen in runs:
        assert not seen.past, seen.past[:5]
        assert seen.through["fprop"] == seen.names, seen.names - seen.through["fprop"]
        assert seen.through["dgrad"] == seen.names, seen.names - seen.through["dgrad"]
        assert seen.elsewhere <= OUTSIDE.keys(), seen.elsewhere
    found, names = runs[0][0], set().union(*(seen.names for _, seen in runs))
    rows = compare(reference(spec, device=CPU), found, spec=spec)
    assert all(row.equal for row in rows), rows
    check_silence(found, run_ranks(silent, spec.plan.ranks, spec)[0], names)
    return [seen for _, seen in runs]


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row with the recipe of every run here."""
    monkeypatch.setitem(RECIPES, "plain", Rounded)


# --- tests ---

SMALL: dict[str, str] = {family_of(preset.values): name for name, preset in presets().items()}
"""A preset of each family."""


@sampled(7, together=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_multiplies_through_the_door(family: str) -> None:
    check(SMALL[family], {})


def test_the_one_process_reference_goes_through_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = run_of("deepseek-tiny", {})
    loud = reference(spec, device=CPU)
    monkeypatch.setitem(RECIPES, "plain", Silent)
    check_silence(loud, reference(spec, device=CPU), set(matrices(Stage(spec.model.build()))))


@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        ("gpt2", {"tensor": 2, "sequence": False}),
        ("gpt2", {"tensor": 2, "overlap_tensor": 2}),
        ("palm-8b", {"tensor": 2, "overlap_tensor": 2}),
        ("mixtral-8x7b", {"data": 2, "expert": 2, "zero": 3}),
        ("qwen3-0.6b", {"data": 2, "zero": 3, "recompute": "full"}),
        ("nemotron-h-tiny", {"pipeline": 2, "schedule": "zb-h1"}),
        ("deepseek-tiny", {"tensor": 2, "expert": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2}),
    ],
    ids=str,
)
@sampled(7, together=True)
def test_under_every_kind_of_rank_too(preset: str, plan: dict[str, Any]) -> None:
    check(preset, plan)


def test_the_list_of_what_stays_outside_has_nothing_else() -> None:
    """Every class on the list has a module that keeps matrices, or that multiplies something else."""
    found: set[str] = set()
    for preset in SMALL.values():
        spec = run_of(preset, {})
        model, tokens = Stage(spec.model.build()), torch.zeros(1, 24, dtype=torch.long)
        apply_precision(model, "plain")
        with Witness(model) as witness, torch.no_grad():
            model(tokens, Batch(tokens))
        known = {id(matrix) for matrix in matrices(model).values()}
        found |= witness.seen.elsewhere
        found |= {
            type(m).__name__ for m in model.modules() for p in m.parameters(recurse=False) if p.dim() > 1 and id(p) not in known
        }
    assert found == OUTSIDE.keys()


# --- the witness, witnessed ---


class Past(nn.Module):
    """Multiplies by its weight without the interface."""

    def __init__(self, lines: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.lines = nn.Parameter(torch.ones(4, 4)), lines

    def forward(self, x: Tensor) -> Tensor:
        return self.lines(x, self.weight)


@pytest.mark.parametrize(
    "lines",
    [
        F.linear,
        lambda x, weight: x @ weight[:2].T,
        lambda x, weight: (x.double() @ weight.double()).float(),
        lambda x, weight: torch.einsum("zsi,oi->zso", x, weight.contiguous() * 2),
        lambda x, weight: torch.bmm(x, weight.expand(2, -1, -1).clone()),
        lambda x, weight: F.conv1d(x.mT, weight.unsqueeze(-1)),
        lambda x, weight: Multiply()(x, weight),
    ],
    ids=["linear", "rows", "cast", "einsum", "copies", "convolution", "another recipe"],
)
def test_a_product_past_the_door_is_seen(lines: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = Past(lines)
    with Witness(module) as witness:
        module(torch.ones(2, 3, 4))
    assert witness.seen.past and not witness.seen.through and "Past" in witness.seen.elsewhere


class HalfWay(torch.autograd.Function):
    """Uses the interface in forward but not in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return Rounded().fprop(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad @ ctx.weight, None


def test_a_gradient_past_the_door_is_seen() -> None:
    """Return the input's gradient. The weight's own gradient shows because the recipe gives none."""
    module = Past(HalfWay.apply)
    with Witness(module) as witness:
        out = module(torch.ones(2, 3, 4, requires_grad=True))
        assert witness.seen.through == {"fprop": {"weight"}} and not witness.seen.past
        out.sum().backward()
    assert witness.seen.past == ["mm with weight"]
