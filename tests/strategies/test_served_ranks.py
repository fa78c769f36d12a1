"""Ranks that share servers: rank 0 brings the weights, each draws its own rows, all end alike when servers are lost."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.scripted_server import KEY, Answer, ScriptedServer, servers
from kit.support import fit, recorder, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl import EngineError, RLCallback, Rollout, VLLMServerEngine
from lightning_rl.checkpointing import INTERRUPTED

HOLDS: dict[str, Any] = {"architecture": "Qwen2ForCausalLM"}


class Keep(RLCallback):
    """Store the full weights at the end of a run."""

    name = "keep"

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.weights: dict[str, Tensor] = {
            name: weight.clone() for name, weight in pl_module.parallel.full_parameters(pl_module.policy)
        }


def with_adapter() -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    return get_peft_model(tiny_policy(), config)


def main(folder: Path, strategy: str, name: str, *servers: str) -> None:
    """Three rollouts, from a checkpoint if there is one; saves the weights, or that the engine failed.

    Servers are URLs, or the path of a file that lists them. A name with ``adapter`` trains an adapter.
    """
    torch.set_num_threads(1)
    seen, keep, resume = list[Rollout](), Keep(), folder / INTERRUPTED
    listing = servers if "://" in servers[0] else Path(servers[0])
    policy, lora = (with_adapter, "adapter") if "adapter" in name else (tiny_policy, "merged")
    patience = 1.0 if name == "lost" else 100.0
    engine = VLLMServerEngine(listing, api_key=KEY, canary=False, patience=patience, at_once=2, lora=lora)
    trainer: dict[str, Any] = {"devices": 2, "strategy": STRATEGIES[strategy]()} if strategy != "alone" else {}
    found: dict[str, Any] = {}
    try:
        fit(
            tiny_module(engine=engine, policy=policy), data=tiny_prompts(12, 4),
            callbacks=[recorder(seen)("seen"), keep], default_root_dir=folder,
            ckpt_path=resume if resume.exists() else None, **trainer,
        )  # fmt: skip
        found["weights"] = keep.weights
    except EngineError as error:
        found["error"] = str(error)
    found["samples"] = [rollout.sample_ids for rollout in seen]
    torch.save(found, folder / f"{name}-{os.environ.get('RANK', '0')}.pt")


def check(folder: Path, name: str, rollouts: range, alone: dict[str, Any]) -> None:
    """Both ranks end with the weights of one rank alone, and have drawn every sample once between them."""
    parts = [torch.load(folder / f"{name}-{rank}.pt") for rank in (0, 1)]
    for part in parts:
        for key, weight in part["weights"].items():
            torch.testing.assert_close(weight, alone["weights"][key], rtol=0, atol=1e-5)
    drawn = [sorted(torch.cat(pair).tolist()) for pair in zip(*(part["samples"] for part in parts), strict=True)]
    assert drawn == [list(range(number * 16, number * 16 + 16)) for number in rollouts]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_ranks_share_servers_outlive_them_together_and_go_on_together(strategy: str, tmp_path: Path) -> None:
    one, other = ScriptedServer(**HOLDS), ScriptedServer(**HOLDS)

    def deadly(_: dict[str, Any], answer: Answer) -> Answer:
        if len(one.requests) + len(other.requests) > 40:  # in the third rollout
            one.kill()
            other.kill()
        elif len(one.requests) > 9:  # in the first one or the second
            one.kill()
        return answer

    one.script = other.script = deadly
    healthy = ScriptedServer(**HOLDS)
    with servers(one, other, healthy):
        run_ranks(__file__, 2, tmp_path, strategy, "lost", one.url, other.url)
        lost = [torch.load(tmp_path / f"lost-{rank}.pt") for rank in (0, 1)]
        assert all(
            "expected one of 2 servers" in part["error"] or "generation on every" in part["error"] for part in lost
        )
        assert [len(part["samples"]) for part in lost] == [2, 2]
        run_ranks(__file__, 2, tmp_path, strategy, "resumed", healthy.url)
        (tmp_path / INTERRUPTED).rename(tmp_path / "done.ckpt")
        main(tmp_path, "alone", "alone", healthy.url)
    assert len(healthy.loads) == 1 + 3, "rank 0 alone brings weights"
    check(tmp_path, "resumed", range(2, 3), torch.load(tmp_path / "alone-0.pt"))


@pytest.mark.nightly
def test_every_rank_goes_to_the_servers_that_rank_0_finds_listed(tmp_path: Path) -> None:
    one, other, listing = ScriptedServer(**HOLDS), ScriptedServer(**HOLDS), tmp_path / "servers"
    listing.write_text(one.url)

    def ranks_of(server: ScriptedServer) -> set[str]:
        return {body["request_id"].split("-")[3] for body in server.requests}

    def moving(_: dict[str, Any], answer: Answer) -> Answer:
        if len(one.requests) > 20:  # in the second rollout
            listing.write_text(other.url)
            other.until(lambda known: ranks_of(known) == {"0", "1"})
        return answer

    one.script = moving
    with servers(one, other):
        run_ranks(__file__, 2, tmp_path, "ddp", "moved", listing)
        main(tmp_path, "alone", "alone", other.url)
    assert ranks_of(one) == {"0", "1"} and other.loads
    check(tmp_path, "moved", range(3), torch.load(tmp_path / "alone-0.pt"))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_rank_names_the_adapter_that_rank_0_writes(strategy: str, tmp_path: Path) -> None:
    server = ScriptedServer(**HOLDS, max_lora_rank=8)
    with servers(server):
        run_ranks(__file__, 2, tmp_path, strategy, "adapter", server.url)
        named = {(body["request_id"].split("-")[3], body["model"].rpartition("/")[2]) for body in server.requests}
        assert named == {(rank, version) for rank in "01" for version in "012"}
        assert (len(server.loads), len(server.adapters)) == (1, 3)
        main(tmp_path, "alone", "adapter-alone", server.url)
    check(tmp_path, "adapter", range(3), torch.load(tmp_path / "adapter-alone-0.pt"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *sys.argv[4:])
