"""The data of a run, in the form that its ranks read, and a check that all ranks read the same."""

import json
import os
import socket
import time
from itertools import pairwise
from typing import Any, Literal

import torch.distributed as dist
from pydantic import TypeAdapter

from megalith import own
from megalith.data.errors import DataError
from megalith.data.manifest import TOKENIZER_FILE
from megalith.data.own import OwnStream
from megalith.data.stream import PhaseChange, Stream
from megalith.data.verified_files import Damage
from megalith.exchange import ObjectCollectives
from megalith.fleet.observations import DataDamaged
from megalith.fleet.rank_info import PLACEMENT, RankInfo
from megalith.fleet.report import report
from megalith.sealed import digest
from megalith.spec.phases import Phases
from megalith.spec.run import RunSpec


def open_stream(spec: RunSpec, split: Literal["train", "validation"], *, tokenizer_is_known: bool = False) -> Stream:
    """Open a run's data. Held-out text is cut into sequences in the same way in all phases, so that its losses in different phases can be
    compared. `tokenizer_is_known`: see `Stream`."""
    phases = Phases.of(spec).all
    changes = [
        PhaseChange(now.first, now.seq_len, now.weights)
        for before, now in pairwise(phases)
        if (before.seq_len, before.weights) != (now.seq_len, now.weights)
    ]
    how: dict[str, Any] = {
        "split": split,
        "seq_len": phases[0].seq_len,
        "seed": spec.train.seed,
        "weights": phases[0].weights,
        "phases": changes if split == "train" else (),
        "document_mask": spec.data.document_mask,
        "copies": spec.data.copies,
        "on_damage": _log_damage,
        "tokenizer_is_known": tokenizer_is_known,
    }
    if spec.data.source is None or split == "validation":
        return Stream(spec.data.path, **how)
    return OwnStream(spec.data.path, name=spec.data.source, source=own.load(spec.data.source), **how)


def _log_damage(found: Damage) -> None:
    elsewhere = None if found.elsewhere is None else str(found.elsewhere)
    report(DataDamaged(time=time.time(), shard=found.file, error=found.error, other_copy=elsewhere))


_INPUTS: TypeAdapter[tuple[str, dict[str, str]]] = TypeAdapter(tuple[str, dict[str, str]])

APART = frozenset({"name", "log", "alerts", "launch"})
"""Keys and tables of a run that may differ between ranks."""


def compare_inputs(spec: RunSpec, stream: Stream, *, group: dist.ProcessGroup) -> None:
    """Check that all ranks have read the same run and the same data, because nodes may have different files at one path. All ranks of
    `group` call it together. Raises DataError on every rank, which names the ranks, their nodes and what differs from rank 0."""
    node = RankInfo.find().node if PLACEMENT in os.environ else socket.gethostname()
    everyone = ObjectCollectives(group).all_gather((node, _inputs(spec, stream)), _INPUTS)
    first_node, first = everyone[0]
    odd = dict[tuple[str, str], list[str]]()
    for rank, (node, found) in enumerate(everyone):
        if wrong := [name for name in {**first, **found} if found.get(name) != first.get(name)]:
            odd.setdefault((node, ", ".join(wrong)), []).append(str(rank))
    if odd:
        listed = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} on {node}: {wrong}" for (node, wrong), ranks in odd.items()
        )
        raise DataError(
            f"these ranks have not read what rank 0 on {first_node} has read, and would train on something else: {listed}",
            "Give all machines the same run folder and the same data at the same path, and start the same command again.",
        )


def _inputs(spec: RunSpec, stream: Stream) -> dict[str, str]:
    """Return the digest of each table of a run and of each value on which its samples depend."""
    tables = {f"[{name}] of spec.json": value for name, value in spec.model_dump(mode="json").items() if name not in APART}
    samples = {f"{name} of {spec.data.path}": value for name, value in stream.fingerprint.items()}
    try:
        tokenizer = digest((stream.folder / TOKENIZER_FILE).read_bytes())
    except OSError as error:
        tokenizer = error.strerror
    samples |= {f"{TOKENIZER_FILE} of {spec.data.path}": tokenizer}
    return {name: digest(json.dumps(value, sort_keys=True).encode()) for name, value in (tables | samples).items()}
