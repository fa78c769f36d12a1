"""ModelOptions: memory, kernels and compilation of policy, critic and reference."""

from dataclasses import dataclass
from typing import Literal

from lightning_rl.policy.activation_checkpointing import MODES, Checkpointing
from lightning_rl.policy.attention import ATTENTIONS, AUTO
from lightning_rl.policy.compilation import BACKENDS
from lightning_rl.utils.arguments import check_bools, check_choices, check_counts


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of how policy, critic and reference compute; they affect memory and speed, and results only by rounding.

    Args:
        max_tokens_per_microbatch: Maximum number of tokens per microbatch. Default: as many as fit into the memory of
            the device, at most 4096, and 16,384 on a GPU; a resumed run keeps the number of its checkpoint.
        packing: If True, microbatches have no padding. Use False for a model whose layers do not support packing.
        attention: Attention kernel for packed sequences: ``"sdpa"``, ``"varlen_attn"``, ``"flash_attention_2"`` or
            ``"flash_attention_3"``. Default: the fastest one that device, precision, packages and model support.
        compile: If True, compile the parts of each layer of policy, critic and reference with ``torch.compile`` and
            ``"inductor"``; the backends ``"aot_eager"`` and ``"eager"`` help to find an error.
        liger: If True, use liger-kernel for norms, rotary embeddings and gated feed-forwards; GPU only.
        activation_checkpointing: ``"full"`` to store only the inputs of the layers and recompute the rest in the
            backward, ``"selective"`` to store also the results of matrix products and attention, which compiled layers
            do by themselves; True for ``"selective"`` if its microbatches fit into the memory of the device by the
            estimate of the doctor, otherwise ``"full"``. Results have the same bits.
        consistency: ``"bitwise"`` to make generation, scoring and update give the same bits for every token in every
            batch (:mod:`.policy.batch_invariance`). Without ``max_staleness`` the rollout then gives the old
            log-probabilities, and each first step on it checks them. Needs the embedded engine. Default: they differ
            by rounding.

    Raises:
        ValueError: If an option is out of range, or two options exclude each other.

    Example:
        >>> ModelOptions(compile=True).backend
        'inductor'
    """

    max_tokens_per_microbatch: int | None = None
    packing: bool = True
    attention: str = AUTO
    compile: bool | str = False
    liger: bool = False
    activation_checkpointing: bool | Checkpointing = False
    consistency: Literal["bitwise"] | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if self.max_tokens_per_microbatch is not None:
            check_counts(1, max_tokens_per_microbatch=self.max_tokens_per_microbatch)
        check_bools(packing=self.packing, liger=self.liger)
        if not isinstance(self.activation_checkpointing, bool) and self.activation_checkpointing not in MODES:
            raise ValueError(
                f"expected activation_checkpointing to be True, False or one of {', '.join(MODES)}, got "
                f"{self.activation_checkpointing!r}"
            )
        check_choices(ATTENTIONS, attention=self.attention)
        if self.consistency not in (None, "bitwise"):
            raise ValueError(f'expected consistency to be "bitwise" or None, got {self.consistency!r}')
        if not isinstance(self.compile, bool) and self.compile not in BACKENDS:
            raise ValueError(
                f"expected compile to be True, False or one of {', '.join(BACKENDS)}, got {self.compile!r}"
            )
        if self.attention != AUTO and not self.packing:
            raise ValueError(
                f'expected attention="auto" with packing=False, got "{self.attention}", a kernel for packed sequences: '
                "remove one of them"
            )
        kernels = {"attention": self.attention != AUTO, "compile": self.compile, "liger": self.liger}
        if self.consistency and (chosen := [name for name, other in kernels.items() if other]):
            raise ValueError(
                f'expected consistency="bitwise" without {chosen[0]}=, which replaces the operations that it fixes: '
                "remove one of them"
            )
        if self.compile and self.liger:
            raise ValueError(
                "expected compile= or liger=, got both, which replace the same operations: remove one of them"
            )

    @property
    def bitwise(self) -> bool:
        """True if generation, scoring and update give the same bits."""
        return self.consistency is not None

    @property
    def checkpointing(self) -> Checkpointing | None:
        """Mode of activation checkpointing; ``"full"`` if the memory chooses it."""
        return "full" if self.activation_checkpointing is True else self.activation_checkpointing or None

    @property
    def backend(self) -> str | None:
        """Backend of ``torch.compile``; None to not compile."""
        return BACKENDS[0] if self.compile is True else self.compile or None
