"""Generation of answers for the user, with or without a Trainer."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from lightning_rl.evaluation.prompt_encoding import encode_prompts, is_single
from lightning_rl.evaluation.questions import with_eos
from lightning_rl.generation import Engine, SamplingParams
from lightning_rl.generation.sampling_params import filter_problems
from lightning_rl.rollouts.collector import Collector
from lightning_rl.rollouts.failures import FailureReport
from lightning_rl.utils.arguments import check_counts


def sampling_for(
    default: SamplingParams,
    engine: Engine,
    *,
    samples: int | None,
    sampling: SamplingParams | None,
    temperature: float | None,
) -> SamplingParams:
    """Return the sampling parameters of :meth:`RLLightningModule.generate`; raise ValueError for wrong arguments."""
    if sampling is None:
        sampling = replace(default, temperature=temperature or 0.0)
    elif temperature is not None:
        raise ValueError(
            f"expected sampling= or temperature={temperature}, got both: write "
            f"SamplingParams(temperature={temperature})"
        )
    elif not isinstance(sampling, SamplingParams):
        raise ValueError(
            f"expected sampling to be an object such as SamplingParams(temperature=1.0), got {sampling!r:.200}"
        )
    check_counts(1, samples=1 if samples is None else samples)
    for problem in filter_problems(sampling, engine):
        raise ValueError(problem)
    if samples is not None and samples > 1:
        sampling.check_random(f"samples={samples}")
    return sampling


def generate(
    prompts: Any, *, samples: int | None, sampling: SamplingParams, collector: Collector, model: PreTrainedModel
) -> Any:
    """Return the answers of a synchronized engine, in the form of :meth:`RLLightningModule.generate`. A collective."""
    single, size = is_single(prompts), samples or 1
    rows = encode_prompts([prompts] if single else prompts, collector.tokenizer, model, sampling.max_new_tokens)
    sampling = with_eos(sampling, model, collector.tokenizer)
    collector = replace(collector, greedy_baseline=False)
    trajectories = collector.sample(collector.open(rows, 0, group_size=size, sampling=sampling)).trajectories
    report = FailureReport()
    report.add(trajectories)
    report.write()
    texts = collector.collectives.share(collector.texts([each.answer for each in trajectories]))
    answers = texts if samples is None else [texts[at : at + size] for at in range(0, len(texts), size)]
    return answers[0] if single else answers
