"""Every option of TRL 1.16's GRPOConfig and GRPOTrainer, and of its command ``trl grpo``: what becomes of each."""

from lightning_rl.translation.option import different, refusal, same, table

VERSION = "1.16"

NOT_LEARNED = "how fast or with how much memory, never what is learned: there is nothing to set"
HUB = "nothing is uploaded; `module.save_pretrained(folder)` writes what can be"
LOADER = "prompts are read, not decoded: there are no loader processes"
ONLY_LOGS = "what is shown, never what is learned; see [metrics](metrics.md)"
BUILD = "build the Trainer's strategy yourself, see [strategies](strategies.md)"
ONE_VALUE = "the `Trainer` has one `precision`, for training and evaluation"
VLLM = "`VLLMEngine` "
SERVER = "servers are started by `lightning-rl serve`, see [vLLM](vllm.md)"

ALGORITHM = table(
    [
        same("num_generations", 8, "`group_size`"),
        same("num_iterations", 1, "`epochs`"),
        same("epsilon", 0.2, "`clip_low` of the loss"),
        same("epsilon_high", None, "`clip_high` of the loss"),
        same(
            "delta",
            None,
            "`dual_clip` of the loss; refused up to 1 + `epsilon_high`",
        ),
        same("loss_type", "dapo", "`loss` and `reduction`; `bnpo` becomes `token_mean`"),
        same(
            "importance_sampling_level",
            "token",
            "`GSPO` for `sequence`; refused beside `cispo` and `sapo`, whose ratio is of tokens",
        ),
        same("sapo_temperature_pos", 1.0, "`SAPO(tau_positive=)`"),
        same("sapo_temperature_neg", 1.05, "`SAPO(tau_negative=)`"),
        same("vespo_k_pos", 2.0, "`VESPO(k_positive=)`"),
        same("vespo_lambda_pos", 3.0, "`VESPO(lambda_positive=)`"),
        same("vespo_k_neg", 3.0, "`VESPO(k_negative=)`"),
        same("vespo_lambda_neg", 2.0, "`VESPO(lambda_negative=)`"),
        same("scale_rewards", "group", '`GRPO`, `Normalized(std="batch")` or `DrGRPO`, with TRL\'s epsilon of 1e-4'),
        refusal(
            "multi_objective_aggregation",
            "sum_then_normalize",
            "each reward standardised by itself is not offered; write an estimator of your own, or scale the rewards",
        ),
        same("reward_weights", None, "the weights in `rewards`"),
        same("beta", 0.0, "`ReferenceKL(beta, as_loss=True)`"),
        same("use_bias_correction_kl", True, "`ReferenceKL(unbiased=)`"),
        different(
            "mask_truncated_completions",
            False,
            '`NoEOSMask("drop_tokens")`',
            "a truncated row leaves the statistics of its group and every denominator; in TRL its reward still "
            "counts in the group, and under `grpo` the row counts in the mean",
        ),
        same("off_policy_mask_threshold", None, '`OPSM(delta)`, with vLLM `OPSM(delta, against="rollout")`'),
        different(
            "entropy_coef",
            0.0,
            "`EntropyBonus(coef)`",
            "the entropy is reduced as the loss is; TRL takes the mean over the tokens of a microbatch under every "
            "`loss_type`. The two agree under `token_mean` where every microbatch has as many tokens",
        ),
        different(
            "use_adaptive_entropy",
            False,
            "`EntropyBonus(coef, target=)`",
            "the first step has the bonus already; in TRL it begins once an entropy was measured",
        ),
        different(
            "entropy_target", 0.2, "`EntropyBonus(target=)`", "used with `use_adaptive_entropy` alone, as in TRL"
        ),
        different("entropy_coef_delta", 0.005, "`EntropyBonus(step=)`", "used with `use_adaptive_entropy` alone"),
        refusal("entropy_coef_min", 0.0, "the coefficient goes down to 0; write a callback for another bound"),
        different("entropy_coef_max", 1.0, "", "the coefficient has no upper bound here"),
        refusal("top_entropy_quantile", 1.0, "no token is left out for its entropy; a callback with `token_mask` can"),
        refusal("sync_ref_model", False, "the reference is frozen"),
        different("ref_model_mixup_alpha", 0.6, "", "without a meaning, as `sync_ref_model` is refused"),
        different("ref_model_sync_steps", 512, "", "without a meaning, as `sync_ref_model` is refused"),
        different(
            "router_aux_loss_coef",
            None,
            "",
            "no load-balancing loss is added, so only 0 is accepted; without it TRL takes the one of a mixture of "
            "experts from its configuration",
        ),
        refusal("label_smoothing_factor", 0.0, "it is for labels, which there are none of"),
        refusal("neftune_noise_alpha", None, "no noise is added to embeddings"),
    ]
)

BATCHES = table(
    [
        same("per_device_train_batch_size", 8, "`prompts_per_rollout` and `minibatches`, with the two options below"),
        same("gradient_accumulation_steps", 1, "`minibatches`; microbatches follow from `token_budget`"),
        different(
            "steps_per_generation",
            None,
            "`minibatches`",
            "a group is never split over optimizer steps; TRL shuffles rows before it splits them; refused but as a "
            "multiple of `gradient_accumulation_steps`",
        ),
        different("generation_batch_size", None, "`prompts_per_rollout`", "as `steps_per_generation`"),
        different(
            "num_train_epochs",
            3.0,
            "`Trainer(max_steps=)`, computed from the number of prompts",
            "prompts that do not fill a rollout wait for the next pass",
        ),
        same("max_steps", -1, "`Trainer(max_steps=)`"),
        same("shuffle_dataset", True, "`PromptDataModule(shuffle=)`"),
        different("seed", 42, "`seed`", "other random numbers follow from the same seed"),
        different("data_seed", None, "`PromptDataModule(seed=)`", "another order follows from the same seed"),
        refusal("auto_find_batch_size", False, "TRL refuses it too"),
        different("average_tokens_across_devices", True, "", "every denominator runs over all ranks"),
        different("ignore_data_skip", False, "", "a resumed run goes on at its prompt"),
        different(
            "train_sampling_strategy", "random", "", "TRL's GRPOTrainer has a sampler of its own and reads it not"
        ),
        different("length_column_name", "length", "", "TRL's GRPOTrainer reads it not"),
        different("pad_to_multiple_of", "auto", "", "microbatches are packed without padding"),
        different("remove_unused_columns", False, "", "every column goes to the rewards"),
        different("label_names", None, "", "there are no labels"),
    ]
)

GENERATION = table(
    [
        same("max_completion_length", 512, "`Sampling(max_new_tokens=)`; None is refused"),
        same("temperature", 1.0, "`Sampling(temperature=)`"),
        different(
            "top_p",
            1.0,
            "`Sampling(top_p=)`",
            "log-probabilities are of the distribution over the tokens that the filter let through; TRL's are of all",
        ),
        different("top_k", 0, "`Sampling(top_k=)`", "as `top_p`"),
        different("min_p", None, "`Sampling(min_p=)`", "as `top_p`"),
        refusal("repetition_penalty", 1.0, "its samples are not of the policy that trains"),
        refusal(
            "generation_kwargs",
            None,
            "set `Sampling` instead; what else changes the distribution makes samples of another policy",
        ),
        same("chat_template_kwargs", None, "`PromptDataModule(chat_template_kwargs=)`"),
        different("cache_implementation", None, "", NOT_LEARNED),
        different(
            "use_transformers_continuous_batching", False, "`TransformersEngine()`", "rows decode together anyway"
        ),
        different("transformers_continuous_batching_config", None, "", NOT_LEARNED),
        different("use_transformers_paged", False, "", "as `use_transformers_continuous_batching`"),
        different(
            "ds3_gather_for_generation",
            True,
            "",
            "each rank keeps a copy that generates, see [strategies](strategies.md)",
        ),
        different("use_cache", False, "", "generation has a cache, training has none"),
    ]
)

ENGINE = table(
    [
        same("use_vllm", False, "`engine=VLLMEngine()` or `VLLMServerEngine(servers)`"),
        same("vllm_mode", "colocate", "which of the two"),
        refusal("vllm_model_impl", "vllm", "the weights are streamed into vLLM's own implementation"),
        same("vllm_enable_sleep_mode", False, "`VLLMEngine(sleeps=)`"),
        refusal("vllm_structured_outputs_regex", None, "its samples are not of the policy that trains"),
        different("vllm_server_base_url", None, "`VLLMServerEngine(servers)`", SERVER),
        different("vllm_server_host", "0.0.0.0", "`VLLMServerEngine(servers)`", SERVER),
        different("vllm_server_port", 8000, "`VLLMServerEngine(servers)`", SERVER),
        different(
            "vllm_server_timeout",
            240.0,
            "`VLLMServerEngine(patience=)`",
            "at any time of the run, not at its start alone",
        ),
        different("vllm_group_port", 51216, "", "weights go through a folder that trainer and servers share"),
        same("vllm_gpu_memory_utilization", 0.3, "`VLLMEngine(gpu_memory_utilization=)`"),
        same("vllm_max_model_length", None, "`VLLMEngine(max_model_len=)`"),
        same("vllm_tensor_parallel_size", 1, "`VLLMEngine(tensor_parallel_size=)`"),
        same(
            "vllm_importance_sampling_correction",
            True,
            "`TruncatedIS`, with `IcePop` or `SequenceRatioMask` for the modes that mask",
        ),
        same("vllm_importance_sampling_mode", "sequence_mask", "which of them"),
        same("vllm_importance_sampling_clip_max", 3.0, "`cap` or `high`"),
        same("vllm_importance_sampling_clip_min", None, "`floor` or `low`"),
        same("vllm_importance_sampling_cap", None, "the old name of `vllm_importance_sampling_clip_max`"),
    ]
)

OPTIMIZER = table(
    [
        same("learning_rate", 1e-6, "`optimizer=partial(AdamW, lr=)`"),
        different(
            "weight_decay",
            0.0,
            "`AdamW(weight_decay=)`",
            "every parameter decays; in TRL biases and norms do not",
        ),
        same("adam_beta1", 0.9, "`AdamW(betas=)`"),
        same("adam_beta2", 0.999, "`AdamW(betas=)`"),
        same("adam_epsilon", 1e-8, "`AdamW(eps=)`"),
        same("optim", "adamw_torch_fused", "`AdamW`, `adamw_8bit` or `SGD`; other names are refused"),
        refusal("optim_args", None, "write the optimizer as `optimizer=partial(...)`"),
        refusal("optim_target_modules", None, "write the optimizer as `optimizer=partial(...)`"),
        same("max_grad_norm", 1.0, "`max_grad_norm`"),
        different(
            "lr_scheduler_type",
            "linear",
            "`lr_scheduler`",
            "a linear warmup begins with a step of rate 1/n, TRL's with one of rate 0; types beside `linear` "
            "and `constant` are those of transformers",
        ),
        refusal("lr_scheduler_kwargs", None, "write the schedule as `lr_scheduler=`, a function of the optimizer"),
        same("warmup_steps", 0, "the schedule; below 1 it is a share of the steps, as in TRL"),
    ]
)

PRECISION = table(
    [
        same("bf16", None, "`Trainer(precision=)`: `bf16-mixed`, as TRL by default"),
        same("fp16", False, '`Trainer(precision="16-mixed")`'),
        different("bf16_full_eval", False, "", ONE_VALUE),
        different("fp16_full_eval", False, "", ONE_VALUE),
        different("tf32", None, "", "call `torch.set_float32_matmul_precision` in the recipe"),
        same("gradient_checkpointing", True, "`activation_checkpointing`"),
        different("gradient_checkpointing_kwargs", None, "", "checkpoints are not reentrant"),
        same("activation_checkpointing", None, "`activation_checkpointing`"),
        different("activation_checkpointing_kwargs", None, "", "as `gradient_checkpointing_kwargs`"),
        different("torch_compile", False, "`compile`", "the parts of each layer, for rows of any length"),
        refusal("torch_compile_backend", None, "`compile=True` is inductor"),
        refusal("torch_compile_mode", None, "`compile=True` is its default mode"),
        different("use_liger_kernel", False, "`liger`", "not its loss, which is the library's own"),
        refusal("liger_kernel_config", None, "`liger=True` is norms, rotary embedding and feed-forward"),
        different("torch_empty_cache_steps", None, "", NOT_LEARNED),
        refusal("cast_lm_head_to_fp32", False, "the head has the precision of the run; its logits become float32"),
        different("disable_dropout", False, "", "a policy with dropout is refused, whatever this says"),
    ]
)

DEVICES = table(
    [
        same("use_cpu", False, '`Trainer(accelerator="cpu")`'),
        different("local_rank", -1, "", "the launcher sets it"),
        different("fsdp", None, '`Trainer(strategy="fsdp2")`', "FSDP2 over all ranks, a unit for each layer"),
        refusal("fsdp_config", None, BUILD),
        refusal("deepspeed", None, "`DeepSpeedStrategy(stage=...)` of Lightning, see [strategies](strategies.md)"),
        refusal("accelerator_config", None, BUILD),
        refusal("parallelism_config", None, BUILD),
        different("ddp_find_unused_parameters", None, "", BUILD),
        different("ddp_bucket_cap_mb", None, "", BUILD),
        different("ddp_broadcast_buffers", None, "", BUILD),
        different("ddp_static_graph", None, "", BUILD),
        different("ddp_backend", None, "", BUILD),
        different("ddp_timeout", 1800, "", BUILD),
        same("full_determinism", False, "`Trainer(deterministic=True)`"),
        different("dataloader_drop_last", False, "", "a rollout has all its prompts"),
        different("dataloader_num_workers", 0, "", LOADER),
        different("dataloader_pin_memory", True, "", LOADER),
        different("dataloader_persistent_workers", False, "", LOADER),
        different("dataloader_prefetch_factor", None, "", LOADER),
        different("dataloader_multiprocessing_context", None, "", LOADER),
        different("dataloader_in_order", True, "", LOADER),
    ]
)

MODELS = table(
    [
        same("model_init_kwargs", None, "`policy=partial(AutoModelForCausalLM.from_pretrained, ...)`"),
        refusal(
            "trust_remote_code",
            False,
            "code that lies beside weights is never run; pass a function that builds the model, see SECURITY.md",
        ),
        different(
            "num_generations_eval", None, "`Evaluation(samples=)`", "the figures are `pass@k`, `avg@n` and rewards"
        ),
    ]
)

EVALUATION = table(
    [
        different(
            "eval_strategy",
            "no",
            "`evaluation=Evaluation(...)`, `Trainer(val_check_interval=)`",
            "answers of the `eval_dataset` with the rewards of training; there is no evaluation loss",
        ),
        different(
            "eval_steps", None, "`Trainer(val_check_interval=)`", "in optimizer steps; by default `logging_steps`"
        ),
        refusal("eval_delay", 0, "an evaluation begins with the run"),
        different("eval_on_start", False, "", "call `trainer.validate(module, data)` before `fit`"),
        different("per_device_eval_batch_size", 8, "", NOT_LEARNED),
        different("prediction_loss_only", False, "", "an evaluation gives rewards, never a loss"),
        different("eval_do_concat_batches", True, "", NOT_LEARNED),
        different("eval_use_gather_object", False, "", NOT_LEARNED),
        different("eval_accumulation_steps", None, "", NOT_LEARNED),
        different("include_for_metrics", [], "", "rewards see every column"),
        different("batch_eval_metrics", False, "", NOT_LEARNED),
        different("do_train", False, "", "the recipe calls `trainer.fit`"),
        different("do_eval", False, "", "`trainer.validate`"),
        different("do_predict", False, "", "`trainer.predict`"),
    ]
)

LOGGING = table(
    [
        same("output_dir", None, "folder of loggers and checkpoints"),
        different(
            "logging_steps",
            10,
            "`Trainer(log_every_n_steps=)`",
            "a row is of all steps since the last one; below 1 is refused",
        ),
        different("logging_strategy", "steps", "`Trainer(logger=False)` for `no`", "`epoch` is refused"),
        different(
            "report_to",
            "none",
            "`Trainer(logger=)`",
            "`none` keeps a table of CSV; a name without a logger of Lightning is refused",
        ),
        same("run_name", None, "the name that the logger gives the run"),
        different("project", "huggingface", "`WandbLogger(project=)`", "of W&B alone"),
        refusal("trackio_space_id", None, "there is no logger for it"),
        refusal("trackio_bucket_id", None, "there is no logger for it"),
        refusal("trackio_static_space_id", None, "there is no logger for it"),
        different("logging_first_step", False, "", ONLY_LOGS),
        different("log_on_each_node", True, "", ONLY_LOGS),
        different(
            "logging_nan_inf_filter",
            True,
            "",
            "a loss that is not finite ends the run, see [reliability](reliability.md)",
        ),
        different("include_num_input_tokens_seen", "no", "", ONLY_LOGS),
        different("log_level", "passive", "", ONLY_LOGS),
        different("log_level_replica", "warning", "", ONLY_LOGS),
        same("disable_tqdm", None, "`Trainer(enable_progress_bar=)`"),
        different(
            "log_completions", False, "`SampleTable(every_n_rollouts)`", "the best and the worst of a few groups"
        ),
        different("num_completions_to_print", None, "`SampleTable(rows=)`", "with `log_completions` alone"),
        different("log_unique_prompts", False, "", "a table shows each prompt once or twice"),
        different("log_multimodal", True, "", "there are no images"),
        refusal("log_completions_hub_repo", None, HUB),
        different("debug", "", "", ONLY_LOGS),
        different("skip_memory_metrics", True, "", "`DeviceStatsMonitor` of Lightning"),
    ]
)

CHECKPOINTS = table(
    [
        same("save_strategy", "steps", "`ModelCheckpoint`; `best` is refused"),
        same("save_steps", 500, "`ModelCheckpoint(every_n_train_steps=)`; below 1 is refused"),
        same("save_total_limit", None, "`ModelCheckpoint(save_top_k=)` of the last ones"),
        different("save_only_model", False, "", "a checkpoint holds what a resume needs"),
        different("save_on_each_node", False, "", "checkpoints lie in a folder that all nodes share"),
        refusal("enable_jit_checkpoint", False, "SIGTERM saves anyway, see [reliability](reliability.md)"),
        refusal("load_best_model_at_end", False, "`ModelCheckpoint(monitor=...)` keeps it"),
        different("metric_for_best_model", None, "", "with `load_best_model_at_end` alone"),
        different("greater_is_better", None, "", "with `load_best_model_at_end` alone"),
        different("restore_callback_states_from_checkpoint", False, "", "a resume restores every callback"),
        refusal(
            "resume_from_checkpoint",
            None,
            "a checkpoint of TRL cannot be resumed",
        ),
        different("push_to_hub", False, "", HUB),
        different("hub_token", None, "", HUB),
        different("hub_private_repo", None, "", HUB),
        different("hub_model_id", None, "", HUB),
        different("hub_strategy", "every_save", "", HUB),
        different("hub_always_push", False, "", HUB),
        different("hub_revision", None, "", HUB),
    ]
)

TURNS = table(
    [
        different(
            "max_tool_calling_iterations",
            None,
            "`max_turns`",
            "one more than it, for the last answer; without it 8 turns, where TRL has no limit",
        ),
    ]
)

SECTIONS = {
    "Algorithm": ALGORITHM,
    "Batches and epochs": BATCHES,
    "Generation": GENERATION,
    "vLLM": ENGINE,
    "Several turns": TURNS,
    "Optimizer": OPTIMIZER,
    "Precision and memory": PRECISION,
    "Devices": DEVICES,
    "Models": MODELS,
    "Evaluation": EVALUATION,
    "Logging": LOGGING,
    "Checkpoints": CHECKPOINTS,
}
"""The options of ``GRPOConfig``, by what they are about."""

CONFIG = table(option for section in SECTIONS.values() for option in section.values())

TRAINER = table(
    [
        same("model", None, "`policy`: a name, or what the script builds it from"),
        same("reward_funcs", None, "`rewards`; the name of a model becomes `RewardModel`"),
        same("args", None, "the table above"),
        same("train_dataset", None, "`PromptDataModule(prompts)`"),
        different("eval_dataset", None, "`Evaluation(prompts=)`", "as `eval_strategy`"),
        same("processing_class", None, "`tokenizer`"),
        refusal("reward_processing_classes", None, "`RewardModel(tokenizer=)`"),
        refusal("callbacks", None, "they are callbacks of transformers; a callback of Lightning takes their place"),
        refusal("optimizers", (None, None), "`optimizer=` and `lr_scheduler=`, functions that build them"),
        refusal("quantization_config", None, "a policy is not quantised"),
        same("peft_config", None, "`policy` builds the model with its adapter"),
        different("tools", None, "`tools`", "`max_completion_length` counts the tokens that the policy draws alone"),
        refusal(
            "rollout_func",
            None,
            "write an `Environment`, or an `Engine`",
        ),
        different(
            "environment_factory",
            None,
            "`environment`",
            "`max_completion_length` counts the tokens that the policy draws alone; `get_reward` is read by "
            "`EnvironmentReward()`",
        ),
    ]
)

SCRIPT = table(
    [
        same("dataset_name", None, "`PromptDataModule(prompts)`"),
        same("dataset_config", None, "`PromptDataModule(name=)`"),
        same("dataset_train_split", "train", "`PromptDataModule(split=)`"),
        same("dataset_test_split", "test", "split of the evaluation"),
        refusal(
            "dataset_streaming", False, "a stream has no length; pass one with `epoch_length=`, see [data](data.md)"
        ),
        refusal("datasets", None, "mix them into one data set first"),
        different("ignore_bias_buffers", False, "", "`trl grpo` reads it not"),
        same("reward_model_name_or_path", None, "`RewardModel(model=)`"),
        same("reward_funcs", None, "`rewards`; TRL's own are imported from `trl.rewards`"),
        same("model_name_or_path", None, "`policy`"),
        same("model_revision", "main", "`from_pretrained(revision=)`"),
        same("dtype", "float32", "`from_pretrained(dtype=)`"),
        same("attn_implementation", None, "`from_pretrained(attn_implementation=)`"),
        same("use_peft", False, "`policy` builds the model with its adapter"),
        same("lora_r", 16, "`LoraConfig(r=)`"),
        same("lora_alpha", 32, "`LoraConfig(lora_alpha=)`"),
        different("lora_dropout", 0.05, "`LoraConfig(lora_dropout=0)`", "a policy with dropout is refused"),
        same("lora_target_modules", None, "`LoraConfig(target_modules=)`"),
        same("lora_target_parameters", None, "`LoraConfig(target_parameters=)`"),
        same("lora_modules_to_save", None, "`LoraConfig(modules_to_save=)`"),
        same("lora_task_type", "CAUSAL_LM", "`LoraConfig(task_type=)`"),
        same("use_rslora", False, "`LoraConfig(use_rslora=)`"),
        same("use_dora", False, "`LoraConfig(use_dora=)`"),
        refusal("load_in_8bit", False, "a policy is not quantised"),
        refusal("load_in_4bit", False, "a policy is not quantised"),
        different("bnb_4bit_quant_type", "nf4", "", "with `load_in_4bit` alone"),
        different("use_bnb_nested_quant", False, "", "with `load_in_4bit` alone"),
        different("bnb_4bit_quant_storage", None, "", "with `load_in_4bit` alone"),
    ]
)
