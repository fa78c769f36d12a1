"""Chat templates of model families, written for these tests from what the families are known to write, and tokenizers.

Nothing here is a copy: only what matters between turns is there, which are heads, ends, where reasoning is dropped, how
tools are called and how they answer.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

WORDS = (
    'hello world, this is some text: one two three\n{"name": "look", "arguments": {"x": "y"}} user assistant system '
    "tool model think <tool_call>\n</tool_call>\n<tool_response>\n</tool_response>\n first-thing-said 41 "
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RIGHT = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Text that a family of models writes.

    Args:
        template: in Jinja.
        special: its control tokens; the first ends an answer unless ``close`` says more.
        added: added tokens that are no control tokens.
        renderer: what the package ``renderers`` calls it.
        close: what ends an answer.
        user: what is wrong with a bridge over a user's message; nothing if it is right.
        tool: the same over a tool's.
        two_tools: the same over those of two.
        appends: the kinds of message before which an answer stays as it was, up to the token that ends it.
    """

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    renderer: str = ""
    close: tuple[str, ...] = ()
    user: str = RIGHT
    tool: str = RIGHT
    two_tools: str = RIGHT
    appends: tuple[str, ...] = ("user", "tool", "two tools")


HERMES_CALLS = """
{%- for call in m.tool_calls or [] -%}
  {{ '\n' if m.content or not loop.first }}
  {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
  {{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor -%}"""
XML_CALLS = """
{%- for call in m.tool_calls or [] -%}
  {{ '\n\n' if said and loop.first else '\n' if not loop.first }}
  {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
  {%- for name, value in call.function.arguments | items -%}
    {{ '<parameter=' + name + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}
  {%- endfor -%}
  {{ '</function>\n</tool_call>' }}
{%- endfor -%}"""
TOOL_RESPONSES = """
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}"""
LAST_QUESTION = """
{%- set seen = namespace(at=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set seen.at = loop.index0 -%}{%- endif -%}{%- endfor -%}"""
CHATML_TOOLS = "{%- if tools -%}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}"
CHATML_HEAD = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
JSON_CALL = """
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}' -}}"""
PYTHON_CALL = """
{{- call.function.name + '(' }}
{%- for name, value in call.function.arguments | items -%}
  {{- ', ' if not loop.first }}{{ name + '=' + (value | tojson) }}
{%- endfor -%}
{{- ')' -}}"""
IM = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
CALL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THOUGHT_TAGS = ("<think>", "</think>")

WIDE = "\N{FULLWIDTH VERTICAL LINE}"
DEEPSEEK = """
{{- bos_token }}
{%- set state = namespace(opened=false, outputs=false, answered=false) -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{ m.content }}{%- endif -%}
  {%- if m.role == 'user' -%}{%- set state.outputs = false -%}{{ '<|User|>' + m.content }}{%- endif -%}
  {%- if m.role == 'assistant' and CALLS -%}
    {%- set state.outputs = false -%}
    {%- for call in m.tool_calls -%}
      {{ '\n' if state.opened else '<|Assistant|>' + (m.content or '') + '<|tool▁calls▁begin|>' }}
      {{- '<|tool▁call▁begin|>' + call.type + '<|tool▁sep|>' + call.function.name + '\n```json\n' }}
      {{- call.function.arguments + '\n```<|tool▁call▁end|>' }}{{ CLOSE if state.opened }}
      {%- set state.opened = true -%}
    {%- endfor -%}
    {{ END }}
  {%- elif m.role == 'assistant' -%}
    {{ '<|tool▁outputs▁end|>' if state.outputs else '<|Assistant|>' }}
    {{- m.content.split('</think>')[-1] + '<|end▁of▁sentence|>' }}
    {%- set state.outputs = false -%}
  {%- endif -%}
  {%- if m.role == 'tool' -%}
    {{ '\n' if state.answered else '<|tool▁outputs▁begin|>' }}
    {{- '<|tool▁output▁begin|>' + m.content + '<|tool▁output▁end|>' }}
    {%- set state.outputs = true -%}{%- set state.answered = true -%}
  {%- endif -%}
{%- endfor -%}
{%- if state.outputs -%}{{ '<|tool▁outputs▁end|>' }}{%- endif -%}
{%- if add_generation_prompt and not state.outputs -%}{{ '<|Assistant|>HEAD' }}{%- endif -%}"""
CALLS_END = "'<|tool▁calls▁end|><|end▁of▁sentence|>'"


def deepseek(head: str, *, calls: str = "m.tool_calls", close: str = "''", end: str = CALLS_END) -> str:
    """Template that opens calls and results once in a conversation, with the full-width signs of its tokens."""
    parts = {"HEAD": head, "CALLS": calls, "CLOSE": close, "END": end}
    text = DEEPSEEK
    for name, part in parts.items():
        text = text.replace(name, part)
    return text.replace("<|", f"<{WIDE}").replace("|>", f"{WIDE}>")


DEEPSEEK_TOKENS = tuple(
    f"<{WIDE}{name}{WIDE}>"
    for name in (
        "end▁of▁sentence",
        "begin▁of▁sentence",
        "User",
        "Assistant",
        "tool▁calls▁begin",
        "tool▁calls▁end",
        "tool▁call▁begin",
        "tool▁call▁end",
        "tool▁sep",
        "tool▁outputs▁begin",
        "tool▁outputs▁end",
        "tool▁output▁begin",
        "tool▁output▁end",
    )
)
LLAMA = """
{{- bos_token }}
{%- if tools -%}
  {{ '<|start_header_id|>system<|end_header_id|>\n\n' + (tools | tojson) + '<|eot_id|>' }}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + (TOOL_TEXT) + '<|eot_id|>' }}
  {%- elif m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call at a time') }}{%- endif -%}
    {{ '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + m.tool_calls[0].function.name }}
    {{- '", "parameters": ' + (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}
  {%- else -%}
    {{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""
LLAMA_TOKENS = (
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)

FAMILIES: dict[str, Family] = {
    "chatml": Family(
        template="""
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"""
        + CHATML_HEAD,
        special=IM,
    ),
    "qwen2.5": Family(
        template=CHATML_TOOLS
        + "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
        + TOOL_RESPONSES
        + "{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        + HERMES_CALLS
        + "{{ '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
        + CHATML_HEAD,
        special=IM,
        added=CALL_TAGS,
    ),
    "qwen3": Family(  # the block of an answer that did not think is there for the last answer alone
        template=CHATML_TOOLS
        + LAST_QUESTION
        + "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
        + TOOL_RESPONSES
        + """
{%- elif m.role == 'assistant' -%}
  {%- set thought = m.reasoning_content or '' -%}
  {{ '<|im_start|>assistant\n' }}
  {%- if loop.index0 > seen.at and (loop.last or thought) -%}
    {{ '<think>\n' + thought + '\n</think>\n\n' }}
  {%- endif -%}
  {{ m.content }}"""
        + HERMES_CALLS
        + """{{ '<|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}{%- endfor -%}"""
        + CHATML_HEAD,
        special=IM,
        added=(*CALL_TAGS, *THOUGHT_TAGS),
        renderer="qwen3",
        appends=(),
    ),
    "qwen3.5": Family(
        template=CHATML_TOOLS
        + LAST_QUESTION
        + "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
        + TOOL_RESPONSES
        + """
{%- elif m.role == 'assistant' -%}
  {%- set said = m.content | trim -%}
  {{ '<|im_start|>assistant\n' }}
  {%- if loop.index0 > seen.at -%}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif -%}
  {{ said }}"""
        + XML_CALLS
        + """{{ '<|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>\n' }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}""",
        special=(*IM, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        added=(*CALL_TAGS, *THOUGHT_TAGS),
        renderer="qwen3.5",
        appends=("tool", "two tools"),
    ),
    "llama-3": Family(template=LLAMA.replace("TOOL_TEXT", "m.content | trim"), special=LLAMA_TOKENS),
    "llama-3.1": Family(  # a tool's text as a JSON string
        template=LLAMA.replace("TOOL_TEXT", "m.content | tojson"),
        special=LLAMA_TOKENS,
        close=("<|eot_id|>", "<|eom_id|>"),
    ),
    "gemma-3": Family(
        template="""
{{- bos_token }}
{%- if messages[0].role == 'system' -%}{{ raise_exception('no system message') }}{%- endif -%}
{%- for m in messages -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles have to alternate') }}{%- endif -%}
  {{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content | trim) }}
  {{- '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}""",
        special=("<end_of_turn>", "<bos>", "<start_of_turn>"),
        tool="roles have to alternate",
        two_tools="roles have to alternate",
        appends=("user",),
    ),
    "gemma-4": Family(  # what tools say stands inside of the model's turn, which goes on behind it
        template="""
{{- bos_token }}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{ '<|tool_response>response:' + m.name + '{value:<|"|>' + m.content + '<|"|>}<tool_response|>' }}
  {%- elif m.role == 'assistant' -%}
    {{ '' if loop.previtem and loop.previtem.role == 'tool' else '<|turn>model\n' }}{{ m.content }}
    {%- for call in m.tool_calls or [] -%}
      {{ '<|tool_call>call:' + call.function.name + '{' }}
      {%- for name, value in call.function.arguments | items -%}
        {{ ',' if not loop.first }}{{ name + ':<|"|>' + value + '<|"|>' }}
      {%- endfor -%}
      {{ '}<tool_call|>' }}
    {%- endfor -%}
    {{ '' if m.tool_calls else '<turn|>\n' }}
  {%- else -%}
    {{ '<|turn>' + m.role + '\n' + m.content + '<turn|>\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{ '<|turn>model\n' }}{%- endif -%}""",
        special=(
            "<turn|>",
            "<bos>",
            "<eos>",
            "<|tool>",
            "<tool|>",
            "<|think|>",
            "<|image>",
            "<image|>",
            "<|image|>",
            "<|turn>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            '<|"|>',
            "<|channel>",
            "<channel|>",
        ),
        renderer="gemma4",
        close=("<turn|>", "<|tool_response>"),
    ),
    "gpt-oss": Family(  # the last answer ends with <|return|>, the same answer in the history with <|end|>
        template="""
{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}
{%- set first = messages[0] if messages[0].role in ['system', 'developer'] -%}
{%- if first or tools -%}
  {{ '<|start|>developer<|message|>' + (first.content if first else '') }}
  {{- (tools | tojson if tools else '') + '<|end|>' }}
{%- endif -%}
{%- set called = namespace(name=none) -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if called.name is none -%}{{ raise_exception('a tool that was not called') }}{%- endif -%}
    {{ '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
    {{- (m.content | tojson) + '<|end|>' }}
  {%- elif m.tool_calls -%}
    {%- set call = m.tool_calls[0].function -%}
    {%- set called.name = call.name -%}
    {{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if m.thinking -}}
    {{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- (call.arguments | tojson) + '<|call|>' }}
  {%- elif m.role == 'assistant' -%}
    {{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
  {%- elif m.role == 'user' -%}
    {{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}""",
        special=("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"),
        renderer="gpt-oss",
        close=("<|return|>", "<|call|>"),
    ),
    "glm-4.5": Family(  # the head of the next speaker ends an answer
        template="""
{{- '[gMASK]<sop>' }}
{%- if tools -%}{{ '<|system|>\n' + (tools | tojson) }}{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{ '<|observation|>' if loop.first or loop.previtem.role != 'tool' }}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
  {%- elif m.role == 'assistant' -%}
    {{ '<|assistant|>\n<think></think>' }}{{ '\n' + m.content | trim if m.content | trim }}
    {%- for call in m.tool_calls or [] -%}
      {{ '\n<tool_call>' + call.function.name }}
      {%- for name, value in call.function.arguments | items -%}
        {{ '\n<arg_key>' + name + '</arg_key>\n<arg_value>' }}{{ value if value is string else value | tojson }}
        {{- '</arg_value>' }}
      {%- endfor -%}
      {{ '\n</tool_call>' }}
    {%- endfor -%}
  {%- else -%}
    {{ '<|' + m.role + '|>\n' + m.content }}{{ '/nothink' if m.role == 'user' and enable_thinking is false }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|assistant|>' }}{{ '\n<think></think>' if enable_thinking is false }}
{%- endif -%}""",
        special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        added=(*CALL_TAGS, *THOUGHT_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        renderer="glm-4.5",
        close=("<|user|>", "<|observation|>"),
    ),
    "deepseek-v3": Family(template=deepseek(""), special=DEEPSEEK_TOKENS, renderer="deepseek-v3"),
    "deepseek-r1": Family(
        template=deepseek("<think>\\n"),
        special=DEEPSEEK_TOKENS,
        added=THOUGHT_TAGS,
        renderer="deepseek-r1",
        appends=(),
    ),
    "r1-distill": Family(  # the first call of a conversation is not closed, and no mark of calls is a token
        template=deepseek("<think>\\n", calls="m.content is none", close=CALLS_END, end="''"),
        special=DEEPSEEK_TOKENS[:4],
        added=THOUGHT_TAGS,
        appends=(),
    ),
    "phi-3.5": Family(  # what a tool says is not there
        template="""
{%- for m in messages -%}
  {%- if m.role != 'tool' -%}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endif -%}
{%- endfor -%}
{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}""",
        special=("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
        close=("<|end|>",),
        tool="drops the text of a tool message",
        two_tools="drops the text of a tool message",
        appends=("user",),
    ),
    "cohere2": Family(
        template="""
{{- bos_token }}
{%- for m in messages -%}
  {{ '<|START_OF_TURN_TOKEN|>' }}
  {%- if m.role == 'user' -%}{{ '<|USER_TOKEN|>' + m.content }}
  {%- elif m.role == 'assistant' -%}{{ '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}
  {%- elif m.role == 'system' -%}{{ '<|SYSTEM_TOKEN|>' + m.content }}
  {%- endif -%}
  {{ '<|END_OF_TURN_TOKEN|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{%- endif -%}""",
        special=(
            "<|END_OF_TURN_TOKEN|>",
            "<BOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
        close=("<|END_RESPONSE|>",),
        tool="drops the text of a tool message",
        two_tools="drops the text of a tool message",
        appends=("user",),
    ),
    "mistral": Family(  # no head before an answer; tools before the last user; a result carries the letters of its call
        template=LAST_QUESTION
        + """
{{- bos_token }}
{%- for m in messages -%}
  {%- if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' or m.role == 'user' and loop.previtem
      and loop.previtem.tool_calls -%}{{ raise_exception('roles have to alternate') }}{%- endif -%}
  {%- if tools and loop.index0 == seen.at -%}
    {{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
  {%- endif -%}
  {%- if m.role == 'tool' -%}
    {%- if m.tool_call_id | length != 9 -%}{{ raise_exception('ids of calls have nine letters') }}{%- endif -%}
    {{ '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
  {%- elif m.tool_calls -%}
    {{ '[TOOL_CALLS] [' }}
    {%- for call in m.tool_calls -%}
      {{ ', ' if not loop.first }}{{ '{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
    {%- endfor -%}
    {{ ']</s>' }}
  {%- elif m.role == 'assistant' -%}{{ ' ' + m.content + '</s>' }}
  {%- elif m.role == 'user' -%}{{ '[INST] ' + m.content + '[/INST]' }}
  {%- else -%}{{ raise_exception('only users, assistants and tools') }}
  {%- endif -%}
{%- endfor -%}""",
        special=(
            "</s>",
            "<s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
        ),
    ),
}

CALL_FORMATS: dict[str, tuple[str, str, str]] = {  # what opens calls, one call in Jinja, and what closes them
    "granite": ("<|tool_call|>[", JSON_CALL, "]"),
    "phi-4-mini": ("<|tool_call|>[", JSON_CALL, "]<|/tool_call|>"),
    "xlam": ("[", JSON_CALL, "]"),
    "functools": ("functools[", JSON_CALL, "]"),
    "pythonic": ("[", PYTHON_CALL, "]"),
    "llama-4": ("<|python_start|>[", PYTHON_CALL, "]<|python_end|>"),
}
for _name, (_open, _call, _close) in CALL_FORMATS.items():
    FAMILIES[_name] = Family(
        template=CHATML_TOOLS
        + "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content }}{%- if m.tool_calls -%}"
        + f"{{{{ '{_open}' }}}}{{%- for call in m.tool_calls -%}}"
        + f"{{{{ ', ' if not loop.first }}}}{_call}{{%- endfor -%}}"
        + f"{{{{ '{_close}' }}}}{{%- endif -%}}{{{{ '<|im_end|>\n' }}}}{{%- endfor -%}}"
        + CHATML_HEAD,
        special=IM,
        added=tuple(re.findall(r"<\|[\w/]+\|>", _open + _close)),
    )


@cache
def tokenizer_of(name: str) -> Any:
    """A byte-level tokenizer with the family's control tokens and template."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(family.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    bos = next(
        (token for token in family.special if "bos" in token.lower() or "begin" in token or token == "<s>"), None
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.special[0], bos_token=bos)
    for token in family.added:
        fast.add_tokens(AddedToken(token, special=False, normalized=False))
    fast.chat_template = family.template
    return fast


def close_of(name: str) -> frozenset[int]:
    """The ids that end an answer of a family."""
    family = FAMILIES[name]
    return frozenset(tokenizer_of(name).convert_tokens_to_ids(list(family.close or family.special[:1])))
