"""KVCache: keys and values of a decode in memory that is taken ahead, so that a token costs a copy of itself alone."""

from typing import Any, cast

from jaxtyping import Float, Int
from torch import LongTensor, Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

GROWTH = 1.5  # of the room when it is full, so that n tokens cost copies of O(n) tokens


class KVCache(DynamicCache):
    """transformers' cache, whose layers of full attention keep room for the tokens to come.

    Layers of other kinds (sliding windows, linear attention) are those of transformers.

    Args:
        config: of the model that decodes.
        max_tokens: of a row, prompt included; bounds the room.
    """

    def __init__(self, config: PreTrainedConfig, max_tokens: int) -> None:
        super().__init__(config=config)
        self.layers = [_RoomyLayer(max_tokens) if type(layer) is DynamicLayer else layer for layer in self.layers]

    def take_rows(self, rows: Int[Tensor, " L"]) -> None:
        """Goes on with these rows, in this order; some more than once, others no longer."""
        self.reorder_cache(cast(Any, rows))  # batch_select_indices forgets the states of linear attention


class _RoomyLayer(DynamicLayer):
    """``keys`` and ``values`` are the filled part of their rooms."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.rooms: list[Float[Tensor, "B H S D"]] = []

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = [key_states, value_states]
        if self.keys is None or self.values is None or self.get_seq_length() == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = new  # of the prompts, which are repeated for their samples before a token comes
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
