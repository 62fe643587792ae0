"""The terms of a run across sites: what all sites must have in common, as each site tells the others when they meet. No torch."""

import json
from collections.abc import Mapping
from typing import Any

from megalith.spec.run import RunSpec
from megalith.spec.toml import literal
from megalith.spec.validate import differing, flat

DECIDE_BITS = ("model", "plan", "train", "optimizer", "sites")
"""The tables of a run file that must not have changed during a run that is replayed."""
DECIDE_NONE = ("site", "addresses", "decides", "grace", "tls", "link", "replay", "place")
"""The keys of `[sites]` that, with given verdicts, do not affect the bits of the result."""
OF_ONE_SITE = frozenset({"train.device", "train.callbacks", "train.init_from", "sites.each"}) | {
    *(f"sites.{key}" for key in DECIDE_NONE if key != "decides"),
    *(f"plan.{table}.folder" for table in ("state", "retain")),
}
"""Keys and tables that may differ between sites. The shares that `sites.each` sets may not, and neither may `sites.decides`: if each site
named another, two groups of sites could train without each other."""
FORMAT, SHARES, DATA = "format", "sites.each.share", "data"
_TEXT = ("manifest", "tokenizer")  # entries of a stream's fingerprint that describe the prepared data
_KEYS = ("weights", "document_mask", "phases", "source")  # entries that have the name of a key


def terms(run: RunSpec, data: Mapping[str, Any], *, version: int) -> dict[str, Any]:
    """Return what must be equal on all sites, as JSON values. `run`: a result of `at_site`. `data`: the fingerprint of its training
    samples. `version`: the version of the format in which sites send messages."""
    sites = run.sites
    assert sites is not None
    tables = [table for table in DECIDE_BITS if table != "plan" or sites.exchanges_gradients]
    found = {key: value for table in tables for key, value in flat(getattr(run, table), table).items()}
    found = {key: value for key, value in found.items() if not {key, ".".join(key.split(".")[:2])} & OF_ONE_SITE}
    found |= {SHARES: sites.shares, FORMAT: version, DATA: {name: data.get(name) for name in _TEXT}}
    found |= {f"data.{name}": data.get(name) for name in _KEYS}
    return json.loads(json.dumps(found, default=str))


def unequal(mine: Mapping[str, Any], theirs: Mapping[str, Any], own: str, other: str) -> str:
    """Return a sentence about everything in which the terms of two sites, named `own` and `other`, differ; empty if they are equal."""
    keys = differing(mine, theirs)
    if FORMAT in keys:
        return f"{own} and {other} run different versions of Megalith. Run the same version on all sites"
    if not keys:
        return ""
    way_out, other_data = "Start all sites with the same run file and the same --set options", DATA in keys
    shown = [key for key in keys if not (other_data and key.partition(".")[0] == DATA)]
    said = [f"{key} is {literal(mine.get(key))} on {own} and {literal(theirs.get(key))} on {other}" for key in shown]
    if other_data:
        said.append("the data differ")
        way_out += ", and with data.path of every site at a copy of the same prepared data"
    if shown:
        way_out += ". Only the plan, the cluster, paths and keys that concern one site alone may differ"
    return f"{own} and {other} would not train the same run: {'; '.join(said)}. {way_out}"
