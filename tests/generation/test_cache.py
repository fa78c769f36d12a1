"""KVCache: what transformers' own cache holds, in memory that seldom moves."""

import pytest
import torch
from transformers import DynamicCache, GemmaConfig, LlamaConfig, MistralConfig

from lightning_rl.generation.cache import KVCache

CONFIG = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
PROMPT, LONGEST = 5, 64


def tokens(rows: int, number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, 1, number, 4, generator=draw)
    return keys, values


@pytest.mark.parametrize("config", [CONFIG, MistralConfig(num_hidden_layers=2, sliding_window=8), GemmaConfig()])
def test_holds_what_the_cache_of_transformers_holds(config: LlamaConfig) -> None:
    mine, theirs = KVCache(config, LONGEST), DynamicCache(config=config)
    rows = torch.tensor([0, 0, 1, 2, 2])
    for step in range(40):
        number, new = (PROMPT if step == 0 else 1), len(rows)
        for layer in range(2):
            keys, values = tokens(3 if step == 0 else new, number, 2 * step + layer)
            for held, expected in zip(
                mine.update(keys, values, layer), theirs.update(keys.clone(), values.clone(), layer), strict=True
            ):
                torch.testing.assert_close(held, expected, rtol=0, atol=0)
        assert mine.get_seq_length() == theirs.get_seq_length() == PROMPT + step
        if step in {0, 7, 21}:
            rows = rows if step == 0 else torch.arange(new - 1)
            mine.take_rows(rows)
            theirs.batch_select_indices(rows)


def test_a_prompt_that_is_selected_goes_on_in_memory_of_its_own() -> None:
    cache = KVCache(CONFIG, LONGEST)
    keys, values = tokens(2, PROMPT, 0)
    before = keys.clone()
    cache.update(keys, values, 0)
    cache.update(*tokens(2, 1, 1), 0)
    cache.take_rows(torch.tensor([1, 0]))
    held, _ = cache.update(*tokens(2, 1, 2), 0)
    assert torch.equal(keys, before) and torch.equal(held[:, :, :PROMPT], before.flip(0))
    assert torch.equal(held[:, :, -1:], tokens(2, 1, 2)[0])
