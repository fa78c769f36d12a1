"""The bare side of `bound.py`: the loop of `bare.py` on the work of the other sides.

Makes a step for each input line, and writes its measurements as a line of JSON.
"""

import json
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from bare import add_gradient, decode, microbatches_of, prepare, rollout_of, step
from measure import peak_memory
from workload import Phases, Workload, workload

MAX_TOKENS = 4096  # of a microbatch


def prompts_of(work: Workload) -> list[list[int]]:
    """Return the token ids of the rows."""
    chat: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    tokenizer: Any = work.tokenizer
    texts = [row["prompt"] for row in work.rows]
    return [
        tokenizer(text)["input_ids"] if isinstance(text, str) else tokenizer.apply_chat_template(text, **chat)
        for text in texts
    ]


def rewards_of(work: Workload, responses: list[list[int]], rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Return the rewards of responses to rows of the data."""
    texts: list[Any] = work.tokenizer.batch_decode(responses, skip_special_tokens=True)
    chats = not isinstance(rows[0]["prompt"], str)
    completions = [[{"role": "assistant", "content": text}] for text in texts] if chats else texts
    return torch.tensor(work.rewards(completions, answer=[row.get("answer") for row in rows]))


def main(cell: dict[str, Any]) -> None:
    """Train for as long as there are lines."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    phases, work = Phases(), workload(**cell)
    model, prompts, number, group = work.model.eval(), prompts_of(work), cell["prompts"], cell["group"]
    optimizer = prepare(model)
    done = 0
    while sys.stdin.readline():
        phases.take()
        wall, cpu = time.perf_counter(), time.process_time()
        places = [place % len(prompts) for place in range(done * number, (done + 1) * number)]
        done += 1
        chosen = [prompts[place] for place in places]
        with phases.of("generation"):
            options = {"lengths": work.lengths, "longest": cell["longest"], "eos": work.eos}
            drawn = decode(model, chosen, group, **options)
        with phases.of("scoring"):
            rows = [work.rows[place] for place in places for _ in range(group)]
            rewards = rewards_of(work, drawn.responses, rows)
            rollout = rollout_of(chosen, drawn, rewards, group)
        with phases.of("update"):
            trained = add_gradient(model, rollout, microbatches_of(rollout, MAX_TOKENS))
            step(model, optimizer)
        whole = time.perf_counter() - wall, time.process_time() - cpu
        tokens = [sum(map(len, drawn.responses)), trained]
        report = {"tokens": tokens, "reward": rewards.mean().item(), "peak": peak_memory()}
        print(json.dumps({"whole": whole, **phases.take(), **report}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
