"""VLLMEngine in whole runs, with a fake vLLM that behaves as its sources do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.engine_requests import launch, request_of
from kit.fake_vllm import FakeVLLM, fake_vllm
from kit.process_state import state_of_process
from kit.support import a_trainer, callback_of, fit, recorder, tiny_module, tiny_policy, tiny_prompts
from kit.vllm_models import synced
from lightning.fabric.accelerators.cuda import _clear_cuda_memory
from lightning.pytorch import Callback
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl import Rollout, SamplingParams, VLLMEngine
from lightning_rl.generation import EngineState
from lightning_rl.generation.vllm import vllm_version
from lightning_rl.generation.vllm.internals import FREE_WORKSPACES
from lightning_rl.policy import memory


@pytest.fixture
def gpu() -> Iterator[FakeVLLM]:
    with fake_vllm(gpus=1) as fake:
        yield fake


def test_a_fit_in_mixed_precision_passes_its_canary_and_draws(gpu: FakeVLLM) -> None:
    seen: list[Rollout] = []
    module = tiny_module(engine=VLLMEngine())
    fit(module, callbacks=[recorder(seen)("seen")], data=tiny_prompts(8, 4), precision="bf16-mixed")
    assert [int(rollout.policy_version.max()) for rollout in seen] == [0, 1]
    for rollout in seen:
        assert rollout.rollout_logprobs is not None and rollout.rollout_logprobs[rollout.valid_tokens].isfinite().all()
    assert [built.options["enable_sleep_mode"] for built in gpu.built] == [True]
    assert module.options.engine.state is EngineState.ASLEEP


def test_graphs_own_their_workspaces_which_are_kept_until_the_last_engine_closes(
    gpu: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list[str]()
    monkeypatch.setattr(torch._C, FREE_WORKSPACES, lambda: events.append("freed"), raising=False)  # noqa: SLF001
    gpu.captured = lambda: events.append("captured")
    module = tiny_module(engine=VLLMEngine())
    fit(module, data=tiny_prompts(4, 4))
    _clear_cuda_memory()
    assert len(gpu.built) == 1 and events[-2:] == ["freed", "captured"]
    module.close_engine()
    _clear_cuda_memory()
    assert events[-3:] == ["freed", "captured", "freed"]


def test_an_engine_that_was_not_built_leaves_the_functions_around_workspaces(
    gpu: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, FREE_WORKSPACES, lambda: None, raising=False)  # noqa: SLF001
    functions = getattr(torch._C, FREE_WORKSPACES), torch.cuda.CUDAGraph.capture_begin  # noqa: SLF001

    def fail() -> None:
        raise torch.OutOfMemoryError("in a capture")

    gpu.captured = fail
    with pytest.raises(torch.OutOfMemoryError, match="in a capture"):
        launch(VLLMEngine(), tiny_policy())
    assert (getattr(torch._C, FREE_WORKSPACES), torch.cuda.CUDAGraph.capture_begin) == functions  # noqa: SLF001


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16-mixed", "bfloat16"), ("bf16-true", "bfloat16"), ("32-true", "float32"), ("64-true", "float32")],
)
def test_vllm_holds_the_weights_in_the_dtype_in_which_the_run_computes(
    precision: str, expected: str, gpu: FakeVLLM
) -> None:
    module = tiny_module(engine=VLLMEngine())
    fit(module, data=tiny_prompts(4, 4), precision=precision)
    assert [str(built.dtype) for built in gpu.built] == [f"torch.{expected}"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gpu_memory_utilization": None}, r"gpu_memory_utilization to be a number in \(0, 1\], got None"),
        ({"enable_sleep_mode": False}, "no enable_sleep_mode: pass sleeps=False"),
        ({"dtype": "float16"}, "dtype to be a floating dtype of torch, such as torch.bfloat16, got 'float16'"),
        ({"max_model_len": 0}, "max_model_len to be a whole number above 0 or None, got 0"),
        ({"sleeps": "yes"}, "sleeps to be True or False, got 'yes'"),
    ],
)
def test_options_that_would_fail_at_the_first_sync_or_mean_nothing_are_refused(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=f"^expected {expected}"):
        VLLMEngine(**options)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the process state to other values than those that vLLM leaves behind."""
    for name in (
        "OMP_NUM_THREADS",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TRITON_CACHE_DIR",
        "VLLM_FLOAT32_MATMUL_PRECISION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of-the-trainer")
    for name, value in vllm_version.ENVIRONMENT.items():  # which stay
        monkeypatch.setenv(name, value)
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(2)
    with import_module("torch._inductor.config").patch(compile_threads=7):  # monkeypatch would delete it
        yield
    torch.set_float32_matmul_precision(before[0])
    torch.set_num_threads(before[1])


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_process_is_as_before_once_an_engine_was_built(gpus: int) -> None:
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    with fake_vllm(gpus=gpus) as fake:
        fake.device = 1  # vLLM makes its own the current one
        before, engine, model = state_of_process(), VLLMEngine(canary=False), tiny_policy()
        engine.start(model, None, device=device, dtype=model.dtype)
        assert state_of_process() == before
        assert len(fake.built) == 1
        engine.close()


def test_policies_of_one_configuration_share_a_folder_so_that_vllm_finds_its_compiled_code(gpu: FakeVLLM) -> None:
    for path, size in (("here", 32), ("there", 32), ("here", 48)):
        engine, model = VLLMEngine(canary=False), tiny_policy(hidden_size=size)
        model.config.name_or_path = path
        launch(engine, model)
        engine.close()
    first, second, other = (built.folder for built in gpu.built)
    assert first == second != other and sorted(first.parent.iterdir()) == sorted([first, other])
    assert first.is_relative_to(gpu.cache) and list(first.iterdir()) == [first / "config.json"]


class Knobs(SimpleNamespace):
    """Settings of Triton, whose scope restores them."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Restore them at the end."""
        before = dict(vars(self))
        yield
        vars(self).clear()
        vars(self).update(before)


@pytest.mark.parametrize("hook", [None, repr])
def test_triton_reports_kernels_of_the_trainer_as_before(
    hook: Any, gpu: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = SimpleNamespace(autotuning=Knobs(print=False), runtime=Knobs(jit_post_compile_hook=hook))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    engine = VLLMEngine(canary=False)
    launch(engine, tiny_policy())
    assert len(gpu.built) == 1 and (knobs.autotuning.print, knobs.runtime.jit_post_compile_hook) == (False, hook)
    engine.close()


@pytest.mark.usefixtures("process")
def test_vllm_is_built_and_generates_with_its_own_threads_and_the_trainer_s_precision(gpu: FakeVLLM) -> None:
    engine, model = VLLMEngine(canary=False), tiny_policy()
    launch(engine, model)
    engine.expect(model.named_parameters())
    synced(engine, model)
    engine.generate([request_of([2, 3], max_new_tokens=2)])
    engine.close()
    assert gpu.built[0].precision == "high"
    assert gpu.threads_in_step == {1} and torch.get_num_threads() == 2


def test_a_gpu_that_vllm_would_not_take_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    engine, model = VLLMEngine(canary=False), tiny_policy()
    with fake_vllm(gpus=2) as fake, pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=6 and pass devices=1"):
        engine.start(model, None, device=torch.device("cuda", 1), dtype=model.dtype)
    assert fake.built == []


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning")  # Lightning sees vLLM's group
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=["plain", "filtered"])
def test_stages_of_trainers_share_an_engine_which_sleeps_between_them(filters: dict[str, Any], gpu: FakeVLLM) -> None:
    sampling = SamplingParams(max_new_tokens=4, **filters)
    module = tiny_module(engine=VLLMEngine(), sampling=sampling)
    data = tiny_prompts(8, 4, validation=[[2, 3], [5]])
    described: list[Any] = []
    for _ in range(2):
        trainer = a_trainer()
        trainer.validate(module, data, verbose=False)
        for stage in (trainer.fit, partial(trainer.test, verbose=False), trainer.predict):
            assert module.options.engine.state is EngineState.ASLEEP and not gpu.cuda.mapped
            stage(module, data)
            described.append(module.run.configuration["module"]["engine"])
    assert len(gpu.built) == 1 and all(description == described[0] for description in described)


def test_an_engine_that_is_closed_in_its_sleep_leaves_room_for_the_next(gpu: FakeVLLM) -> None:
    module = tiny_module(engine=VLLMEngine())
    fit(module, data=tiny_prompts(4, 4))
    gpu.cuda.held_by_others = gpu.cuda.total - max(gpu.block_sizes())  # the trainer's
    module.close_engine()
    assert not gpu.cuda.mapped and gpu.block_sizes() == []
    gpu.cuda.held_by_others = 0
    fit(module, data=tiny_prompts(4, 4))
    assert len(gpu.built) == 2


def test_an_engine_ends_when_that_of_another_policy_starts(gpu: FakeVLLM) -> None:
    first, second = tiny_module(engine=VLLMEngine()), tiny_module(engine=VLLMEngine())
    for module in (first, second, first):
        fit(module, data=tiny_prompts(4, 4))
        module.generate([2, 3])
    assert len(gpu.built) == 3


def test_an_error_that_ends_a_run_ends_the_engine(gpu: FakeVLLM) -> None:
    module = tiny_module(engine=VLLMEngine())
    with pytest.raises(ZeroDivisionError):
        fit(module, callbacks=[callback_of("fails", observe=lambda _: 1 / 0)], data=tiny_prompts(4, 4))
    assert gpu.block_sizes() == [] and gpu.cuda.error == ""


def test_an_engine_sleeps_before_the_policy_scores(gpu: FakeVLLM) -> None:
    module, states = tiny_module(engine=VLLMEngine(canary=False), minibatches_per_rollout=2), list[EngineState]()

    class Watch(Callback):
        @override
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            module.required_policy.register_forward_pre_hook(lambda *_: states.append(module.options.engine.state))

    fit(module, callbacks=[Watch()], data=tiny_prompts(4, 4))
    assert states == [EngineState.ASLEEP] * 4, "old log-probabilities and update of two minibatches"
    assert len(gpu.built) == 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("sleeps", [None, False])
def test_generating_ahead_on_the_trainer_s_gpu_is_refused_with_the_fix(sleeps: bool | None) -> None:
    module = tiny_module(engine=VLLMEngine(sleeps=sleeps), max_staleness=1)
    with pytest.raises(ValueError, match=r"use VLLMServerEngine on other GPUs, or max_staleness=0"):
        fit(module, data=tiny_prompts(4, 4))


WEIGHTS = sum(4 * weight.numel() for weight in tiny_policy().parameters())  # bytes; AdamW's states are twice as large


class Holding(Callback):
    """Callback that holds weights on the fake GPU, and after the first step the states of AdamW."""

    def __init__(self, gpu: FakeVLLM) -> None:
        self.gpu = gpu
        gpu.cuda.held_by_others = WEIGHTS

    @override
    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        self.gpu.cuda.held_by_others = 3 * WEIGHTS


@pytest.fixture
def full_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVLLM]:
    """Fake of a small GPU: 0.4 of it has room beside the weights, and only 0.28 beside the states as well."""
    monkeypatch.setattr(memory, "CONTEXT", 0)
    monkeypatch.setattr(memory, "ENGINE_CONTEXT", 0)
    with fake_vllm(gpus=1, total=WEIGHTS * 9 // 2) as fake:
        yield fake


def validate_and_fit(gpu: FakeVLLM, **options: Any) -> int:
    """Return the version of the last rollout's weights."""
    engine, data = VLLMEngine(canary=False, **options), tiny_prompts(8, 4, validation=[[2, 3]])
    module = tiny_module(engine=engine, optimizer=partial(AdamW, lr=1e-3))
    a_trainer().validate(module, data, verbose=False)
    assert len(gpu.built) == 1, "an evaluation has no optimizer"
    fit(module, callbacks=[Holding(gpu)], data=data)
    return engine.version


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning")  # Lightning sees vLLM's group
@pytest.mark.parametrize("options", [{}, {"gpu_memory_utilization": 0.29}], ids=["default", "option"])
def test_a_share_without_room_beside_the_optimizer_is_refused_before_the_first_rollout(
    options: dict[str, float], full_gpu: FakeVLLM
) -> None:
    with pytest.raises(ValueError, match=r"beside weights and optimizer states .*: pass gpu_memory_utilization=0.28"):
        validate_and_fit(full_gpu, **options)


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning")
def test_the_share_that_the_refusal_names_has_room_at_the_second_rollout(full_gpu: FakeVLLM) -> None:
    assert validate_and_fit(full_gpu, gpu_memory_utilization=0.28) == 1
