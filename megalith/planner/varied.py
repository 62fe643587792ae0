"""A request with one value changed, for what-ifs. No torch."""

from dataclasses import replace

from megalith.planner.problems import problem
from megalith.planner.request import PlanRequest, ResolvedRequest, resolve
from megalith.spec.cluster import ClusterSpec
from megalith.spec.problem import SpecErrors, near
from megalith.spec.quantity import quantity

LINKS = {"scale_out": "bytes/s out of a device over the network", "scale_up": "bytes/s out of a device over the fast links"}
"""Bandwidths that a what-if may change, in GB/s in one direction."""


def vary(plan_request: PlanRequest, change: str) -> ResolvedRequest:
    """Return the request with one value changed, such as "accelerator=h200", "cluster=h100:8192", "seq_len=16384",
    "global_batch=1024", "global_batch_tokens=8M", "format=fp8", "scale_out=25" or "scale_up=900" (GB/s out of a device). Raises
    SpecErrors."""
    key, equals, value = change.partition("=")
    key = key.strip().replace("-", "_")
    known = ("accelerator", "cluster", "seq_len", "global_batch", "global_batch_tokens", "format", *LINKS)
    number = quantity(value, thousand=1024 if key in ("seq_len", "global_batch") else 1000)
    if (
        key not in known
        or not equals
        or (number is None and key not in ("accelerator", "cluster", "format", "global_batch_tokens"))
    ):
        nearest = near(key, known)
        hint = f"Did you mean {nearest!r}? " if nearest and nearest != key else ""
        way_out = f"{hint}Write KEY=VALUE, such as accelerator=h200 or scale_out=25 (GB/s). Known keys: {', '.join(known)}."
        raise SpecErrors([problem("--what-if", change, "is not a known change", way_out)])
    if key in LINKS:
        request = resolve(plan_request)
        rate = (number or 0.0) * 1e9
        cluster = request.cluster
        changed = cluster.model_copy(update={"scale_out": rate}) if key == "scale_out" else _with_fast(cluster, rate)
        return replace(request, cluster=changed)
    if key == "accelerator":
        key, value = "cluster", f"{value.strip()}:{resolve(plan_request).cluster.count}"
    if key in ("seq_len", "global_batch"):
        others = {"global_batch_tokens": None} if key == "global_batch" else {}
        return resolve(replace(plan_request, **{key: int(number or 0)}, **others))
    others = {"global_batch": None} if key == "global_batch_tokens" else {}
    return resolve(replace(plan_request, **{key: value.strip()}, **others))


def _with_fast(cluster: ClusterSpec, rate: float) -> ClusterSpec:
    return cluster.model_copy(update={"accelerator": cluster.accelerator.model_copy(update={"scale_up": rate})})
