"""I-07, I-09, I-13 and I-20 on what is really drawn: versions, lengths and schema, and where every sample went."""

import pytest
import torch
from kit.support import fill_rollout, fit, parity_reward, recorder, tiny_module

from lightning_rl import FakeEngine, PromptDataModule, RLCallback, Rollout, SamplingParams
from lightning_rl.corrections import Corrections
from lightning_rl.generation import Request
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.collector import Collector
from properties.exports import corrections_with, name_of


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    seen: list[Rollout] = []
    fit(tiny_module(minibatches_per_rollout=2), callbacks=[recorder(seen)("recorder")])
    return seen


def test_i_20_versions_never_fall_and_are_minus_1_where_nothing_was_sampled(rollouts: list[Rollout]) -> None:
    newest = []
    for rollout in rollouts:
        inside = torch.arange(rollout.width) < rollout.response_lengths[:, None]
        assert (rollout.policy_version[~inside] == -1).all()
        versions = torch.where(inside, rollout.policy_version, rollout.policy_version.max())
        assert (versions.diff(dim=1) >= 0).all() and (versions >= 0).all()
        newest.append(int(rollout.policy_version.max()))
    assert len(newest) > 1 and newest == sorted(set(newest))  # later rollouts come from later weights


def test_i_09_every_rollout_has_the_same_fields_and_fitting_lengths(rollouts: list[Rollout]) -> None:
    assert len({tuple(name for name, _ in rollout.tensors()) for rollout in rollouts}) == 1
    for rollout in rollouts:
        assert (rollout.response_lengths <= rollout.width).all()
        inside = torch.arange(rollout.width) < rollout.response_lengths[:, None]
        assert not (rollout.action_mask & ~inside).any() and not (rollout.valid_tokens & ~rollout.action_mask).any()
        padding = rollout.padding_rows(2)
        assert [name for name, _ in padding.tensors()] == [name for name, _ in rollout.tensors()]
        assert not (padding.real | padding.trained | padding.rewarded | padding.valid_tokens.any(-1)).any()


def test_i_07_every_sample_is_there_once(rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        assert len(set(rollout.sample_ids.tolist())) == len(rollout)
        assert rollout.groups.unique(return_counts=True)[1].unique().tolist() == [4]


@pytest.mark.parametrize("correction", corrections_with("keep_groups"), ids=name_of)
@pytest.mark.parametrize("number", [1, 5])
def test_i_13_sampled_is_kept_plus_filtered(correction: RLCallback, number: int) -> None:
    generated: list[int] = []

    def answer(request: Request) -> list[int]:
        generated.append(request.sample_id)
        spread = request.sample_id // 2 % 3 > 0  # not in every third group, the first among them
        return [2] * (1 + spread * request.sample_id % 2) + [1]

    collector = Collector(
        engine=FakeEngine(answer), tokenizer=None, rewards=Rewards([parity_reward]), seed=0, group_size=2,
        corrections=Corrections([correction]), sampling=SamplingParams(max_new_tokens=9, eos_token_ids=[1]),
    )  # fmt: skip
    collector.engine.load_weights([], 0)
    data = PromptDataModule([{"prompt": [2]} for _ in range(90)], 1, shuffle=False)
    data.connect(None, None)
    rollout, stats = fill_rollout(collector, data.take, number)
    sampled, filtered = (int(stats[f"groups/{what}"].value()) for what in ("sampled", "filtered"))
    assert len(generated) == 2 * sampled == len(rollout) + 2 * filtered
    assert len(rollout) == 2 * number and filtered > 0 and len(set(generated)) == len(generated)
