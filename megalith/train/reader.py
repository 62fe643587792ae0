"""Determines and reads the samples of each step on this rank."""

from megalith.data.stream import Batch as Samples
from megalith.data.stream import Stream
from megalith.spec.phases import Phases
from megalith.spec.sites.deal import Portion, Share
from megalith.train.assemble import Trainer
from megalith.train.restore import Position, indices_in, read_numbers, read_portion
from megalith.train.sites.merge import Sites
from megalith.train.stability.healer import Data


class Reader:
    """Reads this rank's samples of a step, also of a past step for which `reads` is True. `begin`: the run's position when this rank was
    started. `sites` is None for a run without sites."""

    def __init__(self, trainer: Trainer, stream: Stream, begin: Position, sites: Sites | None) -> None:
        self._trainer, self._stream, self._begin, self._sites = trainer, stream, begin, sites
        self._phases = Phases.of(trainer.run)

    def share(self, step: int) -> Portion:
        """Return the samples that this rank's site, or the whole run, reads in a step."""
        if self._sites is not None:
            return self._sites.share(step)
        numbers = read_numbers(self._trainer.run, self._begin, step)
        return Portion((Share(numbers.start, len(numbers)),))

    def reads(self, step: int) -> bool:
        """Return True if the samples of a past step can be read again: a site knows only its newest shares, and a run that branched
        off knows only the samples that it read after the branch."""
        if self._sites is not None:
            return self._sites.knows(step)
        branch = self._trainer.run.branch
        return self.share(step).first >= (branch.samples + branch.skip if branch else 0)

    def indices(self, step: int) -> list[list[int]]:
        """Return the numbers of the samples of each of this rank's microbatches in a step."""
        return indices_in(self._trainer.run, self.share(step), self._trainer.reader)

    def read(self, step: int) -> list[Samples]:
        """Return this rank's microbatches of a step."""
        return read_portion(self._stream, self._trainer.run, self.share(step), self._trainer.reader)

    def first_sample(self, step: int) -> int:
        """Return the number of the first sample that this rank reads in a step."""
        return self.indices(step)[0][0]

    def data(self) -> Data:
        """Return access to the data in the form that the healer of spikes needs."""

        def place(number: int) -> str:
            return f"{self._stream.sample(number).domain} in {self._stream.bytes_of(number)[0].name}"

        return Data(
            reads=self.reads,
            read=self.read,
            mine=self.indices,
            numbers=lambda step: tuple(range(first, first + size) for first, size in self.share(step).shares),
            shape=lambda step: (self._phases.at(self.share(step).first), self.share(step).size),
            place=place,
        )
