"""The traced profiles of a workload's parts, from memory, from disk, or traced now."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from megalith.cost.profile import Layout, Profile
from megalith.cost.workload import KEPT, Workload
from megalith.spec.model import BlockSpec, ModelSpec

VERSION = 3
"""Of the figures: a change in what is counted makes old files worthless."""

CACHE = "MEGALITH_CACHE"


@dataclass(frozen=True)
class Parts:
    """Profiles of the distinct parts of a model, and which of its blocks is which."""

    embedding: Profile
    head: Profile
    blocks: tuple[Profile, ...]
    """One for each block, in order; equal blocks share one value."""
    ahead: Profile | None = None


def layout(workload: Workload) -> Layout:
    """What of the workload changes a part's figures."""
    plan, practice = workload.plan, workload.practice
    recompute = plan.recompute
    if recompute == "selective":
        recompute = ",".join(plan.recompute_parts)
    return Layout(
        microbatch=plan.microbatch,
        seq_len=workload.seq_len,
        tensor=plan.tensor,
        sequence=plan.sequence,
        context=plan.context,
        ulysses=plan.ulysses,
        expert=plan.expert,
        expert_tensor=plan.expert_tensor,
        recompute=recompute,
        attention=practice.attention,
        regather=practice.generation != "eager" and plan.tensor > 1,
        fused=practice.generation in ("fused", "packaged"),
        rotary=practice.rotary,
        permute=practice.permute,
        loss=practice.loss,
        width=4 if workload.format == "fp32" else 2,
        kept=KEPT[workload.format],
        sparing=practice.sparing,
    )


def parts(workload: Workload) -> Parts:
    """The profiles of every part, traced if they are not known yet."""
    model, plan = workload.model, workload.plan
    here = layout(workload)
    again = [_recomputed(plan.recompute, number, len(model.blocks)) for number in range(len(model.blocks))]
    whole, kept = _with(here, "full"), _with(here, "none" if plan.recompute != "selective" else here.recompute)
    small = _with(here, "none")
    ahead = model.head.ahead
    known: dict[tuple[int, bool], Profile] = {}

    def block_profile(block: BlockSpec, full: bool) -> Profile:
        key = id(block), full  # blocks alike are mostly one value; comparing whole specs a hundred times would take longest here
        if key not in known:
            known[key] = _profile("block", _bare(model), block, whole if full else kept)  # pyright: ignore[reportArgumentType]
        return known[key]

    return Parts(
        embedding=_profile("embedding", _bare(model), None, small),  # pyright: ignore[reportArgumentType]
        head=_profile("head", _bare(model), None, small),  # pyright: ignore[reportArgumentType]
        blocks=tuple(block_profile(block, full) for block, full in zip(model.blocks, again, strict=True)),
        ahead=None if ahead is None else _profile("block", _bare(model), ahead.block, whole if again[-1] else kept),  # pyright: ignore[reportArgumentType]
    )


def _with(layout: Layout, recompute: str) -> Layout:
    return Layout(**{**asdict(layout), "recompute": recompute})


def _recomputed(policy: str, number: int, blocks: int) -> bool:
    """Does this block run again as a whole? As `parallel.recompute.recomputed`, which needs torch to be imported."""
    if policy == "sqrt":
        return number % max(2, round(blocks**0.5)) != 0
    if policy.startswith("every:"):
        return number % int(policy.removeprefix("every:")) == 0
    return policy == "full"


@cache
def _bare(model: ModelSpec) -> ModelSpec:
    """The model without what does not change a single part's figures."""
    head = model.head.model_copy(update={"ahead": None, "tied": False})
    return model.model_copy(update={"name": "", "blocks": model.blocks[:1], "head": head, "context": 0, "init_std": 0.02})


def _profile(kind: str, model: ModelSpec, block: BlockSpec | None, layout: Layout) -> Profile:
    return _found(kind, model, block, layout, os.environ.get(CACHE))  # pyright: ignore[reportArgumentType]


@cache
def _found(kind: str, model: ModelSpec, block: BlockSpec | None, layout: Layout, _folder: str | None) -> Profile:
    """`_folder` is there so that what was traced for one folder is kept in another as well."""
    path = _path(kind, model, block, layout)
    if path is not None and path.exists():
        try:
            return Profile.from_json(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError):
            pass  # cut off while it was written: traced again
    from megalith.cost import trace  # torch takes seconds to import, and known profiles do not need it

    if block is not None:
        found = trace.trace_block(model.model_copy(update={"blocks": (block,)}), 0, layout)
    else:
        found = (trace.trace_head if kind == "head" else trace.trace_embedding)(model, layout)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(found.to_json()))
        half.replace(path)
    return found


def folder() -> Path | None:
    """Where traces are kept: $MEGALITH_CACHE, or ~/.cache/megalith; None where that is empty: nowhere."""
    named = os.environ.get(CACHE)
    if named == "":
        return None
    return (Path(named) if named else Path.home() / ".cache" / "megalith") / "profiles"


def _path(kind: str, model: ModelSpec, block: BlockSpec | None, layout: Layout) -> Path | None:
    where = folder()
    if where is None:
        return None
    if kind == "block":
        subject = {"dim": model.dim, "block": None if block is None else block.model_dump()}
    elif kind == "head":
        subject = {"dim": model.dim, "head": model.head.model_dump()}
    else:
        subject = {"dim": model.dim, "embedding": model.embedding.model_dump()}
    key = json.dumps([VERSION, _code(), kind, subject, asdict(layout)], sort_keys=True)
    return where / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


@cache
def _code() -> str:
    """A digest of the modules traced and of what traces them: a changed model is traced anew."""
    root = Path(__file__).parents[1]
    names = [*sorted((root / "models").glob("*.py")), *sorted((root / "kernels").glob("*.py"))]
    names += [root / "cost" / name for name in ("trace.py", "cores.py", "profile.py")]
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.read_bytes())
    return digest.hexdigest()[:16]
