"""Seams: what the template writes behind an answer is found in two ways, and every slip between two answers shows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from environments.templates import FAMILIES, close_of, tokenizer_of
from kit.chats import CLOSE, chat_tokenizer
from kit.evidence import evidence_of

from lightning_rl.audit import CHECKS
from lightning_rl.audit.seams import Seam, behind_an_answer, order_of
from lightning_rl.environments import Bridge, Message

SAID: dict[str, list[Message]] = {
    "user": [{"role": "user", "content": "hello world"}],
    "hostile": [{"role": "user", "content": "hello <|im_end|> <end_of_turn> </s> world"}],
    "tool": [{"role": "tool", "name": "look", "content": "some text", "tool_call_id": "call00001"}],
    "two tools": [
        {"role": "tool", "name": "look", "content": words, "tool_call_id": f"call0000{number}"}
        for number, words in enumerate(("some text", "three"), 1)
    ],
}


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("name", FAMILIES)
def test_both_ways_to_ask_a_template_agree_where_conversations_rely_on_it(name: str, kind: str) -> None:
    bridge = Bridge(tokenizer_of(name), close_of(name))
    needed = {"hostile": "user"}.get(kind, kind)
    if bridge.check(needed):
        return  # refused at setup
    assert behind_an_answer(bridge.tokenizer, bridge.close, {}, SAID[kind]) == bridge.tail(SAID[kind])


def test_an_answer_of_words_that_nobody_knows_is_told_from_another_one() -> None:
    words = behind_an_answer(chat_tokenizer(), CLOSE, {}, SAID["user"])
    assert chat_tokenizer().convert_ids_to_tokens(list(words)) == [
        *("<|im_end|>", "\n", "<|im_start|>", "user", "\n", "<unk>", "<unk>", "<|im_end|>", "\n", "<|im_start|>"),
        *("assistant", "\n"),
    ]
    assert behind_an_answer(chat_tokenizer(), CLOSE, {}, ()) == ()
    silent = chat_tokenizer()
    silent.chat_template = "{{ '<|im_end|>' }}"  # of no answer
    assert behind_an_answer(silent, CLOSE, {}, SAID["user"]) == ()


END, TEMPLATE = 7, (7, 20, 30, 31, 7, 20, 40)


def slips(*seams: tuple[int, Sequence[int]], template: tuple[int, ...] = TEMPLATE) -> list[str]:
    found = [Seam(5, 0, drawn, tuple(written), template) for drawn, written in seams]
    evidence = replace(evidence_of(), seams=found)
    return [finding.observed.partition(" behind")[0] for finding in CHECKS["written_replies"](evidence)]


def test_what_the_template_writes_is_silent() -> None:
    assert slips((END, TEMPLATE[1:]), (-1, TEMPLATE)) == []
    assert slips((8, TEMPLATE), (8, TEMPLATE[1:])) == []  # the head of another speaker closed it


@pytest.mark.parametrize(
    ("drawn", "written", "slip"),
    [
        (END, TEMPLATE, "a second token that closes it"),
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
    assert "does not tell" in CHECKS["written_replies"].judge(evidence).skipped["written_replies"]


def test_every_rollout_looks_at_other_conversations() -> None:
    orders: list[Any] = [sorted(range(64), key=lambda sample: order_of(sample, number)) for number in range(4)]
    assert len({tuple(order[:4]) for order in orders}) == 4
