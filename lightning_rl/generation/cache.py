"""KV cache in preallocated memory, so that appending a token copies only that token."""

import inspect
from typing import Any, cast, get_args

from jaxtyping import Float, Int
from torch import LongTensor, Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from typing_extensions import override

from lightning_rl.policy.batch_invariance import KEYS
from lightning_rl.policy.text_model import backbone_of

GROWTH = 1.5  # factor of a full buffer's next size, so that n tokens cost O(n) copies
ARGUMENTS = ("cache", "past_key_values")  # transformers 5.24 renamed the second to the first
VLLM_DRAWS = "pass engine=VLLMEngine()"


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which the forward of a model takes its cache.

    Raises:
        ValueError: If it takes none, or if its backbone takes one class of caches alone, as MiniMax does.
    """
    parameters = inspect.signature(type(model).forward).parameters
    inner = inspect.signature(type(backbone_of(model)).forward).parameters
    kinds = {kind for name in ARGUMENTS if name in inner for kind in get_args(inner[name].annotation)}
    caches = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Cache)]
    if caches and not issubclass(KVCache, tuple(caches)):
        raise ValueError(
            f"expected a model that takes any cache of transformers, got {type(model).__name__}, which takes "
            f"{caches[0].__name__} alone: {VLLM_DRAWS}"
        )
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
        aligned: Store each token at its position in its row, as batch-invariant attention needs it; see :meth:`place`.
    """

    def __init__(self, config: PreTrainedConfig, max_tokens: int, *, aligned: bool = False) -> None:
        super().__init__(config=config)
        kinds = (DynamicLayer, DynamicSlidingWindowLayer) if aligned else (DynamicLayer,)
        layer_type = _AlignedLayer if aligned else _RoomyLayer
        self.layers = [layer_type(max_tokens) if type(layer) in kinds else layer for layer in self.layers]

    def place(self, positions: Int[Tensor, "B Q"], width: int) -> None:
        """Set the positions of the next tokens of an aligned cache, all below ``width``."""
        for layer in self.layers:
            if isinstance(layer, _AlignedLayer):
                layer.positions, layer.width = positions, width

    def take_rows(self, rows: Int[Tensor, " L"]) -> None:
        """Keep these rows in this order; a row may be repeated or dropped."""
        self.reorder_cache(cast(Any, rows))  # batch_select_indices ignores the states of linear attention


class _AlignedLayer(DynamicLayer):
    """Layer that stores each token at its position; it returns a multiple of ``KEYS`` tokens, the last ones unset."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens, self.width = max_tokens, 0
        self.positions: Int[Tensor, "B Q"]

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None or not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (
                part.new_empty(*part.shape[:2], 0, part.shape[3]) for part in (key_states, value_states)
            )
        needed = -(-self.width // KEYS) * KEYS
        if self.keys.shape[2] < needed:
            size = -(-max(needed, min(self.max_tokens, int(needed * GROWTH))) // KEYS) * KEYS
            grown = (functional.pad(part, (0, 0, 0, size - part.shape[2])) for part in (self.keys, self.values))
            self.keys, self.values = grown
        for stored, states in ((self.keys, key_states), (self.values, value_states)):
            stored.scatter_(2, self.positions[:, None, :, None].expand(states.shape), states)
        return self.keys[:, :, :needed], self.values[:, :, :needed]

    @override
    def get_seq_length(self) -> int:
        return self.width


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
