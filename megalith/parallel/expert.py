"""Expert parallelism (GShard, Lepikhin et al. 2020, arXiv:2006.16668): experts are divided among ranks, and tokens are sent to them and
back.

Every rank routes its own tokens. In an `expert` group of e ranks, rank i of the group holds experts i E/e to (i + 1) E/e - 1 of all E
experts. The ranks of an `expert_tensor` group hold the same experts and split their hidden width, so each of these ranks receives the
tokens of the whole group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from megalith.kernels.grouped import Sizes
from megalith.kernels.permute import Order, permute, rows_of
from megalith.models.init import HeldExperts
from megalith.models.moe import Experts, LocalRows, Moe, Pending, Traffic
from megalith.models.router import EvenRouting, earlier
from megalith.parallel.conjugate import conjugates
from megalith.parallel.groups import Groups, ranks_in
from megalith.parallel.place import Place
from megalith.parallel.tensor import gather
from megalith.spec.plan import Plan

SPLITS: dict[
    str, tuple[tuple[Placement, Placement], int]
] = {  # on expert and expert_tensor; the dim along which shards cut the rest
    "gate": ((Shard(0), Shard(1)), 2),
    "up": ((Shard(0), Shard(1)), 2),
    "down": ((Shard(0), Shard(2)), 1),
}


def split_experts(moe: Moe, groups: Groups, plan: Plan) -> dict[str, Place]:
    """Keep only this rank's experts, which may still be on the meta device, and replace the token dispatcher and the balance sets. Return
    the `Place` of each split parameter, by the parameter's name in `moe`. Parameters that are not returned are not split.

    The input x of a rank is that rank's part of each sequence: with context parallelism, an early and a late chunk; with `plan.sequence`,
    the tensor rank's share of these chunks. Raises ValueError if the number or the width of the experts cannot be divided evenly.
    """
    experts, hidden = moe.experts.up.shape[:2]
    problems = []
    if experts % plan.expert:
        problems.append(f"plan.expert={plan.expert} does not divide {experts} experts; use a divisor")
    if hidden % plan.expert_tensor:
        problems.append(f"plan.expert_tensor={plan.expert_tensor} does not divide the experts' width {hidden}; use a divisor")
    if problems:
        raise ValueError("; ".join(problems))
    here = groups.mesh.expert_coordinates(groups.rank)
    share_experts(moe.experts, (here["expert"], plan.expert), (here["expert_tensor"], plan.expert_tensor))
    places = {f"experts.{name}": Place(groups.experts, *SPLITS[name]) for name, _ in moe.experts.named_parameters()}
    if plan.expert * plan.expert_tensor * plan.context * plan.tensor > 1:
        moe.dispatcher = AllToAllDispatcher(groups, sequence=plan.sequence)
    moe.sets = DistributedBalanceSets(groups, sequence=plan.sequence)
    return places


def share_experts(experts: Experts, by_expert: tuple[int, int], by_width: tuple[int, int]) -> None:
    """Keep only the experts of one rank, and only this rank's part of each expert's hidden width. `by_expert` and `by_width` are pairs (the
    rank's place, the number of ranks) along the axes `expert` and `expert_tensor`."""
    for name, weight in list(experts.named_parameters()):
        share = weight.detach()
        for placement, (place, ranks) in zip(SPLITS[name][0], (by_expert, by_width), strict=True):
            share = _share(share, placement, place, ranks)
        setattr(experts, name, nn.Parameter(share.clone(memory_format=torch.contiguous_format)))


def held_of(weight: Tensor, place: Place) -> HeldExperts:
    """Return which experts, and which part of each, a weight holds after `split_experts`."""
    _, by_width = place.split
    assert isinstance(by_width, Shard)
    first = place.mesh.get_local_rank(2) * weight.shape[0]
    return HeldExperts(first, by_width.dim - 1, place.mesh.get_local_rank(3), place.mesh.size(3))


def _share(x: Tensor, placement: Placement, index: int, parts: int) -> Tensor:
    assert isinstance(placement, Shard)
    return x.chunk(parts, placement.dim)[index]


# --- sets of tokens ---


def spans_of(seq: int, *, context: int, contexts: int, share: int = 0, shares: int = 1) -> tuple[range, ...]:
    """Return the positions, in the whole sequence, of the `seq` tokens of a context rank, or of the tensor rank that has share `share` of
    the context rank's tokens. A sequence has 2 * contexts chunks; context rank i has the i-th chunk from each end, so that causal attention
    costs the same on all ranks."""
    whole = seq * shares * contexts
    pieces = [range(whole)]
    if contexts > 1:
        assert whole % (2 * contexts) == 0, (whole, contexts)
        size = whole // (2 * contexts)
        pieces = [range(number * size, (number + 1) * size) for number in (context, 2 * contexts - 1 - context)]
    first, found = share * seq, []
    for piece in pieces:
        part = piece[max(0, first) : max(0, first + seq)]
        if part:
            found.append(part)
        first -= len(piece)
    return tuple(found)


class DistributedBalanceSets:
    """Balance sets whose tokens are distributed over ranks. Without `sequence`, all ranks of a tensor group have the same tokens."""

    def __init__(self, groups: Groups, *, sequence: bool) -> None:
        here, mesh = groups.coordinates, groups.mesh
        self._sequence = groups.sequence if sequence else groups.context
        self._batch = groups.tokens if sequence else groups.data
        self.sequence_ranks = self._sequence.size()
        self._shares = mesh.tensor if sequence else 1
        self._place = {"context": here["context"], "contexts": mesh.context}
        self._share = here["tensor"] % self._shares
        self._same = None if sequence or mesh.tensor == 1 else groups.tensor

    def over_sequence(self, counts: Tensor) -> Tensor:
        return _total(counts, self._sequence)

    def over_batch(self, counts: Tensor) -> Tensor:
        return _total(counts, self._batch)

    def spans(self, seq: int) -> tuple[range, ...]:
        return spans_of(seq, **self._place, share=self._share, shares=self._shares)

    def earlier(self, choices: Tensor) -> Tensor:
        if self.sequence_ranks == 1:
            return earlier(choices)
        rows, seq, active = choices.shape
        parts = choices.new_empty(self.sequence_ranks * rows, seq, active, dtype=torch.int32)
        dist.all_gather_into_tensor(parts, choices.to(torch.int32).contiguous(), group=self._sequence)
        whole = choices.new_empty(rows, self.sequence_ranks * seq, active)
        for rank, part in enumerate(parts.unflatten(0, (self.sequence_ranks, rows))):
            context, share = divmod(rank, self._shares)
            spans = spans_of(seq, **self._place | {"context": context}, share=share, shares=self._shares)
            whole[:, _positions(spans, choices.device)] = part.long()
        return earlier(whole)[:, _positions(self.spans(seq), choices.device)]

    def own(self, choices: Tensor) -> Tensor:
        return choices if self._same is None else choices.chunk(self._same.size(), 1)[self._same.rank()]


def _positions(spans: Sequence[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def _total(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return counts
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total


# --- tokens on their way ---


@dataclass(frozen=True)
class AllToAllTraffic(Traffic):
    """Row counts of one token dispatch between this rank and the other ranks of its expert group, and the order of the received rows."""

    send: list[int]  # rows to each rank
    receive: list[int]  # rows from each
    gathered: list[int]  # rows that each rank of the expert_tensor group received
    order: Order | None  # from the order of arrival to that of the experts; None: the same


class AllToAllDispatcher:
    """Dispatches tokens to the ranks that hold their experts. Ranks exchange the numbers of rows first, unless tokens are distributed
    evenly."""

    def __init__(self, groups: Groups, *, sequence: bool) -> None:
        self.expert, self.expert_tensor = groups.expert, groups.expert_tensor
        self._same = None if sequence or groups.mesh.tensor == 1 else groups.tensor
        line = ranks_in(groups.world, self.expert)
        part = self.expert_tensor.rank()
        ranks = [[rank + other - part for rank in line] for other in range(self.expert_tensor.size())]  # neighbours, by the mesh
        mesh = groups.mesh
        places = [[mesh.coordinates(rank) for rank in row] for row in ranks]
        self._tensors, self._contexts = mesh.tensor, mesh.context
        self._sources = [[(place["context"], place["tensor"]) for place in row] for row in places]

    def enter(self, x: Tensor) -> Tensor:
        return x if self._same is None else take_share(x, self._same)

    def leave(self, x: Tensor) -> Tensor:
        return x if self._same is None else join_shares(x, self._same)

    def plan(self, counts: Tensor, kept: int | None, even: EvenRouting | None) -> AllToAllTraffic:
        ranks, parts = self.expert.size(), self.expert_tensor.size()
        mine = counts.shape[0] // ranks
        if ranks * parts == 1 and even is None:  # nothing is sent, so the host need not know how much there is
            sizes = Sizes(counts)
            return AllToAllTraffic(sum(sizes.host) if kept is None else kept, sizes, [], [], [], None)
        if even is None:
            sent, arriving = self._ask(counts)
        else:
            sent, arriving = self._even_traffic(even)
        receive = [sum(row) for row in arriving[self.expert_tensor.rank()]]
        order = None
        if mine > 1 and ranks * parts > 1:
            rows = torch.tensor(arriving, device=counts.device).flatten()
            experts = torch.arange(mine, device=counts.device).repeat(ranks * parts)
            total = sum(sum(row) for table in arriving for row in table)
            keys = experts.repeat_interleave(rows, output_size=total)
            order = Order.sorted_by(keys.unsqueeze(1), total)
        sizes = Sizes([sum(row[expert] for table in arriving for row in table) for expert in range(mine)])
        send = [sum(sent[rank * mine : (rank + 1) * mine]) for rank in range(ranks)]
        return AllToAllTraffic(sum(send), sizes, send, receive, [sum(sum(row) for row in table) for table in arriving], order)

    def dispatch(self, rows: Tensor, traffic: Traffic) -> Tensor:
        assert isinstance(traffic, AllToAllTraffic)
        return dispatch(rows, traffic, self.expert)

    def combine(self, rows: Tensor, traffic: Traffic) -> Tensor:
        assert isinstance(traffic, AllToAllTraffic)
        return combine(rows, traffic, self.expert)

    def start_dispatch(self, rows: Tensor, traffic: Traffic) -> Pending:
        assert isinstance(traffic, AllToAllTraffic)
        return _outward(rows, traffic, self.expert)

    def start_combine(self, rows: Tensor, traffic: Traffic) -> Pending:
        assert isinstance(traffic, AllToAllTraffic)
        return _homeward(rows, traffic, self.expert)

    def arrive(self, rows: Tensor, traffic: Traffic) -> Tensor:
        assert isinstance(traffic, AllToAllTraffic)
        rows = _outward(rows, traffic, self.expert).wait()
        if self.expert_tensor.size() > 1:
            rows = _gather_rows(rows, traffic.gathered, self.expert_tensor)
        return rows if traffic.order is None else rows_of(rows, traffic.order)

    def run(self, experts: Experts, rows: Tensor, traffic: Traffic) -> Tensor:
        assert isinstance(traffic, AllToAllTraffic)
        split, order = self.expert_tensor.size() > 1, traffic.order
        if split:
            rows = gather_rows(rows, traffic.gathered, self.expert_tensor)
        if order is None:
            out = experts(rows, traffic.sizes)
        else:
            back = Order(order.places.flatten(), order.order.unsqueeze(1), order.rows)
            out = permute(experts(permute(rows, order), traffic.sizes), back)
        return scatter_rows(out, traffic.gathered, self.expert_tensor) if split else out

    def _ask(self, counts: Tensor) -> tuple[list[int], list[list[list[int]]]]:
        """Exchange row counts. Return the number of rows that this rank sends to each expert, and the numbers of rows that arrive, by
        [expert_tensor rank][sender][this rank's expert]."""
        ranks, parts = self.expert.size(), self.expert_tensor.size()
        arriving = counts
        if ranks > 1:
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts.contiguous(), group=self.expert)
        table = arriving
        if parts > 1:
            table = counts.new_empty(parts * counts.shape[0])
            dist.all_gather_into_tensor(table, arriving, group=self.expert_tensor)
        known = torch.cat((counts, table)).cpu()  # the host waits here, once: splits are its business
        sent, rest = known.split((counts.shape[0], table.shape[0]))
        return sent.tolist(), rest.view(parts, ranks, -1).tolist()

    def _even_traffic(self, even: EvenRouting) -> tuple[list[int], list[list[list[int]]]]:
        of = {
            place: even.counts(
                spans_of(even.seq, context=place[0], contexts=self._contexts, share=place[1], shares=self._tensors)
            )
            for place in {place for row in self._sources for place in row}
        }
        mine = even.experts // self.expert.size()
        first = self.expert.rank() * mine
        arriving = [[list(of[place][first : first + mine]) for place in row] for row in self._sources]
        return list(of[self._sources[self.expert_tensor.rank()][self.expert.rank()]]), arriving


@dataclass(frozen=True)
class _Moving:
    rows: Tensor
    sent: Tensor  # must live until it has left
    work: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.rows


def _start(rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Pending:
    if group.size() == 1:
        return LocalRows(rows)
    rows = rows.contiguous()
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    return _Moving(out, rows, dist.all_to_all_single(out, rows, receive, send, group=group, async_op=True))


def _outward(rows: Tensor, traffic: AllToAllTraffic, group: dist.ProcessGroup) -> Pending:
    return _start(rows, traffic.receive, traffic.send, group)


def _homeward(rows: Tensor, traffic: AllToAllTraffic, group: dist.ProcessGroup) -> Pending:
    return _start(rows, traffic.send, traffic.receive, group)


def _gather_rows(rows: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    copies = rows.repeat(group.size(), 1)
    return _start(copies, sizes, [rows.shape[0]] * group.size(), group).wait()


def _scatter_rows(rows: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    mine = sizes[group.rank()]
    parts = _start(rows, [mine] * group.size(), sizes, group).wait()
    return parts.unflatten(0, (group.size(), mine)).sum(0)


def _take(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    assert x.shape[1] % group.size() == 0, (x.shape, group.size())
    return x.chunk(group.size(), 1)[group.rank()].contiguous()


dispatch, combine = conjugates(lambda *transfer: _outward(*transfer).wait(), lambda *transfer: _homeward(*transfer).wait())
gather_rows, scatter_rows = conjugates(_gather_rows, _scatter_rows)
take_share, join_shares = conjugates(_take, gather)
