"""RunModels: policy, critic, reference and replica of a run, built and sharded."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lightning_rl.distributed import Parallel, check_agreement, process_count
from lightning_rl.policy.activation_checkpointing import Checkpointing, checkpoint_layers
from lightning_rl.policy.attention import choose_attention, hardware_of
from lightning_rl.policy.build import build_policy, build_scorer, model_and_files
from lightning_rl.policy.compilation import compile_layers
from lightning_rl.policy.liger import apply_liger
from lightning_rl.policy.lora import ModelWithoutAdapter, adapters_of, base_model_of, frozen_copy, is_base_model
from lightning_rl.policy.model import FrozenModel, PolicyModel
from lightning_rl.policy.model_options import ModelOptions
from lightning_rl.policy.processor import PictureProcessor
from lightning_rl.policy.tensor_hash import hash_weights


@dataclass(slots=True, kw_only=True)
class RunModels:
    """Models of a run and their options; the policy itself is an attribute of the module, which trains it.

    Args:
        sources: Sources of ``"policy"``, ``"critic"`` and ``"reference"``.
        temperature: Temperature of the policy.
        options: Memory, kernels and compilation.
        processor: Processor of the policy's pictures, with which models keep their towers; None for text.

    Attributes:
        reference: Frozen reference policy; None if none was needed so far.
        replica: Copy of the policy for an engine that cannot decode with it; None if none was needed so far.
        without_trainer: True if the policy was built without a Trainer, so that it is not sharded.
        stepped: True if the policy has changed since it was built.
    """

    sources: Mapping[str, Any]
    temperature: float
    options: ModelOptions
    processor: PictureProcessor | None = None
    reference: FrozenModel | None = None
    replica: PreTrainedModel | None = None
    without_trainer: bool = False
    stepped: bool = False

    def build(
        self,
        policy: PolicyModel | None,
        parallel: Parallel,
        mesh: DeviceMesh | None,
        *,
        replica: bool,
        reference: bool,
        data: str | None,
    ) -> PolicyModel:
        """Build the models that are missing, check that all ranks have the same ones, and shard them.

        Args:
            policy: Policy, if there is one.
            parallel: Strategy of the run.
            mesh: Devices of the strategy.
            replica: True to build a replica of a new policy.
            reference: True if a reference is needed.
            data: Fingerprint of the prompts; None without prompts.

        Returns:
            Policy with its critic.
        """
        frozen, root, reference = None, parallel.strategy.root_device, reference and self.reference is None
        with parallel.building():
            new, self.without_trainer = policy if self.without_trainer else None, False
            if policy is None:
                policy = new = self.build_policy(split=parallel.splits_first)
            if new is not None and replica:
                self.replica = self.build_replica(parallel, new)
            if reference:
                initial = not self.stepped and (new is not None or not parallel.sharded)
                frozen = self.build_reference(parallel, policy, initial=initial)
            scoring = None if frozen is None else cast(PolicyModel, frozen.scoring)
            self.use_kernels(parallel, *(model for model in (new, scoring) if model is not None))
        _check_ranks({"policy": new, "reference": scoring}, data)
        if new is not None:
            policy = cast(PolicyModel, parallel.shard(new, new.layers(), mesh))
            if new.files is not None:
                policy.fill(root)
        if frozen is not None:
            frozen.shard(lambda model, layers: parallel.shard_frozen(model, layers, mesh), root)
            self.reference = frozen
        elif reference:
            self.reference = ModelWithoutAdapter(policy, policy.model)
        if self.reference is not None:
            self.reference.to(root)  # that of an earlier fit may be on another device
        return policy

    def build_policy(self, *, split: bool = False) -> PolicyModel:
        """Return policy and critic on one device, or with ``split`` without weights if they come from a folder."""
        return build_policy(
            self.sources["policy"],
            self.sources["critic"],
            temperature=self.temperature,
            packed=self.options.packing,
            attention=self.options.attention,
            batch_invariant=self.options.bitwise,
            checkpointing=self._layer_mode(self.options.checkpointing),
            split=split,
            processor=self.processor,
        )

    def checkpoint_activations(self, policy: PolicyModel, mode: Checkpointing) -> None:
        """Change the mode of activation checkpointing of policy and critic."""
        for model in policy.models():
            checkpoint_layers(model, self._layer_mode(mode))

    def _layer_mode(self, mode: Checkpointing | None) -> Checkpointing | None:
        """Return the mode of layers: None for selective ones that are compiled, which keep products by themselves."""
        return None if mode == "selective" and self.options.backend else mode

    def build_reference(self, parallel: Parallel, policy: PolicyModel, *, initial: bool) -> FrozenModel | None:
        """Return the reference, not sharded; None for a policy that without its adapters is the initial one.

        Args:
            parallel: Strategy of the run.
            policy: Policy.
            initial: True if the policy is whole and has not been trained, so that it can be copied.
        """
        given = self.sources["reference"]
        if copies := given is None and initial and policy.model.device.type != "meta":
            model, files = policy.model, None
        else:
            source = self.sources["policy"] if given is None else given
            model, files = model_and_files(
                source, "reference", split=parallel.splits_first, whole=self.processor is not None
            )
        if given is None and files is None:  # the policy before its first step
            inner = base_model_of(model)
            if adapters_of(inner) and is_base_model(inner):
                return None
        if copies:
            model = frozen_copy(model, shares=not parallel.sharded and bool(adapters_of(model)))
        return build_scorer(
            model,
            "reference",
            policy.model,
            temperature=self.temperature,
            packed=self.options.packing,
            attention=self.options.attention,
            batch_invariant=self.options.bitwise,
            files=files,
            processor=self.processor,
        )

    def build_replica(self, parallel: Parallel, policy: PolicyModel) -> PreTrainedModel:
        """Return a frozen copy of a new policy in the compute dtype, for an engine that cannot decode with the policy.

        Args:
            parallel: Strategy of the run.
            policy: New policy.
        """
        whole = copy.deepcopy(policy) if policy.files is None else self.build_policy()
        replica = cast(PolicyModel, parallel.strategy.precision_plugin.convert_module(whole))
        dtype = parallel.compute_dtype(replica.model.dtype)
        if dtype != torch.float16:  # sums would overflow
            replica.to(dtype)
        return replica.model.requires_grad_(requires_grad=False)

    def use_kernels(self, parallel: Parallel, *policies: PolicyModel) -> None:
        """Apply the kernel options to new models.

        Raises:
            ValueError: If the attention kernel does not support the model's dtype or head sizes.
        """
        hardware = hardware_of(parallel.strategy.root_device)
        for policy in policies:
            dtype = parallel.compute_dtype(policy.model.dtype)
            for size in policy.head_sizes():
                choose_attention(self.options.attention, hardware, dtype, frozenset((size,)))
            for model in policy.models() if self.options.liger else ():
                apply_liger(model)
            if self.options.backend:
                compile_layers(policy, policy.layers(), self.options.backend)


def _check_ranks(models: Mapping[str, PolicyModel | None], data: str | None) -> None:
    """Check that all ranks have the same unsharded weights and the same data."""
    if process_count() == 1:
        return
    weights = {
        name: hash_weights(model.named_parameters() if model.files is None else model.files.parameters())
        for name, model in models.items()
        if model is not None
    }
    check_agreement({**weights, **({} if data is None else {"data": data})})
