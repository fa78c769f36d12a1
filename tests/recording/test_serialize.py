"""Objects come back from JSON as they were, or say that they cannot."""

import inspect
import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import parity_reward, tiny_policy
from properties.exports import CORRECTIONS, ESTIMATOR_EXAMPLES, LOSS_EXAMPLES, REDUCTION_EXAMPLES, VALUE_EXAMPLES

from lightning_rl import ClippedSurrogate, presets
from lightning_rl.callbacks import OPSM, IcePop, ReferenceKL, TeacherKL
from lightning_rl.recording.serialize import Opaque, from_json, opaque_places, to_json
from lightning_rl.signal.kl import k3
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import token_mean

EQUAL = [None, True, 3, 0.1, math.inf, -math.inf, "text", [1, [2.5]], (1, (2,)), {"key": (1, None)}, k3, token_mean]


@pytest.mark.parametrize(
    "value", [*EQUAL, ClippedSurrogate(clip_high=0.28)], ids=lambda value: getattr(value, "__name__", str(value))
)
def test_comes_back_equal(value: Any) -> None:
    assert from_json(json.loads(json.dumps(to_json(value), allow_nan=False))) == value


def test_nan_comes_back() -> None:
    assert math.isnan(from_json(to_json(math.nan)))


@pytest.mark.parametrize(
    "callback", [OPSM(0.5), IcePop(), ReferenceKL(0.1, estimator=k3, as_loss=True)], ids=lambda c: c.name
)
def test_callbacks_come_back_with_their_knobs(callback: Any) -> None:
    twin = from_json(json.loads(json.dumps(to_json(callback))))
    assert type(twin) is type(callback)
    assert vars(twin) == vars(callback)


def test_a_partial_keeps_what_it_binds() -> None:
    twin = from_json(to_json(partial(token_mean, global_sum=local_sum)))
    assert (twin.func, twin.args, twin.keywords) == (token_mean, (), {"global_sum": local_sum})


@pytest.mark.parametrize("value", [lambda view: view, tiny_policy(), torch.zeros(2)], ids=["lambda", "model", "tensor"])
def test_what_cannot_be_imported_says_so_as_soon_as_it_is_used(value: Any) -> None:
    twin = from_json(to_json(value))
    assert isinstance(twin, Opaque)
    with pytest.raises(ValueError, match="pass --recipe with the script that made the run"):
        twin()


def test_places_of_what_cannot_be_imported_are_found() -> None:
    description = {"one": to_json([k3, lambda: 0]), "two": to_json(TeacherKL(lambda: tiny_policy()))}
    places = dict(opaque_places({**description, "three": to_json(parity_reward)}))
    assert list(places) == ["one[1]", "two.teacher", "three"]
    assert "lambda" in places["one[1]"] and places["three"] == "kit.support:parity_reward"


def test_an_object_that_holds_itself_ends() -> None:
    callback = TeacherKL()
    callback.teacher = callback  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(from_json(to_json(callback)).teacher, Opaque)


PRESETS = [name for name, one in vars(presets).items() if inspect.isfunction(one) and name[0] != "_"]
PRESETS = [name for name in PRESETS if getattr(presets, name).__module__ == presets.__name__]
PARTS = [*LOSS_EXAMPLES.values(), *ESTIMATOR_EXAMPLES.values(), *REDUCTION_EXAMPLES.values(), *VALUE_EXAMPLES.values()]


@pytest.mark.parametrize("part", [*PARTS, *CORRECTIONS], ids=lambda part: getattr(part, "name", type(part).__name__))
def test_every_part_of_the_library_comes_back(part: Any) -> None:
    described = to_json(part)
    if list(opaque_places(described)) and not isinstance(part, TeacherKL):  # somebody's own, inside one of ours
        assert type(part).__name__ in ("FunctionLoss", "FunctionEstimator")
    else:
        twin = from_json(json.loads(json.dumps(described, allow_nan=False)))
        assert to_json(twin) == described


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_replayed_without_its_script(preset: str) -> None:
    required = {"max_new_tokens": 8, "max_length": 8}
    recipe = getattr(presets, preset)
    asked = {name: value for name, value in required.items() if name in inspect.signature(recipe).parameters}
    made = recipe(**asked)
    parts = [made.options.get(name) for name in ("loss", "advantages", "reduction", "value_loss")]
    assert list(opaque_places(to_json([*parts, *made.callbacks]))) == []
