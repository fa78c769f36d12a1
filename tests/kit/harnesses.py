"""Scripted harnesses for tests, and a policy that answers in the form of a family's chat template."""

import http.client
import json
import os.path
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import pytest
from environments.templates import FAMILIES, close_of, tokenizer_of
from typing_extensions import override

from kit.engine_requests import launch
from kit.marks import wait_for
from kit.support import tiny_policy
from lightning_rl import Engine, FakeEngine, SamplingParams, TransformersEngine
from lightning_rl.environments import ConversationLimits, Program
from lightning_rl.environments.gateway.gateway import GATEWAY
from lightning_rl.environments.program import PolicyEndpoint, ProgramConversation
from lightning_rl.environments.run_environments import Environments
from lightning_rl.environments.workers import WorkerPool
from lightning_rl.generation import Completion, Request
from lightning_rl.samples import Prompt, Trajectory

Ask = Callable[..., dict[str, Any]]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
LOOK, FIND = (
    {"type": "function", "function": {"name": name, "description": text, "parameters": SCHEMA}}
    for name, text in (("look", "Looks."), ("find", "Finds."))
)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


class RefusedError(Exception):
    """Call that got an error of HTTP, with its status and message."""


class Client:
    """Calls of one program over one connection for each thread, without a library.

    Args:
        model: Endpoint.
        pause: Maximum of the random seconds before each call.
    """

    def __init__(self, model: PolicyEndpoint, pause: float = 0.0) -> None:
        self.model, self.pause = model, pause

    def post(self, body: Any, path: str = "/v1/chat/completions", key: str | None = None) -> tuple[int, bytes]:
        """Return status and body of a request."""
        connection = http.client.HTTPConnection(urlsplit(self.model.url).netloc, timeout=30)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request("POST", path, data, {"Authorization": f"Bearer {key or self.model.key}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def __call__(
        self, messages: Sequence[Any], tools: Sequence[Any] = (), *, stream: bool = False, **fields: Any
    ) -> dict[str, Any]:
        """Return the message of the answer."""
        said = self.said(messages, tools=list(tools), stream=stream, **fields)
        return joined(said.decode()) if stream else json.loads(said)["choices"][0]["message"]

    def said(self, messages: Sequence[Any], **fields: Any) -> bytes:
        """Return the body of the response."""
        time.sleep(random.Random().random() * self.pause)
        status, said = self.post({"model": self.model.model, "messages": messages, **fields})
        if status != 200:
            raise RefusedError(status, json.loads(said)["error"]["message"])
        return said


def joined(events: str) -> dict[str, Any]:
    """Return the message of a stream of chunks."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]):
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            message.setdefault("tool_calls", []).append({key: call[key] for key in ("id", "type", "function")})
    return message


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def replies(answer: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
    """Return what follows an answer: a result of each of its calls, or a user's text."""
    calls = answer.get("tool_calls") or ()
    return [{"role": "tool", "tool_call_id": call["id"], "content": f"{text} result"} for call in calls] or [user(text)]


def talk(
    ask: Ask, messages: list[Any], turns: int = 3, tools: Sequence[Any] = (), *, strip: bool = False, **options: Any
) -> list[Any]:
    """Add answers, and what follows each, to messages."""
    for turn in range(turns):
        answer = ask(messages, tools, **options)
        if strip:
            answer.pop("reasoning_content", None)
        messages += [answer, *replies(answer, f"one {turn}")]
    return messages


def append(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    talk(ask, [user(text)], 4, tools)


def stripped(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    talk(ask, [user(text)], 4, tools, strip=True)


def window(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    messages = [user(text)]
    for _ in range(4):
        messages = talk(ask, messages, 1, tools)[-4:]
        while messages[0]["role"] != "user" and len(messages) > 1:
            messages.pop(0)
        messages = messages if messages[0]["role"] == "user" else [user("go on")]


def summary(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    messages = talk(ask, [user(text)], 2, tools)
    short = ask([user(f"{text} summary {len(messages)}")])["content"]
    talk(ask, [user(f"{text} so far {short}")], 2, tools)


def sub_agent(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    messages = talk(ask, [user(text)], 1, tools)
    inner = talk(ask, [user(f"{text} inner")], 2)
    messages[-1]["content"] += str(inner[-2]["content"])
    talk(ask, messages, 2, tools)


def parallel(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    messages = talk(ask, [user(text)], 1, tools)
    answers = at_once(ask, lambda place: talk(ask, [user(f"{text} part {place}")], 3))
    messages[-1]["content"] += "".join(answers)
    talk(ask, messages, 2, tools)


def branching(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    """Two sub-agents that both continue the conversation."""
    messages = talk(ask, [user(text)], 1)
    answers = at_once(ask, lambda place: talk(ask, [*messages[:-1], user(f"part {place}")], 3))
    talk(ask, [*messages[:-1], user(f"a {answers}")], 2)


TOGETHER = set[str]()
"""Keys of programs whose next two calls are open at once, if the engine holds."""


def hold(requests: Sequence[Request]) -> None:
    """Wait until the calls of both sub-agents of each request are open, as in an engine that takes seconds."""
    samples = {request.sample_id for request in requests}
    for key in TOGETHER & GATEWAY._handlers.copy().keys():  # noqa: SLF001
        program: Any = GATEWAY._handlers[key]  # noqa: SLF001
        if program._wanted.request.sample_id in samples:  # noqa: SLF001
            assert wait_for(lambda calls=program._open: len(calls) == 2)  # noqa: SLF001
            TOGETHER.discard(key)


class FakeTogether(FakeEngine):
    """Scripted engine that holds."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        hold(requests)
        return super().generate_batch(requests, logprobs=logprobs)


class TransformersTogether(TransformersEngine):
    """Embedded engine that holds."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        hold(requests)
        return super().generate_batch(requests, logprobs=logprobs)


def at_once(ask: Ask, work: Callable[[int], list[Any]]) -> list[str]:
    """Return the last answers of two sub-agents in threads."""
    assert isinstance(ask, Client)
    TOGETHER.add(ask.model.key)
    with ThreadPoolExecutor(2) as executor:
        return [str(messages[-2]["content"]) for messages in executor.map(work, range(2))]


def retry(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    messages = talk(ask, [user(text)], 1, tools)
    first, _ = ask(messages, tools), ask(messages, tools)
    talk(ask, [*messages, first, *replies(first, "after")], 2, tools)


def edited(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    messages = talk(ask, [user(text)], 2)
    messages[1]["content"] = f"{messages[1]['content']} edited"
    talk(ask, messages, 2)


def tool_order(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    messages = talk(ask, [user(text)], 1, tools)
    messages = talk(ask, messages, 1, [*tools][::-1])
    talk(ask, messages, 2, tools)


def system(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    prompt = {"role": "system", "content": "one"}
    messages = talk(ask, [prompt, user(text)], 2, tools)
    messages[0] = {"role": "system", "content": "two"}
    talk(ask, messages, 2, tools)


def picture(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    messages = talk(ask, [user(text)], 1, tools)
    seen = [{**messages[0], "content": [{"type": "text", "text": text}, PICTURE]}, *messages[1:]]
    with pytest.raises(RefusedError, match="expected messages of text, got a picture: describe it, or leave it out"):
        ask(seen, tools)
    talk(ask, messages, 2, tools)


def streaming(ask: Ask, text: str, tools: Sequence[Any]) -> None:
    talk(ask, [user(text)], 4, tools, stream=True)


Script = Callable[[Request], Sequence[int]]
Harness = Callable[[Ask, str, Sequence[Any]], None]
HARNESSES: dict[str, Harness] = {
    harness.__name__: harness
    for harness in (
        append, stripped, window, summary, sub_agent, parallel, branching, retry, edited, tool_order, system, picture,
        streaming,
    )
}  # fmt: skip
REFUSED: dict[str, list[tuple[int, str]]] = {}
"""Calls that were refused, by the text of the row."""


def run_harness(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    """Run the harness of a row; one that is refused ends."""
    client = Client(model, row.get("pause", 0.0))
    try:
        HARNESSES[row["harness"]](client, row["prompt"], [LOOK, FIND] if row["with_tools"] else [])
    except RefusedError as refused:
        REFUSED.setdefault(row["prompt"], []).append(refused.args)
    return 1.0


def harness_rows(name: str, **columns: Any) -> list[dict[str, Any]]:
    tools = "tools" in FAMILIES[name].template and not FAMILIES[name].tool
    return [
        {"prompt": f"{harness} {name}", "harness": harness, "with_tools": tools, **columns} for harness in HARNESSES
    ]


OWN = {  # answers with thoughts that a template does not write
    "gpt-oss": "<|channel|>analysis<|message|>hm {0}<|end|><|start|>assistant<|channel|>final<|message|>some {0}",
    "gemma-4": "<|channel>thought\nhm {0}<channel|>some {0}",
}


@cache
def answers_of(name: str) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return answers of a family, with and without calls."""
    tokenizer, close = tokenizer_of(name), close_of(name)
    question, ends = (
        user("?"),
        tokenizer.convert_tokens_to_ids(list(FAMILIES[name].close or FAMILIES[name].special[:1])),
    )

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def written(answer: Mapping[str, Any]) -> tuple[int, ...] | None:
        def render(messages: list[Any], *, head: bool) -> list[int]:
            return ids_of(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=head))

        try:
            before, whole = render([question], head=True), render([question, answer], head=False)
        except Exception:  # noqa: BLE001  a template may raise anything
            return None
        said = whole[len(os.path.commonprefix([before, whole])) :]  # noqa: RUF071
        return closed(said, last="tool_calls" in answer)

    def closed(said: list[int], *, last: bool = False) -> tuple[int, ...]:
        end = next((place for place, token in enumerate(said) if token in close), len(said))
        return (*said[:end], said[end] if end < len(said) else ends[-1 if last else 0])

    texts = [written({"role": "assistant", "content": f"this is {number}"}) for number in range(3)]
    head = str(tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True))
    own = OWN.get(name)
    if own is None and "</think>" in FAMILIES[name].added:
        own = ("" if head.endswith("<think>\n") else "<think>\n") + "hm {0}\n</think>\n\nsome {0}"
    if own is not None:
        texts += [closed(ids_of(own.format(number))) for number in range(3)]
    called = list[tuple[int, ...] | None]()
    for number in range(4):
        for form in (dict, json.dumps):
            functions = [
                {"name": "look", "arguments": form({"x": f"y {number} {each}"})} for each in range(1 + number // 3)
            ]
            calls = [{"type": "function", "id": f"call{each:05d}", "function": f} for each, f in enumerate(functions)]
            called.append(written({"role": "assistant", "content": "", "tool_calls": calls}))
    return tuple(one for one in texts if one), tuple(one for one in called if one and "y" in tokenizer.decode(one))


def family_script(name: str) -> Script:
    """Return a script of a FakeEngine, whose answers depend on the seed of the request."""
    plain, called = answers_of(name)

    def script(request: Request) -> Sequence[int]:
        draw = random.Random(request.seed)
        return draw.choice(called if called and draw.random() < 0.5 and "look" in text_of(request) else plain)

    def text_of(request: Request) -> str:
        return str(tokenizer_of(name).decode(list(request.prefix_ids)))

    return script


SIZE = 600  # of the vocabulary


def fake(name: str, script: Callable[[Request], Completion | Sequence[int]] | None = None) -> FakeEngine:
    engine = FakeTogether(script or family_script(name))
    engine.load_weights([], 0)
    return engine


def random_policy(name: str) -> Engine:
    engine, model = TransformersTogether(), tiny_policy(vocab_size=SIZE, max_position_embeddings=4096)
    launch(engine, model, tokenizer_of(name))
    engine.load_weights(model.named_parameters(), 0)
    return engine


def opened(
    name: str, program: Program, rows: Sequence[dict[str, Any]], *, workers: WorkerPool | None = None, **limits: Any
) -> list[ProgramConversation]:
    """Conversations of rows with the chat template of a family."""
    environments = Environments(
        factories={"environment": program},
        tokenizer=tokenizer_of(name),
        close=close_of(name),
        workers=workers,
        limits=ConversationLimits(**{"turn_tokens": 6, "turns": 100, "vocabulary": SIZE, **limits}),
    ).check(FAMILIES[name].renderer or None)
    sampling = SamplingParams(max_new_tokens=2000, eos_token_ids=sorted(close_of(name)))
    found = list[ProgramConversation]()
    for number, row in enumerate(rows):
        request = Request(prefix_ids=(1,), sample_id=number, seed=1000 + number, sampling=sampling)
        wanted = Trajectory(prompt=Prompt(number, (1,), row["prompt"], row), request=request)
        conversation = environments.open(wanted)
        assert isinstance(conversation, ProgramConversation)
        found.append(conversation)
    return found


def path_ids(sample: Trajectory, place: int) -> tuple[int, ...]:
    """Token ids from the root to a segment."""
    segment = sample.segments[place]
    if segment.parent is None:
        return segment.token_ids
    return (sample.request.prefix_ids if segment.parent == -1 else path_ids(sample, segment.parent)) + segment.token_ids


def check_tree(conversation: ProgramConversation) -> Trajectory:
    """Each call is a path of the tree, and each of its tokens was sampled once."""
    sample = conversation.trajectory
    assert sample is not None
    calls = [(*request.prefix_ids, *completion.token_ids) for request, completion in conversation.pairs]
    paths = [path_ids(sample, place) for place, segment in enumerate(sample.segments) if segment.sampled]
    assert Counter(paths) == Counter(calls) and len(calls) == sample.metrics["turns"]
    assert len({request.seed for request, _ in conversation.pairs}) == len(calls)
    return sample
