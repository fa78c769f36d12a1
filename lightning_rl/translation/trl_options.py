"""Options of TRL 1.16's GRPOConfig and ``trl grpo``, with defaults and counterparts in a recipe."""

from dataclasses import dataclass
from typing import Any, Literal

VERSION = "1.16"

SPEED = "affects speed or memory, not results: there is nothing to set"
HUB = "nothing is uploaded; `module.save_pretrained(folder)` writes a folder for the hub"
LOADER = "prompts are read, not decoded: there are no loader processes"
DISPLAY = "affects the display, not results; see [metrics](metrics.md)"
STRATEGY = "build the Trainer's strategy yourself, see [strategies](strategies.md)"
OPTIMIZER = "write the optimizer as `optimizer=partial(...)`"
EVALUATE = "write `evaluation=Evaluation(...)` and `Trainer(val_check_interval=)`"
SHOW = "add `SampleTable()` to the callbacks"
SERVERS = "servers are started by `lightning-rl serve`, see [vLLM](vllm.md)"
OTHER_POLICY = "samples would not come from the trained policy"
REFUSED_SYNC = "no effect, because `sync_ref_model` is refused"
NO_TRACKIO = "Lightning has no logger for it"
NOT_QUANTIZED = "weights are not quantized, which takes more memory"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of TRL.

    Attributes:
        default: Default in TRL.
        verdict: ``"same"`` for an exact translation, ``"different"`` for one with the difference in ``note``,
            ``"refused"`` for an option that has to keep its default.
        ours: Counterpart in a recipe, as code in Markdown; empty if there is nothing to set.
        note: Difference, or reason and remedy; empty for ``"same"``.
    """

    default: Any
    verdict: Literal["same", "different", "refused"]
    ours: str = ""
    note: str = ""


Table = dict[str, Option]


def same(ours: str, **defaults: Any) -> Table:
    """Return options that have the same meaning in TRL."""
    return {name: Option(default, "same", ours) for name, default in defaults.items()}


def different(ours: str, note: str, **defaults: Any) -> Table:
    """Return options that are translated with a difference."""
    return {name: Option(default, "different", ours, note) for name, default in defaults.items()}


def inert(note: str, **defaults: Any) -> Table:
    """Return options without a counterpart, which are accepted with a note."""
    return different("", note, **defaults)


def refusal(note: str, **defaults: Any) -> Table:
    """Return options that have to keep their defaults."""
    return {name: Option(default, "refused", "", note) for name, default in defaults.items()}


SECTIONS: dict[str, Table] = {
    "Algorithm": (
        same("`group_size`", num_generations=8)
        | same("`epochs_per_rollout`", num_iterations=1)
        | same("`clip_low` of the loss", epsilon=0.2)
        | same("`clip_high` of the loss", epsilon_high=None)
        | same("`dual_clip` of the loss; has to be greater than 1 + `epsilon_high`", delta=None)
        | same("`loss` and `reduction`; `bnpo` becomes `token_mean`", loss_type="dapo")
        | same("`GSPO` for `sequence`; refused with `cispo` and `sapo`", importance_sampling_level="token")
        | same("`SAPO(tau_positive=, tau_negative=)`", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
        | same("`VESPO(k_positive=, k_negative=)`", vespo_k_pos=2.0, vespo_k_neg=3.0)
        | same("`VESPO(lambda_positive=, lambda_negative=)`", vespo_lambda_pos=3.0, vespo_lambda_neg=2.0)
        | same('`GRPO`, `Normalized(std="batch")` or `DrGRPO`, with TRL\'s epsilon of 1e-4', scale_rewards="group")
        | same(
            '`RewardNormalization("group", "group", weights=)` and `Normalized(mean="batch", std="batch")` (GDPO)',
            multi_objective_aggregation="sum_then_normalize",
        )
        | same("the weights in `rewards`", reward_weights=None)
        | same("`ReferenceKL(beta, as_loss=True)`", beta=0.0)
        | same("`ReferenceKL(unbiased=)`", use_bias_correction_kl=True)
        | different(
            '`NoEOSMask("drop_tokens")`',
            "a truncated row is left out of its group's statistics and all denominators; in TRL its reward counts",
            mask_truncated_completions=False,
        )
        | same('`OPSM(delta)`, with vLLM `OPSM(delta, against="rollout")`', off_policy_mask_threshold=None)
        | different(
            "`EntropyBonus(coef)`",
            "the entropy is reduced like the loss; TRL averages over the tokens of a microbatch",
            entropy_coef=0.0,
        )
        | different(
            "`EntropyBonus(target=)`",
            "adapts from the first step on; TRL adapts from the second step on",
            use_adaptive_entropy=False,
        )
        | different(
            "`EntropyBonus(target=, step=)`",
            "as for `use_adaptive_entropy`",
            entropy_target=0.2,
            entropy_coef_delta=0.005,
        )
        | refusal("the lower bound of the coefficient is 0; write a callback for another one", entropy_coef_min=0.0)
        | inert("the coefficient has no upper bound here", entropy_coef_max=1.0)
        | refusal(
            "the quantile is over an optimizer step, and a callback gets a microbatch; write a loss with `prepare`",
            top_entropy_quantile=1.0,
        )
        | refusal("the reference is frozen, and checkpoints do not hold it", sync_ref_model=False)
        | inert(REFUSED_SYNC, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512)
        | different(
            "`RouterAuxLoss(coef)`",
            "over the trained tokens of an optimizer step; TRL takes all tokens of a microbatch, and, if it is "
            "unset, the coefficient of the model's configuration",
            router_aux_loss_coef=None,
        )
        | refusal("there are no labels to smooth", label_smoothing_factor=0.0)
        | refusal("no noise is added to embeddings", neftune_noise_alpha=None)
    ),
    "Batches and epochs": (
        same(
            "`prompts_per_rollout` and `minibatches_per_rollout`, with the two options below",
            per_device_train_batch_size=8,
        )
        | same(
            "`minibatches_per_rollout`; microbatches follow from `ModelOptions`",
            gradient_accumulation_steps=1,
        )
        | different("`minibatches_per_rollout`", "a group is never split; TRL shuffles rows", steps_per_generation=None)
        | different("`prompts_per_rollout`", "as for `steps_per_generation`", generation_batch_size=None)
        | different("`Trainer(max_steps=)`", "leftover prompts are used in the next pass", num_train_epochs=3.0)
        | same("`Trainer(max_steps=)`", max_steps=-1)
        | same("`PromptDataModule(shuffle=)`", shuffle_dataset=True)
        | different("`seed`", "the same seed gives different random numbers", seed=42)
        | different("`PromptDataModule(seed=)`", "the same seed gives a different order", data_seed=None)
        | refusal("TRL refuses it too", auto_find_batch_size=False)
        | inert("denominators are global over ranks", average_tokens_across_devices=True)
        | inert("a resumed run continues at its prompt", ignore_data_skip=False)
        | inert("TRL's GRPOTrainer does not read it", train_sampling_strategy="random", length_column_name="length")
        | inert("microbatches are packed without padding", pad_to_multiple_of="auto")
        | inert("every column goes to the rewards", remove_unused_columns=False)
        | inert("there are no labels", label_names=None)
    ),
    "Generation": (
        same("`SamplingParams(max_new_tokens=)`; None is refused", max_completion_length=512)
        | same("`SamplingParams(temperature=)`", temperature=1.0)
        | different(
            "`SamplingParams(top_p=)`",
            "log-probabilities are normalized over the tokens that the filter keeps",
            top_p=1.0,
        )
        | different("`SamplingParams(top_k=)`", "as for `top_p`", top_k=0)
        | different("`SamplingParams(min_p=)`", "as for `top_p`", min_p=None)
        | refusal(OTHER_POLICY, repetition_penalty=1.0)
        | refusal("set `SamplingParams`; other options change the sampled distribution", generation_kwargs=None)
        | same("`PromptDataModule(chat_template_kwargs=)`", chat_template_kwargs=None)
        | inert(SPEED, cache_implementation=None, transformers_continuous_batching_config=None)
        | different("`TransformersEngine()`", "always on", use_transformers_continuous_batching=False)
        | inert("as for `use_transformers_continuous_batching`", use_transformers_paged=False)
        | inert("each rank generates with its replica, see [strategies](strategies.md)", ds3_gather_for_generation=True)
        | inert("generation uses a cache, training does not", use_cache=False)
    ),
    "vLLM": (
        same("`engine=VLLMEngine()` or `VLLMServerEngine(servers)`", use_vllm=False)
        | same("`VLLMEngine` for `colocate`, `VLLMServerEngine` for `server`", vllm_mode="colocate")
        | refusal("weights are streamed into vLLM's own implementation", vllm_model_impl="vllm")
        | refusal(OTHER_POLICY, vllm_structured_outputs_regex=None)
        | different(
            "`VLLMServerEngine(servers)`",
            SERVERS,
            vllm_server_base_url=None,
            vllm_server_host="0.0.0.0",
            vllm_server_port=8000,
        )
        | different(
            "`VLLMServerEngine(patience=)`",
            "limits every wait for servers; in TRL, only the first wait",
            vllm_server_timeout=240.0,
        )
        | inert("weights go through a folder that trainer and servers share", vllm_group_port=51216)
        | same("`VLLMEngine(sleeps=)`", vllm_enable_sleep_mode=False)
        | same("`VLLMEngine(gpu_memory_utilization=)`", vllm_gpu_memory_utilization=0.3)
        | same("`VLLMEngine(max_model_len=)`", vllm_max_model_length=None)
        | same("`VLLMEngine(tensor_parallel_size=)`", vllm_tensor_parallel_size=1)
        | same("`TruncatedIS`, `IcePop`, `SequenceRatioMask`", vllm_importance_sampling_correction=True)
        | same("the class and its option `level=`", vllm_importance_sampling_mode="sequence_mask")
        | same("`cap` or `high`", vllm_importance_sampling_clip_max=3.0)
        | same("`floor` or `low`", vllm_importance_sampling_clip_min=None)
        | same("as `vllm_importance_sampling_clip_max`; this is its old name", vllm_importance_sampling_cap=None)
    ),
    "Several turns": inert("`Conversations(max_turns=)` is one more; by default 8", max_tool_calling_iterations=None),
    "Optimizer": (
        same("`optimizer=partial(AdamW, lr=)`", learning_rate=1e-6)
        | different("`AdamW(weight_decay=)`", "also applies to biases and norms, unlike in TRL", weight_decay=0.0)
        | same("`AdamW(betas=)`", adam_beta1=0.9, adam_beta2=0.999)
        | same("`AdamW(eps=)`", adam_epsilon=1e-8)
        | same("`AdamW`, `adamw_8bit` or `SGD`; other names are refused", optim="adamw_torch_fused")
        | refusal(OPTIMIZER, optim_args=None, optim_target_modules=None)
        | same("`max_grad_norm`", max_grad_norm=1.0)
        | same("`lr_scheduler`", lr_scheduler_type="linear")
        | same("options of transformers' `get_scheduler`", lr_scheduler_kwargs=None)
        | different(
            "an option of the schedule; a value below 1 is a share of the steps, as in TRL",
            "the first of n warmup steps of the linear schedule has the learning rate lr/n; in TRL, it has 0",
            warmup_steps=0,
        )
    ),
    "Precision and memory": (
        same('`Trainer(precision="bf16-mixed")`, which the recipe has unless `bf16` is false', bf16=None)
        | same('`Trainer(precision="16-mixed")`', fp16=False)
        | inert("training and evaluation share the Trainer's `precision`", bf16_full_eval=False, fp16_full_eval=False)
        | inert("call `torch.set_float32_matmul_precision` in the recipe", tf32=None)
        | same("`ModelOptions(activation_checkpointing=)`", gradient_checkpointing=True, activation_checkpointing=None)
        | inert("not reentrant", gradient_checkpointing_kwargs=None, activation_checkpointing_kwargs=None)
        | different(
            "`ModelOptions(compile=)`",
            "compiles norms, attention and MLP of each layer separately, for dynamic lengths",
            torch_compile=False,
        )
        | refusal("inductor in its default mode", torch_compile_backend=None, torch_compile_mode=None)
        | different("`ModelOptions(liger=)`", "without Liger's loss", use_liger_kernel=False)
        | refusal("`liger=True` is norms, rotary embedding and feed-forward", liger_kernel_config=None)
        | inert(SPEED, torch_empty_cache_steps=None)
        | refusal("the head has the precision of the run; its logits are float32", cast_lm_head_to_fp32=False)
        | inert("a policy with dropout is refused in any case", disable_dropout=False)
    ),
    "Devices": (
        same('`Trainer(accelerator="cpu")`', use_cpu=False)
        | inert("the launcher sets it", local_rank=-1)
        | different('`Trainer(strategy="fsdp2")`', "always FSDP2 over all ranks, with one unit per layer", fsdp=None)
        | refusal(STRATEGY, fsdp_config=None, accelerator_config=None, parallelism_config=None)
        | refusal("`DeepSpeedStrategy(stage=...)` of Lightning, see [strategies](strategies.md)", deepspeed=None)
        | inert(
            STRATEGY,
            ddp_find_unused_parameters=None,
            ddp_bucket_cap_mb=None,
            ddp_broadcast_buffers=None,
            ddp_static_graph=None,
            ddp_backend=None,
            ddp_timeout=1800,
        )
        | same("`Trainer(deterministic=True)`", full_determinism=False)
        | inert("a rollout has all its prompts", dataloader_drop_last=False)
        | inert(
            LOADER,
            dataloader_num_workers=0,
            dataloader_pin_memory=True,
            dataloader_persistent_workers=False,
            dataloader_prefetch_factor=None,
            dataloader_multiprocessing_context=None,
            dataloader_in_order=True,
        )
    ),
    "Models": (
        same("`policy=partial(AutoModelForCausalLM.from_pretrained, ...)`", model_init_kwargs=None)
        | refusal("pass a function that builds the model, see SECURITY.md", trust_remote_code=False)
        | inert(EVALUATE, num_generations_eval=None)
    ),
    "Evaluation": (
        inert(EVALUATE, eval_strategy="no", eval_steps=None)
        | refusal("an evaluation cannot be delayed", eval_delay=0)
        | inert("call `trainer.validate(module, data)` before `fit`", eval_on_start=False)
        | inert(
            SPEED,
            per_device_eval_batch_size=8,
            eval_do_concat_batches=True,
            eval_use_gather_object=False,
            eval_accumulation_steps=None,
            batch_eval_metrics=False,
        )
        | inert("an evaluation logs rewards, never a loss", prediction_loss_only=False)
        | inert("rewards get every column", include_for_metrics=[])
        | inert("call `trainer.fit`, `validate` or `predict`", do_train=False, do_eval=False, do_predict=False)
    ),
    "Logging": (
        same("folder of loggers and checkpoints", output_dir=None)
        | different(
            "`Trainer(log_every_n_steps=)`", "a logged row covers all steps since the previous row", logging_steps=10
        )
        | different("`Trainer(logger=False)` for `no`", "`epoch` is refused", logging_strategy="steps")
        | different(
            "`Trainer(logger=)`",
            "a logger of Lightning; `none` and services without one become `CSVLogger`",
            report_to="none",
        )
        | same("the name of the run in the logger", run_name=None)
        | different("`WandbLogger(project=)`", "used by W&B only", project="huggingface")
        | refusal(NO_TRACKIO, trackio_space_id=None, trackio_bucket_id=None, trackio_static_space_id=None)
        | inert(
            DISPLAY,
            logging_first_step=False,
            log_on_each_node=True,
            include_num_input_tokens_seen="no",
            log_level="passive",
            log_level_replica="warning",
            debug="",
        )
        | inert("a non-finite loss ends the run, see [reliability](reliability.md)", logging_nan_inf_filter=True)
        | same("`Trainer(enable_progress_bar=)`", disable_tqdm=None)
        | inert(SHOW, log_completions=False, num_completions_to_print=None, log_unique_prompts=False)
        | inert("there are no images", log_multimodal=True)
        | refusal(HUB, log_completions_hub_repo=None)
        | inert("`DeviceStatsMonitor` of Lightning", skip_memory_metrics=True)
    ),
    "Checkpoints": (
        same("`ModelCheckpoint`; `best` is refused", save_strategy="steps")
        | same("`ModelCheckpoint(every_n_train_steps=)`; below 1 is refused", save_steps=500)
        | same("`ModelCheckpoint(save_top_k=)`, which keeps the latest checkpoints", save_total_limit=None)
        | inert("a checkpoint holds everything that a resume needs", save_only_model=False)
        | inert("all nodes share the folder of checkpoints", save_on_each_node=False)
        | refusal("SIGTERM always saves, see [reliability](reliability.md)", enable_jit_checkpoint=False)
        | refusal("`ModelCheckpoint(monitor=...)` keeps it", load_best_model_at_end=False)
        | inert("with `load_best_model_at_end` only", metric_for_best_model=None, greater_is_better=None)
        | inert("a resume restores every callback", restore_callback_states_from_checkpoint=False)
        | refusal("a checkpoint of TRL cannot be resumed", resume_from_checkpoint=None)
        | inert(
            HUB,
            push_to_hub=False,
            hub_token=None,
            hub_private_repo=None,
            hub_model_id=None,
            hub_strategy="every_save",
            hub_always_push=False,
            hub_revision=None,
        )
    ),
    "Further options of trl grpo": (
        same("`PromptDataModule(prompts)`", dataset_name=None)
        | same("`PromptDataModule(name=, split=)`", dataset_config=None, dataset_train_split="train")
        | inert(EVALUATE, dataset_test_split="test")
        | refusal("a stream has no length; pass one with `epoch_length=`, see [data](data.md)", dataset_streaming=False)
        | refusal("mix them into one data set first", datasets=None)
        | inert("`trl grpo` does not read it", ignore_bias_buffers=False)
        | same("`RewardModel(model=)`", reward_model_name_or_path=None)
        | same("`rewards`; TRL's built-in functions are imported from `trl.rewards`", reward_funcs=None)
        | same("`policy`", model_name_or_path=None)
        | same("`from_pretrained(revision=, dtype=)`", model_revision="main", dtype="float32")
        | same("`from_pretrained(attn_implementation=)`", attn_implementation=None)
        | same("`policy`, a function that adds the adapter ([LoRA](strategies.md#lora))", use_peft=False)
        | same(
            "`LoraConfig` of peft",
            lora_r=16,
            lora_alpha=32,
            lora_target_modules=None,
            lora_target_parameters=None,
            lora_modules_to_save=None,
            use_rslora=False,
            use_dora=False,
            lora_task_type="CAUSAL_LM",
        )
        | inert("the adapter has no dropout: two passes over a sample have to give the same values", lora_dropout=0.05)
        | inert(NOT_QUANTIZED, load_in_8bit=False, load_in_4bit=False)
        | inert(
            "with `load_in_4bit` only",
            bnb_4bit_quant_type="nf4",
            use_bnb_nested_quant=False,
            bnb_4bit_quant_storage=None,
        )
    ),
}
"""Tables by their titles in the docs; all but the last list options of ``GRPOConfig``."""

OPTIONS = {name: option for section in SECTIONS.values() for name, option in section.items()}
"""Options by name."""

RENAMED = {
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "hub_model_revision": "hub_revision",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "wandb_project": "project",
    "wandb_log_unique_prompts": "log_unique_prompts",
}
"""New names of options by those of older versions and of open-r1."""

OLDER = (*RENAMED, "max_prompt_length", "use_liger_loss", "vllm_device", "vllm_dtype", "vllm_enable_prefix_caching")
"""Options that a file for an older version of TRL may have."""

OLDER_BETA = 0.04
"""Default of `beta` in older versions of TRL."""

FURTHER: Table = (
    different(
        '`PromptDataModule(max_prompt_tokens=, too_long="drop")`',
        "longer prompts are dropped; older versions of TRL cut them",
        max_prompt_length=None,
    )
    | same("`PromptDataModule(system=)`", system_prompt=None)
    | different("`PromptDataModule(columns=, chat=True)`", "of open-r1", dataset_prompt_column="prompt")
    | same("`tokenizer=AutoTokenizer.from_pretrained(model, chat_template=)`", chat_template=None)
    | same(
        "the reward `get_cosine_scaled_reward` of open-r1",
        cosine_min_value_wrong=0.0,
        cosine_max_value_wrong=-0.5,
        cosine_min_value_correct=0.5,
        cosine_max_value_correct=1.0,
        cosine_max_len=1000,
    )
    | same(
        "the rewards of open-r1",
        repetition_n_grams=3,
        repetition_max_penalty=-1.0,
        code_language="python",
        max_completion_len=16384,
        soft_punish_cache=4096,
    )
    | inert(
        "set it in the reward",
        code_provider="e2b",
        parallel_code_exec_per_proc=2,
        code_eval_test_batch_size=1,
        ioi_provider="piston",
        e2b_router_url=None,
        morph_router_url=None,
    )
    | refusal("mix them into one data set first", dataset_mixture=None)
    | inert("the folder is kept", overwrite_output_dir=False)
    | inert("the logger decides", logging_dir=None, wandb_entity=None, wandb_run_group=None)
    | inert(HUB, push_to_hub_organization=None, push_to_hub_revision=False, overwrite_hub_revision=False)
    | inert("write an `Evaluation`", benchmarks=[])
    | inert("add callbacks of Lightning to the recipe", callbacks=None)
    | inert(EVALUATE, eval_dataset=None)
    | inert(
        "vLLM decides", vllm_device=None, vllm_dtype=None, vllm_enable_prefix_caching=None, vllm_sampling_params=None
    )
    | inert("the loss never materializes all logits", use_liger_loss=False)
    | inert(
        SPEED,
        group_by_length=False,
        torchdynamo=None,
        jit_mode_eval=False,
        use_ipex=False,
        use_mps_device=False,
        unsloth_num_chunks=-1,
        unsloth_grpo_mini_batch=None,
        dispatch_batches=None,
        split_batches=None,
        tpu_num_cores=None,
        tpu_metrics_debug=False,
        half_precision_backend="auto",
        fp16_backend="auto",
        fp16_opt_level="O1",
        past_index=-1,
        ray_scope="last",
    )
    | inert("checkpoints are safetensors or torch files of Lightning", save_safetensors=True)
    | inert(DISPLAY, include_tokens_per_second=False, include_inputs_for_metrics=False)
    | refusal("write `environment=`", tools=None, environment_factory=None, rollout_func=None)
    | refusal("write `optimizer=` and `lr_scheduler=`", optimizers=None)
    | same("the adapter of `policy`: `LoraConfig(...)` with the same options", peft_config=None)
    | same("`tokenizer`, if it is not that of the model", processing_class=None)
    | inert(NOT_QUANTIZED, quantization_config=None)
    | inert("vLLM is used with `use_vllm`", fast_inference=False, gpu_memory_utilization=None, max_lora_rank=None)
    | inert("`SamplingParams(max_new_tokens=)` limits a response", max_seq_length=None)
    | inert("the Trainer places the model", device_map=None, low_cpu_mem_usage=None)
    | inert("set by `gradient_checkpointing`", use_gradient_checkpointing=None)
    | inert("`seed` of the module", random_state=None)
    | inert("rewards that are models load their own tokenizers", reward_processing_classes=None)
)
"""Options of older versions of TRL and transformers, of open-r1 and unsloth, and arguments of ``GRPOTrainer``."""
