"""An agent of the package openai-agents learns to calculate with its tool, unmodified, on a laptop.

    pip install 'lightning-rl[agents]'
    python recipes/openai_agents.py --tiny
    make model                    # once: SmolLM2-135M-Instruct into models/
    python recipes/openai_agents.py

The agent calls the policy as a model API (docs/environments.md#programs); its loop, its tool and its prompts are the
package's. The task is `tiny_tools.py`. Every option is a keyword of `main`; to change anything else, copy this file.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from command_line import call

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from openai import AsyncOpenAI

    from lightning_rl.environments import PolicyEndpoint

# SmolLM2's own template leaves out tools and their calls.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EXAMPLE = tuple(
    message
    for a, operation, b, result in ((3, "+", 4, 7), (20, "-", 5, 15), (6, "*", 8, 48))
    for message in (
        {"role": "user", "content": f"What is {a} {operation} {b}?"},
        {
            "type": "function_call",
            "call_id": f"call{result}",
            "name": "calculate",
            "arguments": json.dumps({"a": a, "operation": operation, "b": b}),
        },
        {"type": "function_call_output", "call_id": f"call{result}", "output": str(result)},
        {"role": "assistant", "content": f"#### {result}"},
    )
)


async def calculator(row: Mapping[str, Any], model: "PolicyEndpoint", *, example: Sequence[Any] = EXAMPLE) -> float:
    """Run the agent on a question; return 1 if the last word of its final answer is the result, else 0."""
    from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool
    from tools import calculate

    served = OpenAIChatCompletionsModel(model.model, client(model.url).with_options(api_key=model.key))
    agent = Agent(name="calculator", model=served, tools=[function_tool(calculate)])
    try:
        result = await Runner.run(agent, [*example, *row["prompt"]], max_turns=3)
    except AgentsException:  # such as a call of an unknown tool, or too many turns
        return 0.0
    return float(result.final_output.split()[-1:] == row["answer"].split()[-1:])


@cache
def client(url: str) -> "AsyncOpenAI":
    """Return a client, whose connections all samples share; the key is that of a sample."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{url}/v1", api_key="of a sample")


def main(
    policy: str = "models/SmolLM2-135M-Instruct", rollouts: int = 10, prompts: int = 4, learning_rate: float = 1e-5,
    seed: int = 0,
) -> "Trainer":  # fmt: skip
    """Train on 8 runs of the agent for each question; print greedy accuracy on held-out questions before and after.

    Args:
        policy: Folder of the model; ``tiny`` for a small one that mostly guesses.
        rollouts: Number of rollouts, each with one optimizer step.
        prompts: Number of questions per rollout.
        learning_rate: Learning rate of AdamW.
        seed: Random seed.
    """
    from functools import partial  # imports inside, so that --help is fast

    import tiny_tools as task
    from agents import set_tracing_disabled
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.optim import AdamW
    from transformers import AutoTokenizer

    from lightning_rl import Conversations, PromptDataModule, RLLightningModule, SamplingParams
    from lightning_rl.data import PromptDataset
    from lightning_rl.environments import EnvironmentReward, Program
    from lightning_rl.reporting import RolloutSummary

    set_tracing_disabled(True)  # the agent sends nothing to its vendor
    tiny = policy == "tiny"
    tokenizer: Any = task.tiny_tokenizer() if tiny else AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = task.TEMPLATE if tiny else TEMPLATE
    questions = {"columns": {"prompt": "question"}, "chat": True}
    train, test = (PromptDataset(task.calculations(split), **questions) for split in ("train", "test"))
    agent = Program(partial(calculator, example=() if tiny else EXAMPLE))
    module = RLLightningModule(
        policy=partial(task.warm_started_policy, seed) if tiny else policy, tokenizer=tokenizer,
        environment=Conversations(agent, max_turns=4), rewards=EnvironmentReward(), group_size=8,
        sampling=SamplingParams(max_new_tokens=48 if tiny else 96),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True), seed=seed,
    )  # fmt: skip
    data = PromptDataModule(train, prompts, validation=test, seed=seed)
    trainer = Trainer(
        accelerator="cpu", max_steps=rollouts, num_sanity_val_steps=0, log_every_n_steps=1,
        val_check_interval=rollouts, check_val_every_n_epoch=None,
        logger=CSVLogger("runs", "openai_agents"), limit_val_batches=1.0 if tiny else 1, callbacks=[RolloutSummary()],
    )  # fmt: skip
    before = trainer.validate(module, data, verbose=False)[0]["val/reward/task"]
    trainer.fit(module, data)
    after = float(trainer.callback_metrics["val/reward/task"])
    print(f"metrics: {trainer.log_dir}\naccuracy before={before:.3f} after={after:.3f}")  # noqa: T201
    return trainer


if __name__ == "__main__":
    call(main, lambda: {"policy": "tiny", "rollouts": 16, "prompts": 8, "learning_rate": 1e-3})
