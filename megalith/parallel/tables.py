"""Tables of the vocabulary whose master weights are off the device: embedding and output read their rows, and hand over their gradients, in
tiles, so that a rank never holds one of them whole."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from megalith.kernels.chunks import tiles_of
from megalith.models.embedding import Embedding
from megalith.models.head import Output
from megalith.models.stage import Stage
from megalith.parallel.data import Bucket, Weight
from megalith.parallel.passes import Runner

AHEAD = 2
"""Number of tiles in memory: one is used while the next one is read."""


def use_tiles(stages: Iterable[Stage], rows: int) -> None:
    """Make each stage's output layer compute its loss in tiles of this many rows of the vocabulary; 0: without tiles."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, Output):
                module.tile = rows


def cut_tables(
    runners: Iterable[Runner], weights: Mapping[str, Weight], rows: int, *, names: Collection[str]
) -> dict[str, "StreamedTable"]:
    """Cut the tables among the parameters `names` that have more than one tile of `rows` rows, so that these are never gathered; return
    them by name. A tied table is not cut. There must be one shard and one copy of each parameter."""
    known = {weight.compute: (name, weight) for name, weight in weights.items() if name in names}
    found: dict[str, StreamedTable] = {}
    for runner in runners:
        buckets = {weight: bucket for used in runner.buckets for bucket in used for weight in bucket.weights}
        for module in runner.stage.modules():
            if not isinstance(module, Embedding | Output) or module.weight not in known:
                continue
            name, weight = known[module.weight]
            if (
                weight.compute.shape[0] > rows and not weight.shared
            ):  # two gradients of a tied table are added up before they are widened
                module.table = found.setdefault(name, StreamedTable(weight, buckets[weight], rows))
    return found


class StreamedTable:
    """A `kernels.tiled.Table` whose weights come from the weight's `source`."""

    gradient: Tensor | None = None

    def __init__(self, weight: Weight, bucket: Bucket, rows: int) -> None:
        self.weight, self.bucket, self.rows = weight, bucket, rows
        self.tiles = tiles_of(weight.compute.shape[0], rows)
        self.taken: Callable[[int, Tensor], None] | None = None
        """Function that takes the gradient of each tile, as flat numbers with the index of the first; None: gradients are added up for the
        whole share."""
        self.observe: Callable[[Tensor], None] = lambda tensor: None
        """Function that is called with each tensor of a tile."""
        weight.cut = True

    def read(self) -> Iterator[Tensor]:
        """Yield the weights of each tile. While a tile is used, a thread reads the next one, if the weights have such a thread."""
        self.bucket.await_update()
        wide = self.weight.compute.shape[1]
        buffers = [self.weight.compute.detach().new_empty(self.rows, wide) for _ in range(min(AHEAD, len(self.tiles)))]
        for buffer in buffers:
            self.observe(buffer)
        rooms = [buffers[number % AHEAD][: len(rows)] for number, rows in enumerate(self.tiles)]
        coming = [self._start(room, rows) for room, rows in zip(rooms[:AHEAD], self.tiles, strict=False)]
        for number, room in enumerate(rooms):
            coming[number]()
            yield room
            if number + AHEAD < len(rooms):
                coming.append(self._start(rooms[number + AHEAD], self.tiles[number + AHEAD]))

    def _start(self, room: Tensor, rows: range) -> Callable[[], object]:
        source = self.weight.source
        assert source is not None, "the weights of a table in tiles are off the device"
        fill = partial(_fill, source.read, room, rows.start * room.shape[1])
        if source.reader is None:
            return fill
        reading: Future[None] = source.reader.submit(fill)
        return reading.result

    def give(self, rows: range, gradient: Tensor) -> None:
        """Take the gradient of one tile: one rank has all of it, so there is nothing to reduce."""
        gradient = gradient.to(self.weight.sums)  # first: the sum of finite numbers may overflow in fp16
        grads = [gradient if weight is self.weight else None for weight in self.bucket.weights]
        if not self.bucket.take_in([gradient], grads):
            return
        self.observe(gradient)
        if self.taken is not None:
            self.taken(rows.start * gradient.shape[1], gradient.view(-1))
        else:
            self.weight.add_rows(rows, gradient)


@torch.no_grad()
def _fill(read: Callable[[Tensor, int], None], room: Tensor, first: int) -> None:
    read(room, first)
