"""The embedding equals its formula, also as a sum under vocabulary parallelism."""

import torch
from torch import Tensor, nn

from megalith.models.batch import Batch
from megalith.models.embedding import Embedding
from megalith.spec.model import EmbeddingSpec

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def embedding(**more: object) -> Embedding:
    made, generator = Embedding(8, EmbeddingSpec.model_validate({"vocab": 12} | more)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    return made


def test_it_is_the_rows_of_the_tokens_scaled():
    made = embedding(scale=3.0)
    torch.testing.assert_close(made(TOKENS, Batch(TOKENS)), 3 * made.weight[TOKENS])


def test_learned_positions_are_added_after_the_scale():
    made = embedding(scale=3.0, positions=6)
    assert made.positions is not None
    torch.testing.assert_close(made(TOKENS, Batch(TOKENS)), 3 * made.weight[TOKENS] + made.positions[:5])


def test_learned_positions_are_those_of_the_batch():
    made, positions = embedding(positions=6), torch.tensor([[0, 1, 2, 0, 1], [5, 4, 3, 2, 1]])
    assert made.positions is not None
    expected = made.weight[TOKENS] + made.positions[positions]
    torch.testing.assert_close(made(TOKENS, Batch(TOKENS, positions=positions)), expected)


class Share(nn.Module):
    """Look up rows in a part of a table; other rows are zero."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(self, tokens: Tensor, weight: Tensor) -> Tensor:
        here = tokens - self.first
        mine = (here >= 0) & (here < len(weight))
        return weight[here * mine] * mine.unsqueeze(-1)


def test_ranks_with_a_share_of_each_table_add_up_to_the_whole():
    whole = embedding(scale=3.0, positions=6)
    assert whole.positions is not None
    total = torch.zeros(2, 5, 8)
    for rank in range(2):
        part = embedding(scale=3.0, positions=6)
        part.weight = nn.Parameter(whole.weight.chunk(2)[rank])
        part.positions = nn.Parameter(whole.positions.chunk(2)[rank])
        part.lookup, part.position_lookup = Share(6 * rank), Share(3 * rank)
        total += part(TOKENS, Batch(TOKENS)).detach()
    torch.testing.assert_close(total, whole(TOKENS, Batch(TOKENS)).detach())
