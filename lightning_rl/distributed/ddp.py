"""DDP: full models on every rank, gradients averaged after the last microbatch of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from typing_extensions import override

from lightning_rl.distributed.parallel import Parallel


class DataParallel(Parallel):
    """DDPStrategy."""

    @property
    def copies_gradients(self) -> bool:  # pyrefly: ignore[bad-override]
        """True if gradients are copied to buckets, and are not views of them."""
        return not cast(Any, self.strategy)._ddp_kwargs.get("gradient_as_bucket_view")  # noqa: SLF001

    @override
    @contextmanager
    def accumulating(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        wrapper = cast(Any, self.strategy.model)
        before = wrapper.require_backward_grad_sync
        wrapper.require_backward_grad_sync = last  # what no_sync() sets
        try:
            yield
        finally:
            wrapper.require_backward_grad_sync = before
