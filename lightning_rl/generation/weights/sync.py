"""Sync of the engine's weights with its canary, run by every rank together."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from lightning_rl.distributed import failing_together
from lightning_rl.generation.engine import Engine, EngineError, EngineState
from lightning_rl.generation.weights import canary
from lightning_rl.generation.weights.weight_stream import Checksums, Weights
from lightning_rl.policy.context_window import context_window
from lightning_rl.policy.processor import PictureProcessor


def synchronize(
    engine: Engine,
    weights: Weights,
    version: int,
    policy: nn.Module,
    *,
    dtype: torch.dtype,
    packed: bool,
    context: Callable[[], AbstractContextManager[object]],
    processor: PictureProcessor | None = None,
) -> tuple[float, float] | None:
    """Load the weights into the engine and check them with its canary. Every rank has to call it.

    Args:
        engine: Started engine.
        weights: Name and full value of every parameter of the policy, one at a time.
        version: Version of the weights.
        policy: Policy of the trainer, sharded or not.
        dtype: Dtype in which the trainer computes.
        packed: True to score without padding.
        context: Context manager around the canary, for time and precision.
        processor: Processor of the policy's pictures; None for text.

    Returns:
        The largest and the mean difference that the canary measured, or None without one.

    Raises:
        CanaryError: If the engine does not have the weights.
        RuntimeError: If the sync failed on another rank. After any error the engine refuses to generate.
    """
    inner = canary.policy_in(policy)
    checksums = Checksums(engine.dtype or inner.model.dtype)
    copied = engine.canary is not None and engine.holds_copy
    with _failing_together(engine):
        engine.load_weights(checksums.observe(weights) if copied else weights, version)
    proof = engine.canary
    if not isinstance(proof, canary.Canary) or not engine.holds_copy:
        return None
    text = inner.model.config.get_text_config()
    max_length = min(engine.max_length or 2**31, context_window(text) or 2**31)
    with context():
        with _failing_together(engine):
            measurement = proof.measure(
                engine,
                vocabulary=text.vocab_size,
                temperature=inner.temperature,
                max_length=max_length,
                processor=processor,
            )
        trainer = canary.trainer_values(policy, measurement, packed=packed)
        rounding = canary.rounding_between(engine, inner, dtype)
        with _failing_together(engine):
            return proof.judge(measurement, trainer, rounding=rounding, checksums=checksums.values())


@contextmanager
def _failing_together(engine: Engine) -> Iterator[None]:
    """Raise on every rank if the body fails on one; the engines then count as not synced."""
    try:
        with failing_together("a sync", EngineError):
            yield
    except Exception:
        if engine.state is EngineState.SYNCED:
            engine.state = EngineState.AWAKE
        raise
