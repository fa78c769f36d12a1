"""Bridge: what families of templates write between answers, or why they do not, and that text stays text."""

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from environments.templates import FAMILIES, RIGHT, close_of, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from kit.conversations import response_of, turn_numbers_of, wanted
from kit.support import tiny_tokenizer
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from lightning_rl import FinishReason, SamplingParams
from lightning_rl.data.encoding import Encoder
from lightning_rl.data.row_schema import Reading
from lightning_rl.environments import (
    Action,
    Bridge,
    BridgeError,
    Conversation,
    ConversationLimits,
    Environment,
    Message,
    StepResult,
)
from lightning_rl.environments import chat_template as module
from lightning_rl.environments.chat_template import KINDS, SANITIZES, with_callers
from lightning_rl.environments.messages import MessageEnvironment
from lightning_rl.environments.parsing import parser_for, plain_text
from lightning_rl.generation import Completion, Request

ASK: Message = {"role": "user", "content": "one two"}
IDS = ("call00001", "call00002")
NEW: dict[str, list[Message]] = {
    "user": [{"role": "user", "content": "hello world"}],
    "tool": [{"role": "tool", "name": "look", "content": "some text", "tool_call_id": IDS[0]}],
    "two tools": [
        {"role": "tool", "name": "look", "content": words, "tool_call_id": number}
        for words, number in zip(("some text", "three"), IDS, strict=True)
    ],
}
CASES = [(name, kind) for name in FAMILIES for kind in NEW]
sanitizing = pytest.mark.skipif(not SANITIZES, reason="before transformers 5.23 control tokens in a text are refused")


def bridge_of(name: str, **options: Any) -> Bridge:
    return Bridge(tokenizer_of(name), close_of(name), options)


def wrong_with(name: str, kind: str) -> str:
    family = FAMILIES[name]
    return {"user": family.user, "tool": family.tool, "two tools": family.two_tools}[kind]


def text_of(name: str, messages: Sequence[Message], *, head: bool = True) -> str:
    said = [dict(message) for message in messages]
    return str(tokenizer_of(name).apply_chat_template(said, tokenize=False, add_generation_prompt=head))


def ids_of(name: str, text: str) -> list[int]:
    return list(tokenizer_of(name)(text, add_special_tokens=False)["input_ids"])


def answer_to(name: str, new: Sequence[Message]) -> Message:
    """An answer that the messages may follow: a call of each tool, as far as the template takes one."""
    plain: Message = {"role": "assistant", "content": "this is text"}
    if new[0]["role"] == "user":
        return plain
    answers = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "id": number, "function": {"name": "look", "arguments": arguments}}
                for number, _ in zip(IDS, new, strict=False)
            ],
        }
        for arguments in ({"x": "y"}, json.dumps({"x": "y"}))
    ]
    for answer in answers:
        try:
            text_of(name, [ASK, answer, *new])
        except Exception:  # noqa: BLE001  a template may raise anything
            continue
        return answer
    return plain


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_bridge_is_right_or_refused_with_the_reason(name: str, kind: str) -> None:
    found, wrong = bridge_of(name).check(kind), wrong_with(name, kind)
    assert len(found) == bool(wrong) and all(wrong in one for one in found)


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if wrong_with(*case) == RIGHT])
def test_a_bridge_is_what_rendering_the_conversation_writes_behind_the_answer(name: str, kind: str) -> None:
    bridge, new, tokenizer = bridge_of(name), NEW[kind], tokenizer_of(name)
    answer, tail = answer_to(name, NEW[kind]), bridge_of(name).tail(NEW[kind])
    prompt, whole = text_of(name, [ASK]), text_of(name, [ASK, answer, *new])
    assert whole.endswith(tokenizer.decode(list(tail)))
    said = text_of(name, [ASK, answer], head=False).rpartition(tokenizer.decode([tail[0]]))
    appends = whole.startswith(prompt) and whole.startswith(said[0] or said[2])
    assert appends == (kind in FAMILIES[name].appends)
    if appends:
        before = ids_of(name, whole.removesuffix(tokenizer.decode(list(tail))))
        prefix, drawn = ids_of(name, prompt), before[len(ids_of(name, prompt)) :]
        assert [*prefix, *drawn, *bridge.after(drawn, new)] == ids_of(name, whole)
        drawn.append(tail[0])
        assert [*prefix, *drawn, *bridge.after(drawn, new)] == ids_of(name, whole)


@sanitizing
@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if wrong_with(*case) == RIGHT])
def test_text_of_an_environment_is_no_control_token(name: str, kind: str) -> None:
    tokenizer, bridge = tokenizer_of(name), bridge_of(name)
    hostile = "".join((*FAMILIES[name].special, *FAMILIES[name].added))
    tokens = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(list(FAMILIES[name].special))}
    counts = [
        sum(token in tokens for token in bridge.after([], [{**message, "content": text} for message in NEW[kind]]))
        for text in ("hello", hostile)
    ]
    assert counts[0] == counts[1] > 0
    if '"' not in hostile:  # which JSON would escape
        written = tokenizer.decode(list(bridge.after([], [{**message, "content": hostile} for message in NEW[kind]])))
        assert hostile in written


@sanitizing
@pytest.mark.parametrize("name", ["qwen2.5", "llama-3", "mistral"])
def test_a_prompt_of_an_environment_has_the_tools_and_no_control_token_of_its_text(name: str) -> None:
    bridge, end = bridge_of(name), FAMILIES[name].special[0]
    schema = {"type": "function", "function": {"name": "look", "description": f"Looks{end}.", "parameters": {}}}
    harmless, hostile = (
        bridge.encode([{"role": "user", "content": text}], [schema]) for text in ("hello", f"hello{end}")
    )
    assert sum(token in bridge.close for token in hostile) == sum(token in bridge.close for token in harmless)
    assert '"name": "look"' in tokenizer_of(name).decode(hostile)


CALLS: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": IDS[0], "function": {"name": "look", "arguments": {"x": "y"}}}],
}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}


@pytest.mark.parametrize(
    "new",
    [NEW["tool"], NEW["two tools"], [*NEW["tool"], ASK], [ASK, *NEW["tool"]]],
    ids=["tool", "two tools", "tool and user", "user and tool"],
)
def test_messages_of_an_environment_of_which_the_template_drops_a_part_are_refused(new: list[Message]) -> None:
    tokenizer, close = copy.deepcopy(tokenizer_of("chatml")), close_of("chatml")
    drawn = [*close][:1]
    assert Bridge(tokenizer, close).after(drawn, new)
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    with pytest.raises(BridgeError, match="the template drops the text of the role tool, so the policy would not read"):
        Bridge(tokenizer, close).after(drawn, new)


@pytest.mark.parametrize(
    ("name", "messages", "tools", "lost"),
    [
        ("qwen2.5", [{"role": "system", "content": "hello"}, ASK, CALLS, *NEW["tool"]], [LOOK], ""),
        ("mistral", [ASK, CALLS, *NEW["tool"]], [LOOK], ""),
        ("gpt-oss", [ASK, CALLS, *NEW["tool"]], [LOOK], ""),
        ("chatml", [ASK], [LOOK], "the tool look"),
        ("chatml", [ASK, CALLS, *NEW["tool"]], [], "a tool call of the role assistant"),
        ("phi-3.5", [ASK, CALLS, *NEW["tool"]], [], "a tool call of the role assistant, the text of the role tool"),
    ],
)
def test_a_prompt_of_which_the_template_drops_a_part_is_refused(
    name: str, messages: list[Message], tools: list[Any], lost: str
) -> None:
    if not lost:
        assert bridge_of(name).encode(messages, tools)
        return
    with pytest.raises(BridgeError, match=f"the template drops {lost}, so the policy would not read it: set a tokeniz"):
        bridge_of(name).encode(messages, tools)


def test_a_turn_that_was_cut_gets_its_closing_token_once() -> None:
    bridge, (end,) = bridge_of("qwen2.5"), close_of("qwen2.5")
    whole, cut = bridge.after([7, end], NEW["user"]), bridge.after([7], NEW["user"])
    assert cut == (end, *whole) and whole.count(end) == 1


@pytest.mark.parametrize(
    ("name", "drawn", "kind", "begins"),
    [
        ("glm-4.5", "<|user|>", "user", "\nhello"),  # it ends the answer and begins the message
        ("glm-4.5", "<|observation|>", "tool", "\n<tool_response>"),
        ("glm-4.5", "<|user|>", "tool", "<|observation|>\n<tool_response>"),  # another role than the token announced
        ("gemma-4", "<|tool_response>", "tool", "response:look"),
        ("gemma-4", "<turn|>", "tool", "<|tool_response>response:look"),
        ("gpt-oss", "<|return|>", "user", "<|start|>user"),
        ("gpt-oss", "<|call|>", "tool", "<|start|>functions.look"),
        ("llama-3.1", "<|eom_id|>", "tool", "<|start_header_id|>ipython"),
    ],
)
def test_the_token_that_ended_an_answer_is_not_written_again(name: str, drawn: str, kind: str, begins: str) -> None:
    tokenizer = tokenizer_of(name)
    ids = bridge_of(name).after([tokenizer.convert_tokens_to_ids(drawn)], NEW[kind])
    assert tokenizer.decode(list(ids)).startswith(begins)


def templated(template: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("chatml").backend_tokenizer)
    tokenizer.chat_template = template
    return tokenizer


MESSAGES = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "close", "message"),
    [
        ("", [0], "expected a tokenizer with a chat template for an environment in messages, got none"),
        (MESSAGES, [], "expected ids that end an answer, got none: pass sampling="),
    ],
)
def test_what_no_bridge_can_do_without_is_asked_for(template: str, close: list[int], message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        Bridge(templated(template), close)


@pytest.mark.parametrize(
    ("template", "close", "wrong"),
    [
        (
            MESSAGES,
            [9],
            "none of the ids [9] that end a response, but with '<|im_end|>' (id 0): pass sampling=SamplingParams(",
        ),
        (
            "{% for m in messages %}{{ m.content }}. {% endfor %}",
            [0],
            "nor with another control token: it has to write one",
        ),
        (MESSAGES + "{{ messages | tojson }}", [0], "the template writes an answer twice"),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", [0], "does not write the text of an answer"),
        (MESSAGES + "{{ raise_exception('no') }}", [0], "the template raises TemplateError: no"),
        (MESSAGES + "{{ messages | length }}", [0], "the template writes something else after a longer conversation"),
        ("{{ messages[1].content }}<|im_end|>{{ messages[0].role }}", [0], "drops the text of a user message"),
    ],
)
def test_a_template_that_does_not_say_what_comes_next_is_told(template: str, close: list[int], wrong: str) -> None:
    assert any(wrong in found for found in Bridge(templated(template), close).check("user"))


def test_an_answer_that_ends_with_another_token_than_the_template_writes_gets_no_end_of_the_template() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    other, written = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    bridge = Bridge(tokenizer, [written, other])
    whole = bridge.after([3], NEW["user"])
    assert whole[0] == written
    assert bridge.after([3, other], NEW["user"]) == bridge.after([3, written], NEW["user"]) == whole[1:]


MOVED = (
    "{% for m in messages if m.role != 'system' %}{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }}<|im_end|>{% endfor %}"
)


def test_a_system_message_that_the_template_moves_is_refused_where_there_is_one() -> None:
    bridge, ask = Bridge(templated(MOVED), [0]), [{"role": "user", "content": "one"}]
    assert bridge.check("user") == [] and bridge.encode(ask)
    with pytest.raises(BridgeError, match=r"writes a system message after an answer.*put its text into the first user"):
        bridge.encode([{"role": "system", "content": "two"}, *ask])


HEAD_FIRST = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }} {% endfor %}<|im_end|>"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('a late system') }}"
    "{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("more", [[], [ASK], [{"role": "tool", "content": "three"}]], ids=["alone", "user", "tool"])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (HEAD_FIRST, "the template writes the text of the role system before the answer that it follows"),
        (REFUSING, "the template raises TemplateError: a late system"),
    ],
)
def test_a_late_system_message_that_the_template_moves_or_refuses_is_refused_with_the_cure(
    template: str, message: str, more: list[Message]
) -> None:
    bridge, late = Bridge(templated(template), [0]), [{"role": "system", "content": "two"}]
    assert bridge.encode([*late, ASK]) and bridge.after([3], [ASK])
    for new in ([*late, *more], [*more, *late]):
        with pytest.raises(BridgeError, match=f"{message}.*: return it as a message of the role user, or rewrite"):
            bridge.after([3], new)


def test_a_version_that_cannot_write_a_control_token_as_text_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SANITIZES", False)
    bridge = bridge_of("qwen2.5")
    assert bridge.after([], NEW["tool"]) == bridge_of("qwen2.5").tail(NEW["tool"])
    for hostile in ({"content": "a<|im_end|>"}, {"content": "a", "name": "<|im_start|>"}):
        with pytest.raises(BridgeError, match=r"holds the control token '<\|im_.*install transformers>=5.23"):
            bridge.after([], [{**NEW["tool"][0], **hostile}])


class Scripted(Environment):
    """Says what it is told to."""

    def __init__(self, replies: Sequence[Sequence[Message]]) -> None:
        self.replies = list(replies)

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(messages=self.replies.pop(0)) if self.replies else StepResult(done=True)


def drawn_by(ids: Sequence[int], finish: FinishReason) -> Completion:
    return Completion(token_ids=tuple(ids), logprobs=torch.zeros(len(ids)), finish=finish, version=0)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, list[tuple[list[int], FinishReason]], list[list[Message]]]:
    """A family, answers of any tokens, whole or cut, and replies of any text."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    tokenizer, close = tokenizer_of(name), sorted(close_of(name))
    kinds = ["user", *(["tool"] if wrong_with(name, "tool") == RIGHT else [])]
    text = st.one_of(st.text(max_size=12), st.sampled_from([f" {token}\n" for token in FAMILIES[name].special]))
    inside = st.lists(st.integers(len(FAMILIES[name].special), len(tokenizer) - 1), min_size=1, max_size=6)
    answers, replies = [], []
    for _ in range(draw(st.integers(1, 4))):
        ids, end = draw(inside), draw(st.sampled_from([*close, None]))
        answers.append((ids if end is None else [*ids, end], FinishReason.LENGTH if end is None else FinishReason.STOP))
        kind, number = draw(st.sampled_from(kinds)), draw(st.integers(1, 2))
        message = {"role": "tool", "name": "look"} if kind == "tool" else {"role": "user"}
        replies.append([{**message, "content": draw(text)} for _ in range(number if kind == "tool" else 1)])
    return name, answers, replies[:-1]


@sanitizing
@given(conversations())
def test_a_conversation_only_grows_and_every_drawn_token_is_its_own_once(
    case: tuple[str, list[tuple[list[int], FinishReason]], list[list[Message]]],
) -> None:
    name, answers, replies = case
    bridge, tokenizer = bridge_of(name), tokenizer_of(name)
    environment = MessageEnvironment(Scripted(replies), bridge, plain_text(tokenizer), prompt=[ASK])
    first = Request(
        prefix_ids=(1,), sample_id=0, seed=1, sampling=SamplingParams(max_new_tokens=999, eos_token_ids=[0])
    )
    talk = Conversation(environment, wanted(first), ConversationLimits(turns=9))
    talk.begin()
    grown: tuple[int, ...] = ()
    for ids, finish in answers:
        assert talk.request is not None, talk.trajectory
        assert talk.request.prefix_ids[: len(grown)] == grown
        grown = (*talk.request.prefix_ids, *ids)
        talk.receive(drawn_by(ids, finish))
    assert talk.trajectory is not None and talk.trajectory.finish == answers[-1][1]
    row, numbers = response_of(talk.trajectory), turn_numbers_of(talk.trajectory)
    assert (*talk.trajectory.request.prefix_ids, *row) == grown
    trained = [token for token, turn in zip(row, numbers, strict=True) if turn]
    assert trained == [token for ids, _ in answers for token in ids]
    assert sorted(set(numbers) - {0}) == list(range(1, len(answers) + 1))


def test_what_ends_a_response_need_not_end_a_message_of_the_history() -> None:
    name, question = "gpt-oss", NEW["user"]
    tail = tokenizer_of(name).decode(list(bridge_of(name).tail(question)))
    assert tail == "<|end|><|start|>user<|message|>hello world<|end|><|start|>assistant"
    ending, call, end = tokenizer_of(name).convert_tokens_to_ids(["<|return|>", "<|call|>", "<|end|>"])
    after = bridge_of(name).after([ending], question)
    assert end not in after[:1], "the token that was sampled closes the message"
    with pytest.raises(BridgeError, match=rf"but with '<\|return\|>' \(id {ending}\): pass .*\[{ending}, {call}\]"):
        Bridge(tokenizer_of(name), {call}).tail(question)


@pytest.mark.parametrize(("name", "ending"), [("chatml", "<|endoftext|>"), ("phi-3.5", "<|endoftext|>")])
def test_a_token_that_the_template_does_not_write_after_an_answer_does_not_end_a_response(
    name: str, ending: str
) -> None:
    with pytest.raises(BridgeError, match="ends an answer with none of the ids"):
        Bridge(tokenizer_of(name), {tokenizer_of(name).convert_tokens_to_ids(ending)}).tail(NEW["user"])


def test_a_tokenizer_that_knows_no_word_of_the_check_is_no_fault_of_the_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}<s> b {% endif %}"
    )
    bridge = Bridge(tokenizer, [1])
    assert [bridge.check(kind) for kind in KINDS] == [[], [], []]
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", "{{ m.content if m.role != 'user' }}")
    assert bridge.check("user") == ["the template drops the text of a user message"]


def test_a_conversation_of_gpt_oss_is_what_its_template_renders() -> None:
    bridge, family = bridge_of("gpt-oss"), "gpt-oss"
    opening: list[Message] = [{"role": "system", "content": "two three"}, ASK]
    call, thought = {"name": "look", "arguments": {"x": "y"}}, "this is text"
    tool, later = {"role": "tool", "content": "some text"}, {"role": "user", "content": "hello world"}
    answers = [
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
        '<|message|>{"x": "y"}<|call|>',
        "<|channel|>final<|message|>three<|return|>",
    ]
    environment = MessageEnvironment(Scripted([[tool], [later]]), bridge, parser_for(tokenizer_of(family)), (), opening)
    ids = [*environment.reset({}, 0)]
    for answer in answers:
        drawn = ids_of(family, answer)
        ids += [*drawn, *environment.step(drawn, FinishReason.STOP).token_ids]
    talk = [
        *opening,
        {"role": "assistant", "thinking": thought, "tool_calls": [{"type": "function", "function": call}]},
        tool,
        {"role": "assistant", "content": "three"},
        later,
    ]
    end, returned = tokenizer_of(family).convert_tokens_to_ids(["<|end|>", "<|return|>"])
    place = ids.index(returned)  # <|end|> in the history
    assert [*ids[:place], end, *ids[place + 1 :]] == ids_of(family, text_of(family, talk))
    text = tokenizer_of(family).decode(ids)
    assert "<|start|>developer<|message|>two three<|end|>" in text and "<|start|>functions.look to=assistant" in text


@pytest.mark.parametrize(
    ("reply", "written"),
    [
        ([{"tool_call_id": "call00007"}], [("see", "call00007")]),
        ([{"name": "see"}], [("see", "call00007")]),
        ([{}, {}], [("look", "call00003"), ("see", "call00007")]),
        ([{"name": "see"}, {}], [("see", "call00007"), ("look", "call00003")]),
        ([{"name": "error"}], [("error", None)]),
        ([{"name": "look", "tool_call_id": "call00009"}], [("look", "call00009")]),
    ],
)
def test_a_message_of_a_tool_has_the_name_and_the_id_of_its_call(
    reply: list[dict[str, str]], written: list[tuple[str, str | None]]
) -> None:
    calls = [{"id": "call00003", "function": {"name": "look"}}, {"id": "call00007", "function": {"name": "see"}}]
    talk = with_callers([ASK, {"role": "assistant", "tool_calls": calls}, *[{"role": "tool", **one} for one in reply]])
    assert [(message.get("name"), message.get("tool_call_id")) for message in talk[2:]] == written


def test_a_message_of_a_tool_without_a_call_needs_the_name_that_its_template_writes() -> None:
    tool = [{"role": "tool", "content": "some text"}]
    assert bridge_of("qwen2.5").after([3], tool)
    with pytest.raises(BridgeError, match=r'template writes its name, got one without.*return {"role": "tool", "n'):
        bridge_of("gpt-oss").after([3], tool)


@pytest.mark.parametrize("number", ["a1", "call-00001", ""])
def test_an_id_that_the_template_refuses_is_replaced(number: str) -> None:
    tail = bridge_of("mistral").tail([{**NEW["tool"][0], "tool_call_id": number}])
    assert tail == bridge_of("mistral").tail([{**NEW["tool"][0], "tool_call_id": "call00000"}])


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_of_calls_as_json_text_are_rendered_like_mappings(name: str) -> None:
    def chat(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": IDS[0], "type": "function", "function": {"name": "look", "arguments": arguments}}
        reply = {"role": "tool", "tool_call_id": IDS[0], "name": "look", "content": "two"}
        return [dict(ASK), {"role": "assistant", "content": "", "tool_calls": [call]}, reply, dict(ASK)]

    def text(arguments: Any) -> tuple[str, str]:
        ids = bridge.encode(chat(arguments)), encoder.prompts([Reading(chat(arguments), {}, "row 0", {})])[0].token_ids
        first, second = (str(tokenizer.decode(list(each))) for each in ids)
        return first, second

    tokenizer = tokenizer_of(name)
    bridge, encoder = Bridge(tokenizer, close_of(name)), Encoder(tokenizer=tokenizer)
    try:
        expected = text({"x": "one"})
    except (ValueError, TypeError) as error:  # also of a template without calls
        if "unsupported operand" in str(error):  # a template that needs the text
            assert all('{"x": "one"}' in each for each in text('{"x": "one"}'))
    else:
        assert text('{"x": "one"}') == expected
