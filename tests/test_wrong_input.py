"""Errors for wrong options and inputs: one case for each message."""

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
from kit.support import (
    a_trainer,
    callback_of,
    fit,
    parity_reward,
    tiny_module,
    tiny_policy,
    tiny_prompts,
    tiny_tokenizer,
)
from torch.utils.data import DataLoader, TensorDataset
from transformers import Qwen2ForCausalLM
from typing_extensions import override

from lightning_rl import (
    Evaluation,
    FaultTolerance,
    PromptDataModule,
    RLLightningModule,
    SamplingParams,
    TransformersEngine,
    VLLMServerEngine,
    presets,
)
from lightning_rl.advantages import (
    ESTIMATORS,
    ReinforcePlusPlus,
)
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    NoEOSMask,
    OffPolicyIS,
    OverlongPenalty,
    ReferenceKL,
    RewardNormalization,
    RolloutKL,
    StopProperly,
)
from lightning_rl.data.row_schema import PromptForm
from lightning_rl.environments import Conversations, EnvironmentReward
from lightning_rl.environments.adapters import GymEnvironment
from lightning_rl.losses import LOSSES
from lightning_rl.rewards import ExactMatch, NumberMatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:rows get no reward"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
]

Case = tuple[Callable[[], object], str]


class Twice(torch.optim.SGD):
    """An optimizer that evaluates the loss itself."""

    @override
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]  # pyrefly: ignore[bad-override]
        closure()
        super().step()
        return closure()


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


MODELS: dict[str, Case] = {
    "policy-none": (made(policy=None), "expected policy to be the name or path .* got None: pass a name"),
    "policy-class": (
        made(policy=Qwen2ForCausalLM),
        "expected policy .* got the class Qwen2ForCausalLM: pass a name, or",
    ),
    "policy-built": (made(policy=tiny_policy()), "expected policy .* got a Qwen2ForCausalLM instance"),
    "policy-missing": (
        made(policy="./nowhere"),
        "policy= to be an existing folder, .* got './nowhere'",
    ),
    "policy-file": (
        made(policy=__file__),
        "policy= to be an existing folder, .* got the file .*: pass the folder of a model, or load a run by RLLight",
    ),
    "policy-no-such-function": (
        made(policy="kit.support.tiny_polcy"),
        r"policy='kit.support.tiny_polcy' .* module 'kit.support' has no 'tiny_polcy': did you mean .*tiny_policy",
    ),
    "policy-no-such-module": (
        made(policy="my_package.policy"),
        r"policy='my_package.policy' .* no folder of that name, and importing 'my_package' failed: No module named",
    ),
    "loss-no-such-module": (made(loss="kit.nothing.loss"), "expected loss='kit.nothing.loss' to be found"),
    "policy-builds-nothing": (
        fitted(policy=lambda: None),
        "a function that builds a model of transformers, got NoneType",
    ),
    "critic-word": (
        fitted(critic="./share", advantages="gae", group_size=1),
        r"causal language model, got './share'.*critic=.shared. is a value head",
    ),
    "tokenizer": (made(tokenizer=3), "expected tokenizer to be a tokenizer of transformers, or the name .* got 3"),
    "engine-word": (made(engine="vllm"), r"engine to be an object such as VLLMEngine\(\), or None .* got 'vllm'"),
    "engine-without-super": (
        made(engine=type("Mine", (TransformersEngine,), {"__init__": lambda _: None})()),
        r"an engine with state and version, got an uninitialized Mine: call super\(\).__init__\(\) in Mine.__init__",
    ),
    "sampling-dict": (
        lambda: RLLightningModule(tiny_policy, parity_reward, sampling={"top_k": 1}),  # pyrefly: ignore[bad-argument-type]
        r"expected sampling to be an object such as SamplingParams\(temperature=1.0, .* got \{'top_k': 1\}",
    ),
}

DRAWING: dict[str, Case] = {
    "greedy": (made(temperature=0.0), "random sampling for training, got temperature=0, .* equal: raise temperature"),
    "top_k-one": (made(top_k=1), "random sampling for training, got top_k=1, .* equal: raise top_k"),
    "top_p-tiny": (made(top_p=1e-6), "random sampling for training, got top_p=1e-06, .* equal: raise top_p"),
    "temperature-text": (made(temperature="1"), "expected temperature to be a number >= 0, got str '1': remove"),
    "temperature-nan": (made(temperature=math.nan), "expected temperature >= 0, got nan"),
    "top_k": (made(top_k=-1), "expected top_k to be a whole number of at least 0, got -1"),
    "top_p": (made(top_p=0.0), r"expected top_p in \(0, 1\], got 0.0"),
    "min_p": (made(min_p=1.0), "expected min_p below 1, got 1"),
    "max_new_tokens": (made(max_new_tokens=0), "expected max_new_tokens to be a whole number above 0, got 0"),
    "context": (fitted(max_new_tokens=64), "expected max_new_tokens below the context window of 64, got 64"),
    "stop-empty": (made(stop=[""]), r"expected stop to be non-empty strings, .* got \[''\]"),
    "stop-untokenized": (fitted(stop="END"), "expected a tokenizer, because stop strings need one: pass tokenizer="),
    "eos-number": (made(eos_token_ids=1), r"eos_token_ids to be token ids of at least 0, such as \[2\], .* got 1"),
    "eos-outside": (
        fitted(eos_token_ids=[99]),
        r"expected eos_token_ids in \[0, 16\), .* got \[99\]: pass eos_token_ids=",
    ),
    "eos-empty": (fitted(eos_token_ids=[]), "an end of responses, but eos_token_ids is empty: pass eos_token_ids= or"),
}

NUMBERS: dict[str, Case] = {
    "tool_parser": (
        made(environment=Echo, tool_parser=3),
        "expected tool_parser to be a response template of transformers, .* got 3",
    ),
    "group_size-zero": (made(group_size=0), "expected group_size to be a whole number above 0, got 0"),
    "group_size-true": (made(group_size=True), "expected group_size to be a whole number above 0, got True"),
    "epochs_per_rollout": (
        made(epochs_per_rollout=0),
        "expected epochs_per_rollout to be a whole number above 0, got 0",
    ),
    "packing": (made(packing="no"), "expected packing to be True or False, got 'no'"),
    "seed-none": (made(seed=None), "expected seed to be a whole number of at least 0, got None"),
    "conversation_timeout": (made(environment=Echo, conversation_timeout=9), "expected timeout >= 60, got 9"),
    "EnvironmentReward alone": (
        made(rewards=EnvironmentReward()),
        "expected environment= for EnvironmentReward, got none: pass an environment, or another reward",
    ),
    "ReasoningGymScore questions": (
        lambda: ReasoningGymScore("chain_sum"),  # pyrefly: ignore[bad-argument-type]
        "expected questions to be a ReasoningGym, got 'chain_sum': pass that of the data",
    ),
    "environment a lock": (
        made(environment=partial(print, Lock()), environment_workers=1),
        "expected a factory for environment environment that can be sent to another process, got TypeError",
    ),
    "max_reward_failure_rate": (
        made(max_reward_failure_rate=2),
        r"expected max_failure_rate in \(0, 1\] or None, got 2",
    ),
    "skip_rollouts alone": (
        lambda: FaultTolerance(skip_rollouts=7),  # pyrefly: ignore[bad-argument-type]
        r"skip_rollouts to be a list of numbers of rollouts, .*, got 7",
    ),
    "on_checkpoint_error": (
        lambda: FaultTolerance(on_checkpoint_error="stop"),
        "on_checkpoint_error raise or warn, got 'stop'",
    ),
    "two of FaultTolerance": (
        fitted(FaultTolerance(), FaultTolerance(skip_rollouts=[1])),
        "expected one FaultTolerance in callbacks=, got 2: pass all options to one",
    ),
    "max_turn_tokens above all": (
        made(environment=Echo, max_turn_tokens=9),
        "expected max_turn_tokens of at most 8, the max_new_tokens of sampling .*, got 9: raise max_new_tokens, or",
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
    "environment that is a tool": (
        made(environment=parity_reward),
        r", \[parity_reward\] if it is a tool, or Program\(parity_reward\) if it is a program",
    ),
    "environment without a name": (made(environment={3: Echo}), "a name without / for each environment, .*, got 3"),
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
    "no tools": (made(tools=[]), r"expected tools to be a list of at least one function, got \[\]: pass functions"),
    "max_turns": (made(environment=Echo, max_turns=0), "expected max_turns to be a whole number above 0, got 0"),
    "no environment": (made(environment={}), "expected an environment or several by name, got an empty mapping"),
    "tools": (made(tools=["calculator"]), r"tools to be a list of at least one function, got \['calculator'\]: pass"),
    "max_grad_norm-text": (made(max_grad_norm="1"), "expected max_grad_norm to be a number > 0 or None, got str '1'"),
    "allow_config_changes": (
        lambda: FaultTolerance(allow_config_changes="seed"),
        "expected allow_config_changes to be a list of names, .* got 'seed'",
    ),
    "optimizer-name": (made(optimizer="adamw"), "expected optimizer to be a function .* got 'adamw'"),
    "optimizer-none": (
        fitted(optimizer=lambda _: None),
        "expected optimizer to build a torch.optim.Optimizer .* None",
    ),
    "optimizer-closure": (
        fitted(optimizer=torch.optim.LBFGS),
        "takes a step with one gradient, got LBFGS, .* use AdamW or SGD",
    ),
    "optimizer-own-closure": (fitted(optimizer=partial(Twice, lr=0.1)), "takes a step with one gradient, got Twice"),
    "optimizer-ascent": (
        fitted(optimizer=partial(torch.optim.AdamW, lr=0.1, maximize=True)),
        "expected an optimizer that minimizes the loss, got AdamW with maximize=True, .*: remove it",
    ),
    "optimizer-ascent-of-a-group": (
        fitted(optimizer=lambda groups: torch.optim.SGD([{**groups[0], "maximize": True}, *groups[1:]], lr=0.1)),
        "minimizes the loss, got SGD with maximize=True",
    ),
    "optimizer-rate-text": (
        fitted(optimizer=partial(torch.optim.AdamW, lr="1e-6")),  # pyrefly: ignore[bad-argument-type]
        "but it raised TypeError: .*options must be numbers, but YAML reads 1e-6 as a string: write 1.0e-6",
    ),
    "allow_config_changes-unknown": (
        fitted(allow_config_changes=["sede"]),
        "to contain only policy, .*seed, corrections, .* got 'sede'",
    ),
    "loss-module": (made(loss=torch.nn.CrossEntropyLoss()), "a function of a LossView .* the module CrossEntropyLoss"),
    "loss-number": (made(loss=[3]), r"expected a loss out of ppo, .* got \[3\]"),
    "advantages-preset": (made(advantages=presets.grpo()), r"got Preset: pass it as \*\*preset.options"),
    "reduction-preset": (made(reduction=presets.grpo()), r"got Preset: pass it as \*\*preset.options"),
    "lr_scheduler-metric": (
        fitted(lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau),
        "a scheduler .* that counts optimizer steps, such as .* got ReduceLROnPlateau, which waits for a metric",
    ),
    "lr_scheduler-none": (fitted(lr_scheduler=lambda _: None), "expected lr_scheduler to build .* got NoneType"),
    "policy-frozen": (
        fitted(policy=lambda: tiny_policy().requires_grad_(requires_grad=False)),
        "a policy with trainable parameters, got requires_grad=False for all of them: enable some",
    ),
}

ALGORITHMS: dict[str, Case] = {
    "loss-shape": (fitted(loss=lambda view: view.logprobs.sum()), r"to return a value per token \[16, 8\], got \[\]"),
    "value_loss": (
        made(critic="shared", value_loss=0.5),
        r"expected loss of Critic to be an object such as ValueLoss\(coef=0.5\), got 0.5",
    ),
    "gae-without-critic": (
        fitted(advantages="gae", group_size=1),
        'reads "values", but there is no critic: pass critic=',
    ),
}

CORRECTIONS: dict[str, Case] = {
    "dppo": (fitted(OffPolicyIS(), loss="dppo"), "count twice as numerator: leave OffPolicyIS out; a mask"),
    "two-kl": (
        fitted(ReferenceKL(as_loss=True), AdaptiveKL(as_loss=True)),
        "expected AdaptiveKL instead of ReferenceKL, got both, .*: remove ReferenceKL",
    ),
    "too-long": (fitted(OverlongPenalty(100, 10)), "at most max_new_tokens=8, got 100: .* use OverlongPenalty"),
    "class": (fitted(OPSM), "expected callbacks to be objects, got the class OPSM: call it"),
    "twice": (fitted(OPSM(), OPSM()), r'expected unique names, got "opsm" twice: use .with_name'),
    "infinite": (lambda: RolloutKL(math.inf), "expected coef >= 0 and finite, got inf"),
    "stop-and-mask": (
        fitted(StopProperly(), NoEOSMask()),
        "expected StopProperly or NoEOSMask, got both: StopProperly has no effect beside NoEOSMask; remove",
    ),
    "audit-deliberate": (
        lambda: SignalAudit(deliberate=["whitening"]),
        "expected deliberate= a list of prefixes of findings, .* got 'whitening': copy the text",
    ),
    "audit-check": (lambda: SignalAudit(checks=["x"]), "expected checks out of .* got 'x'"),
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
    "nothing": (made(rewards=[]), r"expected at least one reward function, got \[\]"),
    "pair": (
        made(rewards=(parity_reward, 0.5)),
        r"a list of functions, got .*: write \{'parity_reward': \(parity_reward, 0",
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
    "markers": (lambda: NumberMatch(markers="####"), r"markers to be a list of strings .* write \['####'\]"),  # pyrefly: ignore[bad-argument-type]
    "class": (
        made(rewards=NumberMatch),
        "expected an object as reward NumberMatch, got the class NumberMatch: call it",
    ),
    "two-names": (made(rewards=[parity_reward, parity_reward]), "reward functions with different names, got"),
    "reserved": (made(rewards={"task": parity_reward}), "expected names of rewards other than .*'task'"),
    "weight-text": (
        made(rewards={"a": (parity_reward, "0.5")}),
        "weight of reward a to be a number, got str '0.5': remove the quotes",
    ),
    "no-function": (made(rewards={"a": 3}), r"a function or \(function, finite weight\) for reward a, got \(3, 1.0\)"),
    "signature": (fitted(rewards=lambda a: a), r"to accept \(prompts, completions, \*, completion_ids, \*\*columns\)"),
    "returns-dict": (
        fitted(rewards=returns(lambda _: {"a": 1})),
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
    "column-number": (
        prompts([{"prompt": [2], 3: "x"}]),
        r"expected column names to be strings, .* got \[3\] in prompt 0: rename them in the data",
    ),
    "too-few": (prompts([[2]], 2), "expected at least 2 prompts for a rollout, got 1"),
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
}

DICT: Any = {"temperature": 1.0}
OF_TWO: Any = lambda prompt, completion: (prompt, completion)  # noqa: E731


def exported_to_a_file() -> object:
    """A policy that is saved to a file."""
    module = tiny_module(tokenizer=tiny_tokenizer())
    module.generate(["a"])
    Path("rows.jsonl").write_text("")
    return module.save_pretrained("rows.jsonl")


RUNS: dict[str, Case] = {
    "loader": (
        lambda: a_trainer().fit(tiny_module(), DataLoader(TensorDataset(torch.zeros(1)))),
        "got no data module: pass prompts as PromptDataModule",
    ),
    "predict-list": (
        lambda: a_trainer().predict(tiny_module(tokenizer=tiny_tokenizer()), ["a"]),
        r"prompts of a data module, got a str of another loader: pass PromptDataModule\(prompts, .* as datamodule=",
    ),
    "validate-list": (
        lambda: a_trainer().validate(
            tiny_module(tokenizer=tiny_tokenizer(), evaluation=Evaluation("e", ["a"])), dataloaders=["a"]
        ),
        "prompts of a data module, got a str of another loader",
    ),
    "optimizer-of-nothing": (
        lambda: torch.optim.SGD(tiny_module().parameters()),
        r"expected parameters of a policy, which is built at setup, .*: pass a function as optimizer=",
    ),
    "generate-options": (
        lambda: tiny_module(tokenizer=tiny_tokenizer()).generate(["a"], sampling=DICT),
        r"sampling to be an object such as SamplingParams\(temperature=1.0\), got \{'temperature': 1.0\}",
    ),
    "export-file": (exported_to_a_file, "expected a folder to write, got the file .*rows.jsonl: pass another path"),
    "answer-of-two": (
        lambda: Evaluation("e", ["a"], answer=OF_TWO),
        r"expected answer to be a function of \(text\), got <lambda>\(prompt, completion\): missing",
    ),
    "optimizer-of-module": (
        fitted(optimizer=lambda module: torch.optim.SGD(module.parameters())),
        "raised AttributeError: 'list' object has no attribute 'parameters'; its argument is a list of parameter g",
    ),
    "no-validation": (
        lambda: a_trainer().validate(tiny_module(), tiny_prompts()),
        r'expected prompts to evaluate in stage "val", got none: pass validation= to PromptDataModule, or',
    ),
    "complete-untokenized": (lambda: tiny_module().generate("a"), "expected a tokenizer for prompt 0, got none: pass"),
    "complete-nothing": (lambda: tiny_module(tokenizer=tiny_tokenizer()).generate([]), "at least one prompt, got none"),
    "export-unbuilt": (
        lambda: tiny_module().save_pretrained("x"),
        "expected a run with a policy, got one before configure_model",
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
}

CASES = {
    f"{group}-{name}": case
    for group, cases in {
        "model": MODELS, "sampling": DRAWING, "option": NUMBERS, "algorithm": ALGORITHMS, "correction": CORRECTIONS,
        "reward": REWARDS, "data": DATA, "run": RUNS, "server": SERVERS,
    }.items()
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.nightly
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


@pytest.mark.parametrize("known", [*ESTIMATORS.values(), *LOSSES.values()], ids=[*ESTIMATORS, *LOSSES])
def test_every_switch_of_an_estimator_or_loss_is_true_or_false(known: Any) -> None:
    for option in dataclasses.fields(known):
        if option.init and isinstance(getattr(known, option.name), bool):
            with pytest.raises(ValueError, match=f"expected {option.name} to be True or False, got 'x'"):
                dataclasses.replace(known, **{option.name: "x"})


BUDGET = "model=ModelOptions(max_tokens_per_microbatch=)"
PLACES = {
    "value_loss": "critic=Critic(loss=)",
    "tools": "environment=Conversations()",
    "tool_parser": "environment=Conversations(tool_parser=)",
    "max_turns": "environment=Conversations(max_turns=)",
    "max_turn_tokens": "environment=Conversations(max_turn_tokens=)",
    "environment_workers": "environment=Conversations(workers=)",
    "environment_timeout": "environment=Conversations(step_timeout=)",
    "conversation_timeout": "environment=Conversations(timeout=)",
    "max_environment_failure_rate": "environment=Conversations(max_failure_rate=)",
    "reward_timeout": "rewards=Rewards(timeout=)",
    "max_reward_failure_rate": "rewards=Rewards(max_failure_rate=)",
    "max_tokens_per_microbatch": BUDGET,
    "packing": "model=ModelOptions(packing=)",
    "attention": "model=ModelOptions(attention=)",
    "compile": "model=ModelOptions(compile=)",
    "liger": "model=ModelOptions(liger=)",
    "activation_checkpointing": "model=ModelOptions(activation_checkpointing=)",
}


def test_an_old_name_of_an_option_is_refused_with_the_new_one() -> None:
    options: Any = RLLightningModule
    for old, new in {**PLACES, "epochs": "epochs_per_rollout=", "token_budget": BUDGET}.items():
        with pytest.raises(TypeError, match=f"expected {re.escape(new)}, got {old}=, its old name: rename it"):
            options("model", parity_reward, **{old: 1})


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        (RLLightningModule, "learning_rate", "optimizer=partial(AdamW, lr=) of RLLightningModule"),
        (RLLightningModule, "num_generations", "group_size= of RLLightningModule"),
        (RLLightningModule, "group_sizes", "group_size= of RLLightningModule"),
        (RLLightningModule, "callbacks", "callbacks= of Trainer"),
        (RLLightningModule, "temperature", "temperature= of SamplingParams"),
        (PromptDataModule, "batch_size", "prompts_per_rollout= of PromptDataModule"),
        (PromptDataModule, "train", "prompts= of PromptDataModule"),
        (PromptDataModule, "num_workers", "no loader of PromptDataModule, which reads rows in the main process"),
        (SamplingParams, "max_tokens", "max_new_tokens= of SamplingParams"),
        (SamplingParams, "temperatures", "temperature= of SamplingParams"),
    ],
)
def test_an_unknown_argument_is_refused_with_its_place(kind: Any, name: str, place: str) -> None:
    with pytest.raises(TypeError, match=f"^expected {re.escape(place)}, got {name}= of {kind.__name__}: "):
        kind(**{name: 1})


def test_a_preset_is_no_list_of_callbacks() -> None:
    with pytest.raises(TypeError, match=r"\*\*preset.options to the module and callbacks=\[\*preset.callbacks\]"):
        a_trainer([*presets.dapo(max_new_tokens=8)])


@pytest.mark.parametrize("name", ["step_timeout", "timeout"])
def test_a_timeout_without_workers_gives_a_warning(name: str) -> None:
    options: dict[str, Any] = {name: 90.0}
    with pytest.warns(UserWarning, match=f"{name}=90 has no effect, .*: pass workers=, or remove {name}"):
        Conversations(Echo, **options)


def test_a_reference_that_nothing_reads_is_said() -> None:
    with pytest.warns(UserWarning, match="nothing reads ref_logprobs, so it is not loaded: add ReferenceKL"):
        fit(tiny_module(reference="nowhere/model"), max_steps=1)


WRONG_ROWS: dict[str, tuple[Any, dict[str, Any], str]] = {
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
