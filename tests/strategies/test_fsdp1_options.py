"""Options of FSDPStrategy reach FSDP or are refused."""

from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from kit.ranks import CPUFSDP
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from lightning_rl.distributed import parallel_of


def test_options_reach_the_wrapper() -> None:
    strategy = CPUFSDP(
        parallel_devices=[torch.device("cpu")],
        sharding_strategy="SHARD_GRAD_OP",
        cpu_offload=True,
        forward_prefetch=True,
    )
    with patch("lightning_rl.distributed.fsdp1.FullyShardedDataParallel") as wrapper:
        parallel_of(strategy).shard(nn.Linear(2, 2), [])
    options = wrapper.call_args.kwargs
    assert options["sharding_strategy"] is ShardingStrategy.SHARD_GRAD_OP and options["cpu_offload"].offload_params
    assert options["forward_prefetch"] and options["use_orig_params"]


@pytest.mark.parametrize(("offload", "last", "whole"), [(False, False, 0), (True, False, 1), (True, True, 0)])
def test_gradients_add_up_whole_only_where_fsdp_would_overwrite_parts(offload: bool, last: bool, whole: int) -> None:
    """PyTorch: "FSDP currently does not support gradient accumulation outside no_sync() when using CPU offloading"."""
    strategy = CPUFSDP(parallel_devices=[torch.device("cpu")], cpu_offload=offload)
    model = MagicMock(spec=FullyShardedDataParallel)
    parallel_of(strategy).accumulating(model, last=last)
    assert model.no_sync.call_count == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing_policy": {nn.Linear}}, r"pass model=ModelOptions\(activation_checkpointing=True\)"),
        ({"auto_wrap_policy": {nn.Linear}}, "expected FSDPStrategy without auto_wrap_policy"),
        ({"use_orig_params": False}, "expected FSDPStrategy without auto_wrap_policy and use_orig_params"),
    ],
)
def test_what_would_be_ignored_is_refused(options: dict[str, Any], message: str) -> None:
    strategy = CPUFSDP(parallel_devices=[torch.device("cpu")], **options)
    with pytest.raises(ValueError, match=message):
        parallel_of(strategy).check(1.0)
