"""Questions: an evaluation that can run, with its prompts encoded and its options resolved."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.data import Prompt
from lightning_rl.data.form import ColumnCheck
from lightning_rl.evaluation.evaluation import Evaluation
from lightning_rl.evaluation.prompts import encode_prompts
from lightning_rl.generation import Request, Sampling
from lightning_rl.policy.build import eos_ids_of
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.sample import SampleRequests

IDS = 2**40  # how many sample ids an evaluation has to itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """An evaluation that can run: its prompts encoded, its options resolved.

    Args:
        evaluation: as the user wrote it; None for the validation prompts of the data module.
        prompts: in their order, each with an index of its own.
        sampling: with the ids that end a response.
        rewards: what scores.
        samples: of each prompt.
    """

    evaluation: Evaluation | None
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    rewards: Rewards
    samples: int = 1

    @property
    def name(self) -> str:
        """Of the evaluation and of its folder."""
        return "validation" if self.evaluation is None else self.evaluation.name

    def requests(self, prompts: Sequence[Prompt], seed: int, number: int) -> SampleRequests:
        """What the engine is asked for some of the prompts.

        Args:
            prompts: of this rank.
            seed: of the run.
            number: of the evaluation in the run, which keeps the ids of its samples apart from others'.
        """
        requests = [
            Request(
                prefix_ids=prompt.token_ids,
                sample_id=number * IDS + prompt.index * self.samples + place,
                seed=evaluation_seed(seed, self.name, prompt.index, place),
                sampling=self.sampling,
            )
            for prompt in prompts
            for place in range(self.samples)
        ]
        return SampleRequests(prompts=prompts, requests=requests)


def evaluation_seed(run_seed: int, name: str, prompt: int, sample: int) -> int:
    """A 31-bit seed of one sample of an evaluation: neither batches nor ranks, nor how many samples there are, nor the
    step of the run enter, so that validations of one run differ by the weights alone.

    Example:
        >>> evaluation_seed(0, "a", 0, 0) == evaluation_seed(0, "a", 0, 0)
        True
        >>> len({evaluation_seed(0, name, 0, place) for name in "ab" for place in range(2)})
        4
    """
    identity = repr(("evaluation", run_seed, name, prompt, sample)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=4).digest(), "big") >> 1


def questions_of(
    evaluation: Evaluation,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    sampling: Sampling,
    rewards: Rewards,
    check: ColumnCheck | None = None,
) -> Questions:
    """An evaluation for a policy.

    Args:
        evaluation: as the user wrote it.
        model: of the policy.
        tokenizer: its own.
        sampling: that of training, for an evaluation without one: greedy for one sample.
        rewards: those of training, for an evaluation without any.
        check: raises for a row whose columns do not fit the run.

    Raises:
        ValueError: if a prompt does not fit; the message names it and the evaluation.
    """
    default = replace(sampling, temperature=0.0) if evaluation.samples == 1 else sampling
    chosen = with_eos(evaluation.sampling or default, model, tokenizer)
    try:
        prompts = encode_prompts(evaluation.prompts, tokenizer, model, chosen.max_new_tokens, check)
    except ValueError as error:
        raise ValueError(f'evaluation "{evaluation.name}": {error}') from error
    own = rewards if evaluation.rewards is None else Rewards(evaluation.rewards, seconds=rewards.seconds)
    return Questions(evaluation=evaluation, prompts=prompts, sampling=chosen, rewards=own, samples=evaluation.samples)


def with_eos(sampling: Sampling, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Sampling:
    """The same sampling with the ids that end a response."""
    ids = eos_ids_of(model, tokenizer, sampling.eos_token_ids, sampling.stop)
    return replace(sampling, eos_token_ids=tuple(ids))
