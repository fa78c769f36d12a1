"""The module as an object of PyTorch and Lightning: copies, pickles, calls, state_dict, processes, export."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import a_trainer, differing, fit, tiny_module, tiny_prompts, tiny_tokenizer
from transformers import AutoTokenizer

from lightning_rl import Evaluation, PromptDataModule, Rollout
from lightning_rl.cli.export import export


@pytest.mark.parametrize("strategy", ["ddp_notebook", "ddp_fork", "ddp_spawn"])
def test_processes_that_would_end_with_the_trained_policy_are_refused(strategy: str) -> None:
    message = 'strategy="ddp"' if strategy == "ddp_spawn" else 'run a script with strategy="ddp"'
    with pytest.raises((ValueError, TypeError, torch.multiprocessing.ProcessRaisedException), match=message):
        fit(tiny_module(), strategy=strategy, devices=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_is_refused_with_the_option() -> None:
    with pytest.raises(ValueError, match=r"got torch.compile\(module\): pass the module, and model=ModelOptions"):
        fit(torch.compile(tiny_module()))  # pyrefly: ignore[bad-argument-type]


def test_a_pickle_and_a_call_are_refused_with_the_cure() -> None:
    module = tiny_module()
    with pytest.raises(TypeError, match=r"attempt to pickle it.*save_checkpoint or save_pretrained"):
        pickle.dumps(module)
    with pytest.raises(NotImplementedError, match=r"call of generate\(prompts\)"):
        module(torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize("name", ["group_size", "engine", "sampling", "options", "run"])
def test_an_attribute_by_the_name_of_an_option_or_of_the_run_is_refused(name: str) -> None:
    module = tiny_module()
    with pytest.raises(
        AttributeError, match=rf'another name than "{name}" for an attribute of RLLightningModule.*module.options'
    ):
        setattr(module, name, 2)
    module.mine = 2
    assert module.mine == 2 and module.options.group_size != 2


@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [
        (tiny_module, "engine", "module.options.engine"),
        (tiny_module, "group_size", "module.options.group_size"),
        (tiny_module, "sampler", "module.run.collector"),
        (tiny_module, "evaluator", "module.run.evaluator"),
        (lambda: tiny_module().run, "current", "progress.current"),
        (tiny_prompts, "cursor", "position.cursor"),
        (lambda: Rollout.of_samples([[2]], [[3]], groups=[0]), "task_rewards", "rewards_by_function"),
    ],
)
def test_former_names_of_attributes_are_errors_with_the_place_of_today(
    owner: Callable[[], object], name: str, place: str
) -> None:
    assert not hasattr(owner(), name)
    with pytest.raises(AttributeError, match=rf"^expected {place}, got .*{name}"):
        getattr(owner(), name)


def test_attributes_and_submodules_by_former_names_belong_to_the_user() -> None:
    module, data = tiny_module(), tiny_prompts()
    module.sampler = torch.nn.Linear(1, 1)
    data.cursor = 3  # pyrefly: ignore[read-only]
    assert isinstance(module.sampler, torch.nn.Linear) and data.cursor == 3
    with pytest.raises(AttributeError, match="has no attribute 'engines'"):
        getattr(module, "engines")  # noqa: B009


@pytest.mark.parametrize("part", ["policy", "collector", "weights", "trainer", "data"])
def test_parts_of_a_run_that_a_stage_builds_are_asked_for_with_the_cure(part: str) -> None:
    module, built = tiny_module(), "policy" if part in ("policy", "collector", "weights") else "Trainer"
    with pytest.raises(
        RuntimeError, match=rf"^expected a run with a {built}, .*: call fit, validate, test or predict of "
    ):
        getattr(module.run, part)
    fit(module, limit_train_batches=1)
    assert getattr(module.run, part) is not None


@pytest.mark.parametrize("fits", [False, True])
def test_a_copy_has_the_weights_and_trains_alone(fits: bool) -> None:
    module = tiny_module()
    if fits:
        fit(module)
    twin = copy.deepcopy(module)
    fit(twin, max_steps=2)
    again = tiny_module()
    if fits:
        fit(again)
        assert differing(module, twin) and not differing(module, again)
    else:
        fit(again, max_steps=2)
        assert not differing(twin, again) and module.policy is None


def test_weights_are_loaded_into_a_policy_that_has_not_been_built() -> None:
    trained, fresh = tiny_module(), tiny_module()
    fit(trained)
    fresh.load_state_dict(trained.state_dict())
    assert not differing(trained, fresh) and fresh.generate([2, 3]) == trained.generate([2, 3])
    fit(fresh, max_steps=1)


def test_export_calls_the_function_of_a_tokenizer(tmp_path: Path) -> None:
    trainer = fit(tiny_module(), max_steps=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    sources = {"policy": "kit.support:tiny_policy", "tokenizer": "kit.support:tiny_tokenizer"}
    export(tmp_path / "one.ckpt", tmp_path / "exported", **sources)
    exported: Any = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported.eos_token == "</s>"


def test_evaluations_of_unequal_lengths_score_no_empty_batch() -> None:
    def strict(prompts: Any, completions: Any, *, answer: Any, **columns: Any) -> list[float]:
        return [1.0 for _ in answer]

    def rows(number: int) -> list[dict[str, Any]]:
        return [{"prompt": [2 + place % 3], "answer": "a"} for place in range(number)]

    evaluations = [Evaluation("short", rows(3)), Evaluation("long", rows(11), rewards=strict)]
    module = tiny_module(rewards=strict, evaluation=evaluations, tokenizer=tiny_tokenizer())
    data = PromptDataModule(rows(8), 4, validation=rows(2), validation_batch_size=4)
    fit(module, data=data, max_steps=1, num_sanity_val_steps=2)
    figures = a_trainer().validate(module, data, verbose=False)[0]
    assert figures["val/long/reward/strict"] == figures["val/short/reward/strict"] == 1.0, sorted(figures)
