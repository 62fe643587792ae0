"""Small runs for tests."""

from typing import Any

from megalith.spec.presets import presets
from megalith.spec.run import RunSpec

TINY = {"layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 96, "context": 64}

TINY_EXPERTS = {key: TINY[key] for key in ("layers", "dim", "heads", "kv_heads", "head_dim")} | {
    "family": "mixtral",
    "ffn": 16,
    "experts": 8,
    "active": 2,
}


def tiny_run(**parts: dict[str, Any]) -> RunSpec:
    """Return a run of a tiny Llama, or of `model={"preset": NAME}`. Keyword arguments update its tables."""
    tables: dict[str, dict[str, Any]] = {
        "model": TINY,
        "plan": {},
        "data": {"path": "unused"},
        "train": {"steps": 3, "global_batch": 8, "seq_len": 32, "precision": "fp32"},
        "optimizer": {"warmup": 0, "lr": 1e-3, "schedule": "constant"},
    }
    if preset := parts.get("model", {}).get("preset"):
        tables["model"] = presets()[preset].values
        parts["model"] = {key: value for key, value in parts["model"].items() if key != "preset"}
    return RunSpec.model_validate({name: tables.get(name, {}) | parts.get(name, {}) for name in tables | parts})


def brief_run(*, plan: dict[str, Any], train: dict[str, Any] | None = None, **parts: dict[str, Any]) -> RunSpec:
    """Return `tiny_run` with two microbatches for each data rank, or twice as many as pipeline ranks: enough for most effects in
    a step."""
    batch = 2 * plan.get("data", 1) * plan.get("pipeline", 1) * plan.get("microbatch", 1)
    return tiny_run(plan=plan, train={"global_batch": batch} | (train or {}), **parts)
