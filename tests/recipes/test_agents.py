"""Agents of public packages run unmodified: each API of the policy serves them alike, and a policy trains with them."""

import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_tools
import torch
from kit.support import fit, recorder, tiny_module
from tools import calculate
from torch.optim import AdamW

from lightning_rl import FinishReason, PromptDataModule, Rollout
from lightning_rl.data import PromptDataset
from lightning_rl.environments import Conversations, EnvironmentReward, PolicyEndpoint, Program
from lightning_rl.rollout import turn_numbers

agents = pytest.importorskip("agents")
pydantic_ai = pytest.importorskip("pydantic_ai")
import anthropic  # noqa: E402
import openai  # noqa: E402
from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

RECIPES = Path(__file__).parents[2] / "recipes"
agents.set_tracing_disabled(True)


async def openai_agent(kind: Any, question: str, model: PolicyEndpoint) -> str:
    """Final output of an agent of openai-agents."""
    async with openai.AsyncOpenAI(base_url=f"{model.url}/v1", api_key=model.key) as client:
        tools = [agents.function_tool(calculate)]
        agent = agents.Agent(name="calculator", tools=tools, model=kind(model.model, client))
        return (await agents.Runner.run(agent, question, max_turns=4)).final_output


async def chat_agent(question: str, model: PolicyEndpoint) -> str:
    """Output of an agent of pydantic-ai that calls chat completions."""
    async with openai.AsyncOpenAI(base_url=f"{model.url}/v1", api_key=model.key) as client:
        served = OpenAIChatModel(model.model, provider=OpenAIProvider(openai_client=client))
        return (await pydantic_ai.Agent(served, tools=[calculate]).run(question)).output


async def anthropic_agent(question: str, model: PolicyEndpoint) -> str:
    """Output of an agent of pydantic-ai that calls messages."""
    async with anthropic.AsyncAnthropic(base_url=model.url, api_key=model.key) as client:
        served = AnthropicModel(model.model, provider=AnthropicProvider(anthropic_client=client))
        return (await pydantic_ai.Agent(served, tools=[calculate]).run(question)).output


AGENTS: dict[str, Callable[[str, PolicyEndpoint], Awaitable[str]]] = {
    "openai-agents chat completions": partial(openai_agent, agents.OpenAIChatCompletionsModel),
    "openai-agents responses": partial(openai_agent, agents.OpenAIResponsesModel),
    "pydantic-ai chat completions": chat_agent,
    "pydantic-ai messages": anthropic_agent,
}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_of_a_package_trains_unmodified(name: str) -> None:
    async def program(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
        output = await AGENTS[name](row["prompt"][-1]["content"], model)
        return float(output == row["answer"])

    rollouts: list[Rollout] = []
    module = tiny_module(
        policy=partial(tiny_tools.warm_started_policy, 0),
        tokenizer=tiny_tools.tiny_tokenizer(),
        environment=Conversations(Program(program, timeout=120), max_turns=4),
        rewards=EnvironmentReward(),
        group_size=8,
        max_new_tokens=64,
        optimizer=partial(AdamW, lr=1e-3),
    )
    rows = PromptDataset(tiny_tools.calculations("train"), columns={"prompt": "question"}, chat=True)
    trainer = fit(module, data=PromptDataModule(rows, 4), callbacks=[recorder(rollouts)("seen")], max_steps=2)
    assert trainer.global_step == len(rollouts) == 2
    finish = torch.cat([rollout.finish for rollout in rollouts])
    assert FinishReason.FAILED not in finish.tolist() and (finish == FinishReason.STOP).sum() > 48
    assert torch.cat([rollout.rewards for rollout in rollouts]).unique().tolist() == [0.0, 1.0]
    turns = torch.cat([turn_numbers(rollout).amax(-1) for rollout in rollouts])
    assert (turns > 1).sum() > 8  # answers after results of the tool


def test_the_recipe_learns_to_call_the_tool(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPES / "openai_agents.py"), "--tiny"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    figures = re.search(r"accuracy before=(\d\.\d{3}) after=(\d\.\d{3})\n?$", ran.stdout)
    assert figures and float(figures[1]) <= 0.2 and float(figures[2]) >= 0.7
