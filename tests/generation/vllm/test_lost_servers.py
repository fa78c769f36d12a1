"""Servers that die in a rollout: samples stay the same, and a restarted server has the current weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.scripted_server import KEY, Answer, ScriptedServer, servers
from kit.support import fit, recorder, tiny_module, tiny_policy, tiny_prompts, weights_of
from torch import Tensor

from lightning_rl import EngineError, RLLightningModule, Rollout, VLLMServerEngine
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.generation import Canary

HOLDS: dict[str, Any] = {"architecture": "Qwen2ForCausalLM"}


def run(
    *urls: str, seen: list[Rollout], ckpt_path: Path | None = None, patience: float = 20, **options: Any
) -> RLLightningModule:
    """Train on three rollouts of sixteen samples each; servers generate by the seed of the request."""
    module = tiny_module(engine=VLLMServerEngine(urls, api_key=KEY, canary=False, patience=patience))
    fit(module, callbacks=[recorder(seen)("seen")], data=tiny_prompts(12, 4), ckpt_path=ckpt_path, **options)
    return module


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    server = ScriptedServer(**HOLDS)
    with servers(server):
        seen: list[Rollout] = []
        weights = weights_of(run(server.url, seen=seen))
    check_samples(seen)
    return weights


def check_samples(seen: list[Rollout], versions: range = range(3)) -> None:
    """Check that each rollout has each sample once, from the rollout's weights."""
    assert [rollout.sample_ids.tolist() for rollout in seen] == [list(range(v * 16, v * 16 + 16)) for v in versions]
    for rollout, version in zip(seen, versions, strict=True):
        assert (rollout.policy_version[rollout.action_mask] == version).all()


def check_equal(module: RLLightningModule, undisturbed: dict[str, Tensor]) -> None:
    assert all(torch.equal(weight, undisturbed[name]) for name, weight in weights_of(module).items())


class Deadly:
    """Script that kills its server at the n-th request, when others are in flight."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.server = ScriptedServer(self, **HOLDS)

    def __call__(self, _: dict[str, Any], answer: Answer) -> Answer:
        """Return the answer, after killing the server from the n-th request on."""
        if len(self.server.requests) >= self.at:
            self.server.kill()
        return answer


def test_requests_of_a_killed_server_are_sent_to_another(
    undisturbed: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    deadly, other, seen = Deadly(11), ScriptedServer(**HOLDS), []
    with servers(deadly.server, other):
        module = run(deadly.server.url, other.url, seen=seen)
    check_samples(seen)
    check_equal(module, undisturbed)
    assert len(deadly.server.requests) >= 11
    (_,) = [r.message for r in caplog.records if r.message.startswith(f"lost {deadly.server.url}: no answer")]


@pytest.fixture
def reviving() -> Iterator[tuple[Deadly, list[ScriptedServer]]]:
    """Return a server that is killed and restarts at the same port with other weights."""
    revived: list[ScriptedServer] = []

    class Reviving(Deadly):
        def __call__(self, body: dict[str, Any], answer: Answer) -> Answer:
            """Kill the server once, and restart it at once."""
            last = len(self.server.requests) == self.at
            answer = super().__call__(body, answer)
            if last:
                revived.append(ScriptedServer(port=self.server.port, **HOLDS))
            return answer

    deadly = Reviving(21)
    with servers(deadly.server):
        yield deadly, revived
    for server in revived:
        server.kill()


def test_a_restarted_server_loads_the_current_weights_before_it_generates(
    undisturbed: dict[str, Tensor], reviving: tuple[Deadly, list[ScriptedServer]], caplog: pytest.LogCaptureFixture
) -> None:
    (deadly, revived), seen = reviving, []
    module = run(deadly.server.url, seen=seen)
    check_samples(seen)
    check_equal(module, undisturbed)
    (server,) = revived
    assert server.loads and server.loads[0] == deadly.server.loads[-1], "those of the rollout that it comes back into"
    assert [r.message for r in caplog.records].count(f"{server.url} is back, with the current weights") >= 1


def test_without_any_server_the_run_ends_with_a_checkpoint_that_resumes(
    undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    deadly, seen = Deadly(21), []
    with (
        servers(deadly.server),
        pytest.raises(EngineError, match=r"expected one of 1 servers to be ready within 0.3 s"),
    ):
        run(deadly.server.url, seen=seen, patience=0.3, default_root_dir=tmp_path)
    check_samples(seen, range(1))
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 1
    server, resumed = ScriptedServer(**HOLDS), []
    with servers(server):
        module = run(server.url, seen=resumed, ckpt_path=tmp_path / INTERRUPTED)
    check_samples(resumed, range(1, 3))
    check_equal(module, undisturbed)


def shifted_by(shift: float) -> Callable[[dict[str, Any], Answer], Answer]:
    """Return a script that lowers the log-probabilities of prompts."""

    def lower(_: dict[str, Any], answer: Answer) -> Answer:
        assert isinstance(answer, dict)
        entries = [dict(known) for known in answer["prompt_logprobs"][1:]]
        rows = [{token: {"logprob": each["logprob"] - shift} for token, each in entry.items()} for entry in entries]
        return {**answer, "prompt_logprobs": [None, *rows]}

    return lower


@pytest.mark.parametrize(("device", "shift"), [("cpu", 1e-3), ("cuda", 0.1)])
def test_a_restarted_server_with_other_log_probabilities_is_refused(device: str, shift: float) -> None:
    first, policy = ScriptedServer(**HOLDS | {"device": device}), tiny_policy()
    engine = VLLMServerEngine(first.url, api_key=KEY, canary=Canary(), patience=0.5)
    with servers(first):
        launch(engine, policy)
        engine.expect(policy.named_parameters())
        engine.load_weights(policy.named_parameters(), 0)
        assert engine.score_copies([2, 3, 4]).keys() == {first.url}
    second = ScriptedServer(shifted_by(shift), port=first.port, **HOLDS | {"device": device})
    with servers(second):
        with pytest.raises(EngineError, match=rf"agree with another server .* differ by up to {shift:g}"):
            engine.score([[2, 3, 4]])
        assert second.loads
        second.until(lambda known: known.label == "loading")  # the engine may just be trying again
        engine.close()
