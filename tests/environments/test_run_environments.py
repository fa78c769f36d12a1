"""Environments: what cannot work is refused before anything is generated, and what can goes through a whole fit."""

import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import cloudpickle
import pytest
from datasets import Dataset
from environments.templates import close_of, tokenizer_of
from kit.support import fit, recorder, tiny_module, tiny_policy, tiny_prompts
from typing_extensions import override

from lightning_rl import FinishReason, PromptDataModule, RLLightningModule, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.environments import Action, BridgeError, Environment, ParserError, StepResult, ToolCall
from lightning_rl.environments.run_environments import MEASURED, Environments
from lightning_rl.environments.tools import schemas_of
from lightning_rl.rewards.text import text_of, texts_of
from lightning_rl.rollout import turn_numbers

pytestmark = pytest.mark.filterwarnings("ignore:Found 1 environment:UserWarning")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test


def add(a: int) -> int:
    """Adds one.

    Args:
        a: a number.
    """
    return a + 1


class Counter:
    """As TRL's trainer takes it."""

    def reset(self, **row: Any) -> str:
        """Begins with the row's number."""
        self.count = int(row["number"])
        return " go"

    def add(self, a: int) -> int:
        """Adds to the count.

        Args:
            a: a number.
        """
        self.count += a
        return self.count

    def get_reward(self) -> float:
        """The count."""
        return float(self.count)


class Asking(Environment):
    """Asks again and again."""

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(messages=[{"role": "user", "content": "one"}])


def call_once(token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
    """Return a call in the first turn, an unreadable one in the second, none in the third."""
    turn = tokenizer_of("qwen2.5").decode(list(prefix_ids)).count("<tool_response>")
    calls = [ToolCall(name=tools[0]["function"]["name"], arguments={"a": len(token_ids)})]
    return Action(text="", tool_calls=calls if turn == 0 else (), errors=["what?"] if turn == 1 else ())


def module_of(name: str = "qwen2.5", **options: Any) -> RLLightningModule:
    defaults = {
        "policy": partial(tiny_policy, vocab_size=420, max_position_embeddings=1024, eos_token_id=min(close_of(name))),
        "tokenizer": tokenizer_of(name),
        "max_new_tokens": 48,
        "max_turn_tokens": 16,
        "eos_token_ids": sorted(close_of(name)) + list(range(20, 200)),  # so that a policy that knows nothing ends
        "max_tokens_per_microbatch": 8192,
    }
    return tiny_module(**{**defaults, **options})


def data() -> PromptDataModule:
    rows = [{"prompt": [{"role": "user", "content": word}], "number": place} for place, word in enumerate("abcdefgh")]
    return PromptDataModule(rows, prompts_per_rollout=4)


def rollouts_of(module: RLLightningModule) -> list[Rollout]:
    seen: list[Rollout] = []
    audit = SignalAudit(every_n_rollouts=1, mode="raise")
    fit(module, data=data(), callbacks=[recorder(seen)("seen"), audit], limit_train_batches=1)
    return seen


@pytest.mark.filterwarnings("ignore:.*the environment gave rewards")
@pytest.mark.parametrize("options", [{"tools": [add]}, {"environment": Counter}])
def test_a_fit_with_tools_goes_through_every_check_of_the_audit(options: dict[str, Any]) -> None:
    (rollout,) = rollouts_of(
        module_of(tool_parser=call_once, rewards=lambda prompts, *_, **__: [1.0] * len(prompts), **options)
    )
    whole = rollout.finish == FinishReason.STOP
    assert whole.any() and (turn_numbers(rollout).amax(-1)[whole] == 3).all()
    assert (turn_numbers(rollout).amax(-1) >= 1).all()


def test_an_environment_that_never_ends_is_ended_and_needs_no_parser_without_tools() -> None:
    (rollout,) = rollouts_of(module_of("gemma-3", environment=Asking, max_turns=2))
    assert (
        set(rollout.finish.tolist()) <= {FinishReason.TURNS, FinishReason.LENGTH}
        and (rollout.finish == FinishReason.TURNS).any()
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "qwen3.5", "tools": [add]}, ParserError, "it reads .*pass tool_parser="),
        ({"name": "qwen3.5", "environment": Counter}, ParserError, "it reads .*pass tool_parser="),
        ({"name": "qwen2.5", "tools": [add], "tool_parser": "unknown"}, ParserError, "got 'unknown'"),
        ({"name": "gemma-3", "tools": [add]}, BridgeError, "no bridge over tool messages.*roles have to alternate"),
        ({"name": "phi-3.5", "environment": Counter}, BridgeError, "drops the text of a tool message"),
        (
            {"name": "chatml", "tools": [add], "tool_parser": call_once},
            BridgeError,
            "no first prompt for environment environment: the template drops the tool add, so the policy would",
        ),
        ({"name": "qwen2.5", "tokenizer": None, "environment": Asking}, ValueError, "expected a tokenizer for"),
        ({"name": "qwen2.5", "environment": object}, ValueError, r"got object: write def reset\(self, \*\*row\)"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_generated(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        fit(module_of(**options), data=data(), limit_train_batches=1)


@pytest.mark.parametrize("options", [{"environment": Asking}, {"environment": Counter, "tool_parser": call_once}])
def test_prompts_of_token_ids_are_refused_for_an_environment_that_answers_their_words(options: dict[str, Any]) -> None:
    message = "expected prompts of text or of chat messages for environment environment, .*got token ids: write"
    with pytest.raises(ValueError, match=message):
        fit(module_of(**options), data=tiny_prompts(), limit_train_batches=1)


@pytest.mark.parametrize("tools", [[], [add]], ids=["row", "environment"])
def test_tools_and_variables_of_a_row_are_in_the_first_prompt_of_its_conversation(tools: Any) -> None:
    schema = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    ask = [{"role": "user", "content": "one"}]
    row = {"prompt": ask, "tools": [schema], "chat_template_kwargs": {"enable_thinking": False}}
    data = PromptDataModule([row, {"prompt": ask}], 2, shuffle=False)
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template += "{% if enable_thinking is defined %}<think>\n\n</think>{% endif %}"
    data.connect(tokenizer, None)
    first, second = data.take(2)

    class Using(Asking):
        """Has tools."""

    Using.tools = tools
    environments = Environments(factories={"environment": Using}, tokenizer=tokenizer, close=close_of("qwen3"))
    shown, other = (
        tokenizer.decode(environments.in_tokens(Using(), prompt).reset({}, 0)) for prompt in (first, second)
    )
    assert ('"name": "add"' in shown, '"name": "add"' in other) == (bool(tools), bool(tools))
    assert ('"name": "look"' in shown, '"name": "look"' in other) == (not tools, False)
    assert "<think>\n\n</think>" in shown and "<think>" not in other
    assert "<think>\n\n</think>" in tokenizer.decode(first.token_ids)


def long_rows(tokenizer: Any, tools: Any) -> tuple[list[Any], list[int]]:
    """Prompts with words that grow, and the number of tokens with which their conversations begin."""
    rows = [[{"role": "user", "content": " one" * words}] for words in (1, 8, 2, 7)]
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False, "tools": schemas_of(tools) or None}
    return rows, [len(tokenizer.apply_chat_template(row, **options)) for row in rows]


def connect(data: PromptDataModule, tokenizer: Any, environments: Environments) -> None:
    data.connect(tokenizer, None)
    data.limit(environments.first_length)


@pytest.mark.parametrize("tools", [[], [add]], ids=["messages", "tools"])
@pytest.mark.parametrize("kind", ["chat", "string", "stream"])
def test_the_length_of_a_prompt_is_that_with_which_its_conversation_begins(kind: str, tools: Any) -> None:
    class Using(Asking):
        """Has tools."""

    Using.tools = tools
    tokenizer = tokenizer_of("qwen3")
    rows, lengths = long_rows(tokenizer, tools)
    limit = sorted(lengths)[1]
    if kind != "chat":
        rows = [row[0]["content"] for row in rows]
    many: dict[str, Any] = {"shuffle": False, "epoch_length": 1} if kind == "stream" else {"shuffle": False}
    if kind == "stream":
        rows = Dataset.from_list([{"prompt": row} for row in rows]).to_iterable_dataset()
    environments = Environments(factories={"environment": Using}, tokenizer=tokenizer, close=close_of("qwen3")).check()
    for too_long in ("drop", "error"):
        data = PromptDataModule(rows, 2, max_prompt_tokens=limit, too_long=too_long, **many)
        if too_long == "error":
            with pytest.raises(
                ValueError, match=rf"at most {limit} tokens \(max_prompt_tokens\), got .* with {lengths[1]}"
            ):
                connect(data, tokenizer, environments)
            continue
        connect(data, tokenizer, environments)
        taken = [str(prompt.content).count("one") for prompt in data.take(2)]
        assert taken == [1, 2] and (kind == "stream" or data.prompts.drop_count == 2)
        data.limit(environments.first_length)
        assert kind == "stream" or data.max_prompt_length() == limit


def test_a_fit_drops_a_prompt_that_fits_only_without_its_tools() -> None:
    rows, lengths = long_rows(tokenizer_of("qwen3"), [add])
    seen: list[Rollout] = []
    data = PromptDataModule(rows, 2, max_prompt_tokens=sorted(lengths)[1], too_long="drop", shuffle=False)
    options = {"name": "qwen3", "environment": None, "tools": [add], "tool_parser": call_once}
    fit(module_of(**options), data=data, callbacks=[recorder(seen)("seen")], limit_train_batches=1)
    assert sorted(set(seen[0].prompt_lengths.tolist())) == sorted(lengths)[:2] and data.prompts.drop_count == 2


def test_a_reward_of_trl_walks_over_the_messages_of_a_conversation() -> None:
    """Results of tools are in a completion, whose last message is the answer that the library's rewards read."""
    results, ends, texts = list[str](), list[Any](), list[tuple[str, str]]()

    def tool_results(completions: Any, conversation: Any, **_: Any) -> list[float]:
        for completion, talk in zip(completions, conversation, strict=True):
            results.extend(message["content"] for message in completion if message["role"] == "tool")
            ends.append((completion[0]["role"], completion[-1]["role"], talk[0]["role"]))
            texts.append((text_of(completion), completion[-1]["content"]))
        return [float(len(completion)) for completion in completions]

    def whole(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(isinstance(text, str)) for text in texts_of(completions)]

    module = module_of(tools=[add], tool_parser=call_once, rewards=[tool_results, whole])
    audit = SignalAudit(every_n_rollouts=1, mode="raise")
    fit(module, data=data(), callbacks=[audit], limit_train_batches=1)
    assert any(text.isdigit() for text in results) and set(ends) == {("assistant", "assistant", "user")}
    assert all(text == last for text, last in texts)


@pytest.mark.parametrize("reads", ["completion", "completions[0]"])
def test_a_reward_that_reads_the_first_message_of_a_conversation_is_refused(reads: str) -> None:
    def first(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(completion[0]["content"] == prompts[0][0]["content"]) for completion in completions]

    def other(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(completions[0][0]["content"] == "a")] * len(prompts)

    def last(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(completion[-1]["content"] == prompts[0][0]["content"]) for completion in completions]

    function = first if reads == "completion" else other
    with pytest.raises(ValueError, match=rf"got {function.__name__}, which reads {re.escape(reads)}\[0\].*\[-1\]"):
        module_of(environment=Asking, rewards=function)
    module_of(environment=Asking, rewards=last)
    tiny_module(rewards=function)


def thinking_rows() -> list[dict[str, Any]]:
    rows = [{"prompt": [{"role": "user", "content": word}]} for word in "abcd"]
    return [{**row, "chat_template_kwargs": {"enable_thinking": bool(n % 2)}} for n, row in enumerate(rows)]


def test_a_renderer_gets_the_variables_of_the_row_as_well_as_those_of_the_run() -> None:
    tokenizer = tokenizer_of("glm-4.5")
    environments = Environments(
        factories={"environment": Asking},
        tokenizer=tokenizer,
        close=close_of("glm-4.5"),
        template_options={"enable_thinking": True},
    ).check("glm-4.5")
    prompts = PromptDataModule(thinking_rows(), 4, shuffle=False)
    prompts.connect(tokenizer, None)
    for prompt, said in zip(prompts.take(2), ("\nIt is 4.", "\n<think>hm</think>\nIt is 4."), strict=True):
        talk = environments.in_tokens(Asking(), prompt)
        talk.reset({}, 0)
        ids = tokenizer(f"{said}<|user|>", add_special_tokens=False)["input_ids"]
        answer = talk.step(ids, FinishReason.STOP).messages[1]
        reasoning = (answer.get("reasoning_content") or "").strip()
        assert (answer["content"].strip(), reasoning) == ("It is 4.", "hm" if "hm" in said else "")


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5"])
def test_a_fit_with_variables_of_rows_goes_through_every_check_of_the_audit(name: str) -> None:
    parser = "glm-4.5" if name == "glm-4.5" else "hermes"
    module = module_of(name=name, tokenizer=tokenizer_of(name), tools=[add], tool_parser=parser)
    audit = SignalAudit(every_n_rollouts=1, mode="raise")
    fit(module, data=PromptDataModule(thinking_rows(), 4), callbacks=[audit], limit_train_batches=1)


@pytest.mark.parametrize("where", ["run", "row"])
def test_a_prompt_that_ends_with_an_answer_is_refused_before_the_first_rollout(where: str) -> None:
    variables = {"continue_final_message": True}
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Let me"}]
    rows: list[Any] = [{"prompt": begun[:1]}] * 3 + [{"prompt": begun}]
    if where == "row":
        rows = [{**row, "chat_template_kwargs": variables} for row in rows]
    many: dict[str, Any] = {"chat_template_kwargs": variables} if where == "run" else {}
    with pytest.raises(ValueError, match=r"end with a question for environment .* at the end of prompt 3"):
        fit(module_of(tools=[add]), data=PromptDataModule(rows, 4, **many), limit_train_batches=1)


class Telling(Asking):
    """Begins with a text that is as long as the row says."""

    made = 0

    @override
    def reset(self, row: Any, seed: int) -> list[dict[str, Any]]:
        Telling.made += 1
        return [{"role": "user", "content": " one" * row["words"]}]


class TellingMore:
    """Appends a text to the prompt, as an object of TRL."""

    def reset(self, words: int) -> str:  # noqa: D102
        return " one" * words


@pytest.mark.parametrize("environment", [Telling, TellingMore])
@pytest.mark.parametrize("too_long", ["drop", "error"])
def test_the_first_messages_of_a_reset_are_measured_before_the_first_rollout(environment: Any, too_long: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a"}], "words": words} for words in (1, 700, 2, 3, 4)]
    data, seen = PromptDataModule(rows, 4, too_long=too_long, shuffle=False), list[Rollout]()
    options: dict[str, Any] = {"data": data, "callbacks": [recorder(seen)("seen")], "limit_train_batches": 1}
    if too_long == "error":
        with pytest.raises(ValueError, match=r"expected prompts of at most .* tokens .*, got prompt 1 with 7\d\d"):
            fit(module_of(environment=environment, max_new_tokens=400), **options)
        assert not seen
    else:
        fit(module_of(environment=environment, max_new_tokens=400), **options)
        assert data.prompts.drop_count == 1 and len(seen) == 1


def test_few_resets_are_measured_and_none_that_cannot_be_repeated() -> None:
    rows = [{"prompt": [{"role": "user", "content": "a"}], "words": 1} for _ in range(100)]
    for replayable, resets in ((True, MEASURED), (False, 0)):
        kind = type("Kind", (Telling,), {"replayable": replayable})
        environments = Environments(
            factories={"environment": kind}, tokenizer=tokenizer_of("qwen3"), close=close_of("qwen3")
        ).check()
        Telling.made = 0
        data = PromptDataModule(rows, 2, max_prompt_tokens=50)
        connect(data, tokenizer_of("qwen3"), environments)
        assert Telling.made == resets
