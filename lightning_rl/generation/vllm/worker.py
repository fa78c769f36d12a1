"""What a vLLM server can do for the trainer: say what it holds, compare names, load weights from storage or a group.

``lightning-rl serve`` adds :class:`WeightLoader` to each worker of a server (``--worker-extension-cls``), and says in
the environment which folder weights may come from, and at which address the server listens.
"""

import os
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch

from lightning_rl.generation.vllm import internals
from lightning_rl.generation.vllm.address import LOOPBACK
from lightning_rl.generation.vllm.group import Group, GroupError, Invitation, gpu_of
from lightning_rl.generation.vllm.storage import check_inside
from lightning_rl.generation.weights.files import read_weights
from lightning_rl.generation.weights.stream import Stream

STORAGE = "LIGHTNING_RL_STORAGE"  # of weights; that for temporary files if it is not set
PROCESS = token_hex(8)  # the name of this one
HOST = "LIGHTNING_RL_HOST"  # that the server listens at; loopback if it is not set


class Description(NamedTuple):
    """What a server holds."""

    architecture: str
    vocabulary: int  # number of token ids
    max_length: int  # of prompt and response together
    block_size: int  # tokens that its prefix cache keeps together; 0 without such a cache
    dtype: str  # such as float32
    device: str  # such as cuda
    has_tokenizer: bool
    logprobs_mode: str  # which distribution its log-probabilities are of
    generation_config: str  # where its sampling defaults come from
    process: str = ""  # a random name, by which one server behind two URLs is known


class WeightLoader:
    """Mixed into vLLM's worker, so its names begin with ours. An error is an answer, because an exception is a 500."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Any
    rank: int  # among the workers of this server
    device: torch.device
    lightning_rl_group: Group | None = None

    def lightning_rl_describe(self) -> dict[str, Any]:
        """The fields of :class:`Description`."""
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        return Description(
            architecture=str(model.architecture),
            vocabulary=int(model.get_vocab_size()),
            max_length=int(model.max_model_len),
            block_size=int(cache.block_size) if cache.enable_prefix_caching else 0,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(self.vllm_config.device_config.device_type),
            has_tokenizer=not model.skip_tokenizer_init,
            logprobs_mode=str(model.logprobs_mode),
            generation_config=str(model.generation_config),
            process=PROCESS,
        )._asdict()

    def lightning_rl_gpu(self) -> dict[str, str]:
        """The GPU of this worker, as :func:`.group.gpu_of` names it."""
        return {"gpu": gpu_of(self.device)}

    def lightning_rl_compare(self, sent: Sequence[Sequence[Any]]) -> dict[str, str]:
        """Compares names and shapes that a sync will bring with what this worker holds."""
        plan = internals.plan_of(self.vllm_config, self.model_runner.get_model())
        try:
            plan.compare([(name, tuple(shape)) for name, shape in sent])
        except ValueError as error:
            return {"error": str(error)}
        return {}

    def lightning_rl_load(self, folder: str) -> dict[str, str]:
        """Loads all weights of a folder on the storage; none of another one, whoever asks.

        After an error the weights are a mixture, and a later load repairs them.
        """
        try:
            check_inside(Path(folder), Path(os.environ.get(STORAGE) or tempfile.gettempdir()))
            weights = read_weights(Path(folder))
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        return self._lightning_rl_reload(weights)

    def lightning_rl_join(
        self, invitation: Sequence[Any], first: int, tensors: Sequence[Sequence[Any]]
    ) -> dict[str, str]:
        """Joins a group, and leaves the one before. The worker of rank 0 on this server becomes member ``first``.

        A server that listens on loopback alone joins no group beyond it.
        """
        self.lightning_rl_leave()
        try:
            group = Invitation(*invitation)
            if os.environ.get(HOST, LOOPBACK[0]) in LOOPBACK and group.host not in LOOPBACK:
                raise ValueError(
                    f"expected a group on loopback, where this server listens, got one at {group.host}: start the "
                    "server with lightning-rl serve --host"
                )
            specifications = [(str(name), tuple(shape), str(dtype)) for name, shape, dtype in tensors]
            device = self.device if group.backend == "nccl" else torch.device("cpu")
            self.lightning_rl_group = Group(group, specifications, rank=first + self.rank, device=device)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}

    def lightning_rl_membership(self) -> dict[str, str]:
        """The name of the group that this worker is in; empty for none."""
        return {"name": "" if self.lightning_rl_group is None else self.lightning_rl_group.name}

    def lightning_rl_receive(self, name: str) -> dict[str, str]:
        """Loads what is broadcast in a group.

        After an error the weights are a mixture, and a later load repairs them. A worker that cannot load what comes
        reads it to its end all the same, because others wait for it; one that cannot go on says that it has ``left``.
        """
        group = self.lightning_rl_group
        if group is None or group.name != name:
            return {"left": f"expected a member of group {name}, got one of {group and group.name}"}
        tensors = group.receive()
        said = self._lightning_rl_reload(tensors)
        try:
            deque(tensors, maxlen=0)
        except GroupError as error:
            said = {"error": str(error)}
        if group.whole:
            return said
        self.lightning_rl_leave()
        return {"left": said.get("error", "expected all buckets to be read, got an early end")}

    def lightning_rl_leave(self) -> dict[str, str]:
        """Leaves the group, if it is in one."""
        group, self.lightning_rl_group = self.lightning_rl_group, None
        if group is not None:
            group.close()
        return {}

    def _lightning_rl_reload(self, weights: Stream) -> dict[str, str]:
        model = self.model_runner.get_model()
        internals.forget_expert_kernels(model)
        try:
            self.reload_weights(weights_iterator=weights)
        except Exception as error:  # noqa: BLE001  whatever it is, the server has to stay loadable, and the trainer hears
            internals.recover(self.vllm_config, model)
            return {"error": f"{type(error).__name__}: {error}"}
        return {}
