"""The pictures of docs/guide/parallelism.md and precision.md, drawn from the trainer's own code: schedules are simulated, placements come
from the mesh and from the code that splits models, and numbers are rounded by the recipes. `make guide-pictures` draws the guide's pictures
again; a test compares newly drawn pictures with those in the guide.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from types import MappingProxyType

from megalith.mesh import Mesh
from megalith.report import timeline
from megalith.report.svg import Cell, grid, picture, stacked_rows, standalone, text
from megalith.schedule import SCHEDULES, build, lower, simulate
from megalith.spec.numbers import PrecisionSpec, recipe_of
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.plan import Plan, recomputed, segment_size
from megalith.spec.state import bytes_of, kept

RANKS, MICROBATCHES = 4, 8
ROW, AT, OUTLIER, ELSEWHERE = 128, 40, 64.0, 32768.0
"""A row of numbers: how many, the place and the size of its outlier, and the largest number of the tensor, which is in another row."""
FORMATS = MappingProxyType(
    {
        "bf16": ("bf16", "8 bits of precision, a large range", {}),
        "fp16": ("fp16", "11 bits, a small range", {}),
        "fp8, tile": ("fp8", "128 numbers share a scale", {}),
        "fp8, tensor": ("fp8", "all rows share a scale", {"granularity": "tensor"}),
        "mxfp8": ("mxfp8", "32 numbers share a scale", {}),
        "nvfp4": ("nvfp4", "16 numbers share a scale", {}),
        "mxfp4": ("mxfp4", "32 numbers share a scale", {}),
    }
)
"""Precision, description and choices of each format that `outlier` draws."""
STATE = MappingProxyType({"weights to compute with": 0, "master weights": 1, "gradients": 2, "moments": 3})


def schedule(name: str) -> str:
    """Draw a schedule on RANKS ranks. On a rank, a microbatch's forward takes 1 s, and each half of its backward 1 s."""
    row = SCHEDULES[name]
    chunks = row.chunks.usual
    words = f"{row.title}, {chunks} chunks a rank" if chunks > 1 else row.title
    program = lower(build(name, ranks=RANKS, microbatches=MICROBATCHES, chunks=chunks), zero=0)
    each = 1 / chunks
    done = simulate(program, {"F": each, "I": each, "W": each, "B": 2 * each})
    return timeline.draw({words: timeline.predicted(done)}, RANKS)


def placements() -> str:
    """Draw the stages of each rank in the three placements of eight stages that schedules use."""
    kinds = {
        "interleaved, 2 chunks": ("interleaved", 4, 2),
        "a V (zb-v, dualpipev)": ("zb-v", 4, 2),
        "both ways (dualpipe)": ("dualpipe", 8, 1),
    }
    rows, most = [], 0
    for name, ranks, chunks in kinds.values():
        made = build(name, ranks=ranks, microbatches=2 * ranks, chunks=chunks)
        held = [made.stages_of(rank) for rank in range(ranks)]
        rows.append([_strip(f"rank {rank}", [f"stages {stages[0]}, {stages[1]}"], stages, 8) for rank, stages in enumerate(held)])
        most = max(most, ranks)
    return grid(rows, list(kinds), [""] * most, cell_width=112)


def zero() -> str:
    """Draw the bytes for each parameter that each of eight data ranks keeps between steps, in a bf16 run."""
    return stacked_rows(
        {f"ZeRO {stage}": state_bytes(stage, 8) for stage in range(4)}, dict(STATE), form=lambda size: f"{size:.4g} bytes"
    )


def state_bytes(stage: int, shards: int) -> dict[str, float]:
    """Bytes that a rank keeps for each parameter under a ZeRO stage over `shards` ranks: bf16 compute weights, everything else in fp32."""
    words = {"compute": "weights to compute with", "weights": "master weights", "gradients": "gradients"}
    found = dict.fromkeys(STATE, 0.0)
    for slot in kept("bf16", OPTIMIZERS["adamw"].slots):
        found[words.get(slot.name, "moments")] += sum(bytes_of([slot], 1, zero=stage, shards=shards).values())
    return found | ({"weights to compute with": 0.0} if stage == 3 else {})  # ZeRO 3 makes them of the shares, a part at a time


def hsdp() -> str:
    """Draw four data ranks that keep two copies of two shards."""
    plan = Plan(data=4, replicate=2, zero=3)
    mesh = Mesh.of(plan)
    places = [mesh.state_coordinates(rank) for rank in range(mesh.ranks)]
    cells = [
        _strip(
            f"data {rank}",
            [f"copy {at['dp_replicate']}, shard {at['dp_shard']}", "of every weight"],
            [at["dp_shard"]],
            plan.dp_shard,
        )
        for rank, at in enumerate(places)
    ]
    return grid([cells], ["state"], [""] * len(cells), cell_width=150)


def tensor() -> str:
    """Draw the share of a layer that each of four tensor ranks holds: eight heads, channels, and the tokens of a norm."""
    ranks, heads, tokens = 4, 8, 16
    shown = {"attention's heads": heads, "the MLP's channels": 16, "vocabulary rows": 32, "tokens, in norms": tokens}
    rows = [
        [
            _strip(f"tensor {rank}", [_run(rank * size // ranks, (rank + 1) * size // ranks)], _share(size, rank, ranks), size)
            for rank in range(ranks)
        ]
        for size in shown.values()
    ]
    return grid(rows, list(shown), [""] * ranks, cell_width=160)


def context() -> str:
    """Draw a causal sequence on four context ranks: rows are queries, columns are keys, colours are the ranks that compute the scores."""
    from megalith.parallel.context import parts  # computed, not repeated by hand; this alone needs torch

    ranks, chunks, size = 4, 8, 30.0
    owner = {
        position: rank for rank, runs in enumerate(parts(chunks, ranks)) for first, end in runs for position in range(first, end)
    }
    body, left, top = "", 150.0, 26.0
    for query in range(chunks):
        y = top + query * size
        body += text(left - 10, y + 19, f"chunk {query}: rank {owner[query]}", anchor="end")
        for key in range(chunks):
            place = f'x="{left + key * size:.1f}" y="{y:.1f}" width="{size - 2:.1f}" height="{size - 2:.1f}" rx="3"'
            seen = f'class="f{owner[query]}" fill-opacity="{0.55 if key == query else 0.95}"' if key <= query else 'class="soft"'
            body += f"<rect {place} {seen}/>"
    body += text(left, top - 10, "keys: chunk 0 ... 7; paler where the causal mask hides half of a square")
    for rank in range(ranks):
        work = sum(query + 0.5 for query, of in owner.items() if of == rank)
        x, y = left + chunks * size + 26, top + 14 + 24 * rank
        body += f'<rect x="{x:.1f}" y="{y:.1f}" width="13" height="13" rx="3" class="f{rank}"/>'
        body += text(x + 20, y + 11, f"rank {rank} scores {work:g} squares", style="strong")
    return picture(620, top + chunks * size + 8, body, "the context rank that scores each pair of query and key chunks")


def experts() -> str:
    """Draw the experts of each of eight ranks (eight experts, expert 4 x expert_tensor 2), beside the rank's part of the other work."""
    plan = Plan(data=2, tensor=2, context=2, expert=4, expert_tensor=2)
    mesh, shown = Mesh.of(plan), 8
    cells = []
    for rank in range(mesh.ranks):
        work, at = mesh.coordinates(rank), mesh.expert_coordinates(rank)
        held = _share(shown, at["expert"], plan.expert)
        lines = [
            f"data {work['data']}, context {work['context']}",
            f"tensor {work['tensor']}",
            f"experts {_run(held.start, held.stop)}",
        ]
        lines.append(f"half {at['expert_tensor']} of their width")
        cells.append(Cell(f"rank {rank}", lines, [0.5 * (i in held) for i in range(shown)], f"rank {rank}"))
    return grid([cells[:4], cells[4:]], ["data 0", "data 1"], [""] * 4, cell_width=165)


def views() -> str:
    """Draw the same eight ranks in the views of work, state and experts."""
    plan = Plan(data=2, context=2, tensor=2, expert=4, zero=1)
    mesh = Mesh.of(plan)
    asked: tuple[tuple[str, Callable[[int], Mapping[str, int]]], ...] = (
        ("work", mesh.coordinates),
        ("state", mesh.state_coordinates),
        ("experts", mesh.expert_coordinates),
    )
    rows = [
        [
            Cell(
                f"rank {rank}", [f"{axis} {at}" for axis, at in view(rank).items() if axis not in ("place", "pipeline")], [], name
            )
            for rank in range(mesh.ranks)
        ]
        for name, view in asked
    ]
    return grid(rows, [name for name, _ in asked], [""] * mesh.ranks, cell_width=118)


def recompute() -> str:
    """Draw sixteen blocks. A full bar is a block that keeps all results of its forward; a low bar is one that keeps only its
    input. Blocks without a bar keep nothing: they are recomputed from the input that the first block of their segment keeps."""
    blocks = 16
    cells = []
    policies = ("none", "every:4", "every:2", "full", "segments:4", "sqrt")
    for policy in policies:
        size = segment_size(policy, blocks=blocks)
        whole = [not size and not recomputed(number, blocks=blocks, policy=policy) for number in range(blocks)]
        inputs = [not whole[number] and number % max(size, 1) == 0 for number in range(blocks)]
        head = f"{sum(whole)} blocks keep everything, {sum(inputs)} only their input"
        cells.append([Cell(head, [], [1.0 * kept + 0.4 * x for kept, x in zip(whole, inputs, strict=True)], escape(head))])
    return grid(cells, list(policies), [""], cell_width=760)


def ahead() -> str:
    """Draw the inputs and the predictions of the head and of one MTP block at each of four positions."""
    rows = [
        [
            Cell(
                f"token {at + 1 + depth}",
                [f"from tokens 0 to {at + depth}"],
                [1.0 * (i <= at + depth) for i in range(6)],
                "prediction",
            )
            for at in range(4)
        ]
        for depth in range(2)
    ]
    return grid(rows, ["head predicts", "MTP block predicts"], [f"position {at}" for at in range(4)], cell_width=150)


def outlier() -> str:
    """Draw a row of numbers, of which one is an outlier, as each format rounds it."""
    left, wide, tall, top = 196.0, 460.0, 64.0, 30.0
    row, found = rounded_rows()
    body = _dots([(left + 6, 12.0)], 4) + text(left + 14, 16, "number as rounded")
    body += _errors([(left + 136, 6.0, 18.0)]) + text(left + 144, 16, "distance from the number before")
    body += text(left + wide + 16, 16, f"the {ROW - 1} others", style="strong")
    for index, (name, numbers) in enumerate(found.items()):
        y = top + index * (tall + 8)
        error, zeros = lost(row, numbers)
        body += text(left - 10, y + 28, name, anchor="end", style="strong")
        body += text(left - 10, y + 44, FORMATS[name][1], anchor="end")
        body += _rounded_row(row, numbers, left, y, wide, tall)
        body += text(left + wide + 16, y + 28, f"error {100 * error:.2g} %", style="strong")
        body += text(left + wide + 16, y + 44, f"{zeros} become 0")
    return picture(left + wide + 116, top + len(found) * (tall + 8), body, "a row with an outlier, as each format rounds it")


def _rounded_row(before: Sequence[float], after: Sequence[float], left: float, top: float, wide: float, tall: float) -> str:
    """Draw each number as rounded, and its distance from the number before. The outlier is far above the box: words show it."""
    xs = [left + (at + 0.5) * wide / ROW for at in range(ROW)]
    old, new = ([top + tall / 2 * (1 - number / 3.4) for number in numbers] for numbers in (before, after))
    inside = [at for at in range(ROW) if at != AT]
    body = f'<rect class="box" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall:.1f}" rx="4"/>'
    body += _errors([(xs[at], old[at], new[at]) for at in inside]) + _dots([(xs[at], new[at]) for at in inside], 3)
    return body + text(xs[AT], top + 12, f"{before[AT]:g} \u2192 {after[AT]:g}", anchor="middle", style="strong")


def rounded_rows() -> tuple[list[float], dict[str, list[float]]]:
    """Return a row of normal numbers with an outlier, and the same row as each format rounds it in a tensor of two rows."""
    import torch

    from megalith.kernels.draws import key_of, uniform
    from megalith.kernels.narrow import Narrow
    from megalith.kernels.numbers import Dtypes
    from megalith.kernels.quantise import narrowed
    from megalith.parallel.precision import RECIPES

    drawn = uniform(key_of("a row with an outlier"), torch.arange(12), range(ROW)).double().sum(0) - 6  # nearly normal
    drawn[AT] = OUTLIER
    tensor = torch.stack((drawn, torch.full_like(drawn, ELSEWHERE))).float()
    found = dict[str, list[float]]()
    for name, (precision, _, more) in FORMATS.items():
        choices = PrecisionSpec.model_validate(more)
        recipe = RECIPES[recipe_of(choices, precision)].of(choices)
        numbers = tensor.to(Dtypes.of(precision).compute)
        if isinstance(recipe, Narrow):
            numbers = narrowed(numbers, recipe.along)
        found[name] = numbers[0].tolist()
    return tensor[0].tolist(), found


def lost(before: Sequence[float], after: Sequence[float]) -> tuple[float, int]:
    """Return the relative error of all numbers but the outlier, and how many of them became 0."""
    pairs = [pair for at, pair in enumerate(zip(before, after, strict=True)) if at != AT]
    error = sum((new - old) ** 2 for old, new in pairs) / sum(old**2 for old, _ in pairs)
    return error**0.5, sum(new == 0 != old for old, new in pairs)


def _dots(places: Sequence[tuple[float, float]], size: float) -> str:
    path = "".join(f"M{x:.1f},{y:.1f}h0" for x, y in places)
    return f'<path class="c0" d="{path}" stroke-width="{size:g}" stroke-linecap="round"/>'


def _errors(places: Sequence[tuple[float, float, float]]) -> str:
    path = "".join(f"M{x:.1f},{old:.1f}V{new:.1f}" for x, old, new in places if abs(old - new) > 0.3)
    return f'<path class="c1" d="{path}" stroke-width="1.2"/>'


def _share(size: int, index: int, shares: int) -> range:
    return range(index * size // shares, (index + 1) * size // shares)


def _run(first: int, end: int) -> str:
    return f"{first} to {end - 1}" if end - first > 1 else str(first)


def _strip(head: str, lines: Sequence[str], held: Sequence[int], size: int) -> Cell:
    return Cell(head, lines, [1.0 * (i in held) for i in range(size)], escape(head))


def pictures() -> dict[str, Callable[[], str]]:
    """Return the function that draws each picture, by the picture's file name without the ending."""
    others = {
        "placements": placements,
        "zero": zero,
        "hsdp": hsdp,
        "tensor": tensor,
        "context": context,
        "experts": experts,
        "views": views,
        "recompute": recompute,
        "ahead": ahead,
        "outlier": outlier,
    }
    return {f"schedule-{name}": partial(schedule, name) for name in SCHEDULES} | others


def write(folder: Path) -> list[Path]:
    """Draw every picture into a folder; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.svg" for name in pictures()]
    for file, drawn in zip(files, pictures().values(), strict=True):
        file.write_text(standalone(drawn()), encoding="utf-8")
    return files


if __name__ == "__main__":
    write(Path("docs/guide/pictures"))
