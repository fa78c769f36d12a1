"""Under autocast the embedded engine casts each weight once for a draw, and not at every token."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from kit.engine_requests import launch, request_of
from kit.strategy_cases import lora_policy
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl import TransformersEngine
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.generation import Completion, transformers

PROMPTS = ((2,), (3, 4, 5), (6, 7, 8, 9))
POLICIES: dict[str, Callable[[], Any]] = {
    "trained": tiny_policy,
    "tied": partial(tiny_policy, tie_word_embeddings=True),
    "frozen": lambda: nn.Module.requires_grad_(tiny_policy(), requires_grad=False),
    "adapters": lambda: cast(Any, lora_policy(torch.float32)).get_base_model(),
}
aten = torch.ops.aten


class Casts(TorchDispatchMode):
    """Counts casts of each matrix of a model to half precision, by its address."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {weight.data_ptr() for weight in model.parameters() if weight.dim() > 1}
        self.numbers = Counter[int]()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default and args[0].data_ptr() in self.weights:  # noqa: SLF001  what autocast calls
            self.numbers[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def draw(model: PreTrainedModel) -> tuple[list[Completion], Casts]:
    """Some tokens under the autocast of Lightning's ``bf16-mixed``."""
    engine = TransformersEngine()
    launch(engine, model)
    engine.load_weights([], 0)
    requests = [request_of(ids, n, n, max_new_tokens=6) for n, ids in enumerate(PROMPTS)]
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), Casts(model) as casts:
        return engine.generate(requests, logprobs=True), casts


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_each_weight_is_cast_once_for_a_draw(policy: Callable[[], Any]) -> None:
    model = policy()
    trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    _, casts = draw(model)
    head = model.get_output_embeddings()  # which multiplies float32 on a CPU
    linears = {part.weight.data_ptr() for part in model.modules() if isinstance(part, nn.Linear) and part is not head}
    assert casts.numbers == dict.fromkeys(linears, 1)
    assert {name: weight.requires_grad for name, weight in model.named_parameters()} == trained


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_samples_and_log_probabilities_are_those_of_casts_at_every_token(
    policy: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    once, _ = draw(policy())
    monkeypatch.setattr(transformers, "cached_casts", lambda _: torch.autocast("cpu", enabled=True))
    each, casts = draw(policy())
    assert max(casts.numbers.values()) > 1
    assert [one.token_ids for one in once] == [one.token_ids for one in each]
    for one, other in zip(once, each, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        # float32, for whose head a CPU chooses another kernel if its weight is frozen
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)],
)
def test_a_copy_that_decodes_has_the_dtype_of_the_run(precision: str, expected: torch.dtype) -> None:
    module = tiny_module(max_staleness=1)
    fit(module, callbacks=[TruncatedIS()], data=tiny_prompts(8, 4), precision=precision)
    assert module.models.replica is not None and module.models.replica.dtype == expected == module.options.engine.dtype
    assert {weight.dtype for weight in module.required_policy.parameters()} == {torch.float32}
