"""Compare each precision recipe's loss and gradients with those of bf16: the same steps from the same weights on the same samples.

    megalith data prepare bundled:austen --tokenizer bytes --validation 0.03 --out data/austen-bytes
    python benchmarks/precision.py --data data/austen-bytes --steps 2000 --seeds 3 --out precision.jsonl
    python benchmarks/precision.py --data data/austen-bytes --steps 2000 --seeds 3 --model experts --cases bf16 noise fp8 nvfp4
    python benchmarks/precision.py --data data/austen-bytes --steps 2000 --seeds 3 --model quickstart --cases bf16 noise fp8 nvfp4
    python benchmarks/precision.py --data data/austen-bytes --steps 100 --seeds 1 --gradients
    python benchmarks/precision.py --data data/austen-bytes --steps 2000 --seeds 3 --gradients
    python benchmarks/precision.py --quick                   # a fiftieth of its steps, on data of its own

A loss is the mean over the last tenth of the steps, each on samples that the run has not seen. `noise` is bf16 with a learning rate that is
larger by a millionth, and `noise, weights` bf16 with first weights that differ by a millionth: the gap between two runs that hardly differ.
Two cases have a planted fault, which must show: `bad maxima` and `integers`.

Losses of small models do not separate good recipes. So gradients are also compared at fixed weights, those of a bf16 run after all steps.
The error is the norm of the difference from the fp32 gradients, relative to their norm. The cosine is that of the angle between them.
Both are those of all gradients, and of the gradients of embedding, blocks and head.
Both are measured again with an outlier: one channel in front of each MLP is 64 times as large.

The choices of recipes in 4 bits are measured at the same weights. Rounding: the gradients that enter products are drawn 256 times, for
other numbers of the samples. The mean's distance from the gradient of the same step in which they are not rounded, in standard errors of
the mean, is near 1 if the draws have no bias; that of rounding to nearest is in the same units. Hadamard transform: the error of weight
gradients, relative to those of the same step in bf16 products.

`--gradients` leaves out the losses. The file keeps finished cases, as benchmarks/cases.py says.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from benchmarks import cases
from megalith.kernels import narrow
from megalith.kernels.narrow import Narrow
from megalith.kernels.quantise import Scaling
from megalith.parallel.data import local
from megalith.prove.worlds import run_ranks
from megalith.spec.presets import presets
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.restore import Position, read_step
from megalith.train.step import accumulate, train_step
from megalith.train.stream import open_stream

LR = 1e-3
CHANNEL, OUTLIER = 5, 64.0
BAD, INTEGERS = "bad maxima", "integers"
"""Cases with a planted fault: see `fault_of`."""
ROUNDINGS = ("nearest", "stochastic")
NEAREST = {"rounding": "nearest", "hadamard": False}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "noise": {"precision": "bf16", "lr": LR * (1 + 1e-6)},
    "noise, weights": {"precision": "bf16", "perturbed": 1e-6},
    "fp8": {"precision": "fp8", "choices": {"tile": 32}},
    "fp8, scales in fp32": {"precision": "fp8", "choices": {"tile": 32, "scale": "fp32"}},
    "fp8, row": {"precision": "fp8", "choices": {"granularity": "row"}},
    "fp8, tensor": {"precision": "fp8", "choices": {"granularity": "tensor"}},
    "fp8, tensor, delayed": {"precision": "fp8", "choices": {"granularity": "tensor", "history": 16}},
    "mxfp8": {"precision": "mxfp8"},
    "mxfp8, ocp": {"precision": "mxfp8", "choices": {"scale": "ocp"}},
    "nvfp4": {"precision": "nvfp4"},
    "nvfp4, nearest": {"precision": "nvfp4", "choices": NEAREST},
    "mxfp4": {"precision": "mxfp4"},
    "mxfp4, nearest": {"precision": "mxfp4", "choices": NEAREST},
    BAD: {"precision": "fp8", "choices": {"granularity": "tensor", "history": 16}},
    INTEGERS: {"precision": "fp8", "choices": {"granularity": "tensor"}},
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"layers": 4, "dim": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 384, "vocab": 512, "context": 64},
    "experts": presets()["deepseek-tiny"].values | {"vocab": 512},
    "quickstart": presets()["quickstart"].values | {"vocab": 512},
}
"""A Llama and a DeepSeek with eight experts, of four blocks of width 128; and the Llama of recipes/quickstart.toml, of six blocks of width
256, with a vocabulary for bytes. All blocks but the first and the last multiply in few bits."""
GRADIENTS, DRAWS = "gradients by part", "draws"
"""Names of the cases that hold the errors of all recipes' gradients, and the distances of rounded gradients in 4 bits."""
FOUR_BITS = ("nvfp4", "mxfp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="needed, but for --quick")
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the steps, and one seed, on data of its own")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", choices=[*MODELS], default="dense")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[*CASES, GRADIENTS, DRAWS],
        choices=[*CASES, GRADIENTS, DRAWS],
        help="bf16 is always measured",
    )
    parser.add_argument("--draws", type=int, default=256, help="of gradients that are rounded stochastically")
    parser.add_argument("--gradients", action="store_true", help="compare gradients alone")
    parser.add_argument("--out", "--file", type=Path, default=Path("precision.jsonl"), help="where finished cases are kept")
    cases.add_arguments(parser, device=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.quick:
        given.steps, given.draws, given.seeds = given.steps // 50, given.draws // 50, 1
    with cases.data_of(parser, given) as data:
        compare(given, data)


def compare(given: argparse.Namespace, data: str) -> None:
    """Measure the cases that were asked for, and print their tables."""
    names = [GRADIENTS, DRAWS] if given.gradients else list(dict.fromkeys(("bf16", *given.cases)))
    keys = {
        name: [(given.model, name, seed, given.steps, *([given.draws] * (name == DRAWS))) for seed in range(given.seeds)]
        for name in names
    }
    wanted = [key for of_seed in zip(*keys.values(), strict=True) for key in of_seed]
    measure = partial(measured, data, given.device)
    rows = cases.finish(given.out, wanted, measure, workers=given.workers, device=given.device)
    results = {tuple(row["case"]): row["found"] for row in rows}
    found = {name: [results[key] for key in keys[name]] for name in names}
    if compared := found.pop(GRADIENTS, None):
        _show_gradients(compared)
    if drawn := found.pop(DRAWS, None):
        _show_draws(drawn, given.draws)
    if found:
        _show_losses(found, given.seeds)


@contextmanager
def fault_of(name: str) -> Iterator[None]:
    """Plant the fault of a bad recipe, which a comparison must show.

    BAD: maxima are taken without the rank that has the largest numbers, so numbers of over an eighth of the largest saturate.
    INTEGERS: factors have the even steps of 4-bit integers, without companding. 8-bit integers would be no fault: after 40 steps, their
    loss is as near to that of bf16 as the loss of fp8.
    """
    take_in = Narrow.take_in
    faults = {
        BAD: mock.patch.object(Narrow, "take_in", lambda recipe, largest: take_in(recipe, largest / 8)),
        INTEGERS: mock.patch.object(narrow, "narrowed", in_integers),
    }
    with faults.get(name, nullcontext()):
        yield


def in_integers(x: Tensor, scaling: Scaling, **others: Any) -> Tensor:
    """Round to integers from -7 to 7, times the power of two with which the largest number of the tensor does not saturate."""
    step = x.float().abs().amax().clamp(min=2.0**-120).div(7).log2().ceil().exp2()
    return x.float().div(step).round().mul(step).to(x.dtype)


def _show_losses(found: Mapping[str, list[float]], seeds: int) -> None:
    """Print the gap between each case and bf16: the mean over the seeds, and its standard error."""
    print(f"{'recipe':22}loss    gap to bf16")
    for name, mine in found.items():
        gaps = [100 * (loss / wide - 1) for loss, wide in zip(mine, found["bf16"], strict=True)]
        error = statistics.stdev(gaps) / seeds**0.5 if seeds > 1 else float("nan")
        gap = "" if name == "bf16" else f"{statistics.mean(gaps):+.3f} % (+-{error:.3f})"
        print(f"{name:22}{statistics.mean(mine):.4f}  {gap}".rstrip())


def _show_gradients(found: Sequence[Mapping[str, Any]]) -> None:
    """Print the error and the cosine of each recipe's gradients, all and by part: the mean over the seeds."""
    print(f"{'recipe':22}{'part':11}error   cosine   with an outlier: error   cosine")
    for name, parts in found[0]["recipes"].items():
        for part in parts:
            error, cosine, then, angle = means([each["recipes"][name][part] for each in found])
            print(f"{name if part == 'all' else '':22}{part:11}{error:.4f}  {cosine:.5f}  {then:22.4f}   {angle:.5f}")
    print(f"\n{'weight gradients':22}plain   Hadamard   with an outlier: plain   Hadamard")
    for name in found[0]["hadamard"]:
        plain, turned, then, too = means([each["hadamard"][name] for each in found])
        print(f"{name:22}{plain:.4f}  {turned:.4f}  {then:24.4f}   {too:.4f}")


def _show_draws(found: Sequence[Mapping[str, list[float]]], draws: int) -> None:
    """Print how far rounded gradients are from those that are not rounded, in standard errors of the mean of all draws."""
    print(f"\n{f'mean of {draws} draws':22}stochastic  nearest  with an outlier: stochastic  nearest")
    for name in found[0]:
        drawn, nearest, then, too = means([each[name] for each in found])
        print(f"{name:22}{drawn:10.2f}  {nearest:7.2f}  {then:27.2f}  {too:7.2f}")


def means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each column."""
    return [statistics.mean(column) for column in zip(*rows, strict=True)]


def run_of(data: str, steps: int, seed: int, model: str, case: Mapping[str, Any]) -> RunSpec:
    """A run of one of the models."""
    return RunSpec.model_validate(
        {
            "model": MODELS[model],
            "data": {"path": data},
            "plan": {"microbatch": 8},
            "precision": case.get("choices", {}),
            "train": {"steps": steps, "global_batch": 8, "seq_len": 64, "precision": case["precision"], "seed": seed},
            "optimizer": {"lr": case.get("lr", LR), "warmup": 50},
        }
    )


def measured(data: str, device: str, case: tuple[Any, ...]) -> dict[str, Any]:
    """Measure a case in a process of its own; return the row's result."""
    model, name, seed, steps, *draws = case
    function, more = {GRADIENTS: (errors, []), DRAWS: (distances, draws)}.get(name, (loss, [name]))
    (found,) = run_ranks(function, 1, data, torch.device(device), steps, seed, model, *more, timeout=3600.0)
    return {"found": found}


def trainer_of(spec: RunSpec, device: torch.device) -> Trainer:
    return assemble(spec, groups=mesh_groups(spec, device), device=device)


def trained(trainer: Trainer) -> list[float]:
    """Train for all steps; return the losses."""
    spec, stream = trainer.spec, open_stream(trainer.spec, "train")
    steps = range(spec.train.steps)
    return [train_step(trainer, read_step(stream, spec, Position(), step, 0), step=step).loss for step in steps]


def begun(data: str, device: torch.device, steps: int, seed: int, model: str, name: str) -> Trainer:
    """Return the trainer of a case before its first step."""
    trainer = trainer_of(run_of(data, steps, seed, model, CASES[name]), device)
    if by := CASES[name].get("perturbed"):
        draw = torch.Generator().manual_seed(seed)
        for parameter in trainer.parameters.values():
            weight = local(parameter).detach()
            weight *= 1 + by * torch.randn(weight.shape, generator=draw).to(device)
    return trainer


def loss(rank: int, data: str, device: torch.device, steps: int, seed: int, model: str, name: str) -> float:
    """Train with a recipe; return the mean loss of the last steps."""
    with fault_of(name):
        return statistics.mean(trained(begun(data, device, steps, seed, model, name))[-max(1, steps // 10) :])


class Fixed:
    """The weights at which gradients are compared, those of a bf16 run after all steps, without and with an outlier; and the samples of
    two further steps."""

    def __init__(self, data: str, device: torch.device, steps: int, seed: int, model: str) -> None:
        self._run, self._device = (data, steps, seed, model), device
        begun = self.trainer(CASES["bf16"])
        trained(begun)
        stream = open_stream(begun.spec, "train")
        self.before, self.samples = (read_step(stream, begun.spec, Position(), step, 0) for step in (steps, steps + 1))
        weights = {name: local(parameter).detach().clone() for name, parameter in begun.parameters.items()}
        planted = {name: tensor.clone() for name, tensor in weights.items()}
        for name, tensor in planted.items():
            if name.endswith("mlp_norm.weight"):
                tensor[CHANNEL] *= OUTLIER
        self.weights = weights, planted

    def trainer(self, case: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> Trainer:
        """Return a trainer of the run in the precision of a case; `weights`: its weights, instead of the first ones."""
        trainer = trainer_of(run_of(*self._run, case), self._device)
        if weights is not None:
            put(trainer, weights)
        return trainer


def errors(rank: int, data: str, device: torch.device, steps: int, seed: int, model: str) -> dict[str, Any]:
    """Train in bf16; then return the error and the cosine of each recipe's gradients by part, without and with an outlier."""
    at = Fixed(data, device, steps, seed, model)
    exact = at.trainer({"precision": "fp32"})
    expected = [by_part(_after_a_step(exact, at, weights)) for weights in at.weights]
    found = dict[str, dict[str, list[float]]]()
    for name in (name for name in CASES if not name.startswith("noise")):
        trainer, found[name] = at.trainer(CASES[name]), {}
        for weights, theirs in zip(at.weights, expected, strict=True):
            with fault_of(name):
                ours = by_part(_after_a_step(trainer, at, weights))
            for part, its in theirs.items():
                error = (ours[part] - its).norm() / its.norm()
                cosine = torch.dot(ours[part], its) / ours[part].norm() / its.norm()
                found[name].setdefault(part, []).extend((float(error), float(cosine)))
    return {"recipes": found, "hadamard": {f"{name}, {to}": hadamard(at, name, to) for name in FOUR_BITS for to in ROUNDINGS}}


def hadamard(at: Fixed, precision: str, rounding: str) -> list[float]:
    """Return the error of the weight gradients that a recipe rounds, without and with a Hadamard transform; then both with an outlier."""
    row = []
    for weights, turned in product(at.weights, (False, True)):
        choices = {"rounding": rounding, "hadamard": turned}
        ours, theirs = (
            gradients(at.trainer({"precision": precision, "choices": choices | more}, weights), at.samples)
            for more in ({}, {"weight_gradient": "wide"})
        )
        rounded = [name for name in ours if not torch.equal(ours[name], theirs[name])]  # all others have the same bits
        one, other = (torch.cat([each[name] for name in rounded]) for each in (ours, theirs))
        row.append(float((one - other).norm() / other.norm()))
    return row


def distances(
    rank: int, data: str, device: torch.device, steps: int, seed: int, model: str, draws: int
) -> dict[str, list[float]]:
    """Train in bf16; then return the distance of the mean of many draws, and of rounding to nearest, from gradients that are not rounded,
    in standard errors of that mean, for each recipe in 4 bits; then both with an outlier.

    The squares of distance and error are summed over all numbers of the gradient."""
    at, found = Fixed(data, device, steps, seed, model), dict[str, list[float]]()
    for name, weights in product(FOUR_BITS, at.weights):
        trainer = at.trainer(CASES[name], weights)
        with unrounded():
            expected = torch.cat([*gradients(trainer, at.samples).values()])
        nearest = at.trainer({"precision": name, "choices": {"rounding": "nearest"}}, weights)
        total, squares = torch.zeros_like(expected), torch.zeros_like(expected)
        for draw in range(draws):
            samples = [replace(each, numbers=tuple(number + (draw << 20) for number in each.numbers)) for each in at.samples]
            gap = torch.cat([*gradients(trainer, samples).values()]) - expected
            total, squares = total + gap, squares + gap**2
        variance = (squares - total**2 / draws).sum() / (draws - 1)
        gaps = total / draws, torch.cat([*gradients(nearest, at.samples).values()]) - expected
        found.setdefault(name, []).extend(float(gap.norm() / (variance / draws).sqrt()) for gap in gaps)
    return found


@contextmanager
def unrounded() -> Iterator[None]:
    """Inside this context, recipes that round gradients stochastically do not round them. Their other factors are rounded as ever."""
    tokens = Narrow._tokens

    def kept(recipe: Narrow, x: Tensor, scaling: Scaling, *others: Any, draws: Tensor | None = None, **more: Any) -> Tensor:
        if draws is None:
            return tokens(recipe, x, scaling, *others, **more)
        return x if scaling.exact else x.float()

    with mock.patch.object(Narrow, "_tokens", kept):
        yield


def _after_a_step(trainer: Trainer, at: Fixed, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients after a step without an update, which gives delayed scales a history."""
    put(trainer, weights)
    accumulate(trainer, at.before)
    trainer.update_router_biases()
    trainer.drop()
    return gradients(trainer, at.samples)


def put(trainer: Trainer, weights: Mapping[str, Tensor]) -> None:
    """Give a trainer these weights."""
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            local(parameter).copy_(weights[name])


def gradients(trainer: Trainer, samples: list[Any]) -> dict[str, Tensor]:
    """Return the gradient of each parameter on these samples, float64 [numbers]."""
    accumulate(trainer, samples)
    found = {name: local(p.grad).flatten().double() for name, p in trainer.parameters.items() if p.grad is not None}
    trainer.drop()
    return found


def by_part(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all gradients as one vector, and those of each part of the model: embedding, blocks, head."""
    parts = {name.partition(".")[0]: list[Tensor]() for name in found}
    for name, gradient in found.items():
        parts[name.partition(".")[0]].append(gradient)
    return {"all": torch.cat([*found.values()])} | {part: torch.cat(each) for part, each in parts.items()}


if __name__ == "__main__":
    main()
