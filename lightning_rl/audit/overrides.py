"""Names and overridden Lightning hooks of user callbacks, for messages."""

from lightning.pytorch import Callback

from lightning_rl.corrections.rl_callback import RLCallback
from lightning_rl.utils.trainer import OWN

STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
)


def name_of_callback(callback: Callback) -> str:
    """Return the callback's name for messages."""
    return callback.name if isinstance(callback, RLCallback) else type(callback).__name__


def overrides(part: object, hook: str, base: type) -> bool:
    """Return True if an object's method differs from its base's, on the class, the instance or by patching the base."""
    method = getattr(part, hook)
    function = getattr(method, "__func__", method)
    home = str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
    return function is not getattr(base, hook) or home not in OWN
