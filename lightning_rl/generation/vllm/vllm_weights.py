"""Weights of a policy as vLLM takes them: with merged adapters and tied heads, under the names of a checkpoint."""

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.generation.vllm.lora_adapter import Adapter
from lightning_rl.generation.weights import weight_stream
from lightning_rl.policy.text_model import tower_parameters


class VLLMWeights:
    """Function from the stream of a run's weights to the stream for vLLM.

    Args:
        model: Policy.
        lora: ``"merged"``, or ``"adapter"`` to leave the adapter for :attr:`adapter`.
        pictures: True if vLLM reads pictures; otherwise it has no towers, and gets none.

    Attributes:
        adapter: Adapter that is sent alone; None if it is merged.
        exact: Names of the tensors that keep their dtype.
        unties: True if a tied weight trains as a separate copy.
    """

    def __init__(self, model: PreTrainedModel, *, lora: str, pictures: bool) -> None:
        self.adapter = Adapter(model) if lora == "adapter" else None
        self._scales, self._copied = weight_stream.adapter_scales(model), weight_stream.copied_names_of(model)
        ties, alone = weight_stream.aliases_of(model), {*self._copied.values()}
        self._aliases = {alias: source for alias, source in ties.items() if alias not in alone}
        self.unties = self._aliases != ties
        self._name = weight_stream.saved_name_in(model)
        self._left_out = frozenset(() if pictures else tower_parameters(model))
        buffers = [name for name, _ in weight_stream.persistent_buffers(model)]
        self.exact = frozenset(self._name(self._copied.get(name, name)) for name in buffers)

    def __call__(self, weights: weight_stream.Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors; the stream is read to its end."""
        kept = ((name, weight) for name, weight in weights if name not in self._left_out)
        named = ((self._copied.get(name, name), weight) for name, weight in kept)
        sent = ((name, weight) for name, weight in named if name)
        whole = weight_stream.merge_stream(sent, self._scales) if self.adapter is None else self.adapter.split(sent)
        for name, weight in weight_stream.add_aliases(whole, self._aliases):
            yield self._name(name), weight
