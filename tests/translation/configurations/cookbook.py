from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

train_dataset = load_dataset("AI-MO/NuminaMath-TIR", split="train[:5%]")
model_id = "Qwen/Qwen2-0.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype="auto", device_map="auto")
lora_config = LoraConfig(
    task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
)
model = get_peft_model(model, lora_config)


def think_reward(completions, **kwargs):
    return [float("</think>" in completion[0]["content"]) for completion in completions]


training_args = GRPOConfig(
    output_dir="Qwen2-0.5B-GRPO-test",
    learning_rate=1e-5,
    remove_unused_columns=False,
    gradient_accumulation_steps=16,
    num_train_epochs=1,
    bf16=True,
    max_completion_length=64,
    num_generations=4,
    max_prompt_length=128,
    report_to=["tensorboard"],
    logging_steps=10,
    push_to_hub=True,
    save_strategy="steps",
    save_steps=10,
)
trainer = GRPOTrainer(model=model, reward_funcs=[think_reward], args=training_args, train_dataset=train_dataset)
trainer.train()
