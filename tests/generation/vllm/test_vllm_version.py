"""The window of vLLM releases, without any vLLM."""

import sys
from types import SimpleNamespace

import pytest
from kit.engine_requests import launch
from kit.support import tiny_policy

from lightning_rl import VLLMEngine
from lightning_rl.generation.vllm.vllm_version import check_version, load_vllm


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
