"""Does the memory plan hold? Each phase of a step in a fresh process: its peak beside what the plan says.

    python tests/benchmarks/memory.py                                   # small shapes, under 3 GiB
    python tests/benchmarks/memory.py --model qwen2.5-3b --dtype float32 --batch 1 --group 2 --prompt 128 --response 128

Weights are random (`agentr1_lite.random_model`). On a CPU the peak is the process's resident memory, on a GPU what
torch had reserved. On Linux the C library keeps much of what a process frees, the more the smaller the pieces are; the
plan does not count that, and the measurement switches it off (``MALLOC_MMAP_THRESHOLD_``). Every response token is an
action, the most a row can hold; the rollout samples a few tokens and is fed the rest, since the cache does not ask who
wrote a token.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from agentr1_lite import footprint, planner, update
from agentr1_lite.cache import FIRST_SLOTS
from agentr1_lite.config import TrainingConfig
from agentr1_lite.engine import LocalEngine
from agentr1_lite.mdp import Segment, Trajectory
from agentr1_lite.optimizers import OPTIMIZERS, make_optimizer
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.random_model import random_policy
from agentr1_lite.shapes import Shape, shape_of

SMALL = Shape("small", 512, 8, 8, 2, 64, 1408, 49152)
MIDDLE = Shape("middle", 1024, 12, 16, 4, 64, 2816, 151936)
SAMPLED = 8  # tokens sampled before and after what is fed


def peak(work: Callable[[], None], device: str) -> float:
    """GiB at most while ``work`` runs."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_reserved() / footprint.GIB
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20


def rollout(policy: QwenPolicy, s: footprint.Setting) -> None:
    random = torch.Generator().manual_seed(0)
    slots = None if s.device == "cpu" else min(s.shape.context, FIRST_SLOTS + s.response_tokens)
    engine = LocalEngine(policy, max_rows=s.rows, slots=slots)
    prompts = torch.randint(0, 1000, (s.batch_size, s.prompt_tokens), generator=random).repeat_interleave(
        s.group_size, 0
    )
    fed = max(s.tokens - s.prompt_tokens - 2 * SAMPLED, 1)
    rows = engine.open(prompts[: s.rows].tolist(), range(s.rows), [s.prompt_tokens + SAMPLED] * s.rows)
    first = set(rows)
    while rows:
        for turn in engine.next_turns():
            if turn.row in first:
                first.remove(turn.row)
                engine.extend(turn.row, torch.randint(0, 1000, (fed,), generator=random).tolist(), s.tokens)
            else:
                rows.remove(turn.row)
                engine.close(turn.row)


def episodes(s: footprint.Setting) -> list[Trajectory]:
    """Rows of full length: a prompt of the question, then actions."""
    random = torch.Generator().manual_seed(1)
    made = []
    for question in range(s.batch_size):
        prompt = torch.randint(0, s.shape.vocab, (s.prompt_tokens,), generator=random).tolist()
        for member in range(s.group_size):
            segment = Segment()
            segment.extend(prompt)
            ids = torch.randint(0, s.shape.vocab, (s.tokens - s.prompt_tokens,), generator=random).tolist()
            segment.extend(ids, [-1.0] * len(ids))
            made.append(Trajectory(str(question), str(question), segments=[segment], reward=float(member % 2)))
    return made


def measure(s: footprint.Setting, dtype: str, optimizer: str) -> dict[str, float]:
    """Peak of each phase of the second step (the optimiser has its states)."""
    options = {"quantization": "nf4" if s.quantized else None, "gradient_checkpointing": s.gradient_checkpointing}
    policy = random_policy(s.shape, dtype=dtype, device=s.device, lora_rank=s.lora_rank, **options)
    policy.freeze_reference()
    parts = {"actor": policy.actor_parameters()}
    if s.critic:
        policy.add_critic()
        parts = {"critic": policy.critic_parameters(), **parts}
    optimizers = {name: make_optimizer(optimizer, policy, weights) for name, weights in parts.items()}
    for name, weights in parts.items():
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        update.apply_gradient(weights, optimizers[name], 1.0)
    training = TrainingConfig(algorithm="PPO" if s.critic else "GRPO", micro_batch_tokens=s.micro_batch_tokens)
    made: list[update.Experience] = []

    def learn() -> None:
        experience, rows = made[0], torch.arange(s.episodes)
        for name, weights in parts.items():
            gradient = update.actor_gradient if name == "actor" else update.critic_gradient
            gradient(policy, experience, rows, training)
            update.apply_gradient(weights, optimizers[name], 1.0)

    work = {
        "rollout": lambda: rollout(policy, s),
        "log-prob": lambda: made.append(update.prepare(policy, episodes(s), training)),
        "update": learn,
    }
    return {phase: peak(work[phase], s.device) for phase in footprint.PHASES}


def compare(s: footprint.Setting, dtype: str, optimizer: str) -> dict:
    """The phases of one setting, measured in a process of its own, beside the plan."""
    task = json.dumps({"setting": asdict(s), "dtype": dtype, "optimizer": optimizer})
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command = [sys.executable, __file__, "--child", task]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    measured = json.loads(done.stdout.splitlines()[-1])
    plan = {phase: sum(footprint.phase_parts(s, phase).values()) / footprint.GIB for phase in footprint.PHASES}
    return {"setting": asdict(s), "dtype": dtype, "plan": plan, "measured": measured}


def usual(device: str) -> list[tuple[footprint.Setting, str]]:
    """Settings whose peak lies under 3 GiB: with and without recomputation, 4 bits, two number types, full training."""
    small = footprint.Setting(
        SMALL,
        device=device,
        width=4,
        quantized=False,
        gradient_checkpointing=False,
        optimizer="adamw",
        micro_batch_tokens=512,
        batch_size=2,
        group_size=2,
        prompt_tokens=64,
        response_tokens=192,
    )
    middle = replace(small, shape=MIDDLE, quantized=True, gradient_checkpointing=True)
    # three rows in the first micro-batch, whose logits are recomputed, and one in the last, whose logits are kept
    middle = replace(middle, micro_batch_tokens=1536, prompt_tokens=72, response_tokens=440)
    return [
        (replace(small, lora_rank=0), "float32"),
        (small, "float32"),
        (replace(small, quantized=True, critic=True), "float32"),
        (replace(small, quantized=True, width=2), "bfloat16"),
        (middle, "float32"),
        (replace(middle, width=2), "bfloat16"),
        (replace(middle, gradient_checkpointing=False, critic=True), "float32"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="a shape of its own instead of the small ones")
    parser.add_argument("--layers", type=int, help="cut the shape to so many layers")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=tuple(planner.BYTES))
    parser.add_argument("--full", action="store_true", help="train every weight")
    parser.add_argument("--plain", action="store_true", help="no 4 bits")
    parser.add_argument("--keep", action="store_true", help="no recomputation in the backward pass")
    parser.add_argument("--ppo", action="store_true")
    parser.add_argument("--optimizer", default="adamw", choices=tuple(OPTIMIZERS))
    for name, default in {"batch": 1, "group": 2, "prompt": 128, "response": 128, "micro": 256, "rank": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print a JSON object too, as the last line")
    args = parser.parse_args()
    if args.child:
        task = json.loads(args.child)
        setting = footprint.Setting(**task["setting"] | {"shape": Shape(**task["setting"]["shape"])})
        print(json.dumps(measure(setting, task["dtype"], task["optimizer"])))
        return
    cases = usual(args.device)
    if args.model:
        shape = shape_of(args.model)
        one = footprint.Setting(
            replace(shape, layers=args.layers or shape.layers),
            device=args.device,
            width=planner.BYTES[args.dtype],
            quantized=not (args.plain or args.full),
            lora_rank=0 if args.full else args.rank,
            critic=args.ppo,
            gradient_checkpointing=not args.keep,
            optimizer=args.optimizer,
            micro_batch_tokens=args.micro,
            batch_size=args.batch,
            group_size=args.group,
            prompt_tokens=args.prompt,
            response_tokens=args.response,
        )
        cases = [(one, args.dtype)]
    found = []
    for setting, dtype in cases:
        found.append(row := compare(setting, dtype, args.optimizer))
        words = [setting.shape.name, dtype, "nf4" if setting.quantized else "", f"rank {setting.lora_rank}"]
        words += ["PPO" if setting.critic else "GRPO", "recomputed" if setting.gradient_checkpointing else "kept"]
        print(", ".join(w for w in words if w))
        for phase in footprint.PHASES:
            plan, real = row["plan"][phase], row["measured"][phase]
            print(
                f"  {phase:<9} plan {plan:6.2f} GiB  measured {real:6.2f} GiB  {100 * (plan / real - 1):+5.1f} %",
                flush=True,
            )
    if args.json:
        print(json.dumps({"cases": found}))


if __name__ == "__main__":
    main()
