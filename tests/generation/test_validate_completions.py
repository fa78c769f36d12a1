"""Validation of completions: an engine's errors end the run, and a faulty sample is aborted."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_requests import request_of
from kit.rows import Rows
from kit.support import fit, recorder, tiny_module, tiny_prompts, tiny_tokenizer
from torch import Tensor, nan
from typing_extensions import override

from lightning_rl import EngineError, FinishReason, Rollout, SamplingParams, TransformersEngine
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.generation import Capabilities, Completion, Engine, Request
from lightning_rl.generation.validate_completions import Answers
from lightning_rl.rollout import ROUTES
from lightning_rl.run.zero_gradient import IdleRunError

EOS, A = 1, 5
SAMPLING = SamplingParams(max_new_tokens=3, eos_token_ids=[EOS])
REQUESTS = [replace(request_of((2, 3), number), sampling=SAMPLING) for number in range(4)]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the checkpoint of an interrupted run to a temporary folder."""
    monkeypatch.chdir(tmp_path)


class OwnEngine(Engine):
    """Engine as a user writes one."""

    def __init__(self, answer: Callable[[list[Completion]], Any] = list) -> None:
        super().__init__()
        self.answer = answer

    @override
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in weights:
            pass

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        return self.answer([right(request) for request in requests])


def right(request: Request) -> Completion:
    """Return a completion of three tokens, the last of which ends it."""
    ids = (A, A + 1, EOS)
    return Completion(
        token_ids=ids,
        logprobs=torch.tensor([-1.0, -2.0, 0.0]),
        finish=FinishReason.STOP,
        version=0,
        sample_id=request.sample_id,
    )


def check_all(
    engine: Engine, requests: list[Request], given: list[Completion] | None = None, **options: Any
) -> list[Completion]:
    """Return the checked completions of requests, by default those of the engine."""
    answers = Answers(engine, **dict[str, Any](logprobs=True) | options)
    answers.ask(requests)
    given = engine.generate(requests, logprobs=True) if given is None else given
    believed = [answers.check(*pair) for pair in zip(requests, given, strict=True)]
    answers.close()
    return believed


def ask(change: Callable[[list[Completion]], Any], requests: int = 4, **options: Any) -> list[Completion]:
    """Return the checked completions of four requests after a change."""
    engine = OwnEngine(change)
    engine.load_weights([], 0)
    given = [replace(request_of((2, 3 + number), number), sampling=SAMPLING) for number in range(requests)]
    return check_all(engine, given, **dict[str, Any](vocabulary=16) | options)


def one(place: int = 2, **changes: Any) -> Callable[[list[Completion]], list[Completion]]:
    """Return a function that changes one completion."""

    def change(given: list[Completion]) -> list[Completion]:
        return [replace(each, **changes) if number == place else each for number, each in enumerate(given)]

    return change


def test_valid_completions_are_returned_unchanged() -> None:
    given = list[Completion]()

    def keep(completions: list[Completion]) -> list[Completion]:
        given.extend(completions)
        return completions

    believed = ask(keep)
    assert len(believed) == 4 and all(mine is theirs for mine, theirs in zip(believed, given, strict=True))


def swapped(given: list[Completion]) -> list[Completion]:
    return [given[0], given[2], given[1], given[3]]


LONG = {"token_ids": (A,) * 4, "logprobs": torch.full((4,), -1.0), "finish": FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda given: given[:3], "expected 4 completions from OwnEngine, .* got 3", id="missing"),
        pytest.param(
            swapped, r"completion of sample 1 from OwnEngine, got that of sample 2 for sample 1", id="swapped"
        ),
        pytest.param(one(**LONG), r"at most 3 tokens \(max_new_tokens\) from OwnEngine, got 4", id="too-long"),
        pytest.param(one(token_ids=(A, 16, EOS)), r"token ids in \[0, 16\), .* got 16", id="beyond-the-vocabulary"),
        pytest.param(one(logprobs=None), "a log-probability for each of 3 tokens .* got none", id="no-logprobs"),
        pytest.param(one(logprobs=torch.zeros(2)), r"for each of 3 tokens .* of shape \[2\]", id="short-logprobs"),
        pytest.param(one(logprobs=[-1.0] * 3), "got a list .* float32", id="list"),
        pytest.param(one(logprobs=torch.zeros(3).bfloat16()), "got torch.bfloat16 .* float32", id="bfloat16"),
        pytest.param(
            one(logprobs=torch.zeros(3, requires_grad=True)), "with a gradient, .*: return .*no_grad", id="gradient"
        ),
        pytest.param(
            one(logprobs=torch.tensor([-1.0, 0.5, -1.0])), "log-probabilities of at most 0 .* got 0.5", id="positive"
        ),
        pytest.param(one(version=1), "weights that were pushed, the last of which is 0 .* got version 1", id="version"),
        pytest.param(one(versions=(0, 0, 7)), "weights that were pushed, .* got version 7", id="version-of-a-token"),
    ],
)
def test_an_invalid_completion_is_an_error_with_engine_and_sample(
    change: Callable[[list[Completion]], Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message) as raised:
        ask(change)
    assert str(raised.value).rpartition(": ")[2], "what to do"
    if not str(raised.value).startswith("expected 4 completions") and "sample 1" not in message:
        assert "for sample 2 (prompt [2, 5])" in str(raised.value)


def test_an_aborted_sample_needs_no_logprobs() -> None:
    for logprobs, ids in ((None, ()), (torch.tensor([nan]), (A,))):
        believed = ask(one(token_ids=ids, logprobs=logprobs, finish=FinishReason.ABORT))
        assert believed[2].logprobs is not None and believed[2].logprobs.shape == (len(ids),)
        assert [each.finish is FinishReason.ABORT for each in believed] == [False, False, True, False]


def recording(change: Callable[[list[Completion]], Any], names: set[str]) -> list[Completion]:
    """Return the checked completions of an engine that records extras."""
    engine = OwnEngine(change)
    engine.capabilities = Capabilities(extras=frozenset(names))
    engine.select_extras(frozenset(names))
    engine.load_weights([], 0)
    return check_all(engine, REQUESTS)


def extended(place: int, **changes: Any) -> Callable[[list[Completion]], list[Completion]]:
    """Return a function that adds routes to all completions, and other fields to one."""

    def change(given: list[Completion]) -> list[Completion]:
        base = dict[str, Any](token_extras={ROUTES: torch.zeros(3, 2, 1)}, prompt_extras={ROUTES: torch.zeros(2, 2, 1)})
        return [replace(each, **base | (changes if n == place else {})) for n, each in enumerate(given)]

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_extras": {}}, "routed_experts of each of 3 tokens from OwnEngine, got nothing"),
        ({"token_extras": {ROUTES: torch.zeros(2, 2, 1)}}, "of each of 3 tokens from OwnEngine, got 2"),
        ({"token_extras": {ROUTES: [[[0.0]]] * 3}}, "of each of 3 tokens from OwnEngine, got a list"),
        (
            {"token_extras": {ROUTES: torch.tensor(0.0)}},
            "of each of 3 tokens from OwnEngine, got a tensor without axes",
        ),
        ({"token_extras": {ROUTES: torch.zeros(3, 3, 1)}}, r"of shape \[3, 2, 1\].* from OwnEngine, got \[3, 3, 1\]"),
        ({"token_extras": {ROUTES: torch.zeros(3, 2)}}, r"of shape \[3, 2, 1\].* from OwnEngine, got \[3, 2\]"),
        ({"prompt_extras": {}}, "routed_experts of each of 2 tokens from OwnEngine, got nothing"),
        ({"prompt_extras": {ROUTES: torch.zeros(3, 2, 1)}}, "of each of 2 tokens from OwnEngine, got 3"),
    ],
)
def test_extras_have_an_entry_for_each_token(changes: dict[str, Any], message: str) -> None:
    assert len(recording(extended(-1), {ROUTES})) == 4
    with pytest.raises(EngineError, match=message) as raised:
        recording(extended(2, **changes), {ROUTES})
    assert "for sample 2 (prompt" in str(raised.value)


def test_weights_older_than_those_at_the_request_are_refused() -> None:
    engine = OwnEngine()
    for version in (0, 1, 2):
        engine.load_weights([], version)

    def answer(*versions: int) -> list[Completion]:
        given = [replace(right(r), version=v) for r, v in zip(REQUESTS, versions, strict=True)]
        return check_all(engine, REQUESTS, given)

    assert [each.version for each in answer(2, 2, 2, 2)] == [2, 2, 2, 2]
    with pytest.raises(EngineError, match=r"tokens of version 2, which it had at the request, .* got version 1 for"):
        answer(2, 2, 1, 2)
    answers = Answers(engine, logprobs=True)
    answers.ask(REQUESTS)
    engine.load_weights([], 3)  # while it generates
    both = replace(right(REQUESTS[0]), version=2, versions=(2, 3, 3))
    assert answers.check(REQUESTS[0], both).versions == (2, 3, 3)


def test_an_answer_without_any_sample_is_a_warning() -> None:
    def nothing(given: list[Completion]) -> list[Completion]:
        return [replace(each, finish=FinishReason.ABORT) for each in given]

    with pytest.warns(UserWarning, match="OwnEngine aborted every requested sample .* so nothing trains"):
        assert {each.finish for each in ask(nothing)} == {FinishReason.ABORT}


def test_a_run_whose_engine_aborts_everything_ends_with_the_reason() -> None:
    class Lost(TransformersEngine):
        @override
        def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
            drawn = super().generate_batch(requests, logprobs=logprobs)
            return [replace(each, finish=FinishReason.ABORT) for each in drawn]

    told = r"taught the policy nothing: the engine aborted every sample \(FinishReason.ABORT\): .* engine/aborted 16"
    with (
        pytest.warns(UserWarning, match="Lost aborted every requested sample"),
        pytest.warns(UserWarning, match=told),
        pytest.raises(IdleRunError, match=r"8 groups in a row had no gradient .*: the engine aborted every sample"),
    ):
        fit(tiny_module(engine=Lost(), patience=3))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param(
            {"logprobs": torch.tensor([-1.0, -1e30, -1.0])}, r"of -1e\+30 at position 1, at which no token", id="masked"
        ),
        pytest.param({"logprobs": torch.tensor([-1.0, nan, -1.0])}, "a log-probability of nan at position 1", id="nan"),
        pytest.param({"logprobs": torch.tensor([-1.0, -1.0, -torch.inf])}, "of -inf at position 2", id="infinite"),
        pytest.param(
            {"token_ids": (A, A, A)}, r"finish STOP without an id in \[1\] or a stop string", id="stop-without-eos"
        ),
        pytest.param(
            {"finish": FinishReason.LENGTH}, "finish LENGTH although the last id, 1, is an EOS id", id="length-with-eos"
        ),
        pytest.param({"token_ids": (EOS, A, EOS)}, "tokens after an EOS id", id="eos-within"),
        pytest.param(
            {"token_ids": (A, A), "logprobs": torch.zeros(2), "finish": FinishReason.LENGTH},
            "finish LENGTH after 2 of 3 tokens",
            id="length-too-short",
        ),
        pytest.param(
            {"token_ids": (), "logprobs": torch.zeros(0), "finish": FinishReason.STOP},
            "finish STOP without",
            id="empty-stop",
        ),
    ],
)
def test_a_faulty_sample_is_aborted(change: dict[str, Any], what: str) -> None:
    message = rf"1 of 4 samples from OwnEngine are aborted and do not train: got .*{what}.* for sample 2 \(prompt"
    with pytest.warns(UserWarning, match=message):
        believed = ask(one(**change))
    assert [each.finish is FinishReason.ABORT for each in believed] == [False, False, True, False]
    assert believed[2].logprobs is not None and not believed[2].logprobs.any()


def test_several_faulty_samples_are_an_error() -> None:
    def two_nan(given: list[Completion]) -> list[Completion]:
        return [replace(each, logprobs=torch.full((3,), nan)) for each in given[:2]] + given[2:]

    with pytest.raises(
        EngineError, match=r"got a log-probability of nan .* for sample 0 .* and 2 of 4 samples are faulty: look for"
    ):
        ask(two_nan)


def test_an_engine_with_a_limit_may_cut_a_response_short() -> None:
    short = one(token_ids=(A, A), logprobs=torch.zeros(2), finish=FinishReason.LENGTH)
    engine = OwnEngine(short)
    engine.capabilities = Capabilities(cuts_short=True)
    engine.load_weights([], 0)
    assert check_all(engine, REQUESTS)[2].finish is FinishReason.LENGTH
    engine.capabilities, engine.max_length = Capabilities(), 4  # prompt and response
    assert check_all(engine, REQUESTS)[2].finish is FinishReason.LENGTH


def test_a_stop_string_has_to_be_in_the_text() -> None:
    tokenizer, change = tiny_tokenizer(), one(token_ids=(A, A, A), finish=FinishReason.STOP)

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    def answer(stop: str) -> list[Completion]:
        engine = OwnEngine(change)
        engine.load_weights([], 0)
        sampling = replace(SAMPLING, stop=[stop])
        return check_all(engine, [replace(each, sampling=sampling) for each in REQUESTS], text=text)

    assert answer("d")[2].finish is FinishReason.STOP  # id 5 is the letter d
    with pytest.warns(UserWarning, match="finish STOP without an id"):
        assert answer("e")[2].finish is FinishReason.ABORT


class Wrong(TransformersEngine):
    """Embedded engine with one wrong completion."""

    def __init__(self, wrong: Callable[[Completion], Completion], sample_id: int = 5) -> None:
        super().__init__()
        self.wrong, self.sample_id = wrong, sample_id

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn = super().generate_batch(requests, logprobs=logprobs)
        return [self.wrong(each) if each.sample_id == self.sample_id else each for each in drawn]


def not_a_number(completion: Completion) -> Completion:
    return replace(completion, logprobs=torch.full((len(completion.token_ids),), nan))


def test_one_nan_in_a_run_costs_one_row() -> None:
    rows, seen, module = Rows(), list[Rollout](), tiny_module(engine=Wrong(not_a_number))
    with pytest.warns(UserWarning, match="1 of 16 samples from Wrong are aborted and do not train: .* for sample 5"):
        fit(module, callbacks=[rows, recorder(seen)("seen")])
    assert [row["engine/aborted"] for row in rows.rows] == [1.0, 0.0, 0.0, 0.0]
    first = seen[0]
    row = first.sample_ids.tolist().index(5)
    assert first.finish[row] == FinishReason.ABORT and not first.trained[row] and int(first.trained.sum()) == 15
    assert module.run.progress.skipped == 0


@pytest.mark.parametrize("where", ["rollout", "evaluation", "ahead", "answer"])
def test_completions_are_checked_wherever_an_engine_generates(where: str) -> None:
    def beyond(completion: Completion) -> Completion:
        return replace(completion, token_ids=(99, *completion.token_ids[1:]))

    sample = {"rollout": 5, "evaluation": 0, "ahead": 21, "answer": 0}[where]
    module = tiny_module(engine=Wrong(beyond, sample), max_staleness=1 if where == "ahead" else 0)
    runs: dict[str, Callable[[], Any]] = {
        "rollout": lambda: fit(module),
        "evaluation": lambda: fit(module, data=tiny_prompts(validation=[[2, 3]]), num_sanity_val_steps=1),
        "ahead": lambda: fit(module, callbacks=[TruncatedIS()]),
        "answer": lambda: module.generate([2, 3]),
    }
    with pytest.raises(EngineError, match=rf"got 99 for sample {sample} \("):
        runs[where]()
