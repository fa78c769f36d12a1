"""Questions: an evaluation with encoded prompts and resolved options."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.data import Prompt
from lightning_rl.data.row_schema import ColumnCheck
from lightning_rl.evaluation.evaluation import Evaluation
from lightning_rl.evaluation.prompt_encoding import encode_prompts
from lightning_rl.generation import Request, SamplingParams
from lightning_rl.policy.build import eos_ids_of
from lightning_rl.rewards import Rewards
from lightning_rl.rewards.correctness import check_correct_by
from lightning_rl.samples import Trajectory
from lightning_rl.samples.seeds import EVALUATION, evaluation_seed, sample_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """An evaluation with encoded prompts and resolved options.

    Args:
        evaluation: Evaluation of the user; None for the validation prompts of the data module.
        prompts: Prompts in order, each with a unique index.
        sampling: Sampling parameters, with the ids that end a response.
        rewards: Reward functions.
        samples: Number of samples per prompt.
    """

    evaluation: Evaluation | None
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    rewards: Rewards
    samples: int = 1

    @property
    def name(self) -> str:
        """Name of the evaluation and of its folder."""
        return "validation" if self.evaluation is None else self.evaluation.name

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of all prompts."""
        return tuple(sorted({name for prompt in self.prompts for name in prompt.columns}))

    def open(self, prompts: Sequence[Prompt], seed: int, number: int) -> list[Trajectory]:
        """Return the samples of prompts of this rank, without segments; ``number`` makes their sample ids unique."""
        return [
            Trajectory(
                prompt=prompt,
                request=Request.of(
                    prompt,
                    sample_id=sample_id(prompt.index, place, self.samples, first=number * EVALUATION),
                    seed=evaluation_seed(seed, self.name, prompt.index, place),
                    sampling=self.sampling,
                ),
            )
            for prompt in prompts
            for place in range(self.samples)
        ]


def questions_of(
    evaluation: Evaluation,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    sampling: SamplingParams,
    rewards: Rewards,
    check: ColumnCheck | None = None,
) -> Questions:
    """Return the questions of an evaluation for a policy.

    Sampling parameters, made greedy for one sample, and rewards are defaults; ``check`` raises for invalid rows.

    Raises:
        ValueError: If a prompt is invalid; with the prompt and the evaluation.
    """
    default = replace(sampling, temperature=0.0) if evaluation.samples == 1 else sampling
    chosen = with_eos(evaluation.sampling or default, model, tokenizer)
    try:
        prompts = encode_prompts(evaluation.prompts, tokenizer, model, chosen.max_new_tokens, check)
    except ValueError as error:
        raise ValueError(f'evaluation "{evaluation.name}": {error}') from error
    own = rewards if evaluation.rewards is None else replace(rewards, functions=evaluation.rewards)
    check_correct_by(own, evaluation.correct_by, f'evaluation "{evaluation.name}"')
    return Questions(evaluation=evaluation, prompts=prompts, sampling=chosen, rewards=own, samples=evaluation.samples)


def with_eos(
    sampling: SamplingParams, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> SamplingParams:
    """Return the sampling parameters with the ids that end a response."""
    ids = eos_ids_of(model, tokenizer, sampling.eos_token_ids, sampling.stop)
    return replace(sampling, eos_token_ids=tuple(ids))
