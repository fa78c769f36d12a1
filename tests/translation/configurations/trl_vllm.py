import argparse

import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def different_letters(completions, **kwargs):
    return [float(len(set(re.sub(r"\W", "", text)))) for text in completions]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm_server_host", type=str, default="")
    parser.parse_args()
    dataset = load_dataset("trl-lib/tldr", split="train")
    training_args = GRPOConfig(
        output_dir="Qwen2.5-72B-GRPO",
        per_device_train_batch_size=4,
        num_generations=4,
        bf16=True,
        gradient_checkpointing=True,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_host="10.0.0.7",
    )
    trainer = GRPOTrainer(
        "Qwen/Qwen2.5-72B", args=training_args, reward_funcs=[different_letters], train_dataset=dataset
    )
    trainer.train()


if __name__ == "__main__":
    main()
