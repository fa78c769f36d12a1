"""Contexts that an environment rewrites: the row of a sample goes on, and the model reads each context on its own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.conversations import Echo, Forgetful, Rewriting, talking_module
from kit.strategy_cases import Watch
from kit.support import fit, recorder, tiny_model, tiny_policy, weights_of
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import SGD
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import PromptDataModule, RLCallback, RLLightningModule, Rollout
from lightning_rl.advantages import GAEOverTurns
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import EntropyBonus, NoEOSMask, OverlongPenalty, RouterReplay, TruncatedIS
from lightning_rl.recording import Recording, RolloutRecorder, replay
from lightning_rl.recording.differences import replay_differences
from lightning_rl.rollout import Tree, segments_of, tree_of, turn_numbers
from lightning_rl.rollouts import collector

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pre-optimization state.*:UserWarning", "ignore:The dirpath has changed:UserWarning"
)
EXPLAINED = {"env/tokens", "env/rewritten", "env/logprob"}  # figures that a rewritten context has others of


def context_starts(rollout: Rollout) -> Tensor:
    """Mask of the first token of each new context."""
    numbers = turn_numbers(rollout)
    return (numbers < 0) & (numbers != torch.nn.functional.pad(numbers, (1, 0))[:, :-1])


def data(number: int = 8, per_rollout: int = 4) -> PromptDataModule:
    rows = [{"prompt": [2 + place % 11, 3 + place % 7, 4][: 1 + place % 3], "place": place} for place in range(number)]
    return PromptDataModule(rows, per_rollout, shuffle=False)


def module_of(environment: type[Echo], **options: Any) -> RLLightningModule:
    policy = partial(tiny_policy, dtype=torch.float64)
    return talking_module(
        **{
            "policy": policy,
            "optimizer": partial(SGD, lr=0.5),
            "minibatches_per_rollout": 2,
            "environment": environment,
            **options,
        }
    )


def run_of(
    environment: type[Echo], *callbacks: Any, folder: Path | None = None, logger: Any = False, **options: Any
) -> tuple[list[Rollout], list[dict[str, float]], dict[str, Tensor]]:
    """The rollouts of a run, its figures and its weights."""
    seen, watch, module = list[Rollout](), Watch(), module_of(environment, **options)
    fit(
        module,
        data=data(),
        callbacks=[recorder(seen)("seen"), watch, *callbacks],
        default_root_dir=folder,
        logger=logger,
    )
    return seen, watch.rows, weights_of(module)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "token_mean", "max_tokens_per_microbatch": 40},
        {"reduction": "prompt_mean", "group_size": 3},
        {"reduction": "sequence_mean", "loss": "gspo", "group_size": 6, "advantages": "rloo"},
        {"advantages": GAEOverTurns(lam=0.9), "critic": "shared"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_context_that_is_rewritten_as_it_was_changes_nothing(options: dict[str, Any]) -> None:
    corrections = (NoEOSMask, partial(OverlongPenalty, max_length=9, cache=4), TruncatedIS)  # which wants old ones
    (ours, our_rows, our_weights), (theirs, their_rows, their_weights) = (
        run_of(environment, *(make() for make in corrections), **options) for environment in (Rewriting, Echo)
    )
    assert len(ours) == len(theirs) == 2 and len(our_rows) == len(their_rows)
    for one, other in zip(ours, theirs, strict=True):
        assert context_starts(one).any() and not context_starts(other).any()
        assert one.sample_ids.tolist() == other.sample_ids.tolist() and len(one) == len(other)
        for name in ("rewards", "finish", "sampled_lengths", "trained", "rewarded"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert torch.equal(one.response_ids[one.action_mask], other.response_ids[other.action_mask])
        for name in ("advantages", "old_logprobs", "rollout_logprobs"):
            drawn = [rollout.require(name)[rollout.action_mask] for rollout in (one, other)]
            assert drawn[0].any()
            assert_close(*drawn, atol=1e-12 if one is ours[0] else 1e-5, rtol=0)
    for row, other in zip(our_rows, their_rows, strict=True):
        assert row.keys() | EXPLAINED == other.keys()
        assert all(row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5) for name in row.keys() - EXPLAINED)
        assert row["env/rewritten"] > 0 and other["env/rewritten"] == 0 and row["optim/grad_norm"] > 0
    for name, weight in their_weights.items():
        assert_close(our_weights[name], weight, atol=1e-6, rtol=0)  # its norms round gradients to float32


def test_the_model_reads_each_context_on_its_own() -> None:
    asked: dict[tuple[int, int], tuple[Any, Any]] = {}

    class Looking(RLCallback):
        name = "looking"

        @override
        def observe_generated(self, pairs: Any) -> None:
            asked.update({(request.sample_id, request.turn): (request, completion) for request, completion in pairs})

    module, seen = module_of(Forgetful), list[Rollout]()
    fit(module, data=data(), callbacks=[recorder(seen)("seen"), Looking()], max_steps=1, num_sanity_val_steps=0)
    rollout, policy = seen[0], tiny_policy(dtype=torch.float64)
    old, turns, found = rollout.require("old_logprobs"), turn_numbers(rollout), 0
    for row, sample in enumerate(rollout.sample_ids.tolist()):
        for turn in range(int(turns[row].max())):
            request, completion = asked[sample, turn]
            ids = torch.tensor([*request.prefix_ids, *completion.token_ids])
            logits = policy(input_ids=ids[None], use_cache=False).logits[0, len(request.prefix_ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert_close(old[row][turns[row] == turn + 1], expected.detach(), atol=1e-12, rtol=0)
            found += turn > 0 and len(request.prefix_ids) == 4
    assert found > 4, "prefixes of four tokens, even after longer ones"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"packing": False, "reduction": "sequence_mean"},
        {"advantages": GAEOverTurns(lam=0.9), "critic": "shared"},
    ],
    ids=["padded", "critic"],
)
@pytest.mark.parametrize("environment", [Forgetful, Rewriting])
def test_the_audit_has_nothing_to_say(environment: type[Echo], options: dict[str, Any], tmp_path: Path) -> None:
    audit, logger = SignalAudit(every_n_rollouts=1, mode="raise"), CSVLogger(tmp_path)
    seen, *_ = run_of(environment, audit, NoEOSMask(), policy=tiny_policy, logger=logger, **options)
    assert audit.findings == [] and all(context_starts(rollout).any() for rollout in seen)
    assert "logged_metrics" not in audit.skipped


@pytest.mark.parametrize("packing", [True, False])
def test_contexts_of_a_sample_in_different_microbatches_train_as_in_one(packing: bool, tmp_path: Path) -> None:
    made = []
    for budget in (4096, 8):
        folder, audit = tmp_path / str(budget), SignalAudit(every_n_rollouts=1, mode="raise")
        options: dict[str, Any] = {"critic": "shared", "advantages": GAEOverTurns(lam=0.9), "packing": packing}
        callbacks = audit, RolloutRecorder(folder / "rollouts"), EntropyBonus(0.01)
        made.append(run_of(Forgetful, *callbacks, max_tokens_per_microbatch=budget, folder=folder, **options))
        assert audit.findings == []
    for name, weight in made[0][2].items():
        assert_close(made[1][2][name], weight, atol=1e-6, rtol=0)
    for one, other in zip(made[0][1], made[1][1], strict=True):
        figures = [{name: row[name] for name in row if "seconds" not in name} for row in (one, other)]
        assert figures[1] == pytest.approx(figures[0], rel=1e-5, abs=1e-5)
    recorded = [Recording.load(path) for path in sorted((tmp_path / "8" / "rollouts").glob("*.json"))]
    assert any(
        isinstance(entry, list) for each in recorded for step in each.header["plan"] for m in step for entry in m
    )
    for each in recorded:
        (again,) = replay([each], [each.algorithm()])
        assert not [what for what, one in replay_differences(each, again) if one is not None]


@pytest.mark.nightly
@pytest.mark.parametrize("environment", [Echo, Forgetful])
def test_routes_of_experts_are_those_of_each_context(environment: type[Echo]) -> None:
    seen, *_ = run_of(environment, RouterReplay(), policy=partial(tiny_model, "qwen3_moe"))
    rollout = seen[0]
    found, drawn = rollout.require("old_logprobs"), rollout.action_mask
    assert bool(context_starts(rollout).any()) == (environment is Forgetful)
    assert_close(found[drawn], rollout.require("rollout_logprobs")[drawn].double(), atol=1e-5, rtol=0)


lay_out = collector.lay_out


def lose_marks(*rows: Any, **options: Any) -> Rollout:
    rollout = lay_out(*rows, **options)
    return rollout.replace(segments=segments_of(turn_numbers(rollout).clamp(min=0), rollout.response_lengths))


def mark_too_late(*rows: Any, **options: Any) -> Rollout:
    rollout = lay_out(*rows, **options)
    later = torch.where(context_starts(rollout), 0, turn_numbers(rollout))
    return rollout.replace(segments=segments_of(later, rollout.response_lengths))


def read_on(rollout: Rollout) -> Tree:
    tree = tree_of(rollout)
    return tree._replace(parents=torch.where(tree.is_prompt, -1, torch.arange(len(tree.row)) - 1))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("place", "fault", "check"),
    [
        ("lightning_rl.rollouts.collector.lay_out", lose_marks, "trained_tokens"),
        ("lightning_rl.rollouts.collector.lay_out", mark_too_late, "trained_tokens"),
        ("lightning_rl.policy.sequences.tree_of", read_on, "logprob_alignment"),
    ],
    ids=["marks that are lost", "marks one too late", "contexts that read on"],
)
def test_the_audit_finds_contexts_that_are_not_kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, fault: Any, check: str
) -> None:
    monkeypatch.setattr(place, fault)
    audit = SignalAudit(every_n_rollouts=2, mode="warn")
    with pytest.warns(UserWarning, match="the audit of rollout 0 found"):
        run_of(Forgetful, audit, policy=tiny_policy, folder=tmp_path)
    assert check in {finding.check for finding in audit.findings}
