"""KV cache in preallocated memory, so that appending a token copies only that token."""

import inspect
from typing import Any, cast

from jaxtyping import Float, Int
from torch import LongTensor, Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

GROWTH = 1.5  # factor of a full buffer's next size, so that n tokens cost O(n) copies
ARGUMENTS = ("cache", "past_key_values")  # transformers 5.24 renamed the second to the first
VLLM_DRAWS = "pass engine=VLLMEngine()"


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which the forward of a model takes its cache.

    Raises:
        ValueError: If it takes none.
    """
    parameters = inspect.signature(type(model).forward).parameters
    for name in ARGUMENTS:
        if name in parameters:
            return name
    names = " or ".join(ARGUMENTS)
    raise ValueError(f"expected a model whose forward takes {names}, got {type(model).__name__}: {VLLM_DRAWS}")


class KVCache(DynamicCache):
    """Cache of transformers whose full-attention layers preallocate memory for later tokens.

    Layers of other kinds (sliding window, linear attention) are those of transformers.

    Args:
        config: Config of the model that decodes.
        max_tokens: Maximum number of tokens of a row, prompt included.
    """

    def __init__(self, config: PreTrainedConfig, max_tokens: int) -> None:
        super().__init__(config=config)
        self.layers = [_RoomyLayer(max_tokens) if type(layer) is DynamicLayer else layer for layer in self.layers]

    def take_rows(self, rows: Int[Tensor, " L"]) -> None:
        """Keep these rows in this order; a row may be repeated or dropped."""
        self.reorder_cache(cast(Any, rows))  # batch_select_indices ignores the states of linear attention


class _RoomyLayer(DynamicLayer):
    """Layer whose ``keys`` and ``values`` are the filled parts of larger buffers."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.rooms: list[Float[Tensor, "B H S D"]] = []

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = [key_states, value_states]
        if self.keys is None or self.values is None or self.get_seq_length() == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = new  # keys of the prompts, which take_rows repeats before a token is appended
        else:
            self.keys, self.values = self._append([self.keys, self.values], new)
        return self.keys, self.values

    def _append(self, filled: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        length, total = filled[0].shape[2], filled[0].shape[2] + new[0].shape[2]
        if not self.rooms or self.rooms[0].shape[2] < total:
            tokens = max(total, min(self.max_tokens, int(total * GROWTH)))
            self.rooms = [part.new_empty(*part.shape[:2], tokens, part.shape[3]) for part in filled]
            for room, part in zip(self.rooms, filled, strict=True):
                room[:, :, :length] = part
        for room, part in zip(self.rooms, new, strict=True):
            room[:, :, length:total] = part
        return [room[:, :, :total] for room in self.rooms]

    @override
    def reorder_cache(self, beam_idx: LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.rooms = []
