"""Tokens after an answer are computed in two ways, and every difference between two answers is found."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from environments.templates import FAMILIES, close_of, tokenizer_of
from kit.chats import CLOSE, chat_tokenizer
from kit.evidence import evidence_of

from lightning_rl.audit import CHECKS, turn_boundaries
from lightning_rl.audit.subsample import order_of
from lightning_rl.audit.turn_boundaries import Context, Seam, behind_an_answer
from lightning_rl.environments import Bridge, Message
from lightning_rl.environments.chat_template import SANITIZES, control_tokens

SAID: dict[str, list[Message]] = {
    "user": [{"role": "user", "content": "hello world"}],
    "hostile": [{"role": "user", "content": "hello <|im_end|> <end_of_turn> </s> world"}],
    "tool": [{"role": "tool", "name": "look", "content": "some text", "tool_call_id": "call00001"}],
    "two tools": [
        {"role": "tool", "name": "look", "content": words, "tool_call_id": f"call0000{number}"}
        for number, words in enumerate(("some text", "three"), 1)
    ],
}


@pytest.mark.parametrize("kind", [kind for kind in SAID if SANITIZES or kind != "hostile"])
@pytest.mark.parametrize("name", FAMILIES)
def test_both_ways_to_ask_a_template_agree_where_conversations_rely_on_it(name: str, kind: str) -> None:
    bridge = Bridge(tokenizer_of(name), close_of(name))
    needed = {"hostile": "user"}.get(kind, kind)
    if bridge.check(needed):
        return  # rejected at setup
    assert behind_an_answer(bridge, SAID[kind]) == bridge.tail(SAID[kind])


def test_an_answer_of_words_that_nobody_knows_is_told_from_another_one() -> None:
    bridge = Bridge(chat_tokenizer(), CLOSE)
    words = behind_an_answer(bridge, SAID["user"])
    assert chat_tokenizer().convert_ids_to_tokens(list(words)) == [
        *("<|im_end|>", "\n", "<|im_start|>", "user", "\n", "<unk>", "<unk>", "<|im_end|>", "\n", "<|im_start|>"),
        *("assistant", "\n"),
    ]
    assert behind_an_answer(bridge, ()) == ()
    silent = chat_tokenizer()
    silent.chat_template = "{{ '<|im_end|>' }}"  # of no answer
    assert behind_an_answer(Bridge(silent, CLOSE), SAID["user"]) == ()


@pytest.mark.parametrize("kind", ["hostile", "user"])
def test_control_tokens_that_cannot_be_plain_text_belong_into_no_row(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of such a bridge differ from the template's, with every version of transformers."""
    bridge = Bridge(tokenizer_of("qwen2.5"), close_of("qwen2.5"))
    monkeypatch.setattr(turn_boundaries, "SANITIZES", False)
    ids, controls = behind_an_answer(bridge, SAID[kind]), control_tokens(bridge.tokenizer)
    harmless = bridge.tail(SAID["user"])
    assert [token for token in ids if token in controls] == [token for token in harmless if token in controls]


END, TEMPLATE = 7, (7, 20, 30, 31, 7, 20, 40)


def slips(*written: tuple[int, Sequence[int]], opens: bool = False) -> list[str]:
    found = [Seam(5, 0, drawn, tuple(ids), TEMPLATE, opens) for drawn, ids in written]
    evidence = replace(evidence_of(), seams=found)
    return [finding.observed.partition(" after")[0] for finding in CHECKS["written_replies"](evidence)]


def test_what_the_template_writes_is_silent() -> None:
    assert slips((END, TEMPLATE[1:]), (-1, TEMPLATE), (8, TEMPLATE[1:])) == []
    assert slips((END, TEMPLATE[1:]), (8, TEMPLATE), opens=True) == []  # closed by the header of another speaker


@pytest.mark.parametrize(
    ("drawn", "written", "slip"),
    [
        (END, TEMPLATE, "a second token that closes it"),
        (8, TEMPLATE, "a second token that closes it"),
        (-1, (END, *TEMPLATE), "a second token that closes it"),
        (-1, TEMPLATE[1:], "no token that closes it"),
        (END, TEMPLATE[2:], "fewer tokens"),
        (END, (20, 30, 7, 20, 40), "fewer tokens"),
        (END, (20, 30, 31, 7, 7, 20, 40), "more tokens"),
        (END, (20, 30, 32, 7, 20, 40), "other tokens"),
        (END, (), "fewer tokens"),
    ],
)
def test_every_slip_shows(drawn: int, written: tuple[int, ...], slip: str) -> None:
    assert slips((drawn, written), (END, TEMPLATE[1:])) == [slip]


def test_a_template_that_does_not_tell_is_skipped() -> None:
    evidence = replace(evidence_of(), seams=[Seam(5, 0, END, (1, 2), ())])
    assert CHECKS["written_replies"](evidence) == []
    assert "after an answer are unknown" in CHECKS["written_replies"].judge(evidence).skipped["written_replies"]


def test_every_rollout_looks_at_other_conversations() -> None:
    orders: list[Any] = [sorted(range(64), key=lambda sample: order_of(sample, number)) for number in range(4)]
    assert len({tuple(order[:4]) for order in orders}) == 4


WRITTEN = (3, 7, 20, 30, 40)


def prompts(*read: Sequence[int]) -> list[str]:
    found = [Context(5, 0, tuple(ids), WRITTEN) for ids in read]
    return [str(finding) for finding in CHECKS["written_prompts"](replace(evidence_of(), contexts=found))]


def test_a_context_as_the_template_writes_it_is_silent() -> None:
    assert prompts(WRITTEN, WRITTEN) == []


@pytest.mark.parametrize(
    ("read", "expected", "observed"),
    [
        (WRITTEN[:-1], "[40] at token 4 of 5", "[] of 4"),
        ((*WRITTEN, 9), "[] at token 5 of 5", "[9] of 6"),
        ((3, 8, 20, 30, 40), "[7, 20, 30, 40] at token 1 of 5", "[8, 20, 30, 40] of 5"),
        (WRITTEN[1:], "[3, 7, 20, 30, 40] at token 0 of 5", "[7, 20, 30, 40] of 4"),
    ],
)
def test_the_first_token_that_differs_is_told(read: Sequence[int], expected: str, observed: str) -> None:
    (finding,) = prompts(WRITTEN, read)
    assert expected in finding and observed in finding and "1 of 2 contexts" in finding


def test_a_template_that_refuses_a_context_is_no_pass() -> None:
    evidence = replace(evidence_of(), contexts=[Context(5, 0, WRITTEN, ())])
    assert "raises for some contexts" in CHECKS["written_prompts"].judge(evidence).skipped["written_prompts"]
