"""What a vLLM server can do for the trainer: say what it holds, compare names, load weights from shared storage.

``lightning-rl serve`` adds :class:`WeightLoader` to each worker of a server (``--worker-extension-cls``), and says in
the environment which folder weights may come from.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rl.generation.vllm import internals
from lightning_rl.generation.vllm.storage import check_inside
from lightning_rl.generation.weights.files import read_weights

STORAGE = "LIGHTNING_RL_STORAGE"  # of weights; that for temporary files if it is not set


class Description(NamedTuple):
    """What a server holds."""

    architecture: str
    vocabulary: int  # number of token ids
    max_length: int  # of prompt and response together
    block_size: int  # tokens that its prefix cache keeps together; 0 without such a cache
    dtype: str  # such as float32
    has_tokenizer: bool
    logprobs_mode: str  # which distribution its log-probabilities are of
    generation_config: str  # where its sampling defaults come from


class WeightLoader:
    """Mixed into vLLM's worker, so its names begin with ours. An error is an answer, because an exception is a 500."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Any

    def lightning_rl_describe(self) -> dict[str, Any]:
        """The fields of :class:`Description`."""
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        return Description(
            architecture=str(model.architecture),
            vocabulary=int(model.get_vocab_size()),
            max_length=int(model.max_model_len),
            block_size=int(cache.block_size) if cache.enable_prefix_caching else 0,
            dtype=str(model.dtype).removeprefix("torch."),
            has_tokenizer=not model.skip_tokenizer_init,
            logprobs_mode=str(model.logprobs_mode),
            generation_config=str(model.generation_config),
        )._asdict()

    def lightning_rl_compare(self, sent: Sequence[Sequence[Any]]) -> dict[str, str]:
        """Compares names and shapes that a sync will bring with what this worker holds."""
        plan = internals.plan_of(self.vllm_config, self.model_runner.get_model())
        try:
            plan.compare([(name, tuple(shape)) for name, shape in sent])
        except ValueError as error:
            return {"error": str(error)}
        return {}

    def lightning_rl_load(self, folder: str) -> dict[str, str]:
        """Loads all weights of a folder on the storage; none of another one, whoever asks.

        After an error the weights are a mixture, and a later load repairs them.
        """
        try:
            check_inside(Path(folder), Path(os.environ.get(STORAGE) or tempfile.gettempdir()))
            weights = read_weights(Path(folder))
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        model = self.model_runner.get_model()
        internals.forget_expert_kernels(model)
        try:
            self.reload_weights(weights_iterator=weights)
        except Exception as error:  # noqa: BLE001  whatever it is, the server has to stay loadable, and the trainer hears
            internals.recover(self.vllm_config, model)
            return {"error": f"{type(error).__name__}: {error}"}
        return {}
