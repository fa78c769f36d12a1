"""Requests in flight of an engine."""

from lightning_rl.generation import Request, SamplingParams
from lightning_rl.generation.in_flight import InFlight


def request(sample: int, tokens: int = 8) -> Request:
    sampling = SamplingParams(max_new_tokens=tokens, eos_token_ids=(1,))
    return Request(prefix_ids=(2, 3), sample_id=sample, seed=0, sampling=sampling)


def test_limits_add_up_and_the_oldest_version_counts() -> None:
    counted, first, second = InFlight(), request(1), request(2, tokens=5)
    assert counted.tokens() == 0 and counted.oldest() is None
    counted.add(first, 3)
    with counted.holding([second], 4):
        assert counted.tokens() == 13 and counted.oldest() == 3
        counted.discard(first)
        assert counted.tokens() == 5 and counted.oldest() == 4
    assert counted.tokens() == 0
