"""Parsing: other libraries read calls, errors are words for the policy, and a parser that misreads is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from environments.templates import FAMILIES, tokenizer_of
from kit.support import tiny_tokenizer

from lightning_rl.environments import Action, JsonParser, ParserError, RendererParser, TemplateParser, parser_for
from lightning_rl.environments.json_calls import read_call
from lightning_rl.environments.parsing import check_source, misread

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
FIRST = '<tool_call>\n{"name": "look", "arguments": {"x": "one"}}\n</tool_call>'
HEAD = "<|im_start|>assistant\n"


def parse(parser: Any, said: str, before: str = HEAD, name: str = "qwen3") -> Action:
    ids = [tokenizer_of(name)(text, add_special_tokens=False)["input_ids"] for text in (said, before)]
    return parser(ids[0], ids[1], [LOOK])


def calls(answer: Action) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in answer.tool_calls]


QWEN = ["hermes", "qwen3"]


@pytest.mark.parametrize("source", QWEN)
def test_an_answer_falls_into_reasoning_text_and_calls(source: str) -> None:
    second = '<tool_call>\n{"name": "look", "arguments": {"x": "two", "n": 2}}\n</tool_call>'
    parser = parser_for(tokenizer_of("qwen3"), source)
    answer = parse(parser, f"<think>\nhm\n</think>\n\nSure.\n{FIRST}\n{second}<|im_end|>")
    assert calls(answer) == [("look", {"x": "one"}), ("look", {"x": "two", "n": 2})]
    assert (answer.text.strip(), (answer.reasoning or "").strip(), list(answer.errors)) == ("Sure.", "hm", [])


@pytest.mark.parametrize("source", QWEN)
def test_a_call_in_reasoning_is_a_thought(source: str) -> None:
    answer = parse(parser_for(tokenizer_of("qwen3"), source), f"<think>\n{FIRST}\n</think>\n\nNo.<|im_end|>")
    assert calls(answer) == [] and list(answer.errors) == [] and answer.text.strip() == "No."


def test_reasoning_that_the_prompt_began_is_reasoning() -> None:
    parser = parser_for(tokenizer_of("qwen3"), "hermes")
    answer = parse(parser, f"hm {FIRST}\n</think>\n\nNo.<|im_end|>", before=f"{HEAD}<think>\n")
    assert calls(answer) == [] and answer.text == "No."


@pytest.mark.parametrize("source", QWEN)
@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ('<tool_call>\n{"name": "look", "arguments": {"x": }}\n</tool_call>', '"x": }'),
        ('<tool_call>\n{"name": "look", "arguments": [1]}\n</tool_call>', "[1]"),
        ('<tool_call>\n{"name": "look", "arguments": "none"}\n</tool_call>', "none"),
        ('<tool_call>\n{"arguments": {"x": "one"}}\n</tool_call>', "name"),
        ("<tool_call>\n[1]\n</tool_call>", "[1]"),
        ("<tool_call>\n7\n</tool_call>", "7"),
        ('<tool_call>\n{"name": "look", "arg', '"arg'),
    ],
)
def test_what_cannot_be_read_is_an_error_for_the_policy(source: str, said: str, wrong: str) -> None:
    answer = parse(parser_for(tokenizer_of("qwen3"), source), f"{said}<|im_end|>")
    assert calls(answer) == [] and len(answer.errors) == 1 and wrong in answer.errors[0]


TYPED = {  # a template whose transform looks into the JSON of a call
    "start_anchor": HEAD,
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
        },
        "content": {"close": "<|im_end|>", "repeats": True, "join": ""},
    },
}


@pytest.mark.parametrize("broken_first", [True, False])
@pytest.mark.parametrize(
    ("template", "broken"),
    [
        (None, '{"name": "look", "arguments": {"x": }}'),
        (None, '{"name": "look", "arguments": [1]}'),
        (None, "look(1)"),
        (TYPED, '{"name": "look", "arguments": {"x": }}'),
        (TYPED, '{"name": "look"}'),
        (TYPED, "[1]"),
    ],
)
def test_one_broken_call_leaves_the_others_and_the_text(template: Any, broken: str, broken_first: bool) -> None:
    parser = parser_for(tokenizer_of("qwen3"), template or "hermes")
    pair = [f"<tool_call>\n{broken}\n</tool_call>", FIRST]
    answer = parse(parser, "Sure." + "\n".join(pair if broken_first else pair[::-1]) + "<|im_end|>")
    assert calls(answer) == [("look", {"x": "one"})] and len(answer.errors) == 1 and answer.text.strip() == "Sure."


@pytest.mark.parametrize("broken", ["<tool_call>", '<tool_call>\n{"name": "look", "arg'])
def test_a_call_that_is_not_closed_leaves_the_next_one(broken: str) -> None:
    answer = parse(parser_for(tokenizer_of("qwen3"), "hermes"), f"{broken}\n{FIRST}<|im_end|>")
    assert calls(answer) == [("look", {"x": "one"})] and len(answer.errors) == 1


def test_arguments_that_are_nested_too_deeply_are_no_json() -> None:
    with pytest.raises(ValueError, match="arguments of look are no JSON"):
        read_call({"name": "look", "arguments": "[" * 10**5})


def test_arguments_are_optional_and_may_be_written_as_text() -> None:
    parser = parser_for(tokenizer_of("qwen3"), "hermes")
    said = '<tool_call>{"name": "look"}</tool_call><tool_call>{"name": "look", "arguments": "{\\"n\\": 1}"}</tool_call>'
    assert calls(parse(parser, said)) == [("look", {}), ("look", {"n": 1})]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.renderer not in ("", "gpt-oss")])
def test_a_renderer_reads_the_calls_of_its_family(name: str) -> None:
    assert isinstance(parser_for(tokenizer_of(name), FAMILIES[name].renderer), RendererParser)


@pytest.mark.parametrize(
    ("options", "said", "reasoning"),
    [
        ({"enable_thinking": False}, "\nIt is 4.", ""),
        ({"enable_thinking": False, "of": "another template"}, "\nIt is 4.", ""),
        ({"enable_thinking": True}, "\n<think>hm</think>\nIt is 4.", "hm"),
        ({}, "\n<think>hm</think>\nIt is 4.", "hm"),
        ({}, "\nIt is 4.", ""),
        ({"enable_thinking": True}, "\nIt is 4.", ""),
    ],
)
def test_a_renderer_gets_the_options_of_the_template(options: dict[str, Any], said: str, reasoning: str) -> None:
    tokenizer = tokenizer_of("glm-4.5")
    question = [{"role": "user", "content": "2+2?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False, **options)
    answer = parse(parser_for(tokenizer, "glm-4.5", options), f"{said}<|user|>", before=prompt, name="glm-4.5")
    assert (answer.text.strip(), (answer.reasoning or "").strip()) == ("It is 4.", reasoning)


def test_a_parser_that_takes_an_answer_for_reasoning_is_refused() -> None:
    tokenizer, options = tokenizer_of("glm-4.5"), {"enable_thinking": False}
    right = RendererParser(tokenizer, "glm-4.5", options)
    assert misread(right, tokenizer, options) is None

    def without_text(token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        return replace(right(token_ids, prefix_ids, tools), text="")

    assert misread(without_text, tokenizer, options) == "in '\\nwords-of-this-answer' it reads no text"


@pytest.mark.parametrize(
    "rest", ["", "</think>\n<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"]
)
def test_reasoning_without_an_answer_is_no_text(rest: str) -> None:
    parser = parser_for(tokenizer_of("glm-4.5"), "glm-4.5")
    answer = parse(parser, f"\n<think>It is 4.{rest}", before="<|assistant|>", name="glm-4.5")
    assert answer.text == "" and "It is 4." in (answer.reasoning or "")


def test_formats_without_quotes_are_typed_by_the_schemas() -> None:
    said = "</think>\n\n<tool_call>\n<function=look>\n<parameter=x>\n7\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
    parser = parser_for(tokenizer_of("qwen3.5"), "qwen3.5")
    answer = parse(parser, f"{said}</function>\n</tool_call><|im_end|>", before=f"{HEAD}<think>\n", name="qwen3.5")
    assert calls(answer) == [("look", {"x": "7", "n": 7})]


XML = {
    "start_anchor": HEAD,
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\n(?P<value>.*?)\n</parameter>"},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>"},
    },
}

JSON = '{"name": "look", "parameters": {"x": "one"}}'
PYTHON = 'look(x="one")'
ONE, TWO = [("look", {"x": "one"})], [("look", {"x": "one"}), ("look", {"x": "two"})]
READ = {
    ("llama-3.1", JSON): ONE,
    ("llama-3.1", f"{JSON}; {JSON.replace('one', 'two')}"): TWO,
    ("llama-3.1", f"<|python_tag|>{JSON}"): ONE,
    ("llama-3.1", f"<|python_tag|>{JSON}; {JSON.replace('one', 'two')}"): TWO,
    ("llama-3.1", '{"type": "function", "function": {"name": "look", "arguments": {"x": "one"}}}'): ONE,
    ("llama-3.1", '<|python_tag|>look.call(x="one")'): ONE,
    ("llama-3.1", "So the answer is {x} [1]."): [],
    ("llama-3.1", '{"name": "Ada", "age": 36}'): [],
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {"x": "one"}, "id": "call00001"}]'): ONE,
    ("mistral", '[TOOL_CALLS][{"name":"look","arguments":{"x":"one"}},{"name":"look","arguments":{"x":"two"}}]'): TWO,
    ("mistral", '[TOOL_CALLS]look[ARGS]{"x": "one"}[TOOL_CALLS]look[CALL_ID]a1[ARGS]{"x": "two"}'): TWO,
    ("xlam", '<think>hm</think>[{"name": "look", "arguments": {"x": "one"}}]'): ONE,
    ("xlam", '```json\n[{"name": "look", "arguments": {"x": "one"}}]\n```'): ONE,
    ("granite", f"<|tool_call|>[{JSON}]"): ONE,
    ("phi-4-mini", f"<|tool_call|>[{JSON}]<|/tool_call|>"): ONE,
    ("functools", f"functools[{JSON}]"): ONE,
    ("pythonic", f"[{PYTHON}, {PYTHON.replace('one', 'two')}]"): TWO,
    ("llama-4", f"<|python_start|>[{PYTHON}]<|python_end|>"): ONE,
    ("pythonic", "[see (1)] It is 4."): [],
    ("pythonic", '[look(x=["a", null], n={"a": true})]'): [("look", {"x": ["a", None], "n": {"a": True}})],
    ("pythonic", "[Smith(2020)] says 4."): [],
}


@pytest.mark.parametrize(("name", "said"), READ)
def test_calls_without_tags_are_read(name: str, said: str) -> None:
    parser = parser_for(tokenizer_of(name))
    assert isinstance(parser, JsonParser)
    answer = parse(parser, said + FAMILIES[name].special[0], before="", name=name)
    assert calls(answer) == READ[name, said] and list(answer.errors) == []
    assert answer.text == ("" if answer.tool_calls else said)


W = "\N{FULLWIDTH VERTICAL LINE}"
WRITTEN = {  # call of look with x=WHERE, as each family writes it
    ("qwen3", "hermes"): '<tool_call>\n{"name": "look", "arguments": {"x": "WHERE"}}\n</tool_call>',
    ("qwen3", "qwen3"): '<tool_call>\n{"name": "look", "arguments": {"x": "WHERE"}}\n</tool_call>',
    (
        "qwen3.5",
        "qwen3.5",
    ): "<tool_call>\n<function=look>\n<parameter=x>\nWHERE\n</parameter>\n</function>\n</tool_call>",
    ("qwen3.5", "XML"): "<tool_call>\n<function=look>\n<parameter=x>\nWHERE\n</parameter>\n</function>\n</tool_call>",
    ("glm-4.5", "glm-4.5"): "<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>WHERE</arg_value>\n</tool_call>",
    ("gemma-4", "gemma4"): '<|tool_call>call:look{x:<|"|>WHERE<|"|>}<tool_call|>',
    **{
        (name, name): f"<{W}tool▁calls▁begin{W}><{W}tool▁call▁begin{W}>function<{W}tool▁sep{W}>look\n```json\n"
        f'{{"x": "WHERE"}}\n```<{W}tool▁call▁end{W}><{W}tool▁calls▁end{W}>'
        for name in ("deepseek-v3", "deepseek-r1")
    },
    ("llama-3.1", "json"): '{"name": "look", "parameters": {"x": "WHERE"}}',
    ("mistral", "json"): '[TOOL_CALLS] [{"name": "look", "arguments": {"x": "WHERE"}}]',
    ("granite", "json"): '<|tool_call|>[{"name": "look", "arguments": {"x": "WHERE"}}]',
    ("phi-4-mini", "json"): '<|tool_call|>[{"name": "look", "arguments": {"x": "WHERE"}}]<|/tool_call|>',
    ("xlam", "json"): '[{"name": "look", "arguments": {"x": "WHERE"}}]',
    ("pythonic", "json"): '[look(x="WHERE")]',
    ("llama-4", "json"): '<|python_start|>[look(x="WHERE")]<|python_end|>',
}
THOUGHTS = {  # answer, made call, text
    "<think>\nhm ONE so\n</think>\n\nFine.": ("", "Fine."),
    "<think>\nhm ONE so\n</think>\n\nTWO": ("two", ""),
    "hm ONE so</think>\n\nTWO": ("two", ""),
    "<think>\nhm ONE so": ("", ""),
    "<think>\nhm": ("", ""),
    "<think>a</think>\n<think>ONE</think>TWO": ("two", ""),
    "Fine. <think>hm ONE": ("", "Fine."),
    "Fine. <think>hm ONE</think>": ("", "Fine."),
}


@pytest.mark.parametrize(
    ("said", "begun"),
    [*[(said, False) for said in THOUGHTS], *[(said, True) for said in THOUGHTS if said.startswith("<think>")]],
)
@pytest.mark.parametrize(("name", "source"), [one for one in WRITTEN if one[0] != "gemma-4"], ids=str)
def test_a_call_within_a_thought_is_not_made_and_one_after_it_is(
    name: str, source: str, said: str, begun: bool
) -> None:
    family, (made, text) = FAMILIES[name], THOUGHTS[said]
    for word, where in (("ONE", "one"), ("TWO", "two")):
        said = said.replace(word, WRITTEN[name, source].replace("WHERE", where))
    said = said.removeprefix("<think>\n") if begun else said
    parser = parser_for(tokenizer_of(name), XML if source == "XML" else source)
    before = f"{HEAD}<think>\n" if begun else HEAD
    answer = parse(parser, said + (family.close or family.special)[0], before=before, name=name)
    assert [call.arguments["x"] for call in answer.tool_calls] == ([made] if made else [])
    assert (answer.text.strip(), list(answer.errors)) == (text, []) and answer.reasoning
    assert "think>" not in answer.reasoning and family.special[0] not in answer.reasoning


@pytest.mark.parametrize("where", ["a<think>b</think>", "a<think>b"])
@pytest.mark.parametrize(("name", "source"), [one for one in WRITTEN if one[0] != "gemma-4"], ids=str)
def test_tags_of_thoughts_in_an_argument_are_a_part_of_it(name: str, source: str, where: str) -> None:
    said = f"<think>hm</think>{WRITTEN[name, source].replace('WHERE', where)}"
    answer = parse(parser_for(tokenizer_of(name), XML if source == "XML" else source), said, name=name)
    assert calls(answer) == [("look", {"x": where})] and answer.reasoning == "hm"


HARMONY = {
    "<|channel|>analysis<|message|>hm<|end|>"
    '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"x": "one"}<|call|>': (
        ["one"],
        "",
        "hm",
    ),
    "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"x": "one"}<|call|>': (
        ["one"],
        "I look.",
        "so",
    ),
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>": (
        [],
        "Four.",
        "hm",
    ),
    '<|channel|>analysis<|message|>hm to=functions.look {"x": "one"}<|return|>': (
        [],
        "",
        'hm to=functions.look {"x": "one"}',
    ),
    "<|channel|>analysis<|message|>hm": ([], "", "hm"),
    "<|channel|>final<|message|>Four.<|return|>": ([], "Four.", None),
    "Four.<|return|>": ([], "Four.", None),
}


@pytest.mark.parametrize("source", [None, "gpt-oss"])
@pytest.mark.parametrize("said", HARMONY)
def test_an_answer_of_gpt_oss_falls_into_its_channels(said: str, source: str | None) -> None:
    made, text, reasoning = HARMONY[said]
    parser = parser_for(tokenizer_of("gpt-oss"), source)
    answer = parse(parser, said, before="<|start|>assistant", name="gpt-oss")
    assert [one.arguments["x"] for one in answer.tool_calls] == made
    assert (answer.text, answer.reasoning, list(answer.errors)) == (text, reasoning, [])


@pytest.mark.parametrize(
    ("name", "source", "opening", "closing"),
    [("mistral", "json", "[THINK]", "[/THINK]"), ("gemma-4", "gemma4", "<|channel>thought\n", "<channel|>")],
)
def test_a_call_within_a_thought_in_tags_of_a_family_is_not_made(
    name: str, source: str, opening: str, closing: str
) -> None:
    tokenizer, call = tokenizer_of.__wrapped__(name), WRITTEN[name, source]
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]} if name == "mistral" else {})
    parser, end = parser_for(tokenizer, source), (FAMILIES[name].close or FAMILIES[name].special)[0]
    for said, made in (
        (f"{opening}hm {call}{closing}{call.replace('WHERE', 'two')}{end}", ["two"]),
        (f"{opening}hm {call}{end}", []),
    ):
        answer = parser(tokenizer(said, add_special_tokens=False)["input_ids"], [], [LOOK])
        assert [one.arguments["x"] for one in answer.tool_calls] == made
        assert (answer.text, list(answer.errors)) == ("", []) and (answer.reasoning or "").startswith("hm")


def test_a_call_of_a_tool_may_follow_a_text() -> None:
    answer = parse(parser_for(tokenizer_of("llama-3.1")), f"Let me look. {JSON}<|eot_id|>", before="", name="llama-3.1")
    assert calls(answer) == ONE and answer.text == "Let me look."
    answer = parse(parser_for(tokenizer_of("xlam")), f"Let me look. [{JSON}]<|im_end|>", before="", name="xlam")
    assert calls(answer) == ONE and answer.text == "Let me look."


def test_a_text_ends_before_any_special_token_that_ended_it() -> None:
    answer = parse(parser_for(tokenizer_of("llama-3.1")), "Four.<|eom_id|>", before="", name="llama-3.1")
    assert answer.text == "Four."


@pytest.mark.parametrize(
    ("name", "source", "said", "made"),
    [
        ("llama-3.1", "llama-3", JSON[:-9], 0),
        ("llama-3.1", "llama-3", "<|python_tag|>import os", 0),
        ("llama-3.1", "llama-3", f"{JSON}; {JSON[:-9]}", 1),
        ("llama-3.1", "llama-3", '{"name": "look", "parameters": [1]}', 0),
        ("mistral", "json", "[TOOL_CALLS] hello", 0),
        ("granite", "json", f"Sure.<|tool_call|>[{JSON}, {JSON[:-9]}", 1),
        ("pythonic", "json", "[look(1)]", 0),
        ("pythonic", "json", '[look(x="one', 0),
        ("pythonic", "json", "[look(x=f(1))]", 0),
        ("qwen3.5", "qwen3.5", "</think>\n\n<function=look>\n<parameter=x>\none\n</parameter>\n</function>", 0),
        ("qwen3.5", XML, "<function=look>\n<parameter=x>\none\n</parameter>\n</function>", 0),
        ("qwen3.5", XML, "<tool_call>\n<function=look>\n<parameter=x>\none", 0),
        ("qwen3", "hermes", '{"name": "look", "arguments": {"x": "one"}}', 0),
        ("qwen3", "qwen3", '{"name": "look", "arguments": {"x": "one"}}', 0),
    ],
)
def test_what_begins_like_a_call_is_a_call_or_an_error(name: str, source: Any, said: str, made: int) -> None:
    before = f"{HEAD}<think>\n" if name == "qwen3.5" and source != XML else HEAD
    answer = parse(parser_for(tokenizer_of(name), source), said + FAMILIES[name].special[0], before=before, name=name)
    assert (len(answer.tool_calls), len(answer.errors)) == (made, 1)


NAMED = {"name": "look", "parameters": {"x": "one"}}
FORMS = [
    str(NAMED),
    json.dumps(NAMED).replace("}}", "},}"),
    'look(x="one")',
    'I will call look(x="one").',
    'look(x="one',
    'look({"x": "one"})',
    'print(look(x="one"))',
    "look(1)",
    "look()",
    '<function=look>{"x": "one"}</function>',
    "<function=look>\n<parameter=x>\none\n</parameter>\n</function>",
    '<function name="look">one</function>',
    '<invoke name="look"><parameter name="x">one</parameter></invoke>',
    '<look x="one"/>',
    "<look><x>one</x></look>",
    "<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>one</arg_value>",
    '<|tool_call|>look{"x": "one"}',
    'look{"x": "one"}',
    'look\n{"x": "one"}',
    '[TOOL_CALLS]look[ARGS]{"x": one}',
    'to=functions.look {"x": "one"}',
    'Action: look\nAction Input: {"x": "one"}',
    '{"tool": "look", "tool_input": {"x": "one"}}',
    '{"function": "look", "args": {"x": "one"}}',
    '{"name": "look", "args": {"x": "one"}}',
    '{"name": "look", "x": "one"}',
    '{"name": "look", "arguments": {"x": "one"}, "parameters": {"x": "two"}}',
    '{"tool_calls": [{"function": {"name": "look", "arguments": {"x": "one"}}}]',
    '```json\n{"name": "look", "parameters": {"x": }}\n```',
]
TEXTS = [
    "I look at it.",
    "look (it) is 4",
    "Let me look: it is 4.",
    "look (1) and (2)",
    '{"x": "look"}',
    "<b>look</b>",
    "f(x=1) = 4",
]
PARSERS = [
    ("llama-3.1", None),
    ("qwen3", "hermes"),
    ("qwen3", "qwen3"),
    ("qwen3.5", XML),
    ("mistral", None),
    ("xlam", None),
]


@pytest.mark.parametrize(("name", "source"), PARSERS, ids=str)
@pytest.mark.parametrize("said", FORMS)
def test_a_call_of_a_tool_in_any_form_is_a_call_or_an_error(name: str, source: Any, said: str) -> None:
    answer = parse(parser_for(tokenizer_of(name), source), said + FAMILIES[name].special[0], before=HEAD, name=name)
    assert len(answer.tool_calls) + len(answer.errors) == 1
    assert all(dict(call.arguments) for call in answer.tool_calls)


@pytest.mark.parametrize(("name", "source"), PARSERS, ids=str)
@pytest.mark.parametrize("said", TEXTS)
def test_a_text_with_the_name_of_a_tool_is_a_text(name: str, source: Any, said: str) -> None:
    answer = parse(parser_for(tokenizer_of(name), source), said + FAMILIES[name].special[0], before=HEAD, name=name)
    assert (answer.text.strip(), list(answer.tool_calls), list(answer.errors)) == (said, [], [])


@pytest.mark.parametrize("source", QWEN)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_arguments_are_read_under_both_of_their_keys(source: str, key: str) -> None:
    said = f'<tool_call>\n{{"name": "look", "{key}": {{"x": "one"}}}}\n</tool_call><|im_end|>'
    assert calls(parse(parser_for(tokenizer_of("qwen3"), source), said)) == [("look", {"x": "one"})]


@pytest.mark.parametrize("source", QWEN)
@pytest.mark.parametrize("rest", ['"args": {"x": "one"}', '"x": "one"', '"input": "{}"'])
def test_arguments_under_another_key_are_an_error(source: str, rest: str) -> None:
    answer = parse(parser_for(tokenizer_of("qwen3"), source), f'<tool_call>\n{{"name": "look", {rest}}}\n</tool_call>')
    assert calls(answer) == [] and "needs all of its arguments in the object arguments" in answer.errors[0]


@pytest.mark.parametrize(("name", "said"), [("mistral", "[TOOL_CALLS]"), ("llama-3.1", "<|python_tag|>")])
def test_an_opening_without_a_call_is_an_error(name: str, said: str) -> None:
    answer = parse(parser_for(tokenizer_of(name)), said + FAMILIES[name].special[0], before="", name=name)
    assert calls(answer) == [] and len(answer.errors) == 1


def test_a_response_template_is_passed_or_comes_with_the_tokenizer() -> None:
    said = "<tool_call>\n<function=look>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call><|im_end|>"
    parser = parser_for(tokenizer_of("qwen3.5"), XML)
    assert calls(parse(parser, said, before=HEAD, name="qwen3.5")) == [("look", {"n": 7})]
    tokenizer = tokenizer_of.__wrapped__("qwen3.5")
    tokenizer.response_template = XML
    assert parser_for(tokenizer) == TemplateParser(tokenizer, XML)


def test_without_a_source_the_first_that_reads_the_template_is_taken() -> None:
    tokenizer = tokenizer_of.__wrapped__("qwen3")
    assert isinstance(parser_for(tokenizer), TemplateParser)
    tokenizer.name_or_path = "Qwen/Qwen3-4B"
    assert parser_for(tokenizer) == RendererParser(tokenizer, "qwen3")
    tokenizer.chat_template = FAMILIES["qwen2.5"].template
    tokenizer.name_or_path = "deepseek-ai/DeepSeek-V3"  # a name that says nothing true
    assert isinstance(parser_for(tokenizer), TemplateParser)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("chatml", None, "the chat template writes no tool calls"),
        ("llama-3.1", "hermes", "it reads no call"),
        ("qwen3.5", "qwen3", "renderer 'qwen3': in .*function=look_at.* it reads"),
        ("mistral", "hermes", "'hermes': the chat template writes nothing at the head of an answer"),
        (
            "qwen3",
            {"start_anchor": "nowhere", "fields": XML["fields"]},
            "the response template: in .* it reads no call",
        ),
        ("qwen3", {"fields": {}}, "the response template: in .* it reads .*fields must be a non-empty dict"),
        ("qwen3", "unknown", "name of a renderer that fits the tokenizer, got 'unknown'"),
        ("qwen3", "auto", "got 'auto': it asks a server which model this is"),
        ("qwen3", "kimi-k2", "got 'kimi-k2': .*im_user"),
        ("qwen3", "default", "renderer 'default': in .* it reads no call"),
    ],
)
def test_a_tokenizer_whose_calls_nobody_reads_is_refused_with_the_cure(name: str, source: Any, message: str) -> None:
    with pytest.raises(ParserError, match=f"(?s){message}.*pass tool_parser= with a response template of transformers"):
        parser_for(tokenizer_of(name), source)


def test_a_tokenizer_without_tokens_for_calls_is_named_instead_of_its_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = FAMILIES["qwen2.5"].template
    with pytest.raises(
        ParserError, match="the tokenizer has no tokens for the tool calls that the chat template writes"
    ):
        parser_for(tokenizer)


def test_a_parser_that_reads_an_earlier_call_again_is_refused() -> None:
    fields = {**XML["fields"], "tool_calls": {**XML["fields"]["tool_calls"]}}
    anchored_at_the_start = {"start_anchor": "<|im_start|>user", "fields": fields}
    wrong = {**anchored_at_the_start, "start_anchor": "one thing that never comes"}
    tokenizer = tokenizer_of("qwen3.5")
    assert misread(TemplateParser(tokenizer, wrong), tokenizer) == "it reads the call of an earlier answer again"
    assert misread(TemplateParser(tokenizer, anchored_at_the_start), tokenizer) is None


def test_a_parser_that_breaks_gives_the_text_and_the_error() -> None:
    answer = parse(TemplateParser(tokenizer_of("qwen3"), {"fields": {}}), "hello<|im_end|>")
    assert answer.text == "hello" and answer.errors[0].startswith("the tool calls could not be read: ")


@pytest.mark.parametrize("source", [3, ["hermes"]])
def test_what_is_no_source_of_a_parser_is_refused(source: Any) -> None:
    with pytest.raises(ValueError, match="expected tool_parser to be a response template of transformers, the name of"):
        check_source(source)
