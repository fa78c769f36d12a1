import re

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SYSTEM = "Answer between tags."


def after_tag(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def questions(split="train") -> Dataset:
    rows = load_dataset("openai/gsm8k", "main")[split]
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]})


dataset = questions()


def correct(prompts, completions, answer, **kwargs) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [2.0 if after_tag(text) == right else 0.0 for text, right in zip(texts, answer)]


def has_tags(completions, **kwargs) -> list[float]:
    return [0.5 if re.match(r"<answer>.*</answer>", one[0]["content"]) else 0.0 for one in completions]


model_name = "meta-llama/Llama-3.2-1B-Instruct"
output_dir = f"outputs/{model_name}"
run_name = "Llama-1B-GRPO-gsm8k"
training_args = GRPOConfig(
    output_dir=output_dir,
    run_name=run_name,
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    bf16=True,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4 * 4,
    num_generations=16,
    max_prompt_length=256,
    max_completion_length=786,
    num_train_epochs=1,
    save_steps=100,
    max_grad_norm=0.1,
    report_to="wandb",
    log_on_each_node=False,
)
peft_config = LoraConfig(
    r=16,
    lora_alpha=64,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    task_type="CAUSAL_LM",
    lora_dropout=0.05,
)
model = AutoModelForCausalLM.from_pretrained(
    model_name, torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2", device_map=None
).to("cuda")
tokenizer = AutoTokenizer.from_pretrained(model_name)
tokenizer.pad_token = tokenizer.eos_token
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[has_tags, correct],
    args=training_args,
    train_dataset=dataset,
    peft_config=peft_config,
)
trainer.train()
