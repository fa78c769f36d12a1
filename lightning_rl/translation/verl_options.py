"""The options of verl 0.9 that a GRPO run sets: what becomes of each. Every other one is refused by name."""

from lightning_rl.translation.option import different, refusal, same, table

VERSION = "0.9"

MEMORY = "memory and speed alone: there is nothing to set"
VALUES = "`val_kwargs` of verl: `Evaluation(sampling=, samples=)`"

ALGORITHM = table(
    [
        same("algorithm.adv_estimator", "gae", "`GRPO` for `grpo`, `RLOO`, `OPO`; another one is refused"),
        same("algorithm.norm_adv_by_std_in_grpo", True, "`DrGRPO` if not"),
        different("algorithm.gamma", 1.0, "", "it has no meaning for the estimators that are translated"),
        different("algorithm.lam", 1.0, "", "it has no meaning for the estimators that are translated"),
        refusal("algorithm.use_kl_in_reward", False, "estimators of a group take the KL as a term: `use_kl_loss`"),
        different("algorithm.kl_ctrl.kl_coef", 0.001, "", "with `use_kl_in_reward` alone, which is refused"),
        different("algorithm.kl_penalty", "kl", "", "with `use_kl_in_reward` alone, which is refused"),
        different(
            "algorithm.filter_groups.enable",
            False,
            "`DynamicSampling()`",
            "groups are replaced until the rollout is full, within the rounds that `DynamicSampling` allows",
        ),
        refusal("algorithm.filter_groups.metric", "reward", "groups are compared by their reward"),
        different("algorithm.filter_groups.max_num_gen_batches", 0, "", "`DynamicSampling(max_rounds=)`"),
        same("algorithm.rollout_correction.rollout_is", None, "`TruncatedIS(level)`: `token` or `sequence`"),
        same("algorithm.rollout_correction.rollout_is_threshold", 2.0, "`TruncatedIS(cap=)`"),
        same("algorithm.rollout_correction.rollout_is_batch_normalize", False, "`TruncatedIS(normalized=)`"),
        refusal("algorithm.rollout_correction.rollout_rs", None, "take a mask of [choosing](choosing.md)"),
        refusal("algorithm.rollout_correction.bypass_mode", False, "the trainer computes its log-probabilities itself"),
    ]
)
ACTOR = table(
    [
        same("actor_rollout_ref.actor.ppo_mini_batch_size", 256, "`minibatches`"),
        same("actor_rollout_ref.actor.ppo_epochs", 1, "`epochs`"),
        refusal("actor_rollout_ref.actor.shuffle", False, "the plan of a rollout is made once"),
        different(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", None, "", "microbatches follow from `token_budget`"
        ),
        different("actor_rollout_ref.actor.use_dynamic_bsz", False, "", "microbatches follow from `token_budget`"),
        same("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 16384, "`token_budget`"),
        same("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla", "`ClippedSurrogate`, `GSPO`"),
        same("actor_rollout_ref.actor.clip_ratio", 0.2, "where the two below are null"),
        same("actor_rollout_ref.actor.clip_ratio_low", 0.2, "`clip_low` of the loss"),
        same("actor_rollout_ref.actor.clip_ratio_high", 0.2, "`clip_high` of the loss"),
        same("actor_rollout_ref.actor.clip_ratio_c", 3.0, "`dual_clip` of the loss"),
        same("actor_rollout_ref.actor.loss_agg_mode", "token-mean", "`reduction`; `token-sum` is refused"),
        same("actor_rollout_ref.actor.loss_scale_factor", None, "`SequenceSumNorm(length)`"),
        same("actor_rollout_ref.actor.entropy_coeff", 0, "`EntropyBonus(coef)`"),
        same("actor_rollout_ref.actor.use_kl_loss", False, "`ReferenceKL(as_loss=True)`"),
        same("actor_rollout_ref.actor.kl_loss_coef", 0.001, "`ReferenceKL(beta)`"),
        different(
            "actor_rollout_ref.actor.kl_loss_type",
            "low_var_kl",
            "`ReferenceKL(estimator=)`",
            "k3 is not bounded by 10; its gradient goes on beyond",
        ),
        same("actor_rollout_ref.actor.optim.lr", 1e-6, "`AdamW(lr=)`"),
        same("actor_rollout_ref.actor.optim.weight_decay", 0.01, "`AdamW(weight_decay=)`"),
        same("actor_rollout_ref.actor.optim.betas", [0.9, 0.999], "`AdamW(betas=)`"),
        same("actor_rollout_ref.actor.optim.clip_grad", 1.0, "`max_grad_norm`"),
        different("actor_rollout_ref.actor.grad_clip", 1.0, "", "`actor.optim.clip_grad` is the one that is read"),
        refusal("actor_rollout_ref.actor.optim.optimizer", "AdamW", "write `optimizer=partial(...)`"),
        refusal("actor_rollout_ref.actor.optim.lr_scheduler_type", "constant", "write `lr_scheduler=`"),
        different(
            "actor_rollout_ref.actor.optim.lr_warmup_steps",
            -1,
            "`transformers.get_scheduler`",
            "that of transformers, whose first step has the rate 0",
        ),
        refusal("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", 0.0, "say the steps: `lr_warmup_steps`"),
        same(
            "actor_rollout_ref.actor.strategy",
            "fsdp",
            '`Trainer(strategy="fsdp2")` on several devices; `megatron` is refused',
        ),
        different("actor_rollout_ref.actor.fsdp_config.param_offload", False, "", MEMORY),
        different("actor_rollout_ref.actor.fsdp_config.optimizer_offload", False, "", MEMORY),
        refusal("actor_rollout_ref.actor.fsdp_config.model_dtype", "fp32", '`Trainer(precision="bf16-true")`'),
        refusal("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1, "a row is never split over devices"),
        different("actor_rollout_ref.actor.use_torch_compile", True, "", MEMORY),
        different(
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", None, "", "microbatches are those of the update"
        ),
        different("actor_rollout_ref.ref.fsdp_config.param_offload", False, "", MEMORY),
    ]
)
MODEL = table(
    [
        same("actor_rollout_ref.model.path", "~/models/deepseek-llm-7b-chat", "`policy`"),
        same("actor_rollout_ref.model.tokenizer_path", None, "`tokenizer`"),
        same("actor_rollout_ref.model.enable_gradient_checkpointing", True, "`activation_checkpointing`"),
        different("actor_rollout_ref.model.use_remove_padding", True, "", "microbatches are packed without padding"),
        different("actor_rollout_ref.model.enable_activation_offload", False, "", MEMORY),
        refusal(
            "actor_rollout_ref.model.trust_remote_code", False, "pass a function that builds the model, see SECURITY.md"
        ),
        refusal(
            "actor_rollout_ref.model.lora_rank",
            0,
            "`policy` builds the model with its adapter, see [strategies](strategies.md)",
        ),
        different("actor_rollout_ref.model.use_liger", False, "`liger`", "not its loss, which is the library's own"),
    ]
)
ROLLOUT = table(
    [
        same(
            "actor_rollout_ref.rollout.name",
            "???",
            "`VLLMEngine` for `vllm`, `TransformersEngine` for `hf`; another one is refused",
        ),
        different(
            "actor_rollout_ref.rollout.mode",
            "async",
            "",
            "conversations are driven turn by turn, see [environments](environments.md)",
        ),
        same("actor_rollout_ref.rollout.n", 1, "`group_size`"),
        same("actor_rollout_ref.rollout.temperature", 1.0, "`Sampling(temperature=)`"),
        different(
            "actor_rollout_ref.rollout.top_p",
            1,
            "`Sampling(top_p=)`",
            "log-probabilities are of the distribution over the tokens that the filter let through",
        ),
        different("actor_rollout_ref.rollout.top_k", -1, "`Sampling(top_k=)`", "as `top_p`"),
        same("actor_rollout_ref.rollout.gpu_memory_utilization", 0.5, "`VLLMEngine(gpu_memory_utilization=)`"),
        same("actor_rollout_ref.rollout.tensor_model_parallel_size", 2, "`VLLMEngine(tensor_parallel_size=)`"),
        same("actor_rollout_ref.rollout.max_model_len", None, "`VLLMEngine(max_model_len=)`"),
        same("actor_rollout_ref.rollout.free_cache_engine", True, "`VLLMEngine(sleeps=)`"),
        different("actor_rollout_ref.rollout.enforce_eager", False, "", MEMORY),
        different("actor_rollout_ref.rollout.max_num_batched_tokens", 8192, "", MEMORY),
        different("actor_rollout_ref.rollout.max_num_seqs", 256, "", MEMORY),
        different("actor_rollout_ref.rollout.enable_chunked_prefill", True, "", MEMORY),
        different(
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
            None,
            "",
            "microbatches are those of the update",
        ),
        different("actor_rollout_ref.rollout.load_format", "dummy", "", "weights are streamed into the engine"),
        different(
            "actor_rollout_ref.rollout.layered_summon", False, "", "weights are streamed one parameter at a time"
        ),
        different(
            "actor_rollout_ref.rollout.calculate_log_probs", True, "", "the engine's log-probabilities are always kept"
        ),
        refusal("actor_rollout_ref.rollout.ignore_eos", False, "a response ends where it ends"),
        refusal(
            "actor_rollout_ref.rollout.multi_turn.enable",
            False,
            "`environment=` or `tools=`, see [environments](environments.md)",
        ),
        same("actor_rollout_ref.rollout.val_kwargs.n", 1, VALUES),
        same("actor_rollout_ref.rollout.val_kwargs.temperature", 0, VALUES),
        same("actor_rollout_ref.rollout.val_kwargs.top_p", 1.0, VALUES),
        different(
            "actor_rollout_ref.rollout.val_kwargs.do_sample", False, "", "an answer is greedy at a temperature of 0"
        ),
    ]
)
DATA = table(
    [
        same("data.train_files", "~/data/rlhf/gsm8k/train.parquet", "`PromptDataModule(prompts)`, one file"),
        same("data.val_files", "~/data/rlhf/gsm8k/test.parquet", "`Evaluation(prompts=)`, one file"),
        same("data.prompt_key", "prompt", "`PromptDataModule(columns=)`"),
        same("data.train_batch_size", 1024, "`prompts_per_rollout`"),
        same("data.max_response_length", 512, "`Sampling(max_new_tokens=)`"),
        same("data.max_prompt_length", 512, "`PromptDataModule(max_prompt_tokens=)`"),
        same("data.filter_overlong_prompts", False, '`PromptDataModule(too_long="drop")`'),
        refusal("data.truncation", "error", "a prompt is never cut: `filter_overlong_prompts` leaves it out"),
        same("data.shuffle", True, "`PromptDataModule(shuffle=)`"),
        different("data.seed", None, "`PromptDataModule(seed=)`", "another order follows from the same seed"),
        same("data.apply_chat_template_kwargs", {}, "`PromptDataModule(chat_template_kwargs=)`"),
        different("data.return_raw_chat", True, "", "rewards get the chat as it is"),
        different("data.val_batch_size", None, "", MEMORY),
        different("data.dataloader_num_workers", 8, "", "prompts are read, not decoded"),
        different("data.filter_overlong_prompts_workers", 1, "", "prompts are encoded by one process"),
    ]
)
REWARD = table(
    [
        same(
            "reward.custom_reward_function.path",
            None,
            "`rewards`, through a function that gives it what verl does, row by row",
        ),
        same("reward.custom_reward_function.name", "compute_score", "which function of that file"),
        refusal("reward.reward_model.enable", False, "`RewardModel(model=)` among the `rewards`"),
        refusal(
            "reward.reward_manager.name", "naive", "write what it does as a reward, see [rewards](reward_execution.md)"
        ),
    ]
)
TRAINER = table(
    [
        different(
            "trainer.total_epochs",
            30,
            "`Trainer(max_steps=)`, computed from the number of prompts",
            "prompts that do not fill a rollout wait for the next pass",
        ),
        different(
            "trainer.total_training_steps",
            None,
            "`Trainer(max_steps=)`",
            "verl counts rollouts, Lightning optimizer steps",
        ),
        same("trainer.nnodes", 1, "`Trainer(num_nodes=)`"),
        same("trainer.n_gpus_per_node", 8, "`Trainer(devices=)`"),
        different(
            "trainer.save_freq",
            -1,
            "`ModelCheckpoint(every_n_train_steps=)`",
            "verl counts rollouts, Lightning optimizer steps",
        ),
        different(
            "trainer.test_freq", -1, "`Trainer(val_check_interval=)`", "verl counts rollouts, Lightning optimizer steps"
        ),
        different("trainer.val_before_train", True, "", "call `trainer.validate(module, data)` before `fit`"),
        same(
            "trainer.logger", ["console", "wandb"], "`Trainer(logger=)`; one without a logger of Lightning is refused"
        ),
        same("trainer.project_name", "verl_examples", "folder of the logger, or the project of W&B"),
        same("trainer.experiment_name", "gsm8k", "name of the run"),
        same(
            "trainer.default_local_dir",
            "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
            "folder of `ModelCheckpoint`",
        ),
        different("trainer.resume_mode", "auto", "", "`trainer.fit(ckpt_path=)` resumes"),
        different("trainer.critic_warmup", 0, "", "there is no critic"),
        different("trainer.balance_batch", True, "", "microbatches follow from `token_budget`"),
    ]
)

SECTIONS = {
    "Algorithm": ALGORITHM,
    "Actor": ACTOR,
    "Model": MODEL,
    "Rollout": ROLLOUT,
    "Data": DATA,
    "Reward": REWARD,
    "Trainer": TRAINER,
}
"""The options that are known, by what they are about."""

OPTIONS = table(option for section in SECTIONS.values() for option in section.values())
