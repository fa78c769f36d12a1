"""Canary of an engine with a copy of the weights: clean syncs, faults, and ranks that fail together."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.support import fit, tiny_model, tiny_module, tiny_policy, tiny_prompts
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from lightning_rl import FakeEngine, TransformersEngine, VLLMEngine
from lightning_rl.distributed import collectives
from lightning_rl.generation import Canary, CanaryError, Engine, EngineState
from lightning_rl.generation.weights import canary as canaries
from lightning_rl.generation.weights.canary import Measurement, Rounding, Values, canary_of
from lightning_rl.generation.weights.sync import synchronize
from lightning_rl.generation.weights.weight_stream import Weights
from lightning_rl.policy import PolicyModel


def alone(model: PreTrainedModel) -> dict[str, Any]:
    return {"dtype": model.dtype, "packed": True, "context": nullcontext}


class Watched:
    """Policy and an engine with a copy of it."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        self.model, self.version = model, 0
        self.policy = PolicyModel(model, None, temperature=temperature, packed=True)
        self.engine = TransformersEngine()
        launch(self.engine, copy.deepcopy(model))

    def sync(self, change: Callable[[Weights], Weights] = iter) -> tuple[float, float] | None:
        """Sync once; ``change`` may modify the stream."""
        self.version += 1
        take = self.engine.load_stream
        self.engine.load_stream = lambda weights, version: take(change(weights), version)
        try:
            return synchronize(
                self.engine, self.model.named_parameters(), self.version, self.policy, **alone(self.model)
            )
        finally:
            del self.engine.load_stream

    def step(self, scale: float = 1e-3) -> dict[str, Tensor]:
        """Move every weight, and return the old ones."""
        old = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        draw = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += (torch.randn(weight.shape, generator=draw) * scale).to(weight.dtype)
        return old


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clean_syncs_are_clean(dtype: torch.dtype, temperature: float) -> None:
    run = Watched(tiny_policy(dtype=dtype), temperature)
    for _ in range(10):
        found = run.sync()
        assert found is not None and found[1] <= found[0]
        assert found[0] < (0.5 if dtype == torch.bfloat16 else 2e-5)
        run.step()
    assert run.policy.temperature == temperature


def changing(weights: dict[str, Tensor]) -> Callable[[Weights], Iterator[tuple[str, Tensor]]]:
    return lambda stream: ((name, weights.get(name, weight)) for name, weight in stream)


def test_an_engine_that_agreed_before_it_slept_is_advised_to_stay_awake() -> None:
    right, wrong = (Values(torch.full((4,), value), torch.full((4,), value)) for value in (-1.0, -3.0))
    for agreed, sleeps, advised in ((True, True, True), (False, True, False), (True, False, False)):
        canary = Canary()
        judge = partial(canary.judge, trainer=right, rounding=Rounding.FLOAT32)
        if agreed:
            judge(Measurement({"": right}, [], [], 1, sleeps=sleeps))
        with pytest.raises(CanaryError) as raised:
            judge(Measurement({"": wrong}, [], [], 2, sleeps=sleeps))
        assert ("VLLMEngine(sleeps=False)" in str(raised.value)) is advised


def test_each_fault_has_its_message() -> None:
    run = Watched(tiny_model("llama", dtype=torch.float32))
    run.sync()
    run.sync()
    older = run.step()
    zero = {"model.layers.1.self_attn.q_proj.weight": torch.zeros(32, 32)}
    with pytest.raises(CanaryError, match="not the trainer's: "):
        run.sync(changing(zero))
    run.sync()
    middle = run.step()
    with pytest.raises(CanaryError, match=r"bit for bit those of version 4, while the trainer's moved by up to"):
        run.sync(changing(middle))
    run.sync()
    run.step()
    with pytest.raises(CanaryError, match="version 7, but its log-probabilities are bit for bit those of version 2"):
        run.sync(changing(older))
    head = {"lm_head.weight": older["lm_head.weight"]}
    with pytest.raises(CanaryError, match="not the trainer's: "):
        run.sync(changing(head))
    nan = {"model.norm.weight": torch.full((32,), torch.nan)}
    with pytest.raises(CanaryError, match=r"differ by up to nan"):
        run.sync(changing(nan))
    assert run.engine.state is EngineState.AWAKE
    run.sync()
    assert run.engine.state is EngineState.SYNCED


def test_weights_that_change_after_they_were_sent_are_not_called_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(tiny_model("llama", dtype=torch.float32))
    run.engine.holds_copy = True  # as vLLM does before its first sync
    run.sync()
    generate = run.engine.generate

    def overwriting(*arguments: Any, **options: Any) -> Any:
        run.step(0.1)
        return generate(*arguments, **options)

    monkeypatch.setattr(run.engine, "generate", overwriting)
    with pytest.raises(CanaryError, match="the trainer's weights changed in memory after they were sent"):
        run.sync()


def test_a_policy_that_moves_within_rounding_needs_no_engine_that_moves() -> None:
    run = Watched(tiny_policy(dtype=torch.bfloat16))
    run.sync()
    run.sync(changing(run.step(0.0)))
    engine = Values(torch.zeros(3), torch.zeros(2))
    canary, measured = Canary(), Measurement({"": engine}, [], [], 1)
    for move in (0.0, 1e-5):
        canary.judge(
            measured,
            Values(torch.full((3,), move), torch.zeros(2)),
            rounding=Rounding.FLOAT32,
            checksums=(int(move > 0),),
        )
    with pytest.raises(CanaryError, match="bit for bit"):
        canary.judge(
            measured, Values(torch.full((3,), 5e-5), torch.zeros(2)), rounding=Rounding.FLOAT32, checksums=(2,)
        )


def test_coarse_dtypes_are_calibrated_on_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(canary: Canary, difference: float, number: int) -> None:
        noise = Values(torch.randn(64, generator=torch.Generator().manual_seed(number)), torch.zeros(1))
        trainer = Values(noise.fixed + difference, noise.drawn + difference)
        canary.judge(Measurement({"": noise}, [], [], number), trainer, rounding=Rounding.HALF, checksums=(number,))

    monkeypatch.setattr(canaries, "FACTOR", 4.0)
    canary = Canary()
    judged(canary, 0.02, 0)
    judged(canary, 0.07, 1)
    with pytest.raises(CanaryError, match=r"0.09 on average, where rounding explains 0.08 on average"):
        judged(canary, 0.09, 2)
    with pytest.raises(CanaryError, match=r"0.6 on average, where rounding explains 0.5 on average"):
        judged(Canary(), 0.6, 0)


def judge_float32(canary: Canary, largest: float, number: int, *, mean: float = 0.0) -> None:
    """Judge a sync in which all 80 differences are ``mean``, except for a largest one."""
    engine = Values(torch.randn(64, generator=torch.Generator().manual_seed(number)).double(), torch.zeros(16).double())
    trainer = Values(engine.fixed + mean, engine.drawn + mean)
    trainer.fixed[0] = engine.fixed[0] + largest
    canary.judge(Measurement({"": engine}, [], [], number), trainer, rounding=Rounding.FLOAT32, checksums=(number,))


@pytest.mark.parametrize(
    ("first", "later", "beyond"),
    [
        pytest.param(2e-6, 9e-5, 1.1e-4, id="a small model keeps the threshold"),
        pytest.param(5e-5, 2.4e-4, 2.6e-4, id="five times that of the first sync"),
        pytest.param(9e-4, 9.9e-4, 1.1e-3, id="never above the limit of float32"),
    ],
)
def test_the_limit_of_float32_grows_with_the_first_sync_and_is_bounded(
    first: float, later: float, beyond: float
) -> None:
    canary = Canary()
    judge_float32(canary, first, 0)
    judge_float32(canary, later, 1)
    judge_float32(canary, first, 2)
    with pytest.raises(CanaryError, match="not the trainer's: they differ by up to"):
        judge_float32(canary, beyond, 3)
    with pytest.raises(CanaryError, match="not the trainer's: they differ by up to"):
        judge_float32(canary, 0.0, 4, mean=beyond / 10)


def test_a_first_sync_in_float32_has_a_limit_for_the_largest_and_for_the_mean_difference() -> None:
    message = r"where rounding explains 0.001 at most and 0.0001 on average"
    for largest, mean in ((1.1e-3, 0.0), (0.0, 1.1e-4), (math.nan, 0.0)):
        with pytest.raises(CanaryError, match=message):
            judge_float32(Canary(), largest, 0, mean=mean)
    judge_float32(Canary(threshold=2e-3), 1.1e-3, 0)


def zero_layer(model: PreTrainedModel) -> None:
    model.get_parameter("model.layers.1.self_attn.k_proj.weight").zero_()


def one_row_of_the_embedding(model: PreTrainedModel) -> None:
    ids = torch.randint(model.config.vocab_size, (64,), generator=torch.Generator().manual_seed(canaries.SEED))
    model.get_parameter("model.embed_tokens.weight")[ids[40]] *= 1.1


def other_rope(model: PreTrainedModel) -> None:
    rotary: Any = model.get_submodule("model.rotary_emb")
    rotary.inv_freq.copy_(0.9 * rotary.inv_freq)


def other_epsilon(model: PreTrainedModel) -> None:
    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            vars(part)["variance_epsilon"] = 1e-4


def rounded_tensor(model: PreTrainedModel) -> None:
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    weight.copy_(weight.bfloat16())


FAULTS = (zero_layer, one_row_of_the_embedding, other_rope, other_epsilon, rounded_tensor)


@pytest.mark.parametrize("first", [True, False], ids=["first sync", "later sync"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_wrong_weights_and_a_wrong_forward_are_found_from_the_first_sync_on(
    fault: Callable[[PreTrainedModel], None], *, first: bool
) -> None:
    run = Watched(tiny_model("llama", dtype=torch.float32, vocab_size=400, initializer_range=0.15))
    if not first:
        run.sync()
        run.step(1e-5)
    take = run.engine.load_stream

    def broken(weights: Weights, version: int) -> None:
        take(weights, version)
        with torch.no_grad():
            fault(run.engine._model_for("fault"))  # noqa: SLF001

    run.engine.load_stream = broken
    with pytest.raises(CanaryError, match="not the trainer's: "):
        synchronize(run.engine, run.model.named_parameters(), 9, run.policy, **alone(run.model))


def test_one_stale_tensor_of_a_small_step_is_found_after_the_first_sync() -> None:
    run = Watched(tiny_model("llama", dtype=torch.float32, vocab_size=400, initializer_range=0.15))
    run.sync()
    old = run.step(1e-4)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(CanaryError, match="not the trainer's: "):
        run.sync(changing({name: old[name]}))


def tf32(tensor: Tensor) -> Tensor:
    """Round float32 to the 10 bits of mantissa of TF32."""
    return (tensor.contiguous().view(torch.int32) + 0x1000 & -0x2000).view(torch.float32)


def attend_in_tf32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Compute attention as vLLM's Triton kernel does in float32: operands of both products are rounded to TF32."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = tf32(query) @ tf32(key).mT * scaling
    mask = torch.ones_like(scores, dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2]) if mask is None else mask
    weights = scores.masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1)
    return (tf32(weights) @ tf32(value)).transpose(1, 2).contiguous(), None


AttentionInterface.register("tf32", attend_in_tf32)
AttentionMaskInterface.register("tf32", sdpa_mask)


def rounded_run(kind: str, seed: int, request: pytest.FixtureRequest) -> Watched:
    """Return a policy far from uniform, and an engine whose products are rounded to TF32."""
    run = Watched(tiny_model("qwen2", seed, dtype=torch.float32, initializer_range=0.15))
    model: Any = run.engine._model  # noqa: SLF001
    model.set_attn_implementation("tf32")
    if kind == "vllm on a gpu":
        run.engine.allows_tf32 = True
        return run
    matmul: Any = torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]
    request.addfinalizer(
        partial(setattr, matmul, "fp32_precision", matmul.fp32_precision)
    )  # monkeypatch would delete it
    matmul.fp32_precision = "tf32"
    for linear in model.modules():
        if isinstance(linear, nn.Linear):
            rounded = partial(lambda linear, x: nn.functional.linear(tf32(x), tf32(linear.weight), linear.bias), linear)
            linear.forward = rounded
    return run


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["vllm on a gpu", "set_float32_matmul_precision"])
def test_tf32_is_rounding_and_faults_are_still_found(kind: str, seed: int, request: pytest.FixtureRequest) -> None:
    run = rounded_run(kind, seed, request)
    name = f"model.layers.1.{'self_attn.q' if seed % 2 else 'mlp.down'}_proj.weight"
    wrong = {name: torch.zeros_like(run.model.get_parameter(name))}
    with pytest.raises(CanaryError, match=r"rounding explains 0.02 on average"):
        run.sync(changing(wrong))
    older = run.step(1e-5)
    for _ in range(6):
        found = run.sync()
        assert found is not None and found[0] > 5e-4, "more than rounds float32"
        older = run.step(1e-5)
    version = run.version
    with pytest.raises(CanaryError, match=rf"bit for bit those of version {version}, while the trainer's moved"):
        run.sync(changing(older))
    run.sync()
    run.step(1e-5)
    run.sync()
    run.step(1e-5)
    with pytest.raises(CanaryError, match=rf"bit for bit those of version {version}, while the trainer's moved"):
        run.sync(changing(older))
    with pytest.raises(CanaryError, match="not the trainer's: "):
        run.sync(changing(wrong))
    run.sync()


def test_the_coarsest_rounding_of_both_sides_decides(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))

    def rounding(device: str = "cpu", dtype_of_trainer: torch.dtype = torch.float32, **engine: Any) -> Rounding:
        one, model = TransformersEngine(), SimpleNamespace(device=torch.device(device), dtype=torch.float32)
        vars(one).update(engine)
        policy: Any = SimpleNamespace(model=model)
        return canaries.rounding_between(one, policy, dtype_of_trainer)

    assert rounding() is rounding("cuda") is rounding(dtype_of_trainer=torch.float64) is Rounding.FLOAT32
    assert rounding("cuda", allows_tf32=True) is Rounding.TF32
    assert rounding(dtype=torch.bfloat16) is rounding(dtype_of_trainer=torch.float16, allows_tf32=True) is Rounding.HALF
    for precision, expected in (("high", Rounding.TF32), ("medium", Rounding.TF32), ("highest", Rounding.FLOAT32)):
        torch.set_float32_matmul_precision(precision)
        assert rounding() is rounding("cuda") is expected
        assert rounding(dtype=torch.bfloat16) is Rounding.HALF


def test_vllm_may_round_to_tf32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert VLLMEngine().allows_tf32 is gpu and not TransformersEngine().allows_tf32


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan")])
def test_the_threshold_is_checked(threshold: float) -> None:
    with pytest.raises(ValueError, match="expected threshold > 0, got"):
        Canary(threshold=threshold)


def test_a_policy_that_generates_itself_needs_no_canary_and_others_can_do_without() -> None:
    model = tiny_policy()
    for engine in (TransformersEngine(), FakeEngine(lambda _: [1])):
        launch(engine, model)
        policy = PolicyModel(model, None, temperature=1.0, packed=True)
        weights = model.named_parameters()
        assert synchronize(engine, weights, 0, policy, **alone(model)) is None
    assert TransformersEngine(canary=None).canary is None and TransformersEngine(canary=False).canary is None
    given = Canary(threshold=1e-3)
    assert canary_of(given) is given and isinstance(canary_of(canary=True), Canary)


def test_an_engine_that_only_generates_is_compared_by_its_samples() -> None:
    class OnlyDraws(TransformersEngine):
        capabilities = replace(TransformersEngine.capabilities, scores=False)

    run = Watched(tiny_policy())
    run.engine = OnlyDraws()
    launch(run.engine, copy.deepcopy(run.model))
    run.sync()
    old = run.step()
    with pytest.raises(CanaryError, match="bit for bit"):
        run.sync(changing(old))
    with pytest.raises(NotImplementedError, match="FakeEngine only generates"):
        FakeEngine(lambda _: [1]).score([[1, 2]])


def test_each_copy_of_the_weights_is_compared_with_its_own_past() -> None:
    def measured(version: int, **moves: float) -> Measurement:
        fixed = {name: torch.full((3,), move) for name, move in moves.items()}
        return Measurement(
            {name: Values(row, torch.full((2,), float(version))) for name, row in fixed.items()}, [], [], version
        )

    def trainer(version: int) -> Values:
        return Values(torch.full((3,), float(version)), torch.full((2,), float(version)))

    canary = Canary()
    canary.judge(measured(1, a=1.0, b=1.0), trainer(1), rounding=Rounding.FLOAT32, checksums=(1,))
    canary.judge(measured(2, a=2.0, c=2.0), trainer(2), rounding=Rounding.FLOAT32, checksums=(2,))
    with pytest.raises(CanaryError, match="expected the engine at a to move with the weights of version 3"):
        canary.judge(measured(3, b=3.0, a=2.0), trainer(3), rounding=Rounding.FLOAT32, checksums=(3,))
    with pytest.raises(
        CanaryError, match=r"the engine at c to have the weights of version 4, but .* those of version 2"
    ):
        canary.judge(measured(4, c=2.0 + 5e-6), trainer(4), rounding=Rounding.FLOAT32, checksums=(4,))


def test_a_failure_on_another_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(tiny_policy())
    run.sync()
    monkeypatch.setattr(collectives, "process_objects", lambda mine: [mine, (True, "EngineError: lost")])
    message = r"expected a sync on every rank, but it failed on \[1\]: see their errors, on rank 1 EngineError: lost"
    with pytest.raises(RuntimeError, match=message):
        run.sync()
    assert run.engine.state is EngineState.AWAKE


def test_a_fault_ends_the_run() -> None:
    class Copying(TransformersEngine):
        """Engine that decodes with a copy and ignores weights after the second sync."""

        syncs = 0

        def start(self, model: PreTrainedModel, tokenizer: Any, *, device: torch.device, dtype: torch.dtype) -> None:
            super().start(copy.deepcopy(model), tokenizer, device=device, dtype=dtype)

        def load_stream(self, weights: Any, version: int) -> None:
            self.syncs += 1
            super().load_stream((each for each in weights if self.syncs < 3), version)

    module = tiny_module(engine=Copying())
    with pytest.raises(CanaryError, match=r"version 2, but its log-probabilities are bit for bit those of version 1"):
        fit(module, data=tiny_prompts(16, 4))
    rows: Engine = module.options.engine
    assert rows.state is EngineState.ASLEEP and module.global_step == 2


def test_the_distribution_is_compared_where_the_engine_records_it() -> None:
    model = tiny_model("llama", dtype=torch.float32, vocab_size=400)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(5)
    run = Watched(model)
    run.sync()
    measured = Canary().measure(run.engine, vocabulary=400, temperature=1.0, max_length=256)
    used = {token for row in (*measured.fixed, *measured.drawn) for part in row for token in part}
    first = next(token for token in range(200, 399) if not used & {token, token + 1})

    def swapped(stream: Weights) -> Weights:
        for name, weight in stream:
            other = weight.clone()
            if name == "lm_head.weight":  # the logits of two neighbors that are neither scored nor sampled
                other[[first, first + 1]] = weight[[first + 1, first]]
            yield name, other

    for records in (False, True):
        run = Watched(model)
        if records:
            run.engine.close()
            run.engine.select_extras(frozenset(("top_ids", "top_logprobs")))
            launch(run.engine, copy.deepcopy(model))
        assert run.sync() is not None
        if records:
            with pytest.raises(
                CanaryError, match="sampled tokens agree, but the KL over its likeliest tokens is up to"
            ):
                run.sync(swapped)
        else:
            assert run.sync(swapped) is not None


def unvisited_by(model: PreTrainedModel, canary: Canary) -> dict[str, int]:
    run = Watched(model)
    run.engine.load_weights(model.named_parameters(), 0)
    measured = canary.measure(run.engine, vocabulary=model.config.vocab_size, temperature=1.0, max_length=256)
    return dict(canaries.trainer_values(run.policy, measured, packed=True).unvisited)


def test_experts_that_no_token_visits_are_a_warning_at_the_first_sync() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.float32, num_experts=64, max_position_embeddings=512)
    run = Watched(model)
    with pytest.warns(UserWarning, match=r"visits \d+ of the experts, \d+ of them at model.layers.\d.mlp.gate: .*"):
        run.sync()
    run.step()
    run.sync()  # a warning is an error here
    few, many = (unvisited_by(model, Canary(tokens=number)) for number in (8, 250))
    assert 0 < sum(many.values()) < sum(few.values())
