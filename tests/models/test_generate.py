"""Text generated with a cache equals text computed from scratch, and sampling obeys its limits."""

import pytest
import torch

from megalith.models import generate as module
from megalith.models.batch import Batch
from megalith.models.block import Block
from megalith.models.core import CausalCore
from megalith.models.generate import CachedCore, generate
from megalith.spec.presets import presets
from tests.models.plain import lively, llama, logits


def choose(
    chances: list[float], *, times: int = 2000, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
):
    """Return the share of draws in which each token is chosen."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor(chances).log()
    chosen = [module._choose(scores, temperature, top_k, top_p, generator) for _ in range(times)]
    return [chosen.count(token) / times for token in range(len(chances))]


@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 1}, {"kv_heads": 4, "tied": True}], ids=str)
@pytest.mark.parametrize("prompt", [[5], [3, 1, 4, 1, 5, 9, 2, 6]], ids=len)
def test_greedy_text_is_that_of_reading_everything_again_for_each_token(prompt, sizes):
    model = lively(llama(**sizes), spread=0.6)
    line = list(prompt)
    with torch.no_grad():
        for _ in range(20):
            line.append(int(logits(model, torch.tensor([line]))[0, -1].argmax()))
    found = list(generate(model, prompt, tokens=20, temperature=0))
    assert found == line[len(prompt) :]
    assert len(set(found)) > 3  # not always the same token, which any cache would give


def test_a_hybrid_reads_everything_again_for_each_token():
    spec = presets()["nemotron-h-tiny"].build().small(6, 1, 2)
    model, line = lively(spec, spread=0.3), [3, 1, 4]
    with torch.no_grad():
        for _ in range(12):
            line.append(int(logits(model, torch.tensor([line]))[0, -1].argmax()))
    assert list(generate(model, line[:3], tokens=12, temperature=0)) == line[3:]
    assert len(set(line[3:])) > 3


def test_sampled_text_is_that_of_reading_everything_again_for_each_token():
    model, line = lively(llama()), [7, 8]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _ in range(12):
            chances = logits(model, torch.tensor([line]))[0, -1].softmax(-1)
            values, order = chances.sort(descending=True)
            line.append(int(order[torch.multinomial(values, 1, generator=generator)]))
    assert list(generate(model, [7, 8], tokens=12, seed=4)) == line[2:]


@pytest.mark.parametrize(
    "core",
    [
        CausalCore(),
        CausalCore(scale=0.3, softcap=1.5),
        CausalCore(window=3),
        CausalCore(window=5, softcap=0.7),
        CausalCore(window=50),
    ],
    ids=["plain", "capped", "window", "capped window", "window beyond the text"],
)
@pytest.mark.parametrize("prompt", [1, 4, 9])
def test_a_cached_core_gives_a_token_what_the_whole_text_gives_it(core, prompt):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, *size, generator=generator) for size in ((4, 8), (2, 8), (2, 6)))
    batch, cached = Batch(torch.zeros(1, 12)), CachedCore(core)
    found = [cached(*(x[:, :prompt] for x in (q, k, v)), batch)]
    found += [cached(*(x[:, i : i + 1] for x in (q, k, v)), batch) for i in range(prompt, 12)]
    torch.testing.assert_close(torch.cat(found, dim=1), core(q, k, v, batch))
    assert cached.kept is not None
    assert cached.kept[0].shape[1] == min(12, core.window or 12)


def test_seeds_reproduce_and_differ():
    model = lively(llama())
    first, again, other = (list(generate(model, [1, 2], tokens=20, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.slow
def test_temperature_sharpens_and_flattens():
    chances = [0.5, 0.3, 0.2]
    assert choose(chances) == pytest.approx(chances, abs=0.04)
    squared = [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]
    assert choose(chances, temperature=0.5) == pytest.approx(squared, abs=0.04)
    assert choose(chances, temperature=1e4) == pytest.approx([1 / 3] * 3, abs=0.04)
    assert choose(chances, temperature=0, times=50) == [1, 0, 0]


def test_top_k_keeps_the_likeliest_in_their_proportions():
    assert choose([0.1, 0.4, 0.2, 0.3], top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.04)
    assert choose([0.1, 0.4, 0.2, 0.3], top_k=1, times=50) == [0, 1, 0, 0]
    assert choose([0.1, 0.4, 0.2, 0.3], top_k=99) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.04)


@pytest.mark.slow
def test_top_p_keeps_the_fewest_that_hold_it():
    chances = [0.1, 0.4, 0.2, 0.3]
    assert choose(chances, top_p=0.65) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.04)
    assert choose(chances, top_p=0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.04)
    assert choose(chances, top_p=1.0) == pytest.approx(chances, abs=0.04)


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.2])
def test_top_p_always_keeps_the_likeliest(top_p):
    assert choose([0.1, 0.4, 0.2, 0.3], top_p=top_p, times=50) == [0, 1, 0, 0]


def test_text_ends_after_the_token_that_stops_it():
    model = lively(llama())
    whole = list(generate(model, [5], tokens=20, temperature=0))
    stop = whole[6]
    assert list(generate(model, [5], tokens=20, temperature=0, stop=stop)) == whole[: whole.index(stop) + 1]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(lively(llama()), [], tokens=1))


def test_more_than_the_context_is_refused_with_what_would_fit():
    model = lively(llama(context=16))
    assert len(list(generate(model, [1] * 6, tokens=10))) == 10
    with pytest.raises(ValueError, match=r"6 prompt tokens and 11 new .* at most 10 new tokens"):
        next(generate(model, [1] * 6, tokens=11))


def test_the_model_is_left_as_it_was_even_when_the_reader_stops_early():
    model = lively(llama())
    writing = generate(model, [1, 2, 3], tokens=10)
    next(writing)
    writing.close()
    cores = [block.attention.core for block in model.modules() if isinstance(block, Block)]
    assert len(cores) == 4 and all(type(core) is CausalCore for core in cores)
