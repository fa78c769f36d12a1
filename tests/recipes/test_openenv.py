"""Environments of OpenEnv play in conversations, in this process and behind a server; a wrong action is an answer."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from adapters.openenv import OpenEnvEnvironment
from kit.chatter import chatting_module
from kit.support import fit, recorder
from typing_extensions import override

from lightning_rl import FinishReason, PromptDataModule, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.environments import Action, EnvironmentReward
from lightning_rl.rollout import turn_numbers

core: Any = pytest.importorskip("openenv.core")


class Guess(core.Action):
    """A number."""

    number: int


class Hint(core.Observation):
    """Position of the secret."""

    text: str


class Secret(core.Environment):
    """A number from 1 to ``largest``, to be guessed."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    steps = 0

    def reset(self, seed: int | None = None, largest: int = 9, **_: Any) -> Hint:
        """Draws it."""
        self.secret = Random(seed).randint(1, largest)
        return Hint(text=f"Guess my number, from 1 to {largest}.")

    def step(self, action: Guess, **_: Any) -> Hint:
        """Says where it lies."""
        self.steps += 1
        if action.number == self.secret:
            return Hint(text="Right.", done=True, reward=1)
        return Hint(text="higher" if action.number < self.secret else "lower", reward=None if self.steps == 1 else 0.0)

    @property
    def state(self) -> Any:
        """Nothing."""
        return core.State()


class Awaited(Secret):
    """The same in coroutines."""

    @override
    async def reset(self, **options: Any) -> Hint:  # pyrefly: ignore[bad-override]
        return Secret.reset(self, **options)

    @override
    async def step(self, action: Guess, **_: Any) -> Hint:
        return Secret.step(self, action)

    @override
    async def close(self) -> None:
        return None


def parse(text: str) -> Guess:
    return Guess(**json.loads(text))


def text_of(observation: Any) -> str:
    return observation.text


def begun(make: Any = Secret, **options: Any) -> OpenEnvEnvironment:
    environment = OpenEnvEnvironment(make, **dict[str, Any](render=text_of, parse=parse) | options)
    environment.reset({"prompt": "play"}, 3)
    return environment


@pytest.mark.parametrize("make", [Secret, Awaited])
def test_an_episode_is_played_from_the_first_observation_to_its_end(make: Any) -> None:
    environment = OpenEnvEnvironment(make, render=text_of, parse=parse)
    system = {"role": "system", "content": "Be brief."}
    row = {"prompt": [system, {"role": "user", "content": "play"}]}
    assert environment.reset(row, 3) == [system, {"role": "user", "content": "Guess my number, from 1 to 9."}]
    secret = Random(3).randint(1, 9)
    step = environment.step(Action(text=json.dumps({"number": secret + 1})))
    assert (step.messages, step.reward) == ([{"role": "user", "content": "lower"}], None)
    assert environment.step(Action(text=json.dumps({"number": secret - 1}))).reward == 0.0
    step = environment.step(Action(text=json.dumps({"number": secret})))
    assert (step.messages, step.reward, step.done) == ((), 1.0, True)
    environment.close()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"number": 3, "force": true}', "force: Extra inputs are not permitted"),
        ('{"number": "three"}', "number: Input should be a valid integer, unable to parse string as an integer"),
        ("{}", "number: Field required"),
        ("three", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("[3]", "TypeError: "),
        ("[" * 100_000, "RecursionError: "),
    ],
)
def test_what_is_no_action_is_told_to_the_policy_and_never_reaches_the_environment(text: str, error: str) -> None:
    environment = begun()
    step = environment.step(Action(text=text))
    (message,) = step.messages
    assert message["role"] == "user" and json.loads(message["content"])["error"].startswith(error)
    assert (step.done, step.reward, dict(step.metrics)) == (False, None, {"action_errors": 1.0})
    assert environment._remote.steps == 0  # noqa: SLF001


def test_an_answer_that_was_truncated_is_no_action() -> None:
    environment = begun()
    assert environment.step(Action(text='{"number": 3}', finish=FinishReason.LENGTH)).done
    assert environment._remote.steps == 0  # noqa: SLF001


def test_columns_choose_the_task() -> None:
    environment = OpenEnvEnvironment(Secret, render=text_of, parse=parse, columns=["largest"])
    (opening,) = environment.reset({"prompt": "play", "largest": 4, "other": 1}, 3)
    assert opening["content"] == "Guess my number, from 1 to 4."
    with pytest.raises(
        ValueError, match=r"expected a column 'largest' in the data, named by columns=, got \['prompt'\]"
    ):
        environment.reset({"prompt": "play"}, 3)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="expected render to be a function, got 'text': write a lambda"):
        OpenEnvEnvironment(Secret, render="text", parse=parse)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(TypeError, match="expected render to make text of an observation, got None of Hint"):
        begun(render=lambda _: None)
    with pytest.raises(ValueError, match="expected columns to be a list of strings"):
        begun(columns="largest")


def test_a_mistake_in_parse_is_no_fault_of_the_policy() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        begun(parse=lambda text: text.nothing).step(Action(text="3"))


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server of the environment, in a thread."""
    uvicorn: Any = pytest.importorskip("uvicorn")
    app = core.create_fastapi_app(Secret, Guess, Hint, max_concurrent_envs=64)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        running.should_exit = True
        thread.join()


def test_a_client_plays_as_the_environment_does(server: str) -> None:
    environment = OpenEnvEnvironment(
        lambda: core.GenericEnvClient(base_url=server).sync(),
        render=lambda observation: observation["text"],
        parse=lambda text: parse(text).model_dump(),
    )
    (opening,) = environment.reset({"prompt": "play"}, 3)
    assert opening["content"] == "Guess my number, from 1 to 9."
    secret = Random(3).randint(1, 9)
    step = environment.step(Action(text=json.dumps({"number": secret + 1})))
    assert (step.messages, step.reward) == ([{"role": "user", "content": "lower"}], None)
    step = environment.step(Action(text=json.dumps({"number": secret})))
    assert (step.reward, step.done) == (1.0, True)
    environment.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_policy_trains_on_it_under_the_audit(workers: int) -> None:
    rollouts: list[Rollout] = []
    module = chatting_module(
        ["1", "2", "3", "four"],
        environment=partial(
            OpenEnvEnvironment, Secret, render=text_of, parse=lambda text: Guess(number=int(text)), columns=["largest"]
        ),
        rewards=EnvironmentReward(),
        environment_workers=workers,
    )
    data = PromptDataModule([{"prompt": "play", "largest": 3}] * 4, 2, shuffle=False, chat=True)
    audit = SignalAudit(every_n_rollouts=1, mode="raise")
    trainer = fit(module, data=data, callbacks=[recorder(rollouts)("seen"), audit])
    assert trainer.global_step == len(rollouts) == 2
    assert torch.cat([turn_numbers(rollout).amax(-1) for rollout in rollouts]).max() >= 3
    assert set(torch.cat([rollout.rewards for rollout in rollouts]).tolist()) == {0.0, 1.0}
    assert FinishReason.FAILED not in torch.cat([rollout.finish for rollout in rollouts]).tolist()
