"""A user's own source of training samples, which replaces the prepared order."""

from typing import Any, Protocol

import numpy as np

from megalith.data.errors import DataError
from megalith.data.stream import NO_TARGET, Sample, Stream


class SampleSource(Protocol):
    """Training samples by number. A source has no state: sample `index` is a function of only the prepared data and `index`, so a resumed
    run needs no saved state for it.

    Every rank makes its own instance. Ranks that share a sequence (pipeline, context and tensor ranks) request the same samples and take
    their parts; different data ranks request different samples. A sample number must therefore give the same sample on every rank. Ranks
    compare one sample when they start. An attribute `fingerprint`, any JSON value, is saved in checkpoints; a run with another
    fingerprint is not resumed.
    """

    def __init__(self, prepared: Stream) -> None:
        """`prepared`: the training samples of `data.path`, with its mixture, phases and order."""
        ...

    def sample(self, index: int) -> Sample:
        """Return sample `index` (from 0), a `megalith.data.stream.Sample` of the same length as a prepared sample."""
        ...


class OwnStream(Stream):
    """A stream of prepared data whose training samples come from a user's own source."""

    def __init__(self, *args: Any, name: str, source: Any, **how: Any) -> None:
        """`source`: the object that `name` names; called with the prepared stream, it returns the SampleSource. Other arguments are as for
        `Stream`."""
        super().__init__(*args, **how)
        self._name = name
        self._source: SampleSource = source(Stream(*args, **how))

    def sample(self, index: int) -> Sample:
        """Return the source's sample. Raises DataError if the sample does not fit this run."""
        found = self._source.sample(index)
        if faults := list(self._faults(found, index)):
            title = f"data.source = {self._name} returns an invalid sample {index}"
            raise DataError(f"{title}: {faults[0]}") if len(faults) == 1 else DataError.of(faults, title=title)
        return found

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return everything that the samples depend on, including the source's own fingerprint."""
        return super().fingerprint | {"source": [self._name, getattr(self._source, "fingerprint", None)]}

    def _faults(self, found: Sample, index: int) -> "list[str]":
        if not isinstance(found, Sample):
            return [f"the sample is a {type(found).__name__}. Return a megalith.data.stream.Sample."]
        length = self.length_of(index)
        arrays = {"tokens": found.tokens, "targets": found.targets, "positions": found.positions}
        faults = [
            f"{name} has the shape {list(np.shape(array))} and the type {getattr(array, 'dtype', type(array).__name__)}. "
            f"Give int64 [{length}]."
            for name, array in arrays.items()
            if not isinstance(array, np.ndarray) or array.shape != (length,) or array.dtype != np.int64
        ]
        if faults:
            return faults
        if not ((found.tokens >= 0) & (found.tokens < self.vocab_size)).all():
            faults.append(f"tokens has ids outside the vocabulary. Use 0 to {self.vocab_size - 1}.")
        if not ((found.targets >= 0) & (found.targets < self.vocab_size) | (found.targets == NO_TARGET)).all():
            faults.append(
                f"targets has ids outside the vocabulary. Use 0 to {self.vocab_size - 1}, or {NO_TARGET} for positions without a "
                "target."
            )
        if min(found.segments, default=0) < 1 or sum(found.segments) != length:
            faults.append(
                f"segments = {found.segments} are not positive lengths that add up to {length}. Use ({length},) for one document."
            )
        return faults
