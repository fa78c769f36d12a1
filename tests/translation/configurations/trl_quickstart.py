from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

train_dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=train_dataset,
)
trainer.train()
