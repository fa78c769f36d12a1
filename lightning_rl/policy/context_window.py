"""Context window of a model: the positions that it encodes, and encodes alike in every batch."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from lightning_rl.policy.roles import Role, name_role


def context_window(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens of a row; None without a limit.

    LongRoPE and dynamic RoPE choose the frequencies of all rows by the longest row of a batch. Within their original
    context window, rows of every length have the original frequencies.
    """
    text: Any = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None)
    windows = [own, *(rope.get("original_max_position_embeddings", own) for rope in _batch_dependent_ropes(text))]
    return min((window for window in windows if window is not None), default=None)


def depends_on_batch(config: PreTrainedConfig) -> bool:
    """Return True if positions beyond the context window would depend on the longest row of a batch."""
    return any(_batch_dependent_ropes(config.get_text_config()))


def check_window(config: PreTrainedConfig, tokens: int, role: Role) -> None:
    """Check that rows of some number of tokens are within the context window of a model.

    Raises:
        ValueError: If they are not; names the role of the model.
    """
    window = context_window(config)
    if window is not None and tokens > window:
        why = ", beyond which RoPE depends on the longest row of a batch" * depends_on_batch(config)
        with name_role(role):
            raise ValueError(
                f"expected rows within the context window of {window} tokens{why}, got {tokens}: lower max_new_tokens"
            )


def _batch_dependent_ropes(text: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of LongRoPE and dynamic RoPE, which may be nested by type of layer."""
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, Mapping) and ("dynamic" in (kind := rope.get("rope_type") or "") or kind == "longrope"):
            yield rope
