"""The module as an object of PyTorch and Lightning: copies, pickles, calls, state_dict, processes."""

import copy
import pickle

import pytest
import torch
from kit.support import differing, fit, tiny_module


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
