"""A taskset and a harness for the package verifiers: talk for some turns, about how long answers are."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["CountedTalk", "Talker"]


class TalkData(vf.TaskData):
    """A task: how many turns to talk, and what goes wrong in the second of them."""

    turns: int = 3
    fault: str = ""


class TalkTask(vf.Task[TalkData]):
    """Pays for answers of some lengths."""

    @vf.reward
    async def lengths(self, trace: vf.Trace) -> float:
        if self.data.fault == "reward raises":
            raise OSError("no scorer")
        said = [len(message.content or "") for message in trace.assistant_messages]
        return sum(length % 5 for length in said) / (4 * len(said))

    @vf.reward(weight=0.5)
    async def constant(self) -> float:
        return 1.0

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(sum(len(message.content or "") for message in trace.assistant_messages))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class CountedTalk(vf.Taskset[TalkTask]):
    """Tasks of one to four turns, or of two with a fault."""

    def load(self) -> Iterator[TalkTask]:
        """All of them."""
        for number in range(4):
            yield TalkTask(TalkData(prompt=f"say something {number}", turns=1 + number))
        for fault in FAULTS:
            yield TalkTask(TalkData(prompt="say something", turns=3, fault=fault))


FAULTS = ("raises", "hangs", "rewrites", "asks twice", "reward raises", "asks nothing", "blocks", "exits")


class Talker(vf.Harness):
    """Talks in this process, through a client of OpenAI's shape."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, *rest: Any) -> Any:
        """Talks until the task has had enough."""
        _trace, _runtime, endpoint, secret, _servers, data = rest
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            if data.fault != "asks nothing":
                await self.talk(client, ctx.model, data)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def talk(self, client: AsyncOpenAI, model: str, data: TalkData) -> None:
        """Says how long each answer was."""
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for turn in range(data.turns):
            if turn == 1 and data.fault:
                await self.misbehave(data.fault, client, model, messages)
            reply = await client.chat.completions.create(model=model, messages=messages)
            said = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": f"{len(said)} characters, go on"})

    async def misbehave(self, fault: str, client: AsyncOpenAI, model: str, messages: list[Any]) -> None:
        """Does what the fault says."""
        if fault == "raises":
            raise OSError("the connection is gone")
        if fault == "hangs":
            await asyncio.sleep(3600)
        if fault == "blocks":
            time.sleep(3600)
        if fault == "rewrites":
            messages[-2] = {"role": "assistant", "content": "something else"}
        if fault == "exits":
            raise SystemExit(3)
        if fault == "asks twice":
            one = client.chat.completions.create(model=model, messages=messages)
            await asyncio.gather(one, client.chat.completions.create(model=model, messages=messages))
