"""Applies a plan to one stage, part by part, in this order: experts, first weights, the recipe for products, tensor split, context,
recomputation, compilation, data shards.

Each part is built whole (without other ranks' experts), gets its first weights, and is split and sharded before the next part is built, so
a rank never holds more than one whole part.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from megalith.kernels.multiply import Multiply
from megalith.kernels.numbers import Dtypes
from megalith.models.head import Head, MtpModule
from megalith.models.init import initialise
from megalith.models.moe import Moe
from megalith.models.stage import Stage
from megalith.parallel.context import ContextGroups, split_context
from megalith.parallel.data import Bucket, Weight
from megalith.parallel.expert import held_of, split_experts
from megalith.parallel.groups import Groups
from megalith.parallel.moe_overlap import dispatches_tokens, forward
from megalith.parallel.passes import Runner
from megalith.parallel.place import Place
from megalith.parallel.precision import apply_precision, matrices, share_maxima, with_own_narrow
from megalith.parallel.recompute import apply_recompute, rounding_of
from megalith.parallel.reduction import Reducer
from megalith.parallel.retain import Retention, Tiers
from megalith.parallel.source import Put
from megalith.parallel.tensor import Split, split_part
from megalith.spec.model import ModelSpec
from megalith.spec.numbers import PrecisionSpec, recipe_of
from megalith.spec.plan import BLOCK, Plan, place_of, segment_size, segments
from megalith.spec.sizes import tied_names


class Builder:
    """Builds the stages of one rank. Stages on one rank share tied parameters."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        plan: Plan,
        groups: Groups,
        precision: str,
        device: torch.device,
        seed: int | None,
        choices: PrecisionSpec | None = None,
        gradients: str = "fp32",
        aside: Put | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """`seed` None: weights stay unset until a checkpoint is loaded. `choices`: options of the low-precision recipes. `gradients`: the
        number format in which gradients are added up. `aside`: moves master weights off the device during building, so that the device
        never holds all of them. `tiers`: the places outside the device for the tensors that blocks keep for backward (`plan.retain`)."""
        self.spec, self.plan, self.groups, self.device, self.seed = spec, plan, groups, device, seed
        self.choices = with_own_narrow(choices or PrecisionSpec(), precision)
        self.dtypes, self.products = Dtypes.of(precision, gradients=gradients), recipe_of(self.choices, precision)
        self.split = Split(groups.tensor, sequence=plan.sequence, pieces=plan.overlap_tensor)
        self.tied, self.aside, self.tiers = tied_names(spec), aside, tiers or {}
        self.reducer = Reducer()
        self.by_name: dict[str, Weight] = {}  # everything this rank holds, under its name in the whole model
        self.context = ContextGroups.build(plan, groups)
        self._alone: dict[str, Bucket] = {}  # a tied weight is used by several parts: its bucket is its own

    def build(self, first: int, last: int) -> Runner:
        """Build parts `first` to `last - 1` of the model, split and sharded according to the plan."""
        with torch.device("meta"):
            stage = Stage(self.spec, first, last)
        used: list[list[Bucket]] = []
        for name, part in stage.parts():
            experts = self._share_experts(part)
            part.to_empty(device=self.device)
            laid = {part.get_parameter(path): place for path, place in experts.items()}
            if self.seed is not None:
                held = {parameter: held_of(parameter, place) for parameter, place in laid.items()}
                initialise(part, name=name, spec=self.spec, seed=self.seed, held=held)
            self._tie(name, part)
            narrow = apply_precision(part, self.products, name=name, blocks=len(self.spec.blocks), choices=self.choices)
            places = self._split(part) | laid
            share_maxima(narrow, self.split.placed, self.split.partial, self.groups)
            if self.plan.context > 1:
                split_context(part, self.context)
            for number, block in self._blocks(name, part):
                how = {"plan": self.plan, "rounding": rounding_of(self.choices)}
                apply_recompute(block, number, blocks=len(self.spec.blocks), **how)
                if self.plan.compile:
                    block.compile()
            recipes = {parameter: recipe for module, (recipe, *_) in narrow.items() for parameter in matrices(module)}
            used.append(self._keep(name, part, places, recipes))
        size = segment_size(self.plan.recompute, blocks=len(self.spec.blocks))
        cut = segments([name.startswith("blocks.") for name, _ in stage.parts()], size)
        dispatched = {number: partial(forward, part) for number, (_, part) in enumerate(stage.parts()) if dispatches_tokens(part)}
        how = {"segments": cut, "dispatched": dispatched, "retention": self._retention(stage)}
        return Runner(stage, used, zero=self.plan.zero, reducer=self.reducer, **how)

    def _retention(self, stage: Stage) -> Retention | None:
        if not self.tiers:
            return None
        blocks = ((at, name.removeprefix("blocks."), part) for at, (name, part) in enumerate(stage.parts()))
        away = {at: part for at, number, part in blocks if number.isdecimal() and self.plan.retain.leaves(int(number))}
        return Retention(away, self.tiers, self.device, rest=place_of(self.plan.actions[BLOCK]))

    def _blocks(self, name: str, part: nn.Module) -> list[tuple[int, nn.Module]]:
        """Return the blocks of a part with their numbers; blocks of MTP modules are numbered after the model's other blocks."""
        if name.startswith("blocks."):
            return [(int(name.removeprefix("blocks.")), part)]
        ahead = part.ahead if isinstance(part, Head) else ()
        return [(len(self.spec.blocks) + depth, each.block) for depth, each in enumerate(ahead) if isinstance(each, MtpModule)]

    def _tie(self, name: str, part: nn.Module) -> None:
        """Make the part use the tied weights that this rank already holds, so that the rank holds each tied weight only once."""
        held = {full: weight.compute for full, weight in self.by_name.items()}
        for path, parameter in list(part.named_parameters()):
            if (full := self.tied.get(f"{name}.{path}")) is not None:
                owner, _, child = path.rpartition(".")
                part.get_submodule(owner).register_parameter(child, held.setdefault(full, parameter))

    def _share_experts(self, part: nn.Module) -> dict[str, Place]:
        """Keep only this rank's experts, before memory is allocated for experts; return the `Place` of each expert parameter, by its path
        in the part."""
        layers = [(path, module) for path, module in part.named_modules() if isinstance(module, Moe)]
        found = ((path, split_experts(moe, self.groups, self.plan)) for path, moe in layers)
        return {f"{path}.{name}": place for path, places in found for name, place in places.items()}

    def _split(self, part: nn.Module) -> dict[nn.Parameter, Place]:
        if self.plan.tensor > 1:
            split_part(part, self.split)
        return {p: Place(self.groups.state, (self.split.placed.get(p, Replicate()),)) for p in part.parameters()}

    def _keep(
        self, name: str, part: nn.Module, places: dict[nn.Parameter, Place], recipes: Mapping[nn.Parameter, Multiply]
    ) -> list[Bucket]:
        """Make the master form and the compute form of each parameter of the part; return the buckets that the part uses."""
        found: list[Bucket] = []
        place = self.plan.state.weights
        often, late = self.plan.zero == 3 and place == "device", place == "disk"
        own: dict[torch.distributed.DeviceMesh, list[Weight]] = {}
        for path, parameter in part.named_parameters():
            full = self.tied.get(f"{name}.{path}", f"{name}.{path}")
            shared = full in self.tied.values()
            if full not in self.by_name:
                how = {"partial": parameter in self.split.partial, "recipe": recipes.get(parameter)}
                self.by_name[full] = weight = Weight(parameter, places[parameter], self.dtypes, **how)
                weight.shared = shared
                if self.aside is not None and weight.rows:
                    weight.put_aside(self.aside)
                if shared:
                    self._alone[full] = Bucket([weight], late=late)
                else:
                    own.setdefault(places[parameter].mesh, []).append(weight)
            if shared:
                found.append(self._alone[full])
        return [Bucket(weights, often=often, late=late) for weights in own.values()] + found
