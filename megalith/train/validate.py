"""Computes the held-out loss of each domain."""

from dataclasses import replace

import torch
import torch.distributed as dist

from megalith.data.stream import Batch as Samples
from megalith.data.stream import Stream
from megalith.parallel.execute import Executor
from megalith.schedule.forward_only import forward_only
from megalith.schedule.lower import lower
from megalith.train.assemble import Trainer, hidden_of
from megalith.train.batches import Cut, count_valid, indices, to_batch, without_targets


class Validator:
    """Computes held-out losses with forwards of the stages that train. All ranks build this object together, because it creates
    communicators. Held-out text is cut into sequences of `train.seq_len` tokens in all phases of a run."""

    def __init__(self, trainer: Trainer, stream: Stream) -> None:
        plan = trainer.spec.plan
        length = trainer.spec.train.model_copy(update={"seq_len": stream.seq_len})
        hidden = hidden_of(trainer.spec.model_copy(update={"train": length}), trainer.device)
        self.trainer = trainer
        self.stream = stream
        self.samples = {name: stream.validation_samples(name, trainer.spec.validation.samples) for name in stream.domains}
        rows = plan.data * plan.microbatch
        most = max((len(samples) for samples in self.samples.values()), default=0)
        self.microbatches = max(1, -(-most // rows))
        executor = trainer.executor
        program = lower(forward_only(executor.program.schedule, self.microbatches), plan.zero)
        self.executor = Executor(program, trainer.runners, reducer=executor.reducer, groups=trainer.groups, hidden=hidden)

    @torch.no_grad()
    def run(self) -> tuple[float, dict[str, float]]:
        """Return the mean loss over all held-out targets, and the mean loss of each domain, on all ranks."""
        found = {name: self._domain(samples) for name, samples in self.samples.items() if len(samples)}
        self.trainer.forget()
        targets = sum(count for _, count in found.values())
        return sum(loss * count for loss, count in found.values()) / max(1, targets), {
            name: loss for name, (loss, _) in found.items()
        }

    def _domain(self, samples: range) -> tuple[float, int]:
        trainer = self.trainer
        batch = trainer.spec.plan.microbatch * trainer.spec.plan.data * self.microbatches
        spec = trainer.spec.model_copy(update={"train": trainer.spec.train.model_copy(update={"global_batch": batch})})
        mine = [self._read(samples, numbers) for numbers in indices(spec, first=0, data_rank=trainer.groups.coordinates["data"])]
        valid = count_valid(mine, groups=trainer.groups)
        cut = replace(Cut.of(trainer), ahead=0)
        how = {"wide": trainer.wide, "raised": trainer.raised}
        batches = [to_batch(s, cut, device=trainer.device, loss_scale=1 / valid, **how) for s in mine]
        loss = self.executor.run(batches).nll.double() * (trainer.groups.coordinates["tensor"] == 0)
        dist.all_reduce(loss, group=trainer.groups.world)
        return float(loss), valid

    def _read(self, samples: range, numbers: range) -> Samples:
        """Read samples by number. For numbers beyond the last sample, return rows without targets, so that every rank has tensors of the
        same shape."""
        real = [samples[min(number, len(samples) - 1)] for number in numbers]
        return without_targets(self.stream.batch(real), [number >= len(samples) for number in numbers])
