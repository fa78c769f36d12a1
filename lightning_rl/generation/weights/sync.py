"""One sync, on every rank together: weights into the engine, canary, and the same verdict everywhere."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from lightning_rl.distributed import failing_together
from lightning_rl.generation.engine import Engine, EngineError, EngineState
from lightning_rl.generation.weights import canary
from lightning_rl.generation.weights.stream import Checksums, Stream


def synchronize(
    engine: Engine,
    weights: Stream,
    version: int,
    policy: nn.Module,
    *,
    packed: bool,
    context: Callable[[], AbstractContextManager[object]],
) -> tuple[float, float] | None:
    """Loads the weights into the engine and lets its canary prove it. Every rank takes part.

    Args:
        engine: started.
        weights: name and full value of every parameter of the policy, one at a time.
        version: of the weights.
        policy: the trainer's, sharded or not.
        packed: whether it scores without padding.
        context: around the canary, for time and precision.

    Returns:
        The largest and the mean difference that the canary saw, or None without one.

    Raises:
        CanaryError: if the engine does not have the weights.
        RuntimeError: if another rank's sync failed. The engine then refuses to generate, as it does after every error.
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
    max_length = min(engine.max_length or 2**31, getattr(text, "max_position_embeddings", None) or 2**31)
    with context():
        with _failing_together(engine):
            measurement = proof.measure(
                engine, vocabulary=text.vocab_size, temperature=inner.temperature, max_length=max_length
            )
        with canary.capturing_layers(inner.model) as layers:
            trainer = canary.trainer_values(policy, measurement, packed=packed)
        rounding = canary.rounding_between(engine, inner, layers)
        with _failing_together(engine):
            return proof.judge(
                measurement,
                trainer,
                rounding=rounding,
                checksums=checksums.values(),
                where=lambda: canary.first_difference(engine.layer_outputs(measurement.ids), layers, rounding),
            )


@contextmanager
def _failing_together(engine: Engine) -> Iterator[None]:
    """Raises on every rank if one fails inside; the engines then count as not synced."""
    try:
        with failing_together("a sync", EngineError):
            yield
    except Exception:
        if engine.state is EngineState.SYNCED:
            engine.state = EngineState.AWAKE
        raise
