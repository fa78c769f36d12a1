"""Arguments and attributes by names that are not theirs: former ones, and those of TRL, vLLM and Lightning."""

from typing import Never, Self, overload

RENAMED = {
    "activation_checkpointing": "model=ModelOptions(activation_checkpointing=)",
    "allow_changes": "FaultTolerance(allow_config_changes=)",
    "allow_config_changes": "FaultTolerance(allow_config_changes=)",
    "attention": "model=ModelOptions(attention=)",
    "checkpoint_errors": "FaultTolerance(on_checkpoint_error=)",
    "compile": "model=ModelOptions(compile=)",
    "conversation_timeout": "environment=Conversations(timeout=)",
    "environment_timeout": "environment=Conversations(step_timeout=)",
    "environment_workers": "environment=Conversations(workers=)",
    "epochs": "epochs_per_rollout=",
    "liger": "model=ModelOptions(liger=)",
    "max_environment_failure_rate": "environment=Conversations(max_failure_rate=)",
    "max_failed_environments": "environment=Conversations(max_failure_rate=)",
    "max_failed_rewards": "rewards=Rewards(max_failure_rate=)",
    "max_idle_rollouts": "StopOnZeroGradient(patience=)",
    "max_reward_failure_rate": "rewards=Rewards(max_failure_rate=)",
    "max_tokens_per_microbatch": "model=ModelOptions(max_tokens_per_microbatch=)",
    "max_turn_tokens": "environment=Conversations(max_turn_tokens=)",
    "max_turns": "environment=Conversations(max_turns=)",
    "minibatches": "minibatches_per_rollout=",
    "packing": "model=ModelOptions(packing=)",
    "reward_seconds": "rewards=Rewards(timeout=)",
    "reward_timeout": "rewards=Rewards(timeout=)",
    "skip_rollouts": "FaultTolerance(skip_rollouts=)",
    "token_budget": "model=ModelOptions(max_tokens_per_microbatch=)",
    "tool_parser": "environment=Conversations(tool_parser=)",
    "tools": "environment=Conversations()",
    "value_loss": "critic=Critic(loss=)",
}

PROMPTS, SAMPLING, TRAINER = "PromptDataModule", "SamplingParams", "Trainer"
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "lr", "weight_decay"), "optimizer=partial(AdamW, lr=) of RLLightningModule"),
    **dict.fromkeys(("num_generations", "n"), "group_size= of RLLightningModule"),
    **dict.fromkeys(("reward_funcs", "reward"), "rewards= of RLLightningModule"),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), "epochs_per_rollout= of RLLightningModule"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), f"prompts_per_rollout= of {PROMPTS}"),
    "per_device_eval_batch_size": f"validation_batch_size= of {PROMPTS}",
    **dict.fromkeys(("train", "train_dataset", "dataset"), f"prompts= of {PROMPTS}"),
    **dict.fromkeys(("val", "eval_dataset", "val_dataset"), f"validation= of {PROMPTS}"),
    **dict.fromkeys(("num_workers", "pin_memory"), f"no loader of {PROMPTS}, which reads rows in the main process"),
    **dict.fromkeys(("max_tokens", "max_completion_length"), f"max_new_tokens= of {SAMPLING}"),
    **{name: f"{name}= of {SAMPLING}" for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop")},
    "max_prompt_length": f"max_prompt_tokens= of {PROMPTS}",
    **dict.fromkeys(("beta", "kl_coef"), f"ReferenceKL(beta=) in callbacks= of {TRAINER}"),
    **dict.fromkeys(("epsilon", "clip_range"), "loss=ClippedSurrogate(clip_low=, clip_high=) of RLLightningModule"),
    **{
        name: f"{name}= of {TRAINER}"
        for name in ("callbacks", "max_steps", "max_epochs", "precision", "devices", "logger")
    },
    "gradient_accumulation_steps": "minibatches_per_rollout= of RLLightningModule, the number of steps per rollout",
}
"""Places of arguments by the names that TRL, vLLM and Lightning have for them, and by their own."""
IN_RUN = ("evaluator", "fault_tolerance", "sleep_engine", "sync")
MOVED = {"sampler": "run.collector", "weight_sync": "run.weights", **{name: f"run.{name}" for name in IN_RUN}}
"""Places of what were attributes of `RLLightningModule`."""


class Moved:
    """Former name of an attribute; reading it from an object raises AttributeError.

    Args:
        place: Name of today.
    """

    def __init__(self, place: str) -> None:
        self.place = place

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the former name."""
        self.name = name

    @overload
    def __get__(self, part: None, owner: type) -> Self: ...

    @overload
    def __get__(self, part: object, owner: type) -> Never: ...

    def __get__(self, part: object, owner: type) -> Self:
        """Raise AttributeError with the name of today; on the class, return the descriptor."""
        if part is None:
            return self
        raise AttributeError(f"expected {self.place}, got {owner.__name__}.{self.name}, its former name: rename it")
