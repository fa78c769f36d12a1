"""Generation of later rollouts in background threads while the trainer works on earlier ones.

Only :meth:`Sampler.generate` runs in a thread. The trainer's thread takes prompts, scores completions and enters
collectives, so results do not depend on timing. Engines that are not thread-safe generate one rollout at a time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_rl.data import Prompt
from lightning_rl.distributed import failing_together, process_objects
from lightning_rl.generation import EngineError
from lightning_rl.rollouts.sample import Sampled, Sampler
from lightning_rl.version import __version__

PATIENCE = 3600.0  # timeout in seconds for one rollout
HURRY = 12.0  # timeout in seconds for all rollouts together when a signal ends the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A rollout that was submitted.

    Args:
        prompts: Prompts of its first round, on this rank.
        samples: Future with the samples of the engine; None if generation failed before the checkpoint was saved.
    """

    prompts: Sequence[Prompt]
    samples: Future[Sampled] | None


class Prefetcher:
    """Submitted rollouts by number; finished ones stay until :meth:`drop`."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None  # shared, because each stream reserves its own memory
        self._pending: dict[int, Pending] = {}

    def __contains__(self, number: int) -> bool:
        """Return True if a rollout has been submitted."""
        return number in self._pending

    def submit(
        self, number: int, prompts: Sequence[Prompt], *, sampler: Sampler, device: torch.device, at_once: int = 1
    ) -> None:
        """Generate the first round of a rollout in a thread, ``at_once`` rollouts at a time, in order of submission."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="prefetch")
        wanted, logprobs = sampler.open(prompts, number), sampler.reads_logprobs(number)
        context = thread_context(sampler.forward_context, device)
        if device.type == "cuda" and sampler.engine.capabilities.shares_policy:
            self._stream = self._stream or torch.cuda.Stream(device)
            context = stream_context(context, self._stream, torch.cuda.current_stream(device).record_event())
        elsewhere = replace(sampler, forward_context=context)
        samples = self._threads.submit(elsewhere.generate, wanted, logprobs=logprobs)
        self._pending[number] = Pending(prompts=prompts, samples=samples)

    def waiting_prompts(self, number: int) -> Sequence[Prompt] | None:
        """Return the prompts of a rollout that is queued but not being generated, else None."""
        pending = self._pending.get(number)
        return None if pending is None or pending.samples is not None else pending.prompts

    def take(self, number: int) -> Sampled | Sequence[Prompt] | None:
        """Wait for a rollout; every rank has to call this.

        Returns:
            First round, kept until :meth:`drop`; prompts if it has to be sampled again; None if not submitted.

        Raises:
            Exception: Error of the engine, with the traceback of the thread.
            RuntimeError: If generation failed on another rank.
            TimeoutError: After :data:`PATIENCE` seconds.
        """
        if number not in self._pending:
            return None
        pending = self._pending[number]
        with failing_together("generation", EngineError):
            self._wait(number)
            samples = None if pending.samples is None else pending.samples.result()
        everywhere = all(process_objects(samples is not None))
        return samples if everywhere else pending.prompts

    def pending(self) -> Mapping[int, Pending]:
        """Return the submitted rollouts by number."""
        return dict(self._pending)

    def drop(self, *numbers: int) -> None:
        """Remove rollouts."""
        for number in numbers:
            self._pending.pop(number, None)

    def hold(self, number: int, prompts: Sequence[Prompt]) -> None:
        """Store the prompts of a rollout that is not generated ahead."""
        self._pending[number] = Pending(prompts=prompts, samples=None)

    def drain(self, *, hurried: bool = False) -> None:
        """Wait for all rollouts that are being generated, and keep them, failed ones too; every rank has to call this.

        Args:
            hurried: True to wait :data:`HURRY` seconds in all; unfinished rollouts keep their prompts only.

        Raises:
            TimeoutError: After :data:`PATIENCE` seconds for one rollout, unless hurried.
        """
        if hurried:
            wait([pending.samples for pending in self._pending.values() if pending.samples is not None], HURRY)
        elif self._pending:
            with failing_together("generation"):
                for number in self._pending:
                    self._wait(number)

    def close(self) -> None:
        """Drop every rollout, after waiting for those being generated, because a thread cannot be stopped."""
        self._end(wait=True)
        self._pending = {}

    def _end(self, *, wait: bool) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=wait, cancel_futures=True)
            self._threads = None

    def _wait(self, number: int) -> None:
        samples = self._pending[number].samples
        if samples is None or wait([samples], PATIENCE).done:
            return
        self._end(wait=False)
        raise TimeoutError(
            f"expected rollout {number} within {PATIENCE:g} seconds, but the engine is still generating it: check "
            "the engine, sample fewer or shorter responses, or raise lightning_rl.rollouts.prefetch.PATIENCE"
        )

    def load(self, pending: Mapping[int, Pending]) -> None:
        """Replace the submitted rollouts."""
        self.close()
        self._pending = dict(pending)


def state_of_pending(pending: Mapping[int, Pending]) -> list[dict[str, Any]]:
    """Return rollouts as values that load under ``weights_only=True``; prompts by their index in the stream."""
    states = []
    for number, rollout in pending.items():
        future = rollout.samples
        done = future is not None and future.done() and not future.cancelled() and not future.exception()
        samples = future.result().state() if future is not None and done else None
        places = [prompt.index for prompt in rollout.prompts]
        states.append({"rollout": number, "places": places, "samples": samples})
    return states


def pending_from_state(
    states: Iterable[Mapping[str, Any]], at: Callable[[Iterable[int]], list[Prompt]], version: str = __version__
) -> dict[int, Pending]:
    """Restore rollouts from :func:`state_of_pending`.

    Args:
        states: States of the rollouts.
        at: Returns the prompts at indices of the stream.
        version: Version of the library that saved them.

    Raises:
        ValueError: If it stored samples in another form.
    """
    pending = {}
    for state in states:
        prompts, samples = at(state["places"]), None
        if state["samples"] is not None:
            if "trajectories" not in state["samples"]:
                raise ValueError(
                    f"expected trajectories of rollout {state['rollout']}, which was generated ahead of training, got "
                    f"samples in the form of lightning-rl {version}: end the run with that version, or start a "
                    "new run from its weights"
                )
            samples = Future[Sampled]()
            samples.set_result(Sampled.from_state(state["samples"], prompts))
        pending[state["rollout"]] = Pending(prompts=prompts, samples=samples)
    return pending


def remaining_steps(trainer: Trainer, batch_idx: int) -> float:
    """Return the number of step indices left in a fit, the current one included; skipped optimizer steps add more.

    Args:
        trainer: Trainer with ``max_epochs``, ``max_steps`` and the length of an epoch.
        batch_idx: Number of the current step index within the epoch.
    """
    per_epoch, epochs, steps = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    further = math.inf if epochs in (None, -1) else (epochs - trainer.current_epoch - 1) * per_epoch
    return min(per_epoch - batch_idx + further, math.inf if steps == -1 else steps - trainer.global_step)


def thread_context(
    context: Callable[[], AbstractContextManager[object]], device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """Return a context that copies this thread's autocast, thread count and device to another thread.

    The default dtype is global to the process and is not copied.
    """
    with context():
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    threads = torch.get_num_threads()

    @contextmanager
    def inside() -> Iterator[None]:
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.autocast(device.type, enabled=autocast[0], dtype=autocast[1]):
            yield

    return inside


def stream_context(
    context: Callable[[], AbstractContextManager[object]], stream: torch.cuda.Stream, ready: torch.Event
) -> Callable[[], AbstractContextManager[object]]:
    """Return a context that runs kernels on their own CUDA stream, so that they do not wait for the trainer's kernels.

    Args:
        context: Outer context, which sets the device.
        stream: Stream for the kernels; synchronized on exit, so that weights may be overwritten afterwards.
        ready: Event that the first kernel waits for, such as a copy of weights.
    """

    @contextmanager
    def inside() -> Iterator[None]:
        with context():
            stream.wait_event(ready)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                stream.synchronize()

    return inside
