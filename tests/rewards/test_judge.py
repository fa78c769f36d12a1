"""Judge: scores from a local server that is slow, busy or broken, without superfluous requests."""

import asyncio
import json
import math
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from rewards.endpoint import Endpoint, Script, serving

from lightning_rl.rewards import Judge

SECRET = "sk-do-not-show"
Reply = tuple[int, Any]


def completion(answer: Any, prompt_tokens: int = 100, completion_tokens: int = 10) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return json.dumps({"choices": [{"message": {"content": answer}}], "usage": usage}).encode()


def failure(status: int, message: str) -> Reply:
    return status, {"error": {"message": message}}


@pytest.fixture
def serve() -> Iterator[Callable[[Script], Endpoint]]:
    with ExitStack() as stack:
        yield lambda script: stack.enter_context(serving(script))


def of(endpoint: Endpoint, **options: Any) -> Judge:
    known: dict[str, Any] = {"model": "judge-1", "base_url": f"{endpoint.url}/v1", "api_key_env": None}
    return Judge(**{**known, **options})


def ask(judge: Judge, completions: Sequence[Any], **columns: Any) -> list[float | None]:
    return asyncio.run(judge(["What?"] * len(completions), completions, completion_ids=[], **columns))


def question(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


def by_length(body: dict[str, Any], seen: int) -> Reply:
    """Return the number of letters of the response as its score."""
    response = question(body).split("<response>\n")[1].split("\n</response>")[0]
    return 200, completion(json.dumps({"reason": "its length", "score": len(response)}))


def test_scores_lie_on_the_scale(serve: Callable[[Script], Endpoint]) -> None:
    endpoint = serve(by_length)
    chat = [{"role": "assistant", "content": "xxxxx"}]
    assert ask(of(endpoint), ["", "x" * 10, chat]) == [0.0, 1.0, 0.5]
    assert ask(of(endpoint, scale=(20, 0)), ["x" * 5]) == [0.75]
    assert {headers["path"] for _, headers in endpoint.requests} == {"/v1/chat/completions"}
    body, _ = endpoint.requests[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-1", 0.0, 512)


def test_the_template_is_filled_with_prompt_completion_and_columns(serve: Any) -> None:
    endpoint = serve(lambda *_: (200, completion('{"score": 10}')))
    judge = of(
        endpoint,
        template="{prompt}|{completion}|{rubric}|{{}}",
        system="Be fair.",
        options={"top_p": 0.5, "max_tokens": 9},
    )
    prompts = [[{"role": "system", "content": "s"}, {"role": "user", "content": "{rubric}"}]]
    assert asyncio.run(judge(prompts, ["{prompt} \ud800%s"], rubric=[7])) == [1.0]
    ((body, _),) = endpoint.requests
    assert question(body) == "system: s\n\nuser: {rubric}|{prompt} ?%s|7|{}"
    assert body["messages"][0] == {"role": "system", "content": "Be fair."} and (body["top_p"], body["max_tokens"]) == (
        0.5,
        9,
    )


@pytest.mark.parametrize(
    ("options", "answer", "value"),
    [
        ({}, '{"score": 5}', 0.5),
        ({}, 'Well.\n```json\n{"reason": "a {b}", "score": "5"}\n```', 0.5),
        ({}, '{"score": 1} no: {"score": 5}', 0.5),
        ({}, '{"reason": "it says \\"score\\": 10", "score": 5}', 0.5),
        ({}, '{"reason": "{\\"score\\": 10}", "score": 5}', 0.5),
        ({"pattern": r"Rating: \[\[(\d+)\]\]"}, "Rating: [[1]] Rating: [[5]]", 0.5),
        ({}, '{"score": 11}', None),
        ({}, '{"score": -1}', None),
        ({}, '{"score": NaN}', None),
        ({}, '{"score": true}', None),
        ({}, '{"score": null}', None),
        ({}, '{"score": [5]}', None),
        ({}, "5", None),
        ({}, "", None),
        ({}, "{" * 10**5, None),
        ({}, '{"a":' * 10**4, None),
        ({"pattern": r"Rating: (\w+)"}, "Rating: good", None),
        ({"pattern": r"(?:(.*?),){12}P"}, ",".join("1" * 60), None),
    ],
)
def test_answers(options: dict[str, Any], answer: str, value: float | None, serve: Any) -> None:
    judge = of(serve(lambda *_: (200, completion(answer))), **options)
    if value is not None:
        assert ask(judge, ["x"]) == [value]
        return
    with pytest.warns(UserWarning, match=r"returned no score for 1 of 1 completions.*expected a score from 0 to 10"):
        (found,) = ask(judge, ["x"])
    assert found is not None and math.isnan(found)


@pytest.mark.nightly
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_endpoint_is_asked_again(status: int, serve: Any) -> None:
    def script(body: dict[str, Any], seen: int) -> Reply:
        return (200, completion('{"score": 10}')) if seen == 2 else failure(status, "later")

    endpoint = serve(script)
    assert ask(of(endpoint, retries=2), ["x"]) == [1.0] and len(endpoint.requests) == 3


def test_after_the_last_retry_only_its_row_fails(serve: Any) -> None:
    def script(body: dict[str, Any], seen: int) -> Reply:
        return (500, b"broken") if "bad" in question(body) else (200, completion('{"score": 10}'))

    endpoint = serve(script)
    logged: dict[str, Any] = {}
    with pytest.warns(UserWarning, match=r"for 1 of 3 completions.*InternalServerError.*500.*broken"):
        values = ask(of(endpoint, retries=2), ["good", "bad", "fine"], log_extra=logged.__setitem__)
    assert list(logged) == ["reason"] and logged["reason"][::2] == [None, None] and "broken" in logged["reason"][1]
    assert values[0] == values[2] == 1.0 and values[1] is not None and math.isnan(values[1])
    assert len(endpoint.requests) == 5


def test_a_refusal_is_not_asked_again_and_shows_no_key(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    endpoint = serve(lambda *_: failure(401, f"wrong key {SECRET}"))
    judge = of(endpoint, api_key_env="JUDGE_KEY")
    with pytest.warns(UserWarning, match=r"AuthenticationError.*401.*wrong key \*\*\*") as caught:
        ask(judge, ["x"])
    assert endpoint.requests[0][1]["authorization"] == f"Bearer {SECRET}" and len(endpoint.requests) == 1
    shown = [str(warning.message) for warning in caught] + [repr(judge), repr(vars(judge))]
    assert not any(SECRET in text for text in shown) and SECRET.encode() not in pickle.dumps(judge)


@pytest.mark.parametrize(
    "content", [b"", b"no json", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": 4}}]}']
)
def test_an_answer_without_a_chat_completion_fails_its_row(content: bytes, serve: Any) -> None:
    with pytest.warns(UserWarning, match=r"expected (a chat completion|text as the answer), got"):
        (value,) = ask(of(serve(lambda *_: (200, content))), ["x"])
    assert value is not None and math.isnan(value)


@pytest.mark.nightly
def test_a_slow_answer_is_one_time_out_and_the_deadline_is_the_last(serve: Any) -> None:
    release = threading.Event()

    def script(body: dict[str, Any], seen: int) -> Reply:
        if "slow" in question(body):
            release.wait(60)
        return 200, completion('{"score": 10}')

    endpoint = serve(script)
    try:
        with pytest.warns(UserWarning, match="did not answer: APITimeoutError"):
            values = ask(of(endpoint, timeout=2.0, retries=0), ["slow", "quick"])
        assert values == pytest.approx([math.nan, 1.0], nan_ok=True)
        with pytest.warns(UserWarning, match=r"got no answer within deadline=2 s"):
            values = ask(of(endpoint, deadline=2.0), ["slow", "quick"])
        assert values == pytest.approx([math.nan, 1.0], nan_ok=True)
    finally:
        release.set()


def test_many_are_asked_at_once_and_never_more_than_allowed(serve: Any) -> None:
    barrier = threading.Barrier(4)

    def script(body: dict[str, Any], seen: int) -> Reply:
        barrier.wait(20)  # passes only if four are there at the same time
        return 200, completion('{"score": 10}')

    endpoint = serve(script)
    assert ask(of(endpoint, concurrency=4), [f"x{row}" for row in range(12)]) == [1.0] * 12
    assert endpoint.peak == 4 and len(endpoint.requests) == 12


def test_equal_requests_of_a_call_are_sent_once(serve: Any) -> None:
    endpoint = serve(by_length)
    assert ask(of(endpoint), ["xx", "xx", "xxx"]) == [0.2, 0.2, 0.3] and len(endpoint.requests) == 2


def test_counts_are_logged_for_each_call(serve: Any) -> None:
    logged: list[tuple[str, float]] = []
    judge = of(serve(by_length))
    ask(judge, ["x", "xx"], log_metric=lambda name, value: logged.append((name, value)))
    assert dict(logged) == {
        "requests": 2,
        "failed": 0,
        "prompt_tokens": 200,
        "completion_tokens": 20,
    }


@pytest.mark.parametrize("end", ["\u201d", "\n", "\u00e9"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(
    end: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", f"{SECRET}{end}")
    endpoint = serve(by_length)
    with pytest.raises(ValueError, match="expected a key of printable ASCII characters for") as refused:
        ask(of(endpoint, api_key_env="JUDGE_KEY"), ["x"])
    assert SECRET not in str(refused.value) and not endpoint.requests


def test_a_missing_key_a_missing_column_and_token_ids_are_refused_before_anything_is_sent(serve: Any) -> None:
    endpoint = serve(by_length)
    with pytest.raises(ValueError, match=r"in the environment variable NO_SUCH_KEY, which is not set: set it, name"):
        ask(of(endpoint, api_key_env="NO_SUCH_KEY"), ["x"])
    with pytest.raises(ValueError, match=r"expected a column 'rubric' for Judge.*columns \['answer'\]"):
        ask(of(endpoint, template="{completion} {rubric}"), ["x"], answer=["y"])
    with pytest.raises(ValueError, match="expected prompts as text or as chat messages for a judge, got"):
        asyncio.run(of(endpoint)([[1, 2]], ["x"]))
    assert endpoint.requests == []
