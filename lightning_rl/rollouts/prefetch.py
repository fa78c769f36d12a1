"""Prefetch: rollouts that background threads have generated while the trainer works on earlier ones.

Only :meth:`Sampler.generate` runs there: it generates and lays the answers out. Prompts are taken, completions scored
and collectives entered by the trainer's thread alone, so nothing but time depends on which of them is faster. An engine
that cannot be asked by several threads at a time gets one rollout after the other.
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
from lightning_rl.rollouts.sample import Sampler, Samples

PATIENCE = 3600.0  # seconds that anything waits for a rollout that is being generated
HURRY = 12.0  # seconds that a checkpoint waits for them when the run ends at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A rollout that was asked for.

    Args:
        prompts: of its first round, on this rank.
        samples: what the engine makes of them; None for a rollout whose generation failed before it was saved.
    """

    prompts: Sequence[Prompt]
    samples: Future[Samples] | None


class Prefetcher:
    """The rollouts that are generated ahead, by number; those that are done wait here until they are dropped."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None  # one for all rollouts: each would keep memory of its own
        self._pending: dict[int, Pending] = {}

    def __contains__(self, number: int) -> bool:
        """Whether a rollout has been asked for."""
        return number in self._pending

    def submit(
        self, number: int, prompts: Sequence[Prompt], *, sampler: Sampler, device: torch.device, at_once: int = 1
    ) -> None:
        """Has the first round of a rollout generated, ``at_once`` of them at a time, in the order of submission."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="prefetch")
        requests = sampler.requests(prompts, number)
        context = thread_context(sampler.forward_context, device)
        if device.type == "cuda" and sampler.engine.capabilities.shares_policy:
            self._stream = self._stream or torch.cuda.Stream(device)
            context = stream_context(context, self._stream, torch.cuda.current_stream(device).record_event())
        elsewhere = replace(sampler, forward_context=context)
        self._pending[number] = Pending(prompts=prompts, samples=self._threads.submit(elsewhere.generate, requests))

    def waiting_prompts(self, number: int) -> Sequence[Prompt] | None:
        """The prompts of a rollout that nobody generates; None if somebody does, or if nobody asked for it."""
        pending = self._pending.get(number)
        return None if pending is None or pending.samples is not None else pending.prompts

    def take(self, number: int) -> Samples | Sequence[Prompt] | None:
        """Waits for a rollout; its prompts alone if they have to be sampled again. Every rank takes part.

        Returns:
            The first round of the rollout, which stays here until :meth:`drop`; None if nobody asked for it.

        Raises:
            Exception: what the engine raised, with the traceback of the thread.
            RuntimeError: if another rank's generation failed.
            TimeoutError: after :data:`PATIENCE` seconds.
        """
        if number not in self._pending:
            return None
        pending = self._pending[number]
        with failing_together("generation", EngineError):
            self._wait(number)
            samples = None if pending.samples is None else pending.samples.result()
        everywhere = all(process_objects(samples is not None))
        return samples if everywhere else pending.prompts

    def numbers(self) -> set[int]:
        """The rollouts that have been asked for."""
        return set(self._pending)

    def drop(self, *numbers: int) -> None:
        """Forgets rollouts."""
        for number in numbers:
            self._pending.pop(number, None)

    def hold(self, number: int, prompts: Sequence[Prompt]) -> None:
        """Keeps the prompts of a rollout that is not generated ahead."""
        self._pending[number] = Pending(prompts=prompts, samples=None)

    def drain(self, *, hurried: bool = False) -> None:
        """Waits for all rollouts that are being generated, which stay, failed or not. Every rank takes part.

        Args:
            hurried: wait :data:`HURRY` seconds in all; of what is not done by then the prompts are kept.

        Raises:
            TimeoutError: after :data:`PATIENCE` seconds for one of them, unless hurried.
        """
        if hurried:
            wait([pending.samples for pending in self._pending.values() if pending.samples is not None], HURRY)
        elif self._pending:
            with failing_together("generation"):
                for number in self._pending:
                    self._wait(number)

    def close(self) -> None:
        """Drops every rollout. What is being generated is waited for, because a thread cannot be stopped."""
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
            f"expected rollout {number} within {PATIENCE:g} seconds, but the engine is still generating it: look at "
            "the engine, draw fewer or shorter responses, or raise lightning_rl.rollouts.prefetch.PATIENCE"
        )

    def state(self) -> list[dict[str, Any]]:
        """The rollouts in values that load under ``weights_only=True``: of prompts only their place in the stream, and
        nothing more of what failed or is being generated.
        """
        states = []
        for number, pending in self._pending.items():
            future = pending.samples
            done = future is not None and future.done() and not future.cancelled() and not future.exception()
            samples = future.result().state() if future is not None and done else None
            places = [prompt.index for prompt in pending.prompts]
            states.append({"rollout": number, "places": places, "samples": samples})
        return states

    def load(self, states: Iterable[Mapping[str, Any]], at: Callable[[Iterable[int]], list[Prompt]]) -> None:
        """The inverse of :meth:`state`, with the prompts that stand ``at`` places of the stream."""
        self.close()
        for state in states:
            prompts, samples = at(state["places"]), None
            if state["samples"] is not None:
                samples = Future[Samples]()
                samples.set_result(Samples.from_state(state["samples"], prompts))
            self._pending[state["rollout"]] = Pending(prompts=prompts, samples=samples)


def remaining_tickets(trainer: Trainer, batch_idx: int) -> float:
    """How many tickets a fit has left by its limits, the current one included; more if optimizer steps are skipped.

    Args:
        trainer: whose ``max_epochs``, ``max_steps`` and length of an epoch count.
        batch_idx: number of the current ticket within the epoch.
    """
    per_epoch, epochs, steps = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    further = math.inf if epochs in (None, -1) else (epochs - trainer.current_epoch - 1) * per_epoch
    return min(per_epoch - batch_idx + further, math.inf if steps == -1 else steps - trainer.global_step)


def thread_context(
    context: Callable[[], AbstractContextManager[object]], device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """What of a context and of this thread is a thread's own, as a context for another thread: autocast, number of
    threads, device. The default dtype, which some precisions set, belongs to the whole process and stays as it is.
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
    """A context within which kernels run on a CUDA stream of their own, so that they wait for none of the trainer's.

    Args:
        context: around it, which says on which device.
        stream: for the kernels; once the context is left all of them have ended, and weights may be overwritten.
        ready: what the first of them has to wait for, such as weights that are being copied.
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
