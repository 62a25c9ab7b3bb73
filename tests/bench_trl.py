"""Side by side with TRL's GRPO on this machine: same warm-started policy, task, batch, steps and rate.

    python tests/bench_trl.py [iterations]

Needs the extra ``parity``. Both run in this process on one thread, one after the other: ours as in
``loop.py``, TRL's ``GRPOTrainer`` with transformers' generate. Equal on both sides: 96 prompts x 8 samples an
iteration in 8 optimizer steps, clip 0.2/0.28, token mean over the batch, rewards over the group's standard
deviation, AdamW, the schedule. No entropy bonus, which TRL lacks. Different: ours leaves groups of equal
rewards out.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from loop import Loop, two_digits
from policies import write_shard
from transformers import AutoModelForCausalLM, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer

from tasks.config import CampaignConfig
from tasks.environments.scorer import Sample
from tasks.policy.checkpoint.weights import disk_tensors, write_index
from tasks.policy.training.trainee import learning_rate

REACHED = 0.9


class Clock:
    """Exact match of the samples of each iteration, and when they were there."""

    def __init__(self) -> None:
        self.start, self.cpu = time.monotonic(), time.process_time()
        self.rows: list[tuple[float, float, float]] = []

    def add(self, exact: float) -> None:
        self.rows.append((exact, time.monotonic() - self.start, time.process_time() - self.cpu))

    def table(self, name: str) -> str:
        exact, wall, cpu = self.rows[-1]
        reached = next(((w, c, i) for i, (e, w, c) in enumerate(self.rows) if e >= REACHED), None)
        to = f"{reached[0]:.1f} | {reached[1]:.1f} | {reached[2]}" if reached else f"not in {wall:.0f} | | "
        count = len(self.rows) - 1
        wall, cpu = wall - self.rows[0][1], cpu - self.rows[0][2]  # from the first iteration's samples on
        return f"| {name} | {wall / count:.2f} | {cpu / count:.2f} | {to} | {exact:.3f} |"


def ours(loop: Loop, iterations: int) -> Clock:
    clock = Clock()
    for k in range(iterations):
        clock.add(loop.iterate(k)[0])
        if clock.rows[-1][0] >= REACHED:
            break
    return clock


def theirs(folder: Path, loop: Loop, config: CampaignConfig, iterations: int, scratch: str) -> Clock:
    clock, rollout, train = Clock(), config.rollout, config.train
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [loop.environment.train_prompt(i) for i in range(iterations * rollout.prompts_per_iteration)]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p.text}], "prompt_id": p.prompt_id} for p in prompts]
    )
    steps = config.algorithm.num_minibatches
    eos = loop.tokenizer.eos_token_id

    def reward(completion_ids: list[list[int]], prompt_id: list[str], **_: Any) -> list[float]:
        samples = [
            Sample(
                prompt_id=name, prompt_ids=[], response_ids=ids,
                finish_reason="stop" if ids and ids[-1] == eos else "length",
            )
            for ids, name in zip(completion_ids, prompt_id, strict=True)
        ]  # fmt: skip
        outcomes = loop.truth.truths(samples)
        clock.add(sum(outcome.is_exact for outcome in outcomes) / len(outcomes))
        return [outcome.reward or 0.0 for outcome in outcomes]

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = bool(clock.rows) and clock.rows[-1][0] >= REACHED

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.eps,
        weight_decay=0.0,
    )  # fmt: skip
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(config, step // steps) / train.learning_rate
    )
    arguments = GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, shuffle_dataset=False,
        per_device_train_batch_size=rollout.samples_per_iteration // steps, steps_per_generation=steps,
        num_generations=rollout.group_size, max_completion_length=rollout.max_new_tokens, temperature=1.0,
        max_steps=iterations * steps, max_grad_norm=train.max_grad_norm, beta=0.0, loss_type="dapo",
        epsilon=config.algorithm.clip_low, epsilon_high=config.algorithm.clip_high, scale_rewards="group",
        seed=config.seed,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=loop.tokenizer,
        optimizers=(optimizer, rates), callbacks=[Stop()],
    )  # fmt: skip
    clock.start, clock.cpu = time.monotonic(), time.process_time()  # building it is not counted, nor is ours
    trainer.train()
    return clock


def save(loop: Loop, folder: Path) -> None:
    """The warm-started policy as a Hugging Face checkpoint."""
    write_index(folder, [write_shard(folder, disk_tensors(loop.model), 0, 1)])
    loop.model.config.save_pretrained(folder)
    loop.tokenizer.save_pretrained(folder)


def main(iterations: int) -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    config = two_digits(algorithm={"entropy_coefficient": 0.0}, schedule={"iterations": iterations})
    with tempfile.TemporaryDirectory() as random, tempfile.TemporaryDirectory() as warm:
        loop = Loop(config, Path(random))
        save(loop, Path(warm))
        tables = [ours(loop, iterations).table("ours")]
        tables.append(theirs(Path(warm), loop, config, iterations, random).table("TRL 1.16.0"))
    print("| | s an iteration | CPU-s | s to 0.9 | CPU-s to 0.9 | iterations to 0.9 | exact at the end |")
    print("\n".join(["|---|---|---|---|---|---|---|", *tables]))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
