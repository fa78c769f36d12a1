from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/tldr", split="train")
TARGET = 4 * 5


def near_target(completions, **kwargs):
    return [-abs(TARGET - len(completion)) for completion in completions]


training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO", logging_steps=10)
training_args.num_generations = 4
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=near_target,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
