"""Meters: what vLLM servers say of their own work, read once a rollout while it is drawn, so that nobody waits for it.

A server that does not answer in time, or says something else, has no figures in that rollout; and one that began anew
none of its counters.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from lightning_rl.generation.vllm.endpoint import Endpoint
from lightning_rl.generation.vllm.http import LOOP, Cancelled, Refused, Unanswered
from lightning_rl.generation.vllm.places import Server

LOG = logging.getLogger(__name__)
GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache",
}
TOKENS, PREEMPTIONS = "vllm:generation_tokens_total", "vllm:num_preemptions_total"
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
COUNTERS = (TOKENS, PREEMPTIONS, HITS, QUERIES)


class Meters:
    """Figures of servers under names that stay: the number of a server is its place among all that the run has had.

    Without the package prometheus-client there are none, and the log says so.

    Args:
        servers: those that there are now.
    """

    def __init__(self, servers: Callable[[], Sequence[Server]]) -> None:
        self._servers = servers
        self._numbers: dict[str, int] = {}  # by URL
        self._before: dict[str, tuple[float, Mapping[str, float]]] = {}  # time and counters by URL
        self._figures: dict[str, float] = {}
        self._lock = threading.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._last = -2  # rollout that servers were read in
        self._parse: Callable[[str], Any] | None = None
        try:
            from prometheus_client.parser import text_string_to_metric_families

            self._parse = text_string_to_metric_families
        except ImportError:
            LOG.warning("no metrics of servers are logged: pip install 'lightning-rl[servers]'")

    def start(self) -> None:
        """Reads the counters that the first rollout counts from."""
        LOOP.call_soon(lambda: self.begin(-1))

    def begin(self, rollout: int) -> None:
        """Has the servers read, if that was not done in this rollout or a later one. In the thread of the loop."""
        idle = self._reading is None or self._reading.done()
        if self._parse is not None and rollout > self._last and idle:
            self._last = rollout
            self._reading = asyncio.create_task(self._read())

    def take(self) -> dict[str, float]:
        """What was read since the last call, by the name of the metric."""
        with self._lock:
            figures, self._figures = self._figures, {}
        return figures

    async def _read(self) -> None:
        servers = list(self._servers())
        self._add({"server/ready": float(sum(server.ready for server in servers))})
        reads: list[Coroutine[Any, Any, None]] = [self._read_server(server.endpoint) for server in servers]
        await asyncio.gather(*reads)

    async def _read_server(self, endpoint: Endpoint) -> None:
        number = self._numbers.setdefault(endpoint.url, len(self._numbers))
        before = self._before.pop(endpoint.url, None)
        try:
            values = self._values(await endpoint.read_metrics((*GAUGES, *COUNTERS)))
        except (Unanswered, Refused, Cancelled, ValueError, KeyError, OverflowError):
            return
        now = time.monotonic()
        figures = {name: values[key] for key, name in GAUGES.items() if key in values}
        if before is not None:
            figures |= _rates(now - before[0], before[1], values)
        self._before[endpoint.url] = now, values
        self._add({f"server/{number}/{name}": value for name, value in figures.items()})

    def _values(self, text: str) -> dict[str, float]:
        """The value of each metric, summed over its labels."""
        values: dict[str, float] = {}
        for family in self._parse(text) if self._parse is not None else ():
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + float(sample.value)
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _add(self, figures: Mapping[str, float]) -> None:
        with self._lock:
            self._figures |= figures


def _rates(seconds: float, before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """What two readings of the counters say of the time between them; nothing of one that began anew."""
    grown = {key: now[key] - before[key] for key in COUNTERS if key in now and key in before}
    if not grown or min(grown.values()) < 0:
        return {}
    rates: dict[str, float] = {}
    if TOKENS in grown:
        rates["tokens_per_second"] = grown[TOKENS] / seconds
    if PREEMPTIONS in grown:
        rates["preemptions"] = grown[PREEMPTIONS]
    if HITS in grown and grown.get(QUERIES):
        rates["prefix_hits"] = grown[HITS] / grown[QUERIES]
    return rates
