"""The first lines of a fit show what the policy reads and writes; the date of a template is that of the run."""

import datetime
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, recorder, tiny_module, tiny_tokenizer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl import PromptDataModule
from lightning_rl.rollouts.first_sample import shorten
from lightning_rl.utils import template_date
from lightning_rl.utils.template_date import TODAY

ROWS = [[{"role": "user", "content": letter}] for letter in "abcdefgh"]
DATED = (
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{{ 'c' if strftime_now('%d') == '01' else 'd' }}{% if add_generation_prompt %} b{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}b{% endif %}"


def dated(template: str = DATED) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def data() -> PromptDataModule:
    return PromptDataModule(ROWS, 4, shuffle=False, validation=ROWS[:2])


def test_a_fit_shows_one_prompt_and_one_response_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(tiny_module(tokenizer=dated(PLAIN)), data=data(), max_steps=2)
    shown = [record.getMessage() for record in caplog.records if "of rollout 0" in record.getMessage()]
    (text,) = shown
    prompt, response = text.splitlines()
    assert prompt == "prompt of rollout 0, 2 tokens: 'a b'" and response.startswith("response of rollout 0, ")


@pytest.mark.filterwarnings("ignore:.*pre-optimization state.*:UserWarning", "ignore:The dirpath has:UserWarning")
def test_a_resumed_fit_shows_the_number_of_its_first_rollout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "resumed.ckpt"
    fit(tiny_module(tokenizer=dated(PLAIN)), data=data(), max_steps=1, max_epochs=2).save_checkpoint(path)
    with caplog.at_level(logging.INFO):
        fit(tiny_module(tokenizer=dated(PLAIN)), data=data(), max_epochs=2, ckpt_path=path)
    assert any(record.getMessage().startswith("prompt of rollout 1, ") for record in caplog.records)


@pytest.mark.parametrize("chat", [False, True])
def test_the_date_of_the_template_is_shown_if_the_template_is_used(
    chat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        fit(tiny_module(tokenizer=dated()), data=PromptDataModule(["a"] * 8, 4, chat=chat), max_steps=1)
    assert ("the chat template writes the date" in caplog.text) == chat


def test_without_a_tokenizer_nothing_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(tiny_module(), max_steps=1)
    assert not any("of rollout 0" in record.getMessage() for record in caplog.records)


def test_a_long_text_is_cut_in_the_middle() -> None:
    assert shorten("a" * 700, 600).startswith("a" * 300 + " [100 characters] ") and shorten("ab", 2) == "ab"


def test_a_fit_warns_of_stray_tokens_in_its_prompts() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tiny_module(tokenizer=tiny_tokenizer()), data=PromptDataModule(["a </s>"] * 4, 4), max_steps=1)
    texts = [str(each.message) for each in caught if "ends with" in str(each.message)]
    assert len(texts) == 1 and texts[0].startswith("prompt 0 ends with </s>, which ends a text")


@pytest.mark.filterwarnings("ignore:.*pre-optimization state.*:UserWarning", "ignore:The dirpath has:UserWarning")
def test_a_resumed_run_has_the_prompts_of_the_date_on_which_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of the second day are those of the first; a new run has those of its day."""
    days = iter(["2026-01-01T23:59:00", "2026-01-02T00:01:00", "2026-01-02T00:02:00"])
    monkeypatch.setattr("lightning_rl.module.now", lambda: next(days))
    prompts: list[list[list[int]]] = []

    def run(steps: int, ckpt_path: Path | None = None) -> None:
        seen: list[Any] = []
        keep = ModelCheckpoint(tmp_path / str(len(prompts)), filename=f"{steps}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [recorder(seen)("seen"), keep]
        options: dict[str, Any] = {"max_steps": steps, "ckpt_path": ckpt_path, "enable_checkpointing": True}
        fit(tiny_module(tokenizer=dated()), data=data(), callbacks=callbacks, **options)
        prompts.append([row for rollout in seen for row in rollout.prompt_ids.tolist()])

    run(1)
    saved = torch.load(tmp_path / "0" / "1.ckpt", weights_only=True)["lightning_rl"]
    assert saved["template_date"] == "2026-01-01T23:59:00"
    run(2, tmp_path / "0" / "1.ckpt")
    assert TODAY.moment == "2026-01-01T23:59:00"
    run(1)
    first, resumed, later = ({row[1] for row in rows} for rows in prompts)
    assert first == resumed == {4} and later == {5}


def test_the_moment_does_not_change_within_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(["2026-01-01T00:00:00", "2026-01-02T00:00:00"])
    monkeypatch.setattr(template_date, "now", lambda: next(moments))
    date = template_date.TemplateDate()
    assert (date.text("%d"), date.text("%d")) == ("01", "01")


@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d", "%B %-d, at %H:%M", "no date", "%A%j"])
def test_templates_write_the_moment_as_strftime_does(form: str) -> None:
    moment = template_date.TemplateDate("2026-01-02T03:04:05")
    day = "{% macro day() %}{{ strftime_now(form) }}{% endmacro %}"
    tokenizer = dated("\n" + day + "{% if strftime_now is defined %}<{{ day() }}>{% endif %}")
    shown = [
        tokenizer.apply_chat_template(ROWS[0], tokenize=False, **moment.options(tokenizer, form=form)),
        tokenizer.apply_chat_template(ROWS[0], tokenize=False, form=form),
    ]
    expected = datetime.datetime(2026, 1, 2, 3, 4, 5).strftime(form)
    assert shown[0].strip() == f"<{expected}>" and shown[0][: shown[0].index("<")] == shown[1][: shown[1].index("<")]
