"""Extension of a vLLM server's workers: description, comparison of names, and loading of weights.

``lightning-rl serve`` adds :class:`WeightLoader` to each worker (``--worker-extension-cls``), and passes the folder of
weights and the server's address in the environment.
"""

import os
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_rl.generation.vllm import internals
from lightning_rl.generation.vllm.address import LOOPBACK
from lightning_rl.generation.vllm.group import Group, GroupError, Invitation, gpu_of
from lightning_rl.generation.vllm.storage import check_inside
from lightning_rl.generation.weights.weight_folder import read_weights
from lightning_rl.generation.weights.weight_stream import Weights

STORAGE = "LIGHTNING_RL_STORAGE"  # folder of weights; by default that for temporary files
HOST = "LIGHTNING_RL_HOST"  # address at which the server listens; by default loopback


class WorkerDescription(NamedTuple):
    """Properties of a server."""

    architecture: str
    vocabulary: int  # number of token ids
    max_length: int  # of prompt and response together
    dtype: str  # such as float32
    device: str  # such as cuda
    has_tokenizer: bool
    logprobs_mode: str  # distribution of its log-probabilities
    generation_config: str  # source of its sampling defaults
    max_lora_rank: int  # of adapters; 0 if it takes none
    max_pictures: int | None  # in a prompt; None where it reads them in another way than the model


class WeightLoader:
    """Mixin of vLLM's worker, hence the prefix of its names. Returns errors, as an exception would be a status 500."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Any
    rank: int  # among the workers of this server
    device: torch.device
    lightning_rl_group: Group | None = None

    def lightning_rl_describe(self) -> dict[str, Any]:
        """Return the fields of :class:`WorkerDescription`."""
        model, lora = self.vllm_config.model_config, self.vllm_config.lora_config
        return WorkerDescription(
            architecture=str(model.architecture),
            vocabulary=int(model.get_vocab_size()),
            max_length=int(model.max_model_len),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(self.vllm_config.device_config.device_type),
            has_tokenizer=not model.skip_tokenizer_init,
            logprobs_mode=str(model.logprobs_mode),
            generation_config=str(model.generation_config),
            max_lora_rank=0 if lora is None else int(lora.max_lora_rank),
            max_pictures=internals.max_pictures(self.vllm_config),
        )._asdict()

    def lightning_rl_compare(self, sent: Sequence[Sequence[Any]]) -> dict[str, str]:
        """Compare the names and shapes of synced tensors with those of this worker."""
        plan = internals.plan_of(self.vllm_config, self.model_runner.get_model())
        try:
            plan.compare([(name, tuple(shape)) for name, shape in sent])
        except ValueError as error:
            return {"error": str(error)}
        return {}

    def lightning_rl_load(self, folder: str) -> dict[str, str]:
        """Load all weights of a folder on the storage; a failed load leaves a mixture, which a later load repairs."""
        try:
            check_inside(Path(folder), Path(os.environ.get(STORAGE) or tempfile.gettempdir()))
            weights = read_weights(Path(folder))
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        return self._lightning_rl_reload(weights)

    def lightning_rl_join(
        self, invitation: Sequence[Any], first: int, tensors: Sequence[Sequence[Any]]
    ) -> dict[str, str]:
        """Leave the previous group and join this one. A server that listens only on loopback joins no other address."""
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
        except (OSError, RuntimeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}

    def lightning_rl_member(self) -> dict[str, str]:
        """Return the name of this worker's group, and the UUID of its GPU; empty without one."""
        group, gpu = self.lightning_rl_group, gpu_of(self.device) if self.device.type == "cuda" else ""
        return {"group": "" if group is None else group.name, "gpu": gpu}

    def lightning_rl_receive(self, name: str) -> dict[str, str]:
        """Load the weights that are broadcast in a group; a failed load leaves a mixture, which a later load repairs.

        A worker that cannot load them still receives all of them, because other members wait for it; one that cannot
        receive returns ``left``.
        """
        group = self.lightning_rl_group
        if group is None or group.name != name:
            return {"left": f"expected a member of group {name}, got one of {group and group.name}"}
        tensors = group.receive()
        result = self._lightning_rl_reload(tensors)
        try:
            deque(tensors, maxlen=0)
        except GroupError as error:
            result = {"error": str(error)}
        if group.whole:
            return result
        self.lightning_rl_leave()
        return {"left": result.get("error", "expected all tensors to be read, got an early end")}

    def lightning_rl_leave(self) -> dict[str, str]:
        """Leave the group, if there is one."""
        group, self.lightning_rl_group = self.lightning_rl_group, None
        if group is not None:
            group.close()
        return {}

    def _lightning_rl_reload(self, weights: Weights) -> dict[str, str]:
        model = self.model_runner.get_model()
        internals.forget_expert_kernels(model)
        try:
            with internals.without_load_warnings(internals.computed_modules(model)):
                self.reload_weights(weights_iterator=weights)
        except Exception as error:  # noqa: BLE001  the server stays loadable, and the trainer gets the error
            internals.recover(self.vllm_config, model)
            return {"error": f"{type(error).__name__}: {error}"}
        return {}
