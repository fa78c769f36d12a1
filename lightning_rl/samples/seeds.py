"""Ids and seeds of samples; the numbers identify samples in checkpoints and recordings, so they must not change.

A sample of the training data has the id ``prompt * size + place``. Greedy baselines, evaluations and environments have
other ranges.
"""

import hashlib
from collections.abc import Sequence

from lightning_rl.samples.completion import POLICY

GREEDY = 2**62  # first id of greedy baselines; larger than that of any sample that trains
ENVIRONMENTS = 2**61  # first of the ids that seed environments, far from those of samples
EVALUATION = 2**40  # number of ids of each evaluation


def sample_id(prompt: int, place: int, size: int, *, first: int = 0) -> int:
    """Return the id of a sample, unique in a run.

    Args:
        prompt: Index of the prompt.
        place: Place among the samples of the prompt.
        size: Number of samples of each prompt.
        first: First id of the range: 0 for training, ``GREEDY`` for baselines, ``number * EVALUATION`` for evaluations.

    Example:
        >>> sample_id(64, 3, 8), sample_id(64, 0, 1, first=GREEDY) - GREEDY
        (515, 64)
    """
    return first + prompt * size + place


def request_seed(run_seed: int, rollout: int, sample_id: int) -> int:
    """Return a 31-bit seed that depends on the request alone.

    Example:
        >>> request_seed(0, 0, 0) == request_seed(0, 0, 0), request_seed(0, 0, 0) == request_seed(0, 0, 1)
        (True, False)
    """
    return _hash((run_seed, rollout, sample_id, 0))


def turn_seed(first: int, turn: int) -> int:
    """Return the 31-bit seed of a turn of a conversation, derived from the seed of its first turn, turn 0.

    Example:
        >>> turn_seed(5, 0), turn_seed(5, 1) == turn_seed(5, 1), turn_seed(5, 1) == turn_seed(5, 2)
        (5, True, False)
    """
    return first if turn == 0 else _hash(("turn", first, turn))


def call_seed(first: int, prefix_ids: Sequence[int], repeat: int, role: str = POLICY) -> int:
    """Return the 31-bit seed of a program's call, which depends neither on time nor on other calls.

    Args:
        first: Seed of the sample.
        prefix_ids: Token ids that the call continues.
        repeat: Number of calls of the sample that continued the same ids in the same role before.
        role: Name of the model in the call.

    Example:
        >>> len({call_seed(5, ids, repeat) for ids in [(1, 2), (1, 3)] for repeat in range(2)})
        4
    """
    return _hash(("call", first, *prefix_ids, repeat, *([] if role == POLICY else [role])))


def environment_seed(run_seed: int, prompt: int) -> int:
    """Return the 31-bit seed of the environments of a prompt, which all its samples share in every rollout."""
    return request_seed(run_seed, 0, ENVIRONMENTS + prompt)


def evaluation_seed(run_seed: int, name: str, prompt: int, place: int) -> int:
    """Return a 31-bit seed of one sample of an evaluation.

    It does not depend on batches, ranks or the step, so validations of one run differ by the weights only.

    Example:
        >>> evaluation_seed(0, "a", 0, 0) == evaluation_seed(0, "a", 0, 0)
        True
        >>> len({evaluation_seed(0, name, 0, place) for name in "ab" for place in range(2)})
        4
    """
    return _hash(("evaluation", run_seed, name, prompt, place))


def _hash(identity: tuple[str | int, ...]) -> int:
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
