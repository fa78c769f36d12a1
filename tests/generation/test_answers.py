"""Answers: what no engine can mean ends the run, what spoils one sample costs its row, and each names the sample."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_requests import request_of
from kit.support import fit, tiny_module, tiny_prompts, tiny_tokenizer
from torch import Tensor, nan
from typing_extensions import override

from lightning_rl import EngineError, FakeEngine, Finish, RLCallback, Rollout, Sampling, TransformersEngine
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.generation import Capabilities, Completion, Engine, Request
from lightning_rl.generation.answers import Answers

EOS, A = 1, 5
SAMPLING = Sampling(max_new_tokens=3, eos_token_ids=[EOS])


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the checkpoint of an interrupted run goes."""
    monkeypatch.chdir(tmp_path)


class OwnEngine(Engine):
    """An engine as a user writes one."""

    def __init__(self, answer: Callable[[list[Completion]], Any] = list) -> None:
        super().__init__()
        self.answer = answer

    @override
    def start(self, model: Any, tokenizer: Any) -> None:
        pass

    @override
    def _take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in weights:
            pass

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        return self.answer([right(request) for request in requests])


def right(request: Request) -> Completion:
    """Three tokens, the last of which ends the response."""
    ids = (A, A + 1, EOS)
    return Completion(
        token_ids=ids,
        logprobs=torch.tensor([-1.0, -2.0, 0.0]),
        finish=Finish.STOP,
        version=0,
        sample_id=request.sample_id,
    )


def ask(change: Callable[[list[Completion]], Any], requests: int = 4, **options: Any) -> list[Completion]:
    """What is believed of four answers after a change."""
    engine = OwnEngine(change)
    engine.load_weights([], 0)
    given = [replace(request_of((2, 3 + number), number), sampling=SAMPLING) for number in range(requests)]
    answers = Answers(**{"engine": engine, "requests": given, "logprobs": True, "vocabulary": 16, **options})
    return answers.check(engine.generate(given, logprobs=True))


def one(place: int = 2, **changes: Any) -> Callable[[list[Completion]], list[Completion]]:
    """Changes one completion."""

    def change(given: list[Completion]) -> list[Completion]:
        return [replace(each, **changes) if number == place else each for number, each in enumerate(given)]

    return change


def test_right_answers_are_believed_as_they_are() -> None:
    given = list[Completion]()

    def keep(completions: list[Completion]) -> list[Completion]:
        given.extend(completions)
        return completions

    believed = ask(keep)
    assert len(believed) == 4 and all(mine is theirs for mine, theirs in zip(believed, given, strict=True))


def swapped(given: list[Completion]) -> list[Completion]:
    return [given[0], given[2], given[1], given[3]]


LONG = {"token_ids": (A,) * 4, "logprobs": torch.full((4,), -1.0), "finish": Finish.LENGTH}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda given: given[:3], "expected 4 completions from OwnEngine, .* got 3", id="missing"),
        pytest.param(lambda given: [*given, given[0]], "expected 4 completions from OwnEngine, .* got 5", id="surplus"),
        pytest.param(lambda _: None, "expected 4 completions from OwnEngine, .* got a NoneType", id="none"),
        pytest.param(
            swapped, r"completion of sample 1 from OwnEngine, got that of sample 2 for sample 1", id="swapped"
        ),
        pytest.param(one(**LONG), r"at most 3 tokens \(max_new_tokens\) from OwnEngine, got 4", id="too-long"),
        pytest.param(one(token_ids=(A, 16, EOS)), r"token ids in \[0, 16\), .* got 16", id="beyond-the-vocabulary"),
        pytest.param(one(token_ids=(A, -1, EOS)), r"token ids in \[0, 16\), .* got -1", id="negative-id"),
        pytest.param(
            one(token_ids=(A, 6.0, EOS)), r"token ids that are whole numbers .* got \[5, 6.0, 1\]", id="float"
        ),
        pytest.param(one(logprobs=None), "a log-probability for each of 3 tokens .* got none", id="no-logprobs"),
        pytest.param(one(logprobs=torch.zeros(2)), "for each of 3 tokens .* got 2", id="short-logprobs"),
        pytest.param(one(logprobs=torch.zeros(3, 1)), r"for each of 3 tokens .* got \[3, 1\]", id="wide-logprobs"),
        pytest.param(
            one(logprobs=torch.tensor([-1.0, 0.5, -1.0])), "log-probabilities of at most 0 .* got 0.5", id="positive"
        ),
        pytest.param(one(version=1), "weights that were pushed, the last of which is 0 .* got version 1", id="version"),
        pytest.param(one(versions=(0, 0, 7)), "weights that were pushed, .* got version 7", id="version-of-a-token"),
        pytest.param(one(finish=1), "a Completion with a Finish from OwnEngine", id="finish"),
    ],
)
def test_what_no_engine_can_mean_is_an_error_with_engine_and_sample(
    change: Callable[[list[Completion]], Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message) as raised:
        ask(change)
    if "completions from" not in message and "sample 1" not in message:
        assert "for sample 2 (request 2 of 4, prompt [2, 5])" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param({"logprobs": torch.tensor([-1.0, nan, -1.0])}, "a log-probability of nan at position 1", id="nan"),
        pytest.param({"logprobs": torch.tensor([-1.0, -1.0, -torch.inf])}, "of -inf at position 2", id="infinite"),
        pytest.param({"logprobs": torch.tensor([torch.inf, -1.0, -1.0])}, "of inf at position 0", id="plus-infinite"),
        pytest.param(
            {"token_ids": (A, A, A)}, r"a stop without an id in \[1\] or a stop string", id="stop-without-eos"
        ),
        pytest.param({"finish": Finish.LENGTH}, "an end for its length, but with the id 1", id="length-with-eos"),
        pytest.param({"token_ids": (EOS, A, EOS)}, "tokens after the one that ends a response", id="eos-within"),
        pytest.param(
            {"token_ids": (A, A), "logprobs": torch.zeros(2), "finish": Finish.LENGTH},
            "an end for its length after 2 of 3 tokens",
            id="length-too-short",
        ),
        pytest.param(
            {"token_ids": (), "logprobs": torch.zeros(0), "finish": Finish.STOP}, "a stop without", id="empty-stop"
        ),
    ],
)
def test_what_spoils_one_sample_aborts_its_row(change: dict[str, Any], what: str) -> None:
    message = rf"1 of 4 samples from OwnEngine are aborted and train nothing: got .*{what}.* for sample 2 \(request 2"
    with pytest.warns(UserWarning, match=message):
        believed = ask(one(**change))
    assert [each.finish for each in believed] == [Finish.STOP, Finish.STOP, Finish.ABORT, Finish.STOP]
    assert believed[2].logprobs is not None and not believed[2].logprobs.any()


def test_if_it_is_so_of_several_samples_it_is_the_engine() -> None:
    def two_nan(given: list[Completion]) -> list[Completion]:
        return [replace(each, logprobs=torch.full((3,), nan)) for each in given[:2]] + given[2:]

    with pytest.raises(
        EngineError, match=r"got a log-probability of nan .* for sample 0 .* and 2 of 4 like it: look for"
    ):
        ask(two_nan)


def test_an_engine_with_a_limit_of_its_own_may_cut_a_response_short() -> None:
    short = one(token_ids=(A, A), logprobs=torch.zeros(2), finish=Finish.LENGTH)

    def limited(given: list[Completion]) -> list[Completion]:
        return short(given)

    engine = OwnEngine(limited)
    engine.capabilities = Capabilities(cuts_short=True)
    engine.load_weights([], 0)
    requests = [replace(request_of((2, 3), number), sampling=SAMPLING) for number in range(4)]
    answers = Answers(engine=engine, requests=requests, logprobs=True)
    assert [each.finish for each in answers.check(engine.generate(requests))][2] is Finish.LENGTH
    engine.capabilities, engine.max_length = Capabilities(), 4  # prompt and response
    assert [each.finish for each in answers.check(engine.generate(requests))][2] is Finish.LENGTH


def test_a_sample_that_the_engine_gave_up_may_be_anything_but_too_long() -> None:
    given_up = one(token_ids=(A,), logprobs=torch.tensor([nan]), finish=Finish.ABORT)
    assert [each.finish for each in ask(given_up)] == [Finish.STOP, Finish.STOP, Finish.ABORT, Finish.STOP]


def test_a_stop_string_has_to_be_in_the_text() -> None:
    tokenizer, change = tiny_tokenizer(), one(token_ids=(A, A, A), finish=Finish.STOP)

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    def answer(stop: str) -> list[Completion]:
        engine = OwnEngine(change)
        engine.load_weights([], 0)
        sampling = replace(SAMPLING, stop=[stop])
        requests = [replace(request_of((2, 3), number), sampling=sampling) for number in range(4)]
        return Answers(engine=engine, requests=requests, logprobs=True, text=text).check(engine.generate(requests))

    assert answer("d")[2].finish is Finish.STOP  # id 5 is the letter d
    with pytest.warns(UserWarning, match="a stop without an id"):
        assert answer("e")[2].finish is Finish.ABORT


class Meddling(OwnEngine):
    """Edits what it is asked."""

    def __init__(self, edit: Callable[[Sequence[Any]], None]) -> None:
        super().__init__()
        self.edit = edit

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn = super()._draw(requests, logprobs=logprobs)
        self.edit(requests)
        return drawn


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda requests: object.__setattr__(requests[1], "prefix_ids", (9,)),
            "its requests alone, got edits of sample 1",
        ),
        (lambda requests: object.__setattr__(requests[0].sampling, "temperature", 0.5), "temperature=1.0.*=0.5"),
    ],
    ids=["request", "sampling"],
)
def test_an_engine_that_edits_its_requests_is_named(edit: Callable[[Sequence[Any]], None], message: str) -> None:
    engine, requests = Meddling(edit), [replace(request_of((2, 3), n), sampling=replace(SAMPLING)) for n in range(2)]
    engine.load_weights([], 0)
    answers = Answers(engine=engine, requests=requests, logprobs=True)
    with pytest.raises(EngineError, match=f"expected Meddling to leave .*{message}"):
        answers.check(engine.generate(requests))


class Wrong(TransformersEngine):
    """The embedded engine, one of whose completions is wrong."""

    def __init__(self, wrong: Callable[[Completion], Completion], sample_id: int = 5) -> None:
        super().__init__()
        self.wrong, self.sample_id = wrong, sample_id

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn = super()._draw(requests, logprobs=logprobs)
        return [self.wrong(each) if each.sample_id == self.sample_id else each for each in drawn]


class Aborted(RLCallback):
    """Counts what was aborted, and keeps the rollouts."""

    name = "aborted"

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.counts: list[float] = []

    @override
    def observe(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        self.counts.append(float(pl_module.run.rollout_stats["rollout/aborted"].value()))


def not_a_number(completion: Completion) -> Completion:
    return replace(completion, logprobs=torch.full((len(completion.token_ids),), nan))


def test_in_a_run_one_nan_costs_one_row_which_is_counted_and_never_blames_the_learning_rate() -> None:
    seen, module = Aborted(), tiny_module(engine=Wrong(not_a_number))
    with pytest.warns(UserWarning, match="1 of 16 samples from Wrong are aborted and train nothing: .* for sample 5"):
        fit(module, callbacks=[seen])
    assert seen.counts == [1.0, 0.0, 0.0, 0.0]
    first = seen.rollouts[0]
    row = first.sample_ids.tolist().index(5)
    assert first.finish[row] == Finish.ABORT and not first.trained[row] and int(first.trained.sum()) == 15
    assert module.run.skipped == 0


@pytest.mark.parametrize("where", ["rollout", "evaluation", "ahead", "answer"])
def test_every_answer_comes_by_the_same_place(where: str) -> None:
    def beyond(completion: Completion) -> Completion:
        return replace(completion, token_ids=(99, *completion.token_ids[1:]))

    sample = {"rollout": 5, "evaluation": 0, "ahead": 21, "answer": 0}[where]
    module = tiny_module(engine=Wrong(beyond, sample), max_staleness=1 if where == "ahead" else 0)
    runs: dict[str, Callable[[], Any]] = {
        "rollout": lambda: fit(module),
        "evaluation": lambda: fit(module, data=tiny_prompts(validation=[[2, 3]]), num_sanity_val_steps=1),
        "ahead": lambda: fit(module, callbacks=[TruncatedIS()]),
        "answer": lambda: module.complete([2, 3]),
    }
    with pytest.raises(EngineError, match=rf"got 99 for sample {sample} \("):
        runs[where]()


def test_a_scripted_engine_is_held_to_its_answers_too() -> None:
    module = tiny_module(engine=FakeEngine(lambda _: [2] * 9))
    with pytest.raises(EngineError, match=r"at most 8 tokens \(max_new_tokens\) from FakeEngine, got 9 for sample 0"):
        fit(module)
