"""Wrong configurations and inputs: each is refused with a message that names what came and what to do."""

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from adapters.reasoning_gym import ReasoningGymScore
from kit.conversations import Echo
from kit.support import callback_of, fit, parity_reward, tiny_module, tiny_policy, tiny_prompts, tiny_tokenizer
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset
from transformers import Qwen2ForCausalLM

from lightning_rl import (
    DRO,
    GAE,
    GMPO,
    GRPO,
    GSPO,
    VESPO,
    ClippedSurrogate,
    Evaluation,
    PromptDataModule,
    RLLightningModule,
    SamplingParams,
    TransformersEngine,
    VLLMEngine,
    VLLMServerEngine,
    presets,
)
from lightning_rl.advantages import (
    ESTIMATORS,
    GPG,
    GAEOverTurns,
    LengthAdaptive,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePlusPlus,
    RelativePosition,
)
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    DivergenceMask,
    DynamicSampling,
    EntropyBonus,
    LinearLengthPenalty,
    NoEOSMask,
    OffPolicyIS,
    OverlongPenalty,
    PositiveNLL,
    ReferenceKL,
    RewardNormalization,
    RolloutKL,
    SequenceRatioMask,
    StopProperly,
    TotalVariationMask,
    TruncatedIS,
)
from lightning_rl.cli.serve import Address, check_options
from lightning_rl.data.row_schema import PromptForm
from lightning_rl.environments import EnvironmentReward, ToolEnvironment
from lightning_rl.environments.adapters import GymEnvironment, Verifiers
from lightning_rl.losses import LOSSES
from lightning_rl.recording import RolloutRecorder
from lightning_rl.reporting import SampleTable
from lightning_rl.rewards import ExactMatch, NumberMatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:rows get no reward"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
]

Case = tuple[Callable[[], object], str]


def made(**options: Any) -> Callable[[], object]:
    """A module with wrong options."""
    return lambda: tiny_module(**options)


def fitted(*callbacks: Any, data: Callable[[], PromptDataModule] | None = None, **options: Any) -> Callable[[], object]:
    """A fit with wrong options of the module, or of the Trainer under ``flags``."""
    flags = options.pop("flags", {})
    return lambda: fit(tiny_module(**options), callbacks=callbacks, data=data() if data else None, **flags)


def prompts(rows: Any, number: Any = 1, **options: Any) -> Callable[[], PromptDataModule]:
    """A data module with wrong prompts or options."""
    return lambda: PromptDataModule(rows, number, **options)


def returns(value: Callable[[int], Any]) -> Callable[..., Any]:
    """A reward that returns something of a number of rows."""

    def odd(prompts: Any, completions: Any, **columns: Any) -> Any:
        return value(len(prompts))

    return odd


def bare(*callbacks: Any) -> Trainer:
    return Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=list(callbacks))


MODELS: dict[str, Case] = {
    "policy-none": (made(policy=None), "expected policy to be the name or path .* got None: pass a name"),
    "policy-number": (made(policy=3), "expected policy to be the name or path .* got 3: pass a name"),
    "policy-empty": (made(policy=""), "expected policy to be the name or path .* got ''"),
    "policy-class": (
        made(policy=Qwen2ForCausalLM),
        "expected policy .* got the class Qwen2ForCausalLM: pass a name, or",
    ),
    "policy-built": (made(policy=tiny_policy()), "expected policy .* got a Qwen2ForCausalLM instance"),
    "policy-missing": (
        made(policy="./nowhere"),
        "policy= to be an existing folder, .* got './nowhere'",
    ),
    "policy-no-such-function": (
        made(policy="kit.support.tiny_polcy"),
        r"policy='kit.support.tiny_polcy' .* module 'kit.support' has no 'tiny_polcy': did you mean .*tiny_policy",
    ),
    "policy-no-such-module": (
        made(policy="my_package.policy"),
        r"policy='my_package.policy' .* no folder of that name, and importing 'my_package' failed: No module named",
    ),
    "reference-no-such-function": (made(reference="kit.support.nope"), "'kit.support' has no 'nope': it has "),
    "critic-no-such-module": (made(critic="kit.nothing.critic"), "expected critic='kit.nothing.critic' to be found"),
    "tokenizer-no-such-module": (made(tokenizer="kit.nothing.it"), "expected tokenizer='kit.nothing.it' to be found"),
    "loss-no-such-module": (made(loss="kit.nothing.loss"), "expected loss='kit.nothing.loss' to be found"),
    "policy-builds-nothing": (
        fitted(policy=lambda: None),
        "a function that builds a model of transformers, got NoneType",
    ),
    "reference-built": (made(reference=tiny_policy()), "expected reference .* instance: pass a name, or"),
    "critic-built": (
        made(critic=tiny_policy()),
        "expected critic .* instance: pass a name, or a function",
    ),
    "critic-word": (
        fitted(critic="./share", advantages="gae", group_size=1),
        r"causal language model, got './share'.*critic=.shared. is a value head",
    ),
    "tokenizer": (made(tokenizer=3), "expected tokenizer to be a tokenizer of transformers, or the name .* got 3"),
    "engine-word": (made(engine="vllm"), r"engine to be an object such as VLLMEngine\(\), or None .* got 'vllm'"),
    "engine-class": (made(engine=TransformersEngine), "expected engine .* got the class TransformersEngine"),
    "engine-without-super": (
        made(engine=type("Mine", (TransformersEngine,), {"__init__": lambda _: None})()),
        r"an engine with state and version, got an uninitialized Mine: call super\(\).__init__\(\) in Mine.__init__",
    ),
    "sampling-dict": (
        lambda: RLLightningModule(tiny_policy, parity_reward, sampling={"top_k": 1}),  # pyright: ignore[reportArgumentType]
        r"expected sampling to be an object such as SamplingParams\(temperature=1.0, .* got \{'top_k': 1\}",
    ),
    "sampling-class": (
        lambda: RLLightningModule(tiny_policy, parity_reward, sampling=SamplingParams),  # pyright: ignore[reportArgumentType]
        "expected sampling to be an object .* got the class SamplingParams",
    ),
}

DRAWING: dict[str, Case] = {
    "greedy": (made(temperature=0.0), "a temperature > 0 for training, got 0: greedy answers .* are identical"),
    "temperature-text": (made(temperature="1"), "expected temperature >= 0, got '1'"),
    "temperature-nan": (made(temperature=math.nan), "expected temperature >= 0, got nan"),
    "temperature-infinite": (made(temperature=math.inf), "expected temperature >= 0 and finite, got inf"),
    "top_k": (made(top_k=-1), "expected top_k to be a whole number of at least 0, got -1"),
    "top_p": (made(top_p=0.0), r"expected top_p in \(0, 1\], got 0.0"),
    "min_p": (made(min_p=1.0), "expected min_p below 1, got 1"),
    "max_new_tokens": (made(max_new_tokens=0), "expected max_new_tokens to be a whole number above 0, got 0"),
    "context": (fitted(max_new_tokens=64), "expected max_new_tokens below the context window of 64, got 64"),
    "stop-empty": (made(stop=[""]), r"expected stop to be non-empty strings, .* got \[''\]"),
    "stop-number": (made(stop=[3]), r"expected stop to be non-empty strings, .* got \[3\]"),
    "stop-untokenized": (fitted(stop="END"), "expected a tokenizer, because stop strings need one: pass tokenizer="),
    "eos-number": (made(eos_token_ids=1), r"eos_token_ids to be token ids of at least 0, such as \[2\], .* got 1"),
    "eos-negative": (made(eos_token_ids=[-1]), r"eos_token_ids to be token ids of at least 0, .* got \[-1\]"),
    "eos-outside": (
        fitted(eos_token_ids=[99]),
        r"expected eos_token_ids in \[0, 16\), .* got \[99\]: pass eos_token_ids=",
    ),
    "eos-empty": (fitted(eos_token_ids=[]), "an end of responses, but eos_token_ids is empty: pass eos_token_ids= or"),
}

NUMBERS: dict[str, Case] = {
    "tool_parser": (made(tool_parser=3), "expected tool_parser to be a response template of transformers, .* got 3"),
    "verifiers timeout": (partial(Verifiers, {}, "policy", {}, timeout=0), "expected timeout > 0, got 0"),
    "verifiers max_tasks": (
        partial(Verifiers, {}, "policy", {}, max_tasks=0),
        "expected max_tasks to be a whole number above 0 or None, got 0",
    ),
    "max_characters": (
        lambda: ToolEnvironment([], max_characters=0),
        "expected max_characters to be a whole number above 0 or None, got 0",
    ),
    "group_size-zero": (made(group_size=0), "expected group_size to be a whole number above 0, got 0"),
    "group_size-half": (made(group_size=2.5), "expected group_size to be a whole number above 0, got 2.5"),
    "group_size-text": (made(group_size="8"), "expected group_size to be a whole number above 0, got '8'"),
    "group_size-true": (made(group_size=True), "expected group_size to be a whole number above 0, got True"),
    "group_size-one": (
        fitted(group_size=1),
        'advantages="grpo" compares the samples .* group_size=1 .*: use group_size=2',
    ),
    "minibatches_per_rollout": (
        made(minibatches_per_rollout=0),
        "expected minibatches_per_rollout to be a whole number above 0, got 0",
    ),
    "minibatches-uneven": (
        fitted(minibatches_per_rollout=3),
        "prompts_per_rollout to be a multiple of minibatches_per_rollout x ranks, got 4",
    ),
    "epochs_per_rollout": (
        made(epochs_per_rollout=0),
        "expected epochs_per_rollout to be a whole number above 0, got 0",
    ),
    "max_staleness": (made(max_staleness=-1), "expected max_staleness to be a whole number of at least 0, got -1"),
    "max_tokens_per_microbatch": (
        made(max_tokens_per_microbatch=0),
        "expected max_tokens_per_microbatch to be a whole number above 0, got 0",
    ),
    "packing": (made(packing="no"), "expected packing to be True or False, got 'no'"),
    "checkpointing": (made(activation_checkpointing=1), "activation_checkpointing to be True or False, got 1"),
    "seed-none": (made(seed=None), "expected seed to be a whole number of at least 0, got None"),
    "seed-text": (made(seed="x"), "expected seed to be a whole number of at least 0, got 'x'"),
    "seed-negative": (made(seed=-1), "expected seed to be a whole number of at least 0, got -1"),
    "reward_timeout": (made(reward_timeout=-1), "expected reward_timeout > 0 or None, got -1"),
    "environment_workers": (
        made(environment_workers=-1),
        "expected environment_workers to be a whole number of at least 0, got -1",
    ),
    "environment_timeout": (made(environment_timeout=0), "expected environment_timeout > 0, got 0"),
    "conversation_timeout": (made(conversation_timeout=9), "expected conversation_timeout >= 60, got 9"),
    "EnvironmentReward alone": (
        made(rewards=EnvironmentReward()),
        "expected environment= or tools= for EnvironmentReward, got neither: pass one of them",
    ),
    "ReasoningGymScore questions": (
        lambda: ReasoningGymScore("chain_sum"),  # pyright: ignore[reportArgumentType]
        "expected questions to be a ReasoningGym, got 'chain_sum': pass that of the data",
    ),
    "environment a lock": (
        made(environment=partial(print, Lock()), environment_workers=1),
        "expected a factory that can be sent to another process for environment environment, got functools.partial",
    ),
    "max_reward_failure_rate": (
        made(max_reward_failure_rate=2),
        r"expected max_reward_failure_rate in \(0, 1\] or None, got 2",
    ),
    "skip_rollouts alone": (made(skip_rollouts=7), r"skip_rollouts to be a list of numbers of rollouts, .*, got 7"),
    "skip_rollouts below": (made(skip_rollouts=[-1]), r"skip_rollouts to be a list of numbers of rollouts, .*\[-1\]"),
    "checkpoint_errors": (made(checkpoint_errors="stop"), "checkpoint_errors raise or warn, got 'stop'"),
    "max_turns": (made(max_turns=0), "max_turns to be a whole number above 0, got 0"),
    "max_turn_tokens": (made(max_turn_tokens=0), "max_turn_tokens to be a whole number above 0 or None, got 0"),
    "max_turn_tokens above all": (
        made(environment=Echo, max_turn_tokens=9),
        "expected max_turn_tokens of at most 8, the max_new_tokens of sampling .*, got 9: raise max_new_tokens, or",
    ),
    "max_turn_tokens alone": (
        made(max_turn_tokens=4),
        "expected environment= or tools= for max_turn_tokens=4, got neither: pass .*, or remove max_turn_tokens",
    ),
    "tool_parser alone": (made(tool_parser="hermes"), "expected environment= or tools= for tool_parser='hermes', got"),
    "environment_workers alone": (
        made(environment_workers=2),
        "expected environment= or tools= for environment_workers=2, got neither",
    ),
    "max_environment_failure_rate": (
        made(max_environment_failure_rate=2),
        r"expected max_environment_failure_rate in \(0, 1\] or None, got 2",
    ),
    "environment that is a number": (
        made(environment=3),
        "expected environment environment to be a class or a function .*, got 3: pass the class itself, or a lambda",
    ),
    "environment with arguments": (
        made(environment={"gym": GymEnvironment}),
        r"expected environment gym to be made without arguments .*, got GymEnvironment, missing a required "
        r"argument: 'make': pass functools.partial\(GymEnvironment, ...\) or a lambda",
    ),
    "environment without a name": (made(environment={3: Echo}), "a name without / for each environment, .*, got 3"),
    "environment of an empty name": (made(environment={"": Echo}), "a name without / for each environment, .*, got ''"),
    "environment of a path": (made(environment={"a/b": Echo}), "a name without / .*, got 'a/b': its metrics are env/"),
    "environment that is an object": (
        made(environment=Echo()),
        "to be a class or a function .*, got <.*Echo object.*: pass the class itself, or a lambda that makes one",
    ),
    "environment that is a word": (
        made(environment="Guess"),
        "got 'Guess': pass the class itself, or its name with its module, such as my_package.Guess",
    ),
    "turn_rewards-elsewhere": (
        fitted(advantages=ReinforcePlusPlus(turn_rewards=True)),
        r"one EnvironmentReward\(\) of weight 1 for ReinforcePlusPlus\(turn_rewards=True\), got none: add it",
    ),
    "turn_rewards-weight": (
        fitted(
            advantages=ReinforcePlusPlus(turn_rewards=True),
            environment=Echo,
            rewards={"talk": (EnvironmentReward(), 0.5)},
        ),
        r"one EnvironmentReward\(\) of weight 1 .*, got weights \[0.5\]",
    ),
    "turn_rewards-scaled": (
        fitted(
            RewardNormalization(),
            advantages=ReinforcePlusPlus(turn_rewards=True),
            environment=Echo,
            rewards=EnvironmentReward(),
        ),
        "expected unscaled rewards for .*, got RewardNormalization, which scales rewards of rows",
    ),
    "no tools": (made(tools=[]), r"expected tools to be a list of at least one function, got \[\]: leave tools out"),
    "max_turns alone": (made(max_turns=3), "expected environment= or tools= for max_turns=3, got neither: pass one"),
    "max_environment_failure_rate alone": (
        made(max_environment_failure_rate=None),
        "expected environment= or tools= for max_environment_failure_rate=None, got neither",
    ),
    "environment_timeout alone": (
        made(environment_timeout=5.0),
        "expected environment= or tools= for environment_timeout=5.0, got neither",
    ),
    "no environment": (made(environment={}), "expected an environment or several by name, got an empty mapping"),
    "environment and tools": (made(environment=dict, tools=[print]), "expected environment= or tools=, got both"),
    "tools": (made(tools="calculator"), "expected tools to be a list of functions, got 'calculator'"),
    "max_idle_rollouts": (made(max_idle_rollouts=0), "max_idle_rollouts to be a whole number above 0 or None, got 0"),
    "max_grad_norm-text": (made(max_grad_norm="1"), "expected max_grad_norm > 0 or None, got '1'"),
    "max_grad_norm-infinite": (made(max_grad_norm=math.inf), "expected max_grad_norm > 0 or None and finite, got inf"),
    "allow_config_changes": (
        made(allow_config_changes="seed"),
        "expected allow_config_changes to be a list of names, .* got 'seed'",
    ),
    "optimizer-name": (made(optimizer="adamw"), "expected optimizer to be a function .* got 'adamw'"),
    "optimizer-number": (made(optimizer=1e-6), "expected optimizer to be a function .* got 1e-06"),
    "optimizer-built": (made(optimizer=torch.optim.SGD([torch.zeros(1)], lr=1)), "expected optimizer to be a function"),
    "optimizer-none": (
        fitted(optimizer=lambda _: None),
        "expected optimizer to build a torch.optim.Optimizer .* None",
    ),
    "optimizer-rate-text": (
        fitted(optimizer=partial(torch.optim.AdamW, lr="1e-6")),  # pyright: ignore[reportArgumentType]
        "but it raised TypeError: .*options must be numbers, but YAML reads 1e-6 as a string: write 1.0e-6",
    ),
    "allow_config_changes-unknown": (
        made(allow_config_changes=["sede"]),
        "to contain only policy, .*seed, corrections, .* got 'sede'",
    ),
    "loss-module": (made(loss=torch.nn.CrossEntropyLoss()), "a function of a LossView .* the module CrossEntropyLoss"),
    "loss-number": (made(loss=[3]), r"expected a loss out of ppo, .* got \[3\]"),
    "advantages-preset": (made(advantages=presets.grpo()), "expected advantages out of grpo, .* got Preset"),
    "reduction-preset": (made(reduction=presets.grpo()), "expected a reduction out of token_mean, .* got Preset"),
    "gpu_memory_utilization": (
        lambda: VLLMEngine(gpu_memory_utilization=5),
        r"expected gpu_memory_utilization in \(0, 1\], got 5",
    ),
    "lr_scheduler-metric": (
        fitted(lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau),
        "a scheduler .* that counts optimizer steps, such as .* got ReduceLROnPlateau, which waits for a metric",
    ),
    "lr_scheduler-none": (fitted(lr_scheduler=lambda _: None), "expected lr_scheduler to build .* got NoneType"),
    "policy-frozen": (
        fitted(policy=lambda: tiny_policy().requires_grad_(requires_grad=False)),
        "a policy with trainable parameters, got requires_grad=False for all of them: enable some",
    ),
    "lr_scheduler-name": (made(lr_scheduler="cosine"), "expected lr_scheduler to be a function .* got 'cosine'"),
    "lr_scheduler-number": (made(lr_scheduler=0.1), "expected lr_scheduler to be a function .* got 0.1"),
}

ALGORITHMS: dict[str, Case] = {
    "loss-name": (made(loss="pp0"), "expected a loss out of ppo, .*, an object or a function, got 'pp0'"),
    "loss-class": (made(loss=ClippedSurrogate), "expected an object as loss, got the class ClippedSurrogate: call it"),
    "loss-none": (made(loss=None), "expected a loss out of ppo, .* got None"),
    "loss-shape": (fitted(loss=lambda view: view.logprobs.sum()), r"to return a value per token \[16, 8\], got \[\]"),
    "advantages-name": (made(advantages="grp0"), "expected advantages out of grpo, .* got 'grp0'"),
    "advantages-class": (made(advantages=GRPO), "expected an object as advantages, got the class GRPO: call it"),
    "gae-decay": (lambda: GAE(lam=1.5), r"expected lam in \[0, 1\], got 1.5"),
    "gae-decay-of-the-critic": (lambda: GAE(lam_critic=-1), r"expected lam_critic in \[0, 1\], got -1"),
    "gae-over-turns-decay-of-the-critic": (
        lambda: GAEOverTurns(lam_critic=1.5),
        r"expected lam_critic in \[0, 1\], got 1.5",
    ),
    "gae-over-turns-decay": (lambda: GAEOverTurns(gamma=2), r"expected gamma in \[0, 1\], got 2"),
    "gae-over-turns-critic": (
        fitted(advantages="gae_over_turns", group_size=1),
        'advantages="gae_over_turns" reads "values", but there is no critic: pass critic= to the module',
    ),
    "length-adaptive": (lambda: LengthAdaptive(0), "expected alpha > 0, got 0"),
    "relative-position": (lambda: RelativePosition(1.5), "expected kept .* got 1.5"),
    "gpg-teaches": (lambda: GPG(teaches="all"), "expected teaches .*different.*nonzero.* got 'all'"),  # pyright: ignore[reportArgumentType]
    "pass-at-k-epsilon": (lambda: PassAtK(epsilon=-1), "expected epsilon >= 0, got -1"),
    "otb-cap": (lambda: OptimalTokenBaseline(importance_cap=0), "expected importance_cap > 0 or None, got 0"),
    "pass-at-k-alone": (
        fitted(advantages="pass_at_k", group_size=1),
        'advantages="pass_at_k" compares the samples .* group_size=1 .*: use group_size=2',
    ),
    "reduction-name": (made(reduction="mean"), "expected a reduction out of token_mean, .* got 'mean'"),
    "value_loss": (made(value_loss=0.5), r"value_loss to be an object such as ValueLoss\(coef=0.5\), got 0.5"),
    "critic-unread": (
        fitted(critic="shared"),
        'critic= has no effect, because advantages="grpo" reads no values: use',
    ),
    "gae-without-critic": (
        fitted(advantages="gae", group_size=1),
        'reads "values", but there is no critic: pass critic=',
    ),
    "preset": (lambda: presets.dapo(max_new_tokens="x"), "max_new_tokens to be a whole number above 0, got 'x'"),  # pyright: ignore[reportArgumentType]
}

CORRECTIONS: dict[str, Case] = {
    "ratio-twice": (fitted(OffPolicyIS()), 'OffPolicyIS .* and loss="ppo" .* count twice .*: use TruncatedIS'),
    "cispo": (
        fitted(OffPolicyIS(), loss="cispo"),
        'OffPolicyIS .* and loss="cispo" .* count twice .*: use TruncatedIS',
    ),
    "dppo": (fitted(OffPolicyIS(), loss="dppo"), "count twice as numerator: leave OffPolicyIS out; a mask"),
    "dppo-truncated": (fitted(TruncatedIS(), loss="dppo"), "count twice as denominator: leave TruncatedIS out; a mask"),
    "two-kl": (
        fitted(ReferenceKL(as_loss=True), AdaptiveKL(as_loss=True)),
        "expected AdaptiveKL instead of ReferenceKL, got both, .*: remove ReferenceKL",
    ),
    "too-long": (fitted(OverlongPenalty(100, 10)), "at most max_new_tokens=8, got 100: .* use OverlongPenalty"),
    "class": (fitted(OPSM), "expected callbacks to be objects, got the class OPSM: call it"),
    "twice": (fitted(OPSM(), OPSM()), r'expected unique names, got "opsm" twice: use .with_name'),
    "token-reward": (
        fitted(ReferenceKL()),
        r"ReferenceKL returns a reward per token, .*: use ReferenceKL\(as_loss=True",
    ),
    "infinite": (lambda: RolloutKL(math.inf), "expected coef >= 0 and finite, got inf"),
    "text": (lambda: EntropyBonus("0.1"), "expected coef >= 0, got '0.1'"),  # pyright: ignore[reportArgumentType]
    "anchor": (lambda: OPSM(against="ref"), "expected against old or rollout, got 'ref'"),  # pyright: ignore[reportArgumentType]
    "action": (lambda: NoEOSMask("skip"), "expected action zero_reward or drop_tokens, got 'skip'"),  # pyright: ignore[reportArgumentType]
    "level": (lambda: TruncatedIS("row"), "expected level token or sequence or geometric, got 'row'"),  # pyright: ignore[reportArgumentType]
    "floor": (lambda: TruncatedIS(floor=2), r"expected floor in \[0, 1\], got 2"),
    "normalized": (lambda: TruncatedIS(normalized="yes"), "expected normalized to be True or False, got 'yes'"),  # pyright: ignore[reportArgumentType]
    "statistic": (lambda: SequenceRatioMask("min"), "expected statistic geometric or product or max, got 'min'"),  # pyright: ignore[reportArgumentType]
    "divergence": (lambda: DivergenceMask(0.1, divergence="js"), "expected divergence binary_kl or k2 or k3, got 'js'"),  # pyright: ignore[reportArgumentType]
    "divergence-level": (lambda: DivergenceMask(0.1, level="row"), "level token or mean or sum or max, got 'row'"),  # pyright: ignore[reportArgumentType]
    "divergence-bound": (lambda: DivergenceMask(-1), "expected bound >= 0, got -1"),
    "variation": (lambda: TotalVariationMask(None), "expected bound >= 0, got None"),  # pyright: ignore[reportArgumentType]
    "variation-policy": (lambda: TotalVariationMask(0.1, policy="ref"), "expected policy old or current, got 'ref'"),  # pyright: ignore[reportArgumentType]
    "stop-scale": (lambda: StopProperly(-0.5), r"expected scale in \[0, 1\], got -0.5"),
    "stop-reward": (lambda: StopProperly(reward=math.inf), "expected reward .* or None and finite, got inf"),
    "stop-and-mask": (
        fitted(StopProperly(), NoEOSMask()),
        "expected StopProperly or NoEOSMask, got both: StopProperly has no effect beside NoEOSMask; remove",
    ),
    "length-cost": (lambda: LinearLengthPenalty(turns=-1), "expected turns >= 0, got -1"),
    "length-alone": (
        fitted(LinearLengthPenalty(), group_size=1, advantages="reinforce"),
        "LinearLengthPenalty compares the samples of a prompt, .*: use group_size=2 or more",
    ),
    "nll-coef": (lambda: PositiveNLL(math.inf), "expected coef >= 0 and finite, got inf"),
    "nll-threshold": (lambda: PositiveNLL(threshold="0"), "expected threshold to be a number, got '0'"),  # pyright: ignore[reportArgumentType]
    "gspo-truncated": (
        fitted(TruncatedIS(), loss=GSPO(anchor="rollout")),
        "count twice as denominator: leave TruncatedIS out; a mask",
    ),
    "vespo-power": (lambda: VESPO(k_positive=-1), "expected k_positive >= 0, got -1"),
    "vespo-power-of-bad": (lambda: VESPO(k_negative=math.inf), "expected k_negative >= 0 and finite, got inf"),
    "vespo-rate": (lambda: VESPO(lambda_positive=0), "expected lambda_positive > 0, got 0"),
    "vespo-rate-of-bad": (lambda: VESPO(lambda_negative=math.nan), "expected lambda_negative > 0, got nan"),
    "vespo-rate-text": (lambda: VESPO(lambda_negative="2"), "expected lambda_negative > 0, got '2'"),  # pyright: ignore[reportArgumentType]
    "vespo-power-flag": (lambda: VESPO(k_negative=True), "expected k_negative >= 0, got True"),
    "vespo-anchor": (lambda: VESPO(anchor="ref"), "expected anchor old or rollout, got 'ref'"),  # pyright: ignore[reportArgumentType]
    "gspo-anchor": (lambda: GSPO(anchor="ref"), "expected anchor old or rollout, got 'ref'"),  # pyright: ignore[reportArgumentType]
    "gmpo-bounds": (lambda: GMPO(clip_high=-1), "expected clip_high >= 0, got -1"),
    "dro-leash": (lambda: DRO(beta=-1), "expected beta >= 0, got -1"),
    "rounds": (lambda: DynamicSampling(max_rounds=0), "expected max_rounds to be a whole number above 0, got 0"),
    "population": (lambda: RewardNormalization("rows"), "expected mean and std out of batch, group, none, got 'rows'"),  # pyright: ignore[reportArgumentType]
    "ledger": (lambda: SignalLedger(1.5), "expected every_n_rollouts to be a whole number above 0, got 1.5"),  # pyright: ignore[reportArgumentType]
    "audit-mode": (lambda: SignalAudit(mode="print"), "expected mode warn or raise, got 'print'"),  # pyright: ignore[reportArgumentType]
    "audit-deliberate": (
        lambda: SignalAudit(deliberate=["whitening"]),
        "expected deliberate= a list of beginnings of findings, .* got 'whitening': copy the text",
    ),
    "audit-deliberate-text": (lambda: SignalAudit(deliberate="versions"), "got 'versions': copy the text"),
    "audit-check": (lambda: SignalAudit(checks=["x"]), "expected checks out of .* got 'x'"),
    "recorder": (lambda: RolloutRecorder("x", keep=0), "expected keep to be a whole number above 0 or None, got 0"),
    "table": (lambda: SampleTable(rows=0), "expected rows to be a whole number above 0, got 0"),
    "metrics": (
        fitted(callback_of("m", metrics=lambda _: {"m/a": 0.5})),
        r"expected metrics of m to return a mapping from names to Stat, such as Stat.of\(.*got \{'m/a': 0.5\}",
    ),
    "loss_term": (
        fitted(callback_of("m", loss_term=lambda view: view.logprobs)),
        r"expected loss_term of m to return a LossTerm\(per_token=",
    ),
    "mask": (
        fitted(callback_of("m", token_mask=lambda view: view.valid_tokens.float())),
        r"expected token_mask of m to return a bool tensor \[16, 8\], got float32",
    ),
}

REWARDS: dict[str, Case] = {
    "none": (made(rewards=None), "expected rewards to be a function, a list .* got None: pass one such as"),
    "name": (made(rewards="exact"), "expected rewards to be a function, a list .* got 'exact': pass one such as"),
    "nothing": (made(rewards=[]), r"expected at least one reward function, got \[\]"),
    "pair": (
        made(rewards=(parity_reward, 0.5)),
        r"a function with a weight: write \{'parity_reward': \(parity_reward, 0",
    ),
    "name-empty": (
        made(rewards={"": parity_reward}),
        r"names of rewards to be strings of at least one letter, got \[''\]",
    ),
    "name-figure": (
        made(rewards={"x": parity_reward, "x/failed": parity_reward}),
        'expected names of rewards of which none is the folder of another, got "x/failed" beside "x"',
    ),
    "weights": (
        fitted(rewards={"a": (parity_reward, 0.0)}),
        r"expected a reward with a non-zero weight to train with, got \{'a': 0.0\}: give",
    ),
    "column-lacks": (
        fitted(rewards=lambda completions, solution, **_: [0.0 for _ in zip(completions, solution, strict=True)]),
        r'with the columns \[\], got .* which needs "solution": use the names of columns, or rename',
    ),
    "markers": (lambda: NumberMatch(markers="####"), r"markers to be a list of strings .* write \['####'\]"),  # pyright: ignore[reportArgumentType]
    "class": (
        made(rewards=NumberMatch),
        "expected an object as reward NumberMatch, got the class NumberMatch: call it",
    ),
    "two-names": (made(rewards=[parity_reward, parity_reward]), "reward functions with different names, got"),
    "reserved": (made(rewards={"task": parity_reward}), "expected names of rewards other than .*'task'"),
    "weight-text": (made(rewards={"a": (parity_reward, "0.5")}), "weight of reward a to be a number, got '0.5'"),
    "weight-true": (made(rewards={"a": (parity_reward, True)}), "weight of reward a to be a number, got True"),
    "weight-nan": (made(rewards={"a": (parity_reward, math.nan)}), "weight of reward a to be a number, got nan"),
    "no-function": (made(rewards={"a": 3}), r"a function or \(function, finite weight\) for reward a, got \(3, 1.0\)"),
    "signature": (fitted(rewards=lambda a: a), r"to accept \(prompts, completions, \*, completion_ids, \*\*columns\)"),
    "returns-dict": (
        fitted(rewards=returns(lambda _: {"a": 1})),
        "reward odd returned .*expected 16 numbers or None",
    ),
    "returns-scalar": (fitted(rewards=returns(lambda _: 1.0)), "reward odd returned .*expected 16 numbers or None"),
    "returns-texts": (fitted(rewards=returns(lambda rows: ["x"] * rows)), "reward odd returned .*expected 16 numbers"),
    "returns-one": (fitted(rewards=returns(lambda _: [1.0])), "reward odd returned .*expected 16 numbers or None"),
    "returns-nothing": (
        fitted(rewards=returns(lambda _: None)),
        "reward odd returned .*expected 16 numbers or None",
    ),
    "returns-nan": (fitted(rewards=returns(lambda rows: [math.nan] * rows)), "reward odd returned nan"),
    "raises": (
        fitted(rewards=returns(lambda _: 1 / 0)),
        r"failed on 16 of 16 rows.*reward odd raised ZeroDivisionError",
    ),
    "column": (fitted(rewards=ExactMatch()), r"expected a column 'answer' for ExactMatch\(answer='answer'\)"),
}

DATA: dict[str, Case] = {
    "columns-of-lists": (
        prompts({"prompt": ["a"]}),
        "expected a list of rows, got a mapping .* datasets.Dataset.from_dict",
    ),
    "question": (
        prompts([{"question": "a"}]),
        r'got none in prompt 0, which has "question": name .*columns=\{"prompt": ',
    ),
    "empty": (prompts([]), "expected at least one prompt, got none"),
    "column-number": (
        prompts([{"prompt": [2], 3: "x"}]),
        r"expected column names to be strings, .* got \[3\] in prompt 0: rename them in the data",
    ),
    "column-reserved": (
        prompts([{"prompt": [2], "completion_ids": [7]}]),
        r'got "completion_ids" in prompt 0: rename, as in columns=\{"my_completion_ids": "completion_ids"\}',
    ),
    "missing-file": (prompts("no.jsonl"), "expected a file of prompts, got no.jsonl, which is none"),
    "none": (prompts(None), "expected a list of prompts, a file, .* got None"),
    "too-few": (prompts([[2]], 2), "expected at least 2 prompts for a rollout, got 1"),
    "number-zero": (prompts([[2]], 0), "expected prompts_per_rollout to be a whole number above 0, got 0"),
    "number-half": (prompts([[2]], 1.5), "expected prompts_per_rollout to be a whole number above 0, got 1.5"),
    "seed": (prompts([[2]], seed=None), "expected seed to be a whole number of at least 0, got None"),
    "shuffle": (prompts([[2]], shuffle="yes"), "expected shuffle to be True or False, got 'yes'"),
    "column-missing": (
        prompts([{"q": 1}], columns={"prompt": "question"}),
        r'to name columns that exist, got no "question"',
    ),
    "columns-text": (prompts([{"q": "a"}], columns="q"), r"expected columns to map new names .* got \'q\'"),
    "too_long": (prompts([[2]], too_long="cut"), "expected too_long error or drop, got 'cut'"),
    "no-role": (fitted(data=prompts([[{"content": "a"}]])), 'message 0 of prompt 0 to have a string "role"'),
    "content": (fitted(data=prompts([[{"role": "user", "content": 3}]])), 'prompt 0 to have a string "content"'),
    "no-template": (
        fitted(data=prompts([[{"role": "user", "content": "a"}]]), tokenizer=tiny_tokenizer()),
        "a tokenizer with a chat template, because prompt 0 is a list of messages: set tokenizer.chat_template",
    ),
    "no-tokenizer": (fitted(data=prompts(["a b"])), "expected a tokenizer for prompt 0, got none: pass tokenizer="),
    "foreign-ids": (fitted(data=prompts([[2, 99]])), r"expected token ids in \[0, 16\), got 2 to 99 in prompt 0"),
    "long": (
        fitted(data=prompts([[2] * 80])),
        "expected prompts of at most 56 tokens .* got prompt 0 with 80: shorten",
    ),
    "no-token": (fitted(data=prompts([[]])), "expected prompt 0 to have at least one token, got none"),
    "float-ids": (fitted(data=prompts([[2.5]])), r"list of token ids, .* got a list of float \(\[2.5\]\) in prompt 0"),
}

RUNS: dict[str, Case] = {
    "evaluation-name": (lambda: Evaluation("a b", [[2]]), "expected a name of letters, .* got 'a b'"),
    "evaluation-samples": (lambda: Evaluation("a", [[2]], samples=0), "samples to be a whole number above 0, got 0"),
    "evaluation-greedy": (
        lambda: Evaluation("a", [[2]], samples=8, sampling=SamplingParams(temperature=0)),
        "expected a temperature above 0, because samples=8 greedy answers would all be the same",
    ),
    "evaluation-pass": (lambda: Evaluation("a", [[2]], samples=2, pass_at=8), "from 1 to samples=2, got 8"),
    "evaluation-text": (
        made(evaluation="gsm8k"),
        "expected evaluation to be an Evaluation or a list of them, got 'gsm8k'",
    ),
    "evaluation-twice": (
        made(evaluation=[Evaluation("a", [[2]]), Evaluation("a", [[3]])]),
        r"expected evaluations with different names, got \['a', 'a'\]: rename one",
    ),
    "clipping": (fitted(flags={"gradient_clip_val": 1.0}), "without gradient_clip_val, got 1.0: pass max_grad_norm="),
    "accumulation": (
        fitted(flags={"accumulate_grad_batches": 2}),
        "without accumulate_grad_batches, got 2: max_tokens_per_microbatch=",
    ),
    "precision": (
        fitted(flags={"precision": "16-true"}),
        r'precision for training, got .*16-true.*: use "bf16-mixed"',
    ),
    "loader": (
        lambda: bare().fit(tiny_module(), DataLoader(TensorDataset(torch.zeros(1)))),
        "got no data module: pass prompts as PromptDataModule",
    ),  # pyright: ignore[reportArgumentType]
    "no-data": (lambda: bare().fit(tiny_module()), "got no data module: pass prompts as PromptDataModule"),
    "no-validation": (
        lambda: bare().validate(tiny_module(), tiny_prompts()),
        r'expected prompts to evaluate in stage "val", got none: pass validation= to PromptDataModule, or',
    ),
    "complete-untokenized": (lambda: tiny_module().generate("a"), "expected a tokenizer for prompt 0, got none: pass"),
    "complete-nothing": (lambda: tiny_module(tokenizer=tiny_tokenizer()).generate([]), "at least one prompt, got none"),
    "export-unbuilt": (
        lambda: tiny_module().save_pretrained("x"),
        "expected a policy, but configure_model has not run",
    ),
}

SERVER = "http://127.0.0.1:8000"
SERVERS: dict[str, Case] = {
    "urls": (lambda: VLLMServerEngine([]), r"expected URLs of one or more servers, each of them once, got \[\]"),
    "url": (lambda: VLLMServerEngine("localhost:8000"), "expected a URL such as http://127.0.0.1:8000, got 'localhost"),
    "storage": (
        lambda: VLLMServerEngine("http://10.0.0.7:8000"),
        "expected storage=, a folder shared with the machine of .*10.0.0.7",
    ),
    "timeout": (lambda: VLLMServerEngine(SERVER, timeout=0), "expected timeout > 0, got 0"),
    "timeout-infinite": (
        lambda: VLLMServerEngine(SERVER, timeout=math.inf),
        "expected timeout > 0 and finite, got inf",
    ),
    "patience": (lambda: VLLMServerEngine(SERVER, patience=math.nan), "expected patience > 0, got nan"),
    "ca": (
        lambda: VLLMServerEngine("https://127.0.0.1:8000", ca="none.pem"),
        "expected ca to be a file of certificates in PEM, got 'none.pem'",
    ),
    "certificate": (
        lambda: Address(certificate=Path("c.pem")),
        "expected --ssl-certfile and --ssl-keyfile together, got one of them",
    ),
    "certificate-missing": (
        lambda: Address(certificate=Path("c.pem"), private_key=Path("k.pem")),
        "expected --ssl-certfile to be a file, got c.pem",
    ),
    "several-engines": (lambda: check_options(["-dp", "2"]), "expected no -dp after --: .* start a server for each"),
    "key-shown": (lambda: check_options(["--api-key=x"]), "can read a command line: set VLLM_API_KEY"),
}

CASES = {
    f"{room}-{name}": case
    for room, cases in {
        "model": MODELS, "sampling": DRAWING, "option": NUMBERS, "algorithm": ALGORITHMS, "correction": CORRECTIONS,
        "reward": REWARDS, "data": DATA, "run": RUNS, "server": SERVERS,
    }.items()
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), CASES.values(), ids=CASES.keys())
def test_what_is_wrong_is_named_with_what_to_do(
    wrong: Callable[[], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError, RuntimeError, OSError)) as refused:
        wrong()
    assert re.search(message, str(refused.value), re.DOTALL), str(refused.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "expected one JSON value on each line, got .* line 2"),
        ('{"question": "a"}', r'none in prompt 1 \(.*rows.jsonl, line 2\), which has "question"'),
        ("3", r"rows.jsonl, line 2"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": [2]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(), data=PromptDataModule(file, 1))


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 80 and len({message for _, message in CASES.values()}) >= 80


@pytest.mark.parametrize("known", [*ESTIMATORS.values(), *LOSSES.values()], ids=[*ESTIMATORS, *LOSSES])
def test_every_switch_of_an_estimator_or_loss_is_true_or_false(known: Any) -> None:
    for option in dataclasses.fields(known):
        if option.init and isinstance(getattr(known, option.name), bool):
            with pytest.raises(ValueError, match=f"expected {option.name} to be True or False, got 'x'"):
                dataclasses.replace(known, **{option.name: "x"})


def test_an_old_name_of_an_option_is_refused_with_the_new_one() -> None:
    with pytest.raises(
        TypeError, match="expected max_tokens_per_microbatch=, got token_budget=, its old name: rename it"
    ):
        RLLightningModule("model", parity_reward, token_budget=64)  # pyright: ignore[reportCallIssue]


def test_a_preset_is_no_list_of_callbacks() -> None:
    with pytest.raises(TypeError, match=r"\*\*preset.options to the module and callbacks=\[\*preset.callbacks\]"):
        bare(*presets.dapo(max_new_tokens=8))


@pytest.mark.parametrize("name", ["environment_timeout", "conversation_timeout"])
def test_a_limit_of_time_without_workers_is_told_to_bound_nothing(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name}=90 has no effect, .*: pass environment_workers=, or remove {name}"):
        tiny_module(environment=Echo, **{name: 90.0})


def test_a_reference_that_nothing_reads_is_said() -> None:
    with pytest.warns(UserWarning, match="nothing reads ref_logprobs, so it is not loaded: add ReferenceKL"):
        fit(tiny_module(reference="nowhere/model"), max_steps=1)


WRONG_ROWS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "number-as-column": ([{"prompt": [2], 3: "x"}], {}, "column names to be strings, .* got .3. in prompt 0"),
    "prompt-and-messages": (
        [{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}],
        {},
        'one entry "prompt" or "messages", got both in .* columns={"prompt": "prompt"}',
    ),
    "variables-of-no-chat": (
        ["a"],
        {"chat_template_kwargs": {"x": 1}},
        "chat messages, because chat_template_kwargs=.* got a string in prompt 0.*: pass chat=True",
    ),
    "variables-of-ids": ([[2]], {"chat_template_kwargs": {"x": 1}}, "got token ids in prompt 0"),
    "column-for-column": (
        [{"prompt": "a", "answer": "b"}],
        {"columns": {"answer": "prompt"}},
        'got none in .*, which has "answer": name',
    ),
}


@pytest.mark.parametrize("case", WRONG_ROWS)
def test_a_wrong_row_is_named(case: str) -> None:
    rows, options, message = WRONG_ROWS[case]
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(tokenizer=tiny_tokenizer()), data=PromptDataModule(rows, 1, **options), max_steps=1)


def test_a_column_chosen_by_name_ends_the_doubt() -> None:
    rows = [{"prompt": [2, 3], "messages": [{"role": "user", "content": "b"}]}]
    assert PromptForm(columns={"prompt": "prompt"}).read(rows[0], "row 0").content == [2, 3]
    assert PromptForm(columns={"messages": "messages"}).read(rows[0], "row 0").content == rows[0]["messages"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.jsonl",
            b'{"prompt": "\xe9"}\n',
            "line 1 .*: it is in another encoding, such as Latin-1: save it as UTF-8",
        ),
        ("rows.json", b'[{"prompt": "\xe9"}]', "such as Latin-1: save it as UTF-8"),
        ("rows.csv", b"prompt\n\xe9\n", "such as Latin-1: save it as UTF-8"),
        (
            "rows.csv",
            b"prompt;answer\n1;2\n",
            "the header 'prompt;answer' in .* are separated by ';': save the file with",
        ),
        ("rows.csv", b"prompt\tanswer\n1\t2\n", "or tabs as .tsv"),
        ("rows.jsonl.gz", b"x", "got .*rows.jsonl.gz: decompress it to rows.jsonl"),
        ("rows.txt", b"x", "got .*rows.txt: rename it, if it is in"),
    ],
)
def test_a_file_in_another_format_is_named_with_the_cure(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PromptDataModule(str(tmp_path / name), 1)
