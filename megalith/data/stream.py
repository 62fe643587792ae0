"""Prepared data as numbered samples: sample `i` is a pure function of (folder, seq_len, seed, weights, phases, i).

- Which domain: `mixture` gives the domain, and the number of earlier samples from it, which is the sample's number in the domain.
- Which window: a domain's tokens are one long sequence, cut every `seq_len` tokens; window w reads tokens w * seq_len to (w + 1) * seq_len,
  where the last one is only a target. Every token except the domain's first is a target once an epoch (with document masks,
  first tokens of documents are no targets). The last window is padded
  with end-of-text tokens that are no targets.
- Which order: every epoch of a domain has its own permutation of its windows (`shuffle`).
- Phases: mixture and sequence length may change at a sample. When the length changes, the current pass over a domain continues: the rest of
  its windows are read, in the same order, in pieces of the new length. A pass therefore reads every token exactly once, whatever the
  sequence lengths. The domain's next pass uses windows of the new length.

A stream has no state. The caller holds one number, the samples consumed. Any number of ranks can divide the next samples among themselves,
and together read what one rank would read.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalith import disk
from megalith.data.errors import DataError
from megalith.data.manifest import SPLITS, Domain, SplitName, check_copies, check_sizes, check_tokenizer, read_manifest
from megalith.data.mixture import Mixture
from megalith.data.shards import SplitReader
from megalith.data.shuffle import Permutation
from megalith.data.verified_files import Damage, sums_file

NO_TARGET = -100  # what torch's cross-entropy, too, leaves out

Ids = npt.NDArray[np.int64]

# What a resumed run must find unchanged -> how to restore it if it changed.
_WAYS_OUT = {
    "manifest": "Point data.path to the data that the run began with, or prepare them again from the same sources with the same options",
    "tokenizer": "Point data.path to data prepared with the run's tokenizer",
    "split": "Read the split that the run began with",
    "seq_len": "Set train.seq_len back",
    "seed": "Set train.seed back",
    "weights": "Set data.weights back",
    "phases": "Restore the entries of data.phases for phases that had already begun",
    "document_mask": "Set data.document_mask back",
    "source": "Restore data.source and everything that its fingerprint describes",
}


@dataclass(frozen=True)
class Sample:
    """One sequence. All arrays are int64 [seq_len] and may be modified by the caller.

    `targets` holds the next token, or -100 if there is no target: in padding and, with document masks, at the last token of a document,
    because a document does not determine the first token of the next document. `segments` are the lengths of the documents (or parts of
    documents) in the sequence; padding counts as one document. `positions` restart in each segment. Without document masks there is one
    segment.
    """

    tokens: Ids
    targets: Ids
    positions: Ids
    segments: tuple[int, ...]
    domain: str


@dataclass(frozen=True)
class PhaseChange:
    """A change of sequence length and mixture from sample `first` on. `weights`: as for `Stream`; None: in proportion to tokens."""

    first: int
    seq_len: int
    weights: Mapping[str, float] | None


@dataclass(frozen=True)
class _Pass:
    """Progress in a domain: pass `epoch`, which is cut into shuffled windows of `unit` tokens, has been read up to place `at`. Places count
    tokens and padding over all windows in shuffled order."""

    epoch: int
    unit: int
    at: int


@dataclass(frozen=True)
class _Phase:
    """A phase: samples from `first` on, with one length and one mixture."""

    first: int
    seq_len: int
    mixture: Mixture
    mixed: int
    """Number of the sample, in the run, at which the mixture's sequence of domains begins."""
    before: tuple[int, ...]
    """For each domain, number of its samples in the mixture's sequence between `mixed` and this phase."""
    passes: tuple[_Pass, ...]
    """Progress of each domain when this phase begins."""


@dataclass(frozen=True)
class Batch:
    """Stacked samples: int64 [samples, seq_len] arrays, and the segments and domain of each sample."""

    tokens: Ids
    targets: Ids
    positions: Ids
    segments: tuple[tuple[int, ...], ...]
    domains: tuple[str, ...]
    numbers: tuple[int, ...]
    """Each sample's number in the run"""


class Stream:
    """Samples of a prepared folder. Opening a stream checks manifest, tokenizer and file sizes; contents are checked as they are read."""

    def __init__(
        self,
        folder: Path | str,
        *,
        split: SplitName = "train",
        seq_len: int,
        seed: int = 0,
        weights: Mapping[str, float] | None = None,
        phases: Sequence[PhaseChange] = (),
        document_mask: bool = True,
        copies: Sequence[Path | str] = (),
        on_damage: Callable[[Damage], None] = lambda damage: None,
        tokenizer_is_known: bool = False,
    ) -> None:
        """`weights` gives every domain's share of the samples (the weights are scaled to add up to 1; 0 leaves a domain out); by default
        shares are in proportion to tokens. The validation split is read in order, once, whatever the weights. `phases` are changes of
        lengths and weights, in the order of their samples.

        `copies` are folders with the same data. A damaged block is read from the next folder, and `on_damage` is called once for each
        damaged block. `tokenizer_is_known`: tokenizer.json need not be checked here, because another process has checked the same file.

        Raises DataError, with all problems of one kind at once, for a folder that is not as it was prepared, weights that do not fit its
        domains, a split without data, or a copy with other data. Reading raises DamagedDataError if no copy is intact.
        """
        self.folder, others = Path(folder), [Path(copy) for copy in copies]
        self._manifest = read_manifest(self.folder)
        check_copies(self.folder, self._manifest, others)
        check_sizes(self.folder, self._manifest, copies=others)
        if not tokenizer_is_known:
            check_tokenizer(self.folder, self._manifest)
        domains = self._manifest.domains
        problems = _problems(domains, split, seq_len, weights)
        problems += [
            text for each in phases for text in _problems(domains, split, each.seq_len, each.weights) if text not in problems
        ]
        if problems:
            raise DataError.of(problems, title=f"{self.folder} cannot be read as requested")
        self.split: SplitName = split
        self.seq_len = seq_len
        self.seed = seed
        self.document_mask = document_mask
        self.domains: tuple[str, ...] = tuple(domains)
        self.vocab_size: int = self._manifest.tokenizer.vocab_size
        self.end_of_text: int = self._manifest.tokenizer.end_of_text
        self._readers = tuple(
            SplitReader(self.folder, getattr(domain, split), copies=others, on_damage=on_damage) for domain in domains.values()
        )
        self._windows = tuple(_windows(reader.tokens, seq_len) for reader in self._readers)
        self._firsts = np.cumsum([0, *self._windows])
        self._permutation = lru_cache(maxsize=4 * len(self.domains))(self._new_permutation)
        fresh = tuple(_Pass(0, seq_len, 0) for _ in self.domains)
        begin = _Phase(0, seq_len, self._mixture_of(weights), mixed=0, before=(0,) * len(fresh), passes=fresh)
        self._phases = [begin]
        for each in phases:
            self._phases.append(self._following(self._phases[-1], each))
        self._begins = [phase.first for phase in self._phases]

    @property
    def epoch_samples(self) -> dict[str, int]:
        """Number of samples in one pass over each domain."""
        return dict(zip(self.domains, self._windows, strict=True))

    @property
    def shares(self) -> dict[str, float]:
        """Each domain's share of the training samples in the first phase, rounded to a multiple of 1/65,536, as it is used."""
        return self._shares(self._phases[0])

    def _shares(self, phase: _Phase) -> dict[str, float]:
        return dict(zip(self.domains, phase.mixture.shares, strict=True))

    def sample(self, index: int) -> Sample:
        """Sample `index`, from 0. Training has no end; validation ends (IndexError) after every domain's last window."""
        domain, length, runs = self._place(index)
        reader = self._readers[domain]
        tokens = np.full(length, self.end_of_text, np.int64)
        targets = np.full(length, NO_TARGET, np.int64)
        positions = np.arange(length)
        edges = {0, length}
        for run in runs:
            here = slice(run.at, run.at + run.count)
            ids = reader.read(run.start, run.start + run.count + 1)
            tokens[here], targets[here] = ids[:-1], ids[1:]
            begins = reader.documents_between(run.start + 1, run.start + run.count + 1) - run.start + run.at
            if self.document_mask:
                targets[begins - 1] = NO_TARGET
            edges |= {run.at, *begins.tolist(), here.stop}
        segments: tuple[int, ...] = (length,)
        if self.document_mask:
            ends = np.array(sorted(edges))  # np.unique would import numpy.ma in every rank
            lengths = np.diff(ends)
            positions -= np.repeat(ends[:-1], lengths)
            segments = tuple(lengths.tolist())
        return Sample(tokens, targets, positions, segments, self.domains[domain])

    def length_of(self, index: int) -> int:
        """Return the number of tokens of sample `index`."""
        return self.seq_len if self.split == "validation" else self._phases[bisect_right(self._begins, index) - 1].seq_len

    def batch(self, indices: Iterable[int]) -> Batch:
        """Return samples `indices`, stacked in this order."""
        numbers = tuple(indices)
        samples = [self.sample(index) for index in numbers]
        return Batch(
            tokens=np.stack([sample.tokens for sample in samples]),
            targets=np.stack([sample.targets for sample in samples]),
            positions=np.stack([sample.positions for sample in samples]),
            segments=tuple(sample.segments for sample in samples),
            domains=tuple(sample.domain for sample in samples),
            numbers=numbers,
        )

    @property
    def unchecked(self) -> list[str]:
        """Shards whose tokens are read unchecked, because they have no checksums."""
        return [shard.file for shard in self._manifest.shards() if not disk.is_there(self.folder / sums_file(shard))]

    def bytes_of(self, index: int) -> tuple[Path, int, int]:
        """Locate the first tokens of sample `index`: return a shard of the folder, and the byte range in it."""
        domain, _, runs = self._place(index)
        start, count = (runs[0].start, runs[0].count) if runs else (0, 1)
        return self._readers[domain].bytes_of(start, start + count + 1)

    def valid_targets(self, indices: Iterable[int]) -> int:
        """Return the number of targets in samples `indices` that are not -100, by which the loss of a global batch is divided. Reads no
        tokens."""
        total = 0
        for index in indices:
            domain, _, runs = self._place(index)
            between = self._readers[domain].documents_between
            for run in runs:
                begins = len(between(run.start + 1, run.start + run.count + 1)) if self.document_mask else 0
                total += run.count - begins
        return total

    def validation_samples(self, domain: str, limit: int | None = None) -> range:
        """Return the indices (for `sample` and `batch`) of a domain's validation samples: all, or `limit` evenly spaced samples, in
        order."""
        assert self.split == "validation", "only samples of the validation split are numbered domain by domain"
        if domain not in self.domains:
            raise DataError(f"{domain!r} is not a domain of {self.folder}. The domains: {', '.join(self.domains)}.")
        which = self.domains.index(domain)
        first, windows = int(self._firsts[which]), self._windows[which]
        taken = windows if limit is None else min(limit, windows)
        step = windows // taken if taken else 1
        return range(first, first + taken * step, step)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return everything that the samples depend on, as JSON: to be stored in a checkpoint, and given to `check_same` on resume."""
        return {
            "manifest": self._manifest.sha256,
            "tokenizer": self._manifest.tokenizer.fingerprint,
            "split": self.split,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "weights": self.shares,
            "document_mask": self.document_mask,
        } | (
            {"phases": [[each.first, each.seq_len, self._shares(each)] for each in self._phases[1:]]} if self._begins[1:] else {}
        )

    def check_same(self, saved: Mapping[str, Any], *, samples: int | None = None) -> None:
        """Raise DataError with all differences from a saved `fingerprint`: after any difference, the same sample number would give another
        sample. `samples`: number of samples consumed; phases that had not begun by then may differ. `samples` None: no phase may differ.
        """
        now = _begun(json.loads(json.dumps(self.fingerprint)), samples)
        saved = _begun(saved, samples)
        problems = [
            f"{key} was {saved.get(key, 'not saved')!r}, but is now {value!r}. {_WAYS_OUT[key]}, or start a new run."
            for key, value in now.items()
            if saved.get(key) != value
        ]
        problems += [
            f"{key} was {saved[key]!r}, but is now not set. {_WAYS_OUT[key]}, or start a new run."
            if key in _WAYS_OUT
            else f"{key} was {saved[key]!r}, but this version does not know this key. Resume with the version of Megalith that "
            "saved the checkpoint, or start a new run."
            for key in sorted(saved.keys() - now.keys())
        ]
        if problems:
            raise DataError.of(problems, title=f"{self.folder} does not give the samples that this run began with")

    def _place(self, index: int) -> "tuple[int, int, list[_Run]]":
        """Return the number of sample `index`'s domain, the sample's length, and the contiguous runs of the domain's tokens in it."""
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        if self.split == "validation":
            if index >= self._firsts[-1]:
                raise IndexError(f"sample {index}: {self.folder} has only {self._firsts[-1]} validation samples")
            domain = int(np.searchsorted(self._firsts, index, side="right")) - 1
            window = index - int(self._firsts[domain])
            return domain, self.seq_len, self._runs(domain, [(window, 0, self.seq_len)], self.seq_len)
        phase = self._phases[bisect_right(self._begins, index) - 1]
        domain, earlier = phase.mixture.place(index - phase.mixed)
        where = self._further(domain, phase.passes[domain], phase.seq_len, earlier - phase.before[domain])
        return domain, phase.seq_len, self._runs(domain, self._pieces(domain, where, phase.seq_len), where.unit)

    def _pieces(self, domain: int, where: _Pass, seq_len: int) -> list[tuple[int, int, int]]:
        """Return the next `seq_len` places of a pass, or the places up to its end, as (window, first place in the window, end)."""
        end = min(where.at + seq_len, self._places(domain, where))
        order, found, at = self._permutation(domain, where.epoch, where.unit), list[tuple[int, int, int]](), where.at
        while at < end:
            number, begin = divmod(at, where.unit)
            stop = min(where.unit, begin + end - at)
            found.append((order(number), begin, stop))
            at += stop - begin
        return found

    def _runs(self, domain: int, pieces: Sequence[tuple[int, int, int]], unit: int) -> "list[_Run]":
        """Convert pieces of windows to runs of tokens, without the padding of a domain's last window."""
        found, at, last = list[_Run](), 0, self._readers[domain].tokens - 1
        for window, begin, stop in pieces:
            start = window * unit + begin
            if count := max(0, min(stop - begin, last - start)):
                found.append(_Run(at, start, count))
            at += stop - begin
        return found

    def _places(self, domain: int, where: _Pass) -> int:
        return _windows(self._readers[domain].tokens, where.unit) * where.unit

    def _further(self, domain: int, where: _Pass, seq_len: int, samples: int) -> _Pass:
        """Return a domain's progress after `samples` more samples of `seq_len` tokens. The current pass is read to its end, where a
        sample may have fewer tokens; later passes are cut into windows of `seq_len`."""
        left = -(-(self._places(domain, where) - where.at) // seq_len)
        if samples < left:
            return replace(where, at=where.at + samples * seq_len)
        epochs, windows = divmod(samples - left, _windows(self._readers[domain].tokens, seq_len))
        return _Pass(where.epoch + 1 + epochs, seq_len, windows * seq_len)

    def _following(self, phase: _Phase, change: PhaseChange) -> _Phase:
        mixture, counts = self._mixture_of(change.weights), phase.mixture.counts(change.first - phase.mixed).tolist()
        passes = list[_Pass]()
        for domain, (where, count, before) in enumerate(zip(phase.passes, counts, phase.before, strict=True)):
            now = self._further(domain, where, phase.seq_len, count - before) if count > before else where
            passes.append(replace(now, unit=change.seq_len) if now.at == 0 else now)
        same = mixture.shares == phase.mixture.shares
        mixed, before = (phase.mixed, tuple(counts)) if same else (change.first, (0,) * len(counts))
        return _Phase(change.first, change.seq_len, mixture, mixed, before, tuple(passes))

    def _mixture_of(self, weights: Mapping[str, float] | None) -> Mixture:
        domains = self._manifest.domains
        return Mixture([_default_weight(domains[name], weights, name) for name in self.domains])

    def _new_permutation(self, domain: int, epoch: int, unit: int) -> Permutation:
        return Permutation.of(_windows(self._readers[domain].tokens, unit), self.seed, self.domains[domain], epoch)


@dataclass(frozen=True)
class _Run:
    """`count` tokens of a domain from `start` on, and their targets, at position `at` of a sample."""

    at: int
    start: int
    count: int


def _begun(fingerprint: Mapping[str, Any], samples: int | None) -> Mapping[str, Any]:
    """Return a fingerprint without phases that had not begun when `samples` samples were consumed."""
    if samples is None or "phases" not in fingerprint:
        return fingerprint
    phases = [phase for phase in fingerprint["phases"] if phase[0] < samples]
    rest = {name: value for name, value in fingerprint.items() if name != "phases"}
    return rest | ({"phases": phases} if phases else {})


def _windows(tokens: int, seq_len: int) -> int:
    """Return the number of windows of `seq_len` inputs in which every token except the first is a target once."""
    return -(-max(tokens - 1, 0) // seq_len)


def _default_weight(domain: Domain, weights: Mapping[str, float] | None, name: str) -> float:
    return weights[name] if weights is not None else domain.train.tokens


def _problems(domains: Mapping[str, Domain], split: str, seq_len: int, weights: Mapping[str, float] | None) -> list[str]:
    held = ", ".join(domains)
    problems: list[str] = []
    if split not in SPLITS:
        problems.append(f"split={split!r} is not one of: {', '.join(SPLITS)}.")
    if seq_len < 1:
        problems.append(f"seq_len={seq_len} is no valid length. Use 1 or more.")
    if weights is not None:
        problems += _weight_problems(list(domains), weights)
    if not problems:
        wanted = [name for name in domains if split == "validation" or weights is None or weights[name] > 0]
        empty = [name for name in wanted if getattr(domains[name], split).tokens < 2]
        if split == "validation" and len(empty) == len(domains):
            problems.append(
                f"None of the domains ({held}) has validation data. Prepare the data with a validation share above 0."
            )
        if split == "train":
            problems += [f"The domain {name} has fewer than 2 training tokens. Set the domain's weight to 0." for name in empty]
    return problems


def _weight_problems(domains: Sequence[str], weights: Mapping[str, float]) -> list[str]:
    problems: list[str] = []
    for name, weight in weights.items():
        if name not in domains:
            close = get_close_matches(name, domains, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"The data holds: {', '.join(domains)}."
            problems.append(f"weights.{name}={weight} names no domain of the data. {hint}")
        elif not 0 <= weight < float("inf"):
            problems.append(f"weights.{name}={weight} is not a valid weight. Use a finite number of 0 or more.")
    missing = [name for name in domains if name not in weights]
    problems += [
        f"weights has no entry for the domain {name!r}. Give the domain a share; 0 leaves it out of the mixture."
        for name in missing
    ]
    if not problems and sum(weights.values()) == 0:
        problems.append("weights are all 0. Give at least one domain a weight above 0.")
    return problems
