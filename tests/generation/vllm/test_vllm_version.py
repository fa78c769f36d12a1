"""The window of vLLM releases, without any vLLM."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kit.engine_requests import launch
from kit.support import tiny_model, tiny_policy

from lightning_rl import VLLMEngine
from lightning_rl.generation.vllm.vllm_version import BATCH_INVARIANT, check_version, load_vllm, set_batch_invariance


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1.dev3", "0.33.0"])
def test_a_release_of_the_window_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "0.3.2", "dev", ""])
def test_an_error_names_the_window(version: str) -> None:
    with pytest.raises(ImportError, match=rf"expected vllm >= 0.32 and < 0.34, got {version}: install vllm==0.32"):
        check_version(version)


def test_an_engine_of_another_version_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.19.1"))
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    with pytest.raises(ImportError, match=r"got 0\.19\.1"):
        launch(VLLMEngine(), tiny_policy())


def test_a_missing_vllm_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-rl\[vllm\]'"):
        load_vllm()


def test_an_engine_in_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(RuntimeError, match="expected VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        load_vllm()


def test_batch_invariance_needs_a_gpu_that_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"compute capability 9.0 or later for batch_invariant=True, got none"):
        set_batch_invariance()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ValueError, match=r"got 8\.6: remove it"):
        set_batch_invariance()


def test_batch_invariance_is_set_before_vllm_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv(BATCH_INVARIANT, "0")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(ValueError, match="set VLLM_BATCH_INVARIANT=1 before the process starts"):
        set_batch_invariance()
    monkeypatch.delitem(sys.modules, "vllm")
    set_batch_invariance()
    assert os.environ[BATCH_INVARIANT] == "1"
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    set_batch_invariance()


def test_an_engine_refuses_it_before_vllm_is_built() -> None:
    model = tiny_model("qwen2")
    with pytest.raises(ValueError, match="batch_invariant=True, got none"):
        VLLMEngine(batch_invariant=True).start(model, None, device=model.device, dtype=model.dtype)
