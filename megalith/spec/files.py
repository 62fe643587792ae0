"""Run files: from TOML to a checked RunSpec, with the origin of each value. Later values override earlier ones in this order:
defaults, preset (`[model] preset = "llama3-8b"`), file, command line (`--set train.steps=100`). Tables are merged key by key; all
other values are replaced. Relative paths in a run file start at the current directory, as on the command line: the same
`data.path` means the same folder wherever the run file lies. Only the path of a cluster file is first looked up in the run file's
folder, because the two are usually in one folder.
"""

import contextlib
import copy
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from megalith import disk, epochs
from megalith.spec import lengths, renamed
from megalith.spec.base import AbsentError
from megalith.spec.plan import Plan
from megalith.spec.presets import meant, presets
from megalith.spec.problem import Problem, SpecErrors, near
from megalith.spec.run import RunSpec
from megalith.spec.sites import SitesSpec, at_site
from megalith.spec.toml import dotted, key, literal
from megalith.spec.validate import Leaf, Tree, examine, leaves

FILE = "run.toml"
SPEC_FILE = "spec.json"
PROVENANCE_FILE = "provenance.json"
STARTED = "started."
"""Prefix of those keys in provenance.json that record how a run was started."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run with all its values. `provenance` names the origin of each value by its dotted key:
    "default", "preset llama3-8b", "file run.toml" or "command line"."""

    spec: RunSpec
    provenance: dict[str, str]
    path: Path | None = None


@dataclass(frozen=True)
class Reading:
    """Result of reading a run file: the spec and its problems. Invalid values are not in the spec, and reading one raises
    AbsentError."""

    resolved: ResolvedRun
    problems: list[Problem]

    def whole(self) -> ResolvedRun:
        """Return the run if it has no problems; otherwise raise SpecErrors with all of them."""
        if self.problems:
            raise SpecErrors(self.problems)
        return self.resolved


@dataclass(frozen=True)
class Layer:
    """Values from one origin."""

    values: Tree
    source: str


def load(path: str | Path, *, overrides: Sequence[str] = ()) -> ResolvedRun:
    """Return the run that a file describes, changed by `overrides` ("train.steps=100"). Raises SpecErrors with every problem."""
    return read(path, overrides=overrides).whole()


def read(path: str | Path, *, overrides: Sequence[str] = (), saved: bool = False) -> Reading:
    """Like `load`, but return the problems together with the valid values. `saved`: the file is in a run folder, where renamed
    keys keep their old meaning. Raises SpecErrors if the file or an override is not TOML."""
    path = Path(path)
    problems: list[Problem] = []
    layers: list[Layer] = []
    for reader, subject in ((_file, path), *((read_setting, text) for text in overrides)):
        try:
            layers.append(reader(subject))  # type: ignore[operator]
        except SpecErrors as errors:
            problems += errors.problems
    found = _lay_all(layers, path=path, saved=saved)
    if not problems:
        return Reading(found.resolved, [*found.problems, *_cluster_missing(found.resolved, path)])
    unread = problems[0].source != "command line"  # a file: then only its problems can be reported
    raise SpecErrors(problems if unread else [*problems, *found.problems])


def _cluster_missing(resolved: ResolvedRun, path: Path) -> list[Problem]:
    source = resolved.provenance.get("cluster", "")
    if not source.startswith("file "):
        return []
    named = resolved.spec.cluster
    if not _is_relative_file(named) or Path(named).is_file():
        return []
    reason = f"no such file in {path.parent.absolute()}, where the run file is, nor in {Path.cwd()}, the current directory"
    return [
        Problem(
            "error",
            "cluster",
            named,
            reason,
            "Correct the path (it may be relative to either of these folders), or give an absolute path.",
            source,
        )
    ]


def _tables_of_sites(values: Tree) -> list[Tree]:
    sites = values.get("sites")
    each = sites.get("each") if isinstance(sites, dict) else None
    return [one for one in each if isinstance(one, dict)] if isinstance(each, list) else []


def _is_relative_file(cluster: Any) -> TypeGuard[str]:
    return isinstance(cluster, str) and cluster.endswith(".toml") and not Path(cluster).is_absolute()


def resolve(layers: Sequence[Layer]) -> ResolvedRun:
    """Merge layers of values on top of the preset that they name; later layers override earlier ones. Raises SpecErrors with
    every problem."""
    return _lay_all(layers, path=None).whole()


def _lay_all(layers: Sequence[Layer], *, path: Path | None, saved: bool = False) -> Reading:
    base, failed = _preset(layers)
    tree: Tree = {}
    sources: dict[str, str] = {}
    for layer in (*base, *layers):
        lay(tree, layer.values, source=layer.source, sources=sources)
    if isinstance(tree.get("model"), dict):
        tree["model"].pop("preset", None)

    def source(name: str) -> str:
        while name and name not in sources:  # an item of a list has the origin of the list
            name = name.rpartition(".")[0]
        return sources.get(name, "")

    old = [] if saved else list(renamed.take(tree, source))
    lengths.convert(tree, sources)
    found = examine(tree, RunSpec, source=source, preset_failed=bool(failed))
    spec = _placed(found.spec)
    origins = {name: sources.get(name, "default") for name in (dotted(leaf.path) for leaf in leaves(spec))}
    return Reading(ResolvedRun(spec, origins, path), [*failed, *old, *found.problems, *_replaced(found.spec, sources)])


def _replaced(spec: RunSpec, sources: Mapping[str, str]) -> Iterator[Problem]:
    """Yield values of the command line that no site would use, because each site's table has its own."""
    each = getattr(getattr(spec, "sites", None), "each", ())  # absent if they are invalid
    own = [table for table in ("plan", "cluster") if each and all(getattr(one, table) is not None for one in each)]
    tables = {name.rpartition(".")[0] for name in sources}
    for name, source in sources.items():
        if source == "command line" and name not in tables and (table := name.partition(".")[0]) in own:
            reason = f"changes no site: each table of sites.each has a {table} of its own"
            way_out = f"Set sites.each as a whole, or change the {table} of each site in the run file."
            value = reduce(lambda found, part: getattr(found, part, None), name.split("."), spec)
            yield Problem("error", name, value, reason, way_out, source)


def _placed(spec: RunSpec) -> RunSpec:
    """Return the run of the site that this command trains (`sites.at_site`). Return the run unchanged if values of its sites are
    missing."""
    with contextlib.suppress(AbsentError):
        return at_site(spec)
    return spec


def dump(resolved: ResolvedRun, *, brief: bool = False) -> str:
    """Return the whole run as TOML, with the origin of each value in a comment. `load` of this text returns an equal spec.

    A value that is not set is written as "none". `brief`: leave out default values, and write a model that equals a preset as
    the preset's name.
    """
    tables: dict[tuple[str, ...], list[Leaf]] = {}
    for leaf in telling(resolved.spec, resolved.provenance) if brief else leaves(resolved.spec):
        tables.setdefault(leaf.path[:-1], []).append(leaf)
    # the top level first, a table before the tables inside it: leaves come in the order of the fields
    first = [section for section in dict.fromkeys(path[:1] for path in tables) if section]
    order = [(), *(path for section in first for path in sorted((p for p in tables if p[:1] == section), key=len))]
    text = ["# One run: keys not listed have their defaults." if brief else "# One run, in full: every value with its origin."]
    for path in order:
        text += ["", f"[{dotted(path)}]"] if path else []
        rows = {
            f"{key(leaf.path[-1])} = {literal(leaf.value)}": resolved.provenance.get(dotted(leaf.path), "")
            for leaf in tables[path]
        }
        width = min(48, max(map(len, rows)))
        text += [f"{row:<{width}}  # {_printable(origin)}" if origin else row for row, origin in rows.items()]
    return "\n".join(text) + "\n"


def telling(spec: RunSpec, origins: Mapping[str, str] = MappingProxyType({})) -> Iterator[Leaf]:
    """Yield the values of a run that are not defaults; if the model equals a preset, only the preset's name is yielded for it.
    `origins`: the origin of each value."""
    values = spec.model.model_dump()
    kept = {name: values[name] for name, field in type(spec.model).model_fields.items() if field.is_required()}
    usual = {leaf.path: leaf.value for leaf in leaves(type(spec.model).model_validate(kept))}
    needed = {(name,) for name in kept} | {("family",)}
    named = presets().get(spec.model.name)
    if named is not None and named.build() == spec.model:
        yield Leaf(("model", "preset"), spec.model.name)
    else:
        model = (leaf for leaf in leaves(spec.model) if leaf.path in needed or usual.get(leaf.path, ...) != leaf.value)
        yield from (Leaf(("model", *leaf.path), leaf.value) for leaf in model)
    least = {"model": values, "data": {"path": ""}, "train": {"steps": 1, "global_batch": 1, "seq_len": 1}}
    plain = {leaf.path: leaf.value for leaf in leaves(RunSpec.model_validate(least))}
    plain |= {("sites", *leaf.path): leaf.value for leaf in leaves(SitesSpec())}
    said = {("name",), ("data", "path"), ("train", "steps"), ("train", "global_batch"), ("train", "seq_len"), ("sites", "count")}
    for leaf in leaves(spec):
        # missing keys of `[sites]` may be chosen for a link, so a value that a person gave is kept even if it is the default
        asked = leaf.path[0] == "sites" and origins.get(dotted(leaf.path), "default") not in ("", "default")
        if leaf.path[0] != "model" and (asked or leaf.path in said or plain.get(leaf.path, ...) != leaf.value):
            yield Leaf(leaf.path, tuple(map(_told, leaf.value)) if isinstance(leaf.value, tuple) else leaf.value)


def _told(table: Any) -> Any:
    if isinstance(table, Mapping) and isinstance(table.get("plan"), Mapping):
        return {**table, "plan": Plan.model_validate(table["plan"]).model_dump(exclude_defaults=True)}
    return table


def spec_text(spec: RunSpec) -> str:
    """Return the text that `save` writes to spec.json."""
    return json.dumps(spec.model_dump(mode="json"), indent=1) + "\n"


def save(resolved: ResolvedRun, run_dir: Path, origin: Mapping[str, str] | None = None, *, epoch: int = 0) -> None:
    """Write run.toml (for people and for `load`), spec.json and provenance.json (for programs) to the run folder. `origin`:
    further entries of provenance.json, whose keys get the prefix STARTED. `epoch`: the owner's number in the files' names."""
    run_dir.mkdir(parents=True, exist_ok=True)
    provenance = resolved.provenance | {f"{STARTED}{name}": value for name, value in (origin or {}).items()}
    texts = {SPEC_FILE: spec_text(resolved.spec), PROVENANCE_FILE: json.dumps(provenance, indent=1) + "\n", FILE: dump(resolved)}
    for file, text in texts.items():  # run.toml last: a reader that finds it finds the others
        for path in epochs.names(run_dir, file, epoch):
            disk.write_whole(path, text)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def lay(tree: Tree, values: Tree, *, source: str, sources: dict[str, str], path: tuple[str, ...] = ()) -> None:
    """Merge values into a tree, tables key by key; record `source` as the origin of each value in `sources`."""
    for name, value in values.items():
        here = (*path, name)
        if isinstance(value, dict):
            if not isinstance(tree.get(name), dict):
                tree[name] = {}
            lay(tree[name], value, source=source, sources=sources, path=here)
        else:
            tree[name] = copy.deepcopy(value)
        sources[dotted(here)] = source


def _preset(layers: Sequence[Layer]) -> tuple[list[Layer], list[Problem]]:
    """Return a layer with the values of the preset that the layers name; the last layer that names one counts. For an unknown
    preset, return a problem and no layer."""
    for layer in reversed(layers):
        model = layer.values.get("model")
        if not isinstance(model, dict) or "preset" not in model:
            continue
        name = model["preset"]
        if isinstance(name, str) and name in presets():
            return [Layer({"model": presets()[name].values}, f"preset {name}")], []
        nearest = near(str(name), presets())
        fits = " or ".join(map(literal, [nearest] if nearest else meant(str(name))[:3]))
        way_out = f"{f'Did you mean {fits}? ' if fits else ''}`megalith models` lists all models."
        return [], [Problem("error", "model.preset", name, "no preset has this name", way_out, layer.source)]
    return [], []


def _file(path: Path) -> Layer:
    def problem(reason: str, way_out: str, line: str = "") -> SpecErrors:
        return SpecErrors([Problem("error", f"{path}{line}", None, reason, way_out, f"file {path}")])

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        nearest = near(path.name, (p.name for p in _beside(path)))
        way_out = f"Did you mean {path.with_name(nearest)}?" if nearest else "A relative path starts at the current directory."
        raise problem(f"no such file (looked in {path.parent.absolute()})", way_out) from None
    except IsADirectoryError:
        raise problem("is a folder, but a run file is needed", f"Did you mean {path / FILE}?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise problem(f"cannot be read: {error}", "Give a readable TOML file in UTF-8.") from error
    try:
        values = tomllib.loads(text)
        for table in (values, *_tables_of_sites(values)):
            if _is_relative_file(named := table.get("cluster")) and (path.parent / named).is_file():
                table["cluster"] = str(
                    (path.parent / named).resolve()
                )  # absolute: it is saved in run folders, which are elsewhere
        return Layer(values, f"file {path}")
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        number = int(found[1]) if found else len(text.splitlines())
        quoted = text.splitlines()[number - 1].strip() if 0 < number <= len(text.splitlines()) else ""
        way_out = 'Text needs "quotes", lists need [brackets].'
        raise problem(f"not TOML: {error}: {quoted}", way_out, f":{number}") from error


def _beside(path: Path) -> Iterator[Path]:
    return path.parent.iterdir() if path.parent.is_dir() else iter(())


def read_setting(text: str) -> Layer:
    """Parse the TEXT of `--set TEXT`, which is "a.b=VALUE". If VALUE is not TOML, it is read as a string. Raises SpecErrors."""
    name, equals, value = (part.strip() for part in text.partition("="))

    def problem(reason: str, way_out: str) -> SpecErrors:
        return SpecErrors([Problem("error", f"--set {text}", None, reason, way_out, "command line")])

    if not (name and equals and value):
        raise problem("a key and a value are needed", "Write --set train.steps=100.")
    quoted = f"{name} = {literal(value)}"
    attempts = [quoted] if "\n" in value else [f"{name} = {value}"] if value[0] in "[{\"'" else [f"{name} = {value}", quoted]
    error: Exception | None = None
    for attempt in attempts:  # a TOML value, or else a word
        try:
            return Layer(tomllib.loads(attempt), "command line")
        except tomllib.TOMLDecodeError as failed:
            error = failed
    raise problem(
        f"not TOML: {error}", "Write --set a.b=VALUE, and put a.b=VALUE in 'single quotes' if VALUE has quotes or spaces."
    )
