"""Prompts of a run: encoding, and checks of their columns, lengths and chat template."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_rl.data import Prompt, PromptDataModule, find_data_module
from lightning_rl.data.prompt_checks import is_chat, prompt_findings
from lightning_rl.environments.outcome import REWARD_COLUMNS
from lightning_rl.environments.run_environments import RowCheck
from lightning_rl.evaluation.questions import Questions, with_eos
from lightning_rl.generation import SamplingParams
from lightning_rl.options import Options
from lightning_rl.policy.build import max_prompt_length
from lightning_rl.rewards import Rewards
from lightning_rl.run.run import Run
from lightning_rl.utils.chat_rendering import apply_template
from lightning_rl.utils.finding import Finding

ANSWER = "quux"  # a text that no template writes
PROMPTS_CHECKED = 32


def encode_prompts(run: Run) -> SamplingParams:
    """Encode the prompts of training and evaluation, and check that they fit policy and rewards.

    Returns:
        Sampling parameters for training, with the ids that end a response.
    """
    options, policy, stage, data = run.options, run.policy, run.trainer.state.fn, find_data_module(run.trainer)
    tokenizer, rewards = options.tokenizer, options.rewards
    names = () if options.environment is None else tuple(options.environment.factories)
    check, sampling = RowCheck(names) if names else None, with_eos(options.sampling, policy.model, tokenizer)
    if data is not None:
        data.connect(tokenizer, max_prompt_length(policy.model, sampling.max_new_tokens), policy.vocabulary, check)
        for model in (policy, run.models.reference):
            if model is not None:
                model.check_windows(data.max_prompt_length() + sampling.max_new_tokens)
    evaluated = run.evaluator.encode(policy.model, tokenizer, sampling=sampling, rewards=rewards, check=check)
    for ids in (one.eos_token_ids or () for one in (sampling, *(questions.sampling for questions in evaluated))):
        if outside := sorted({i for i in ids if not 0 <= i < policy.vocabulary}):
            raise ValueError(
                f"expected eos_token_ids in [0, {policy.vocabulary}), the policy's vocabulary, got {outside}: pass "
                "eos_token_ids= of this policy, or its tokenizer"
            )
    used = [(sampling, data.first(), data.template_options)] if data is not None else []
    used += [(questions.sampling, next(iter(questions.prompts), None), {}) for questions in evaluated]
    warn_of_eos(tokenizer, used)
    for where, found, columns in _columns(options, data, evaluated, stage):
        try:
            found.check_columns((*columns, *(REWARD_COLUMNS if names else ())))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}{error}") from error
    if data is not None:
        for fault in prompt_findings(data.prompts.examples(PROMPTS_CHECKED), tokenizer, sampling.eos_token_ids or ()):
            rank_zero_warn(f"{fault.observed}; {fault.cure}")
    return sampling


def _columns(
    options: Options, data: PromptDataModule | None, evaluated: Sequence[Questions], stage: TrainerFn | None
) -> Iterator[tuple[str, Rewards, Iterable[str]]]:
    """Yield the columns of each set of encoded prompts of the stage, with its name in messages and its rewards."""
    if stage != TrainerFn.PREDICTING:
        yield from ((f"evaluation {one.name}: ", one.rewards, one.columns) for one in evaluated)
        if data is not None and data.validation is not None:
            yield "validation=: ", options.rewards, data.validation.columns
    if data is not None and stage == TrainerFn.FITTING:
        yield "", options.rewards, data.prompts.columns


def wrong_eos(
    sampling: SamplingParams,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Finding | None:
    """Return a finding if the token that the chat template writes after an answer does not end a response, or is none.

    Args:
        sampling: Sampling parameters with EOS ids.
        tokenizer: Tokenizer of the policy.
        prompt: A prompt of the run, or None for chats; nothing is found for plain text, which uses no template.
        options: Further arguments of the chat template.
    """
    ids = list(sampling.eos_token_ids or ())
    after = None if tokenizer is None else text_after_answer(tokenizer, options)
    if tokenizer is None or after is None or any(stop in after for stop in sampling.stop):
        return None
    ending = answer_end(tokenizer, after)
    if ending in ids or not is_chat(prompt, ending):
        return None
    if ending is None:
        between = text_after_answer(tokenizer, options, [{"role": "user", "content": "two"}]) or ""
        written: Any = tokenizer(between, add_special_tokens=False)["input_ids"]
        if set(written) & set(ids):  # as the marker of the next role, which ends answers of GLM
            return None
        return Finding(
            check="eos",
            observed="the chat template ends an answer with no token that ends a response: the policy has not seen an "
            "EOS there, so answers may continue to max_new_tokens",
            cure="a tokenizer.chat_template that writes the EOS after an answer, or a stop string",
            severity="warning",
        )
    name = f"{ending} ({tokenizer.convert_ids_to_tokens(ending)})"
    return Finding(
        check="eos",
        observed=f"the chat template ends an answer with {name}, which does not end a response: answers continue to "
        "max_new_tokens",
        cure=f"eos_token_ids={[*ids, ending]}",
        severity="error",
    )


def warn_of_eos(
    tokenizer: PreTrainedTokenizerBase | None,
    samplings: Iterable[tuple[SamplingParams, Prompt | None, Mapping[str, Any]]],
) -> None:
    """Warn once of each :func:`wrong_eos` of sampling parameters with a prompt and options of the chat template."""
    faults = (wrong_eos(sampling, tokenizer, prompt, options) for sampling, prompt, options in samplings)
    for observed, cure in dict.fromkeys((fault.observed, fault.cure) for fault in faults if fault is not None):
        rank_zero_warn(f"{observed}; pass " + (f"sampling=SamplingParams({cure}, ...)" if "=" in cure else cure))


def text_after_answer(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], messages: Sequence[Any] = ()
) -> str | None:
    """Return the text that the chat template writes after an answer, with messages; None if it writes no answer."""
    if not tokenizer.chat_template:
        return None
    history: Any = [{"role": "user", "content": "one"}, {"role": "assistant", "content": ANSWER}, *messages]
    try:
        text = str(apply_template(tokenizer, history, tokenize=False, **options))
    except Exception:  # noqa: BLE001  a template may raise anything
        return None
    _, answer, after = text.rpartition(ANSWER)
    return after if answer else None


def answer_end(tokenizer: PreTrainedTokenizerBase, after: str) -> int | None:
    """Return the first special token of the text after an answer; None if there is none."""
    written: Any = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return next((token for token in written if token in special), None)
