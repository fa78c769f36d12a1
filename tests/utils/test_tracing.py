"""Spans of a run: their tree, names, attributes and errors, in threads, coroutines, processes and ranks."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from kit.chats import TOOLS, chat_prompts
from kit.conversations import Talk, wanted
from kit.forks import PATH
from kit.harnesses import Client, fake, opened, user
from kit.ranks import STRATEGIES, run_ranks
from kit.support import a_trainer, fit, tiny_module, tiny_prompts, weights_of
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from typing_extensions import override

from lightning_rl import FakeEngine, FinishReason, PromptDataModule, SamplingParams
from lightning_rl.environments import (
    Action,
    Conversation,
    ConversationLimits,
    Program,
    TokenStep,
    ToolCall,
    ToolEnvironment,
    converse,
)
from lightning_rl.environments.workers import WorkerPool
from lightning_rl.generation import Completion, EngineError, Request, TransformersEngine
from lightning_rl.rewards import Rewards, SubprocessReward
from lightning_rl.utils.tracing import Span

EXPORTER = InMemorySpanExporter()
FIRST = Request(prefix_ids=(1, 2), sample_id=5, seed=77, sampling=SamplingParams(max_new_tokens=6, eos_token_ids=[9]))
SECOND = replace(FIRST, sample_id=6)
FORGED = "forged <|im_start|>"  # a name that the policy writes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test
pytestmark = pytest.mark.filterwarnings("ignore:max_staleness=1 trains on samples of earlier weights")


def export_spans() -> None:
    """Configure the only provider of this process, as a user does, unless a block of the docs has done so."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))


@pytest.fixture(scope="module", autouse=True)
def provider() -> Iterator[None]:
    """The spans of this file go to the exporter, and those of later files nowhere."""
    export_spans()
    yield
    EXPORTER.shutdown()


@pytest.fixture(autouse=True)
def no_earlier_spans() -> None:
    EXPORTER.clear()


def spans(name: str = "") -> list[ReadableSpan]:
    """The spans that ended, by their beginning; those of a name alone."""
    ended = sorted(EXPORTER.get_finished_spans(), key=lambda span: span.start_time or 0)
    return [span for span in ended if span.name.startswith(name)]


def ids(context: Any) -> str:
    return f"{context.trace_id:x}/{context.span_id:x}"


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def tree(parent: ReadableSpan | None = None) -> list[Any]:
    """Name and children of each root, or of each child of a span."""
    found = [span for span in spans() if span.parent == (parent and parent.context)]
    return [(span.name, inner) if (inner := tree(span)) else span.name for span in found]


def call_twice(token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
    calls = [ToolCall(name="look", arguments={"x": "red"}), ToolCall(name=FORGED, arguments={})]
    return Action(text="", tool_calls=tuple(calls))


def named_policy() -> Any:
    policy = TOOLS["policy"]()
    policy.config.name_or_path = "tiny"
    return policy


def tool_fit(rollouts: int = 1, **options: Any) -> dict[str, Any]:
    """Train on two conversations of two turns a rollout, with two calls in each turn; return the weights."""
    module = tiny_module(
        **{**TOOLS, "tool_parser": call_twice, "policy": named_policy, "max_turns": 2, "group_size": 2, **options}
    )
    fit(module, data=chat_prompts(4, 1), max_steps=rollouts)
    return {name: weight.tolist() for name, weight in weights_of(module).items()}


TURN = ["chat tiny", "execute_tool look", "execute_tool"]
SAMPLE = ("sample", [("invoke_agent environment", TURN * 2)] * 2)
REST = [("reward", ["reward last_answer"]), "score", "signal", "update"]


def test_a_rollout_is_the_tree_of_its_phases_conversations_turns_tools_and_rewards() -> None:
    tool_fit()
    assert tree() == [("rollout", ["sync", ("generate", [SAMPLE]), *REST])]
    (root,), chats = spans("rollout"), spans("chat")
    assert attributes_of(root) == {"lightning_rl.rollout": 0, "lightning_rl.rank": 0}
    assert attributes_of(chats[0]) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lightning_rl",
        "gen_ai.request.model": "tiny",
        "gen_ai.conversation.id": "0",
        "gen_ai.usage.input_tokens": 13,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
        "lightning_rl.turn": 1,
    }
    assert attributes_of(spans("invoke_agent")[1]) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "environment",
        "gen_ai.conversation.id": "1",
        "gen_ai.response.finish_reasons": ("turns",),
    }
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.type": "function", "gen_ai.tool.name": "look"}
    assert attributes_of(spans("execute_tool look")[0]) == tool
    assert attributes_of(spans("reward last_answer")[0]) == {
        "gen_ai.evaluation.name": "last_answer",
        "lightning_rl.rows": 2,
    }


def test_an_evaluation_has_a_span_around_each_batch() -> None:
    module = tiny_module(**{**TOOLS, "tool_parser": call_twice, "policy": named_policy, "max_turns": 2})
    trainer, prompt = a_trainer(), {"prompt": [{"role": "user", "content": "say one ?"}]}
    data = PromptDataModule([prompt] * 4, 4, validation=[prompt] * 2, validation_batch_size=1)
    sample = ("sample", [("invoke_agent environment", ["chat tiny", "execute_tool look", "execute_tool", "chat tiny"])])
    for evaluate, stage, rewards in (
        (trainer.validate, "val", ["reward last_answer"]),
        (trainer.predict, "predict", []),
    ):
        EXPORTER.clear()
        evaluate(module, data)
        assert tree() == [("evaluate", [sample, *rewards])] * (2 if stage == "val" else 4)
        assert all(attributes_of(span) == {"lightning_rl.stage": stage} for span in spans("evaluate"))


def test_calls_of_an_opponent_are_chats_with_its_name() -> None:
    def play(row: Any, model: Any) -> None:
        for name in (model.model, model.opponent):
            Client(model)([user(row["prompt"])], model=name)

    converse(opened("qwen2.5", Program(play), [{"prompt": "one"}]), fake("qwen2.5"))
    assert tree() == [("invoke_agent environment", ["chat", "chat opponent"])]


def test_every_attribute_of_generative_ai_is_in_the_conventions() -> None:
    tool_fit()
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    used = {name for span in spans() for name in attributes_of(span)}
    assert {name for name in used if not name.startswith("lightning_rl.")} - {"error.type"} <= known
    operations = {attributes_of(span).get("gen_ai.operation.name", "chat") for span in spans()}
    assert operations <= {one.value for one in gen_ai_attributes.GenAiOperationNameValues}


def test_no_span_holds_a_text_of_prompts_answers_or_errors() -> None:
    tool_fit()
    exported = [span.to_json() for span in spans()]
    assert len(exported) > 20 and not [text for text in exported if FORGED in text or "say one" in text]
    failed = spans("execute_tool")[1]
    assert attributes_of(failed)["error.type"] == "LookupError" and not failed.events
    assert failed.status.status_code is trace.StatusCode.ERROR and failed.status.description is None


def test_a_rollout_generated_ahead_is_sampled_under_its_own_span() -> None:
    tool_fit(3, max_staleness=1)
    assert [attributes_of(span)["lightning_rl.rollout"] for span in spans("rollout")] == [0, 1, 2]
    first, second, third = spans("rollout")
    assert tree(first)[:3] == ["wait", ("sync", ["canary"]), ("generate", [SAMPLE])]
    for rollout, before in ((second, first), (third, second)):
        (sample,) = [span for span in spans("sample") if span.parent == rollout.context]
        assert rollout.parent is None and (sample.start_time or 0) < (before.end_time or 0)
        assert tree(rollout)[1:] == ["wait", ("sync", ["canary"]), "generate", *REST]


def test_single_turn_samples_have_a_chat_each_and_steps_of_a_rollout_its_span() -> None:
    with trace.get_tracer("user").start_as_current_span("fit"):
        fit(tiny_module(minibatches_per_rollout=2), data=tiny_prompts(2, 2), max_steps=2)
    inner = ["sync", ("generate", [("sample", ["chat"] * 8)]), ("reward", ["reward parity_reward"]), "score", "signal"]
    assert tree() == [("fit", [("rollout", [*inner, "update", "update"])])]


def test_a_copy_of_a_module_has_spans_of_its_own() -> None:
    module = tiny_module()
    with Span("fit"):
        fit(module, max_steps=1)
        assert copy.deepcopy(module).run.ahead.spans.of(0) is not module.run.ahead.spans.of(0)


def test_spans_neither_change_a_run_nor_repeat_their_ids() -> None:
    once = tool_fit(2)
    before = {ids(span.context) for span in spans()}
    EXPORTER.clear()
    assert tool_fit(2) == once and before.isdisjoint(ids(span.context) for span in spans())


WITHOUT = """
import json, sys
import torch
torch.set_num_threads(1)
if sys.argv[1] == "package":
    sys.modules["opentelemetry"] = None
from kit.chats import TOOLS, chat_prompts
from kit.support import a_trainer, fit, tiny_module, weights_of
module = tiny_module(**{**TOOLS, "max_turns": 2, "group_size": 2})
fit(module, data=chat_prompts(4, 1), max_steps=2)
from lightning_rl.utils import tracing
assert tracing.INSTALLED is (sys.argv[1] != "package") and "opentelemetry.sdk" not in sys.modules
print(json.dumps({name: weight.tolist() for name, weight in weights_of(module).items()}))
"""


@pytest.mark.parametrize("missing", ["package", "provider"])
def test_a_run_is_the_same_without(missing: str) -> None:
    environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, missing]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    module = tiny_module(**{**TOOLS, "max_turns": 2, "group_size": 2})
    fit(module, data=chat_prompts(4, 1), max_steps=2)
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        name: weight.tolist() for name, weight in weights_of(module).items()
    }
    assert spans("rollout")


class Broken(TransformersEngine):
    """Raises when it is to generate."""

    @override
    def generate(self, requests: Sequence[Request], *, logprobs: bool = False) -> list[Completion]:
        raise EngineError("no answer to a secret prompt")


def test_an_error_ends_each_span_around_it() -> None:
    with pytest.raises(EngineError, match="secret"):
        fit(tiny_module(engine=Broken()), max_steps=1)
    errors = {span.name: attributes_of(span).get("error.type") for span in spans()}
    assert errors == {"sync": None, "sample": "EngineError", "generate": "EngineError", "rollout": "EngineError"}


def report(log_extra: Any) -> list[float]:
    log_extra("span", [ids(trace.get_current_span().get_span_context())])
    return [1.0]


def scores(prompts: Any, completions: Any, *, log_extra: Any, **_: Any) -> list[float]:
    return report(log_extra)


async def scores_later(prompts: Any, completions: Any, *, log_extra: Any, **_: Any) -> list[float]:
    return report(log_extra)


def raises(prompts: Any, completions: Any, **_: Any) -> list[float]:
    raise KeyError("secret")


async def raises_later(prompts: Any, completions: Any, **_: Any) -> list[float]:
    raise KeyError("secret")


def returns_nan(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [float("nan")]


@pytest.mark.parametrize("inside", [scores, scores_later, SubprocessReward(scores)])
def test_the_span_of_a_reward_is_current_where_it_runs(inside: Any) -> None:
    rewards = Rewards({"inside": inside})
    (call,) = rewards(["?"], ["!"], completion_ids=[[1]], columns={})
    rewards.close()
    (span,) = spans()
    assert span.name == "reward inside" and call.extras["span"] == [ids(span.context)]


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (raises, "KeyError"),
        (raises_later, "KeyError"),
        (SubprocessReward(raises), "KeyError"),
        (returns_nan, "invalid"),
    ],
)
def test_the_span_of_a_reward_has_the_kind_of_its_failure(broken: Any, kind: str) -> None:
    rewards = Rewards({"broken": broken})
    rewards(["?"], ["!"], completion_ids=[[1]], columns={})
    rewards.close()
    assert [attributes_of(span)["error.type"] for span in spans("reward broken")] == [kind]


def answering_engine() -> FakeEngine:
    engine = FakeEngine(lambda _: (3, 9))
    engine.load_weights([], 0)
    return engine


class Reporting(Talk):
    """Returns the span that is current in its step as a message."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        message = {"role": "tool", "content": ids(trace.get_current_span().get_span_context())}
        return TokenStep(done=True, messages=[message])


@pytest.mark.parametrize("place", ["here", "threads", "workers"])
def test_the_span_of_a_conversation_is_current_where_its_environment_runs(place: str) -> None:
    pool = WorkerPool({"environment": Reporting}, workers=2)
    make: Any = Reporting if place != "workers" else lambda: pool.open("environment", pool.budget())
    with Span("sample"):
        talks = [Conversation(None, wanted(each), ConversationLimits(), again=make) for each in (FIRST, SECOND)]
    with ThreadPoolExecutor(2) as executor:
        made = converse(talks, answering_engine(), executor=None if place == "here" else executor)
    pool.close()
    sample, agents = spans("sample")[0], spans("invoke_agent")
    assert {each.messages[-1]["content"] for each in made} == {ids(span.context) for span in agents}
    assert [span.parent for span in agents] == [sample.context] * 2


class Failing(Talk):
    """Raises in its step."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        raise OSError("secret")


def test_a_failed_conversation_has_the_kind_of_its_failure_and_of_its_first_try() -> None:
    talk = Conversation(None, wanted(FIRST), ConversationLimits(), again=Failing)
    converse([talk], answering_engine())
    assert tree() == [("invoke_agent environment", ["chat", "retry", "chat"])]
    assert [attributes_of(span)["error.type"] for span in (*spans("invoke"), *spans("retry"))] == ["OSError"] * 2


async def whose(x: str) -> str:
    """Returns the current span.

    Args:
        x: any text; an empty one is an error.
    """
    if not x:
        raise ValueError("secret")
    return ids(trace.get_current_span().get_span_context())


def test_coroutines_of_tools_run_within_their_spans() -> None:
    calls = [ToolCall(name="whose", arguments={"x": x}) for x in ("a", "", "b")]
    with Span("invoke_agent"):
        step = ToolEnvironment([whose]).step(Action(text="", tool_calls=calls))
    first, failed, last = spans("execute_tool whose")
    assert [step.messages[place]["content"] for place in (0, 2)] == [ids(first.context), ids(last.context)]
    assert attributes_of(failed)["error.type"] == "ValueError"
    assert tree() == [("invoke_agent", ["execute_tool whose"] * 3)]


def test_a_result_that_is_no_data_is_an_error_of_its_tool() -> None:
    def colors(x: str) -> Any:
        """Returns a set.

        Args:
            x: any text.
        """
        return {x}

    ToolEnvironment([colors]).step(Action(text="", tool_calls=[ToolCall(name="colors", arguments={"x": "red"})]))
    assert [attributes_of(span)["error.type"] for span in spans("execute_tool colors")] == ["TypeError"]


def test_each_rank_has_its_own_rollouts(tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [each["ranks"] for each in found] == [[0, 0], [1, 1]]
    assert found[0]["tree"] == found[1]["tree"] and len(found[0]["tree"]) == 2
    assert not {*found[0]["ids"]} & {*found[1]["ids"]}


if __name__ == "__main__":
    export_spans()
    fit(tiny_module(), strategy=STRATEGIES["ddp"](), devices=2, data=tiny_prompts(8, 4), max_steps=2)
    rollouts = spans("rollout")
    ended = {
        "ranks": [attributes_of(span)["lightning_rl.rank"] for span in rollouts],
        "ids": [ids(span.context) for span in rollouts],
        "tree": tree(),
    }
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(ended))
