"""Weights of a sharded policy by broadcast: rounded before they are gathered, and the very ones that a server gets."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.scripted_server import KEY, ScriptedServer, servers
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_rl import RLCallback, VLLMServerEngine


class Compare(RLCallback):
    """Compares what is rounded before with what is rounded after it was gathered."""

    name = "compare"

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        parallel, policy = pl_module.parallel, pl_module.policy
        after = {name: weight.bfloat16() for name, weight in parallel.full_parameters(policy)}
        before = {name: weight.clone() for name, weight in parallel.full_parameters(policy, dtype=torch.bfloat16)}
        assert len(before) > 10 and {weight.dtype for weight in before.values()} == {torch.bfloat16}
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in after)


def main(url: str, storage: str) -> None:
    """One rollout, after one sync."""
    torch.set_num_threads(1)
    engine = VLLMServerEngine(url, api_key=KEY, canary=False, patience=20, transfer="broadcast", storage=storage)
    module = tiny_module(engine=engine)
    fit(module, callbacks=[Compare()], data=tiny_prompts(4, 4), devices=2, strategy=STRATEGIES["fsdp2"]())


@pytest.mark.nightly
def test_a_server_gets_the_weights_of_a_sharded_policy_in_its_own_dtype(tmp_path: Path) -> None:
    server = ScriptedServer(architecture="Qwen2ForCausalLM", dtype="bfloat16")
    with servers(server):
        run_ranks(__file__, 2, server.url, tmp_path)
    assert len(server.receptions) == 1 and not server.loads
    expected = {name: weight.bfloat16() for name, weight in tiny_policy().state_dict().items()}
    assert server.weights.keys() == expected.keys()
    assert all(torch.equal(server.weights[name], weight) for name, weight in expected.items())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
