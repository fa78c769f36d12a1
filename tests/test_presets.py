"""Presets: each fits as it is, sets only options that exist, and is written down as it is."""

import dataclasses
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import differing, fit, tiny_module, tiny_policy, weights_of

from lightning_rl import RLLightningModule, SamplingParams, presets
from lightning_rl.callbacks import DynamicSampling, OverlongPenalty, ReferenceKL
from lightning_rl.presets import PRESETS, Preset
from lightning_rl.signal.reductions import SequenceSumNorm, sequence_mean

PAGE = Path(__file__).resolve().parents[1] / "docs" / "presets.py"
LONGEST = 8
each = pytest.mark.parametrize("name", PRESETS)


def small(name: str, **given: Any) -> Preset:
    """A preset for responses that fit into the tiny policy."""
    known = inspect.signature(PRESETS[name]).parameters
    return PRESETS[name](**({"max_new_tokens": LONGEST} if "max_new_tokens" in known else {}), **given)


def run(preset: Preset, *, callbacks: bool = True, rollouts: int = 1, **options: Any) -> RLLightningModule:
    module = tiny_module(**{"max_new_tokens": LONGEST, **options, **preset.options})
    used = preset.callbacks if callbacks else ()
    trainer = fit(module, callbacks=used, max_steps=rollouts * module.steps_per_rollout)
    assert trainer.global_step == rollouts * module.steps_per_rollout and module.run.progress.skipped == 0
    return module


@each
@pytest.mark.parametrize("epochs", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_it_trains_and_warns_of_nothing(name: str, epochs: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "`isinstance|Found .* in eval mode|The .* does not have many workers")
        module = run(small(name), epochs_per_rollout=epochs, rollouts=3 - epochs)
    assert [str(warning.message) for warning in caught] == []
    moved, fresh = weights_of(module), tiny_policy().named_parameters()
    assert all(torch.isfinite(weight).all() for weight in moved.values())
    assert any(not torch.equal(moved[f"policy.model.{part}"], weight) for part, weight in fresh)


def test_luspo_counts_every_token_and_gspo_every_response() -> None:
    luspo, gspo = presets.luspo().options, presets.gspo().options
    assert luspo["loss"] == gspo["loss"] and luspo["advantages"] == gspo["advantages"]
    assert luspo["reduction"] == SequenceSumNorm(1) and gspo["reduction"] is sequence_mean


@each
def test_it_sets_only_options_of_the_module(name: str) -> None:
    known = inspect.signature(RLLightningModule).parameters
    assert set(small(name).options) <= set(known) - {"policy", "rewards"}


@each
def test_it_names_its_source(name: str) -> None:
    source = (inspect.getdoc(PRESETS[name]) or "").partition("Source:")[2]
    assert re.search(r"20\d\d.*arXiv:\d{4}\.\d{5}", " ".join(source.split()))


@each
def test_it_is_read_only_and_made_anew_by_every_call(name: str) -> None:
    preset, other = small(name), small(name)
    with pytest.raises(TypeError, match="does not support item assignment"):
        preset.options["loss"] = "ppo"  # pyrefly: ignore[unsupported-operation]
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.options = {}  # pyrefly: ignore[read-only]
    assert not {id(callback) for callback in preset.callbacks} & {id(callback) for callback in other.callbacks}
    assert "loss" in dict(preset.options) and [type(c) for c in preset.callbacks] == [type(c) for c in other.callbacks]


def test_a_preset_keeps_its_own_copy_of_the_options() -> None:
    options = {"loss": "ppo"}
    preset = Preset(options)
    options["loss"] = "reinforce"
    assert preset.options["loss"] == "ppo"
    assert {**preset.options, "loss": "gspo"} == {"loss": "gspo"}, "an option is replaced as in any mapping"


# the weight of m2po is 1 as long as engine and trainer agree
@pytest.mark.parametrize("name", [name for name in PRESETS if small(name).callbacks and name != "m2po"])
def test_its_callbacks_act(name: str) -> None:
    with_and_without = (run(small(name), callbacks=c, minibatches_per_rollout=2, rollouts=2) for c in (True, False))
    assert differing(*with_and_without)


def test_every_function_of_the_module_that_makes_a_preset_is_known_by_its_name() -> None:
    makers = dict(inspect.getmembers(presets, inspect.isfunction))
    own: dict[str, Callable[..., Any]] = {
        name: maker for name, maker in makers.items() if maker.__module__ == presets.__name__
    }
    assert own == PRESETS


@pytest.mark.parametrize("name", [name for name in PRESETS if "beta" in inspect.signature(PRESETS[name]).parameters])
def test_beta_is_that_of_the_reference_kl(name: str) -> None:
    (callback,) = PRESETS[name](beta=0.125).callbacks
    assert isinstance(callback, ReferenceKL) and callback.beta == 0.125


def test_the_longest_response_reaches_everything_that_depends_on_it() -> None:
    (sampling, penalty), options = presets.dapo(max_new_tokens=50).callbacks, presets.dapo(max_new_tokens=50).options
    assert isinstance(sampling, DynamicSampling) and isinstance(penalty, OverlongPenalty)
    assert (penalty.max_length, penalty.cache, options["sampling"]) == (50, 10, SamplingParams(max_new_tokens=50))
    shortest = presets.dapo(max_new_tokens=3).callbacks[1]
    assert isinstance(shortest, OverlongPenalty) and shortest.cache == 1
    dr_grpo = presets.dr_grpo(max_new_tokens=50).options
    assert (dr_grpo["reduction"], dr_grpo["sampling"]) == (SequenceSumNorm(50), SamplingParams(max_new_tokens=50))


def test_the_page_is_what_the_presets_say() -> None:
    spec = importlib.util.spec_from_file_location("presets_page", PAGE)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    table = script.table()
    assert f"\n{table}{script.END}" in PAGE.with_name("choosing.md").read_text(), "run python docs/presets.py"
    assert all(f"| `{name}` |" in table for name in PRESETS)
