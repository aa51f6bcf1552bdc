"""The vLLM bridge against vLLM itself, by hand in an environment that holds both packages:

    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind python tests/vllm_check.py [record|full|lora|train ...]

``record`` writes the interface that the bridge uses to ``golden/vllm_interface.json``, from which `fake_vllm` is made;
``full`` and ``lora`` compare log-probs and greedy turns with the trainer's and the local engine's, before and after an
update, and measure both engines; ``train`` runs two steps of GRPO. Without a name all run, each in its own process.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.modules["numba"] = None  # bm25s would load it, and vLLM 0.32's CPU backend fails on a module that numba brings

from agentr1_lite.batch import collate  # noqa: E402
from agentr1_lite.bridges.vllm import VLLMEngine  # noqa: E402
from agentr1_lite.policy import QwenPolicy  # noqa: E402
from agentr1_lite.rollout import rollout  # noqa: E402
from agentr1_lite.sampling import Sampling  # noqa: E402
from agentr1_lite.tasks import load_task  # noqa: E402
from agentr1_lite.trainer import AgentR1Trainer  # noqa: E402

RECORD = Path(__file__).parent / "golden" / "vllm_interface.json"
METHODS = ("add_request", "step", "abort_request", "add_lora", "remove_lora")


def check(name: str, good: bool, said: str) -> None:
    print(f"{'ok  ' if good else 'FAIL'}  {name}: {said}", flush=True)
    if not good:
        sys.exit(1)


def differences(policy: QwenPolicy, trajectories: list[Any], temperature: float) -> torch.Tensor:
    """|log π of the trainer − log π of the engine| of every sampled token."""
    batch = collate(trajectories)
    with torch.no_grad():
        found = policy.log_probs(batch, temperature=temperature).logprobs
    return (found - batch.old_logprobs)[batch.action_mask].abs()


def nudge(policy: QwenPolicy, size: float) -> None:
    """Weights after an update: noise on every trained one."""
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in policy.actor_parameters():
            p += size * torch.randn(p.shape, generator=noise)


def compare(policy: QwenPolicy, size: float) -> None:
    tasks = load_task("atlas", "dev")
    questions = tasks.tasks[:24]
    started = time.perf_counter()
    engine = VLLMEngine(policy, stop_strings=tasks.env.stop_strings, max_rows=64)
    print(f"      vLLM {engine._vllm.__version__} started in {time.perf_counter() - started:.0f} s")

    def play(temperature: float, **options: Any) -> list[Any]:
        sampling = Sampling(temperature, options.pop("greedy", False))
        engine.using(sampling, tasks.env.stop_strings)
        return rollout(policy, tasks.env, questions, engine=engine, **options)

    for temperature in (1.0, 1.6):
        found = differences(policy, play(temperature, group_size=2, seed=1), temperature)
        said = f"{len(found)} tokens, mean |difference| {found.mean():.1e}, largest {found.max():.1e}"
        check(f"log-probs at temperature {temperature}", float(found.max()) < 1e-3, said)
    first, again = play(1.0, seed=2), play(1.0, seed=2)
    same = sum(a.segments[0].token_ids == b.segments[0].token_ids for a, b in zip(first, again, strict=True))
    check("one seed twice", same >= 0.9 * len(first), f"{same} of {len(first)} episodes have the same tokens")
    mine, theirs = rollout(policy, tasks.env, questions, greedy=True), play(1.0, greedy=True)
    same = sum(a.segments[0].token_ids == b.segments[0].token_ids for a, b in zip(mine, theirs, strict=True))
    check("greedy", same >= 0.9 * len(mine), f"{same} of {len(mine)} episodes equal the local engine's token for token")
    ends = [(turn.finish_reason, turn.kind) for t in theirs for turn in t.turns]
    check(
        "turns", len(ends) > len(theirs), f"{len(ends)} turns in {len(theirs)} episodes, {len(set(ends))} kinds of end"
    )

    asked = play(1.0, seed=4)
    nudge(policy, size)
    stale = differences(policy, asked, 1.0)
    fresh = differences(policy, play(1.0, seed=4), 1.0)
    said = f"mean |difference| {stale.mean():.1e} before, {fresh.mean():.1e} after (largest {fresh.max():.1e})"
    loaded = fresh.max() < 1e-3 and stale.mean() > 100 * fresh.mean()
    check("weights loaded after an update", bool(loaded), said)

    prompts = cached = 0
    inner = engine._llm.llm_engine
    step = inner.step

    def counted() -> list[Any]:
        nonlocal prompts, cached
        outputs = step()
        prompts += sum(len(o.prompt_token_ids) for o in outputs if o.finished)
        cached += sum(o.num_cached_tokens for o in outputs if o.finished)
        return outputs

    inner.step = counted
    play(1.0, group_size=2, seed=6)
    inner.step = step
    check("prefix cache", cached > prompts / 2, f"{cached} of {prompts} prompt tokens were not computed again")

    for name, options in (("local", {}), ("vLLM", {"engine": engine})):
        started = time.perf_counter()
        played = rollout(policy, tasks.env, questions, group_size=2, seed=5, max_batch=64, **options)
        seconds, tokens = time.perf_counter() - started, sum(t.num_actions for t in played)
        print(f"      {name}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} a second")


def full() -> None:
    compare(QwenPolicy("atlas-agent"), 2e-3)


def lora() -> None:
    policy = QwenPolicy("atlas-agent", lora_rank=4)
    nudge(policy, 0.02)
    compare(policy, 0.02)


def train() -> None:
    training = {"engine": "vllm", "algorithm": "GRPO", "batch_size": 4, "group_size": 4, "temperature": 1.6}
    with tempfile.TemporaryDirectory() as folder:
        config = {"training": training, "run": {"output": f"{folder}/run", "progress": False}}
        trainer = AgentR1Trainer(QwenPolicy("atlas-agent", lora_rank=8), config)
        for metrics in trainer.online_rl(load_task("atlas", "train"), 32):
            shown = {
                k: v for k, v in metrics.items() if k.startswith(("engine", "importance", "first", "reward", "grad"))
            }
            print("      " + ", ".join(f"{k} {v:.3g}" for k, v in shown.items()))
            check("step", metrics["engine_difference_max"] < 1e-3, "the engine sampled from the weights of this step")
        print("      " + "\n      ".join(str(finding) for finding in trainer.findings if "engine" in finding.check))


def record() -> None:
    """Names, defaults and three real answers: ended by a stop string, by an end token, by the length limit."""
    import vllm
    from vllm.logprobs import Logprob
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput

    policy, tasks = QwenPolicy("atlas-agent"), load_task("atlas", "dev")
    engine = VLLMEngine(policy, max_rows=4)
    env = tasks.env.fork()
    prompt = policy.chat.prompt_ids(env.reset(tasks.tasks[0]), tools=env.tool_schemas or None)
    answers, step = {}, engine._llm.llm_engine.step
    for name, stops, limit in (("stop string", ["</"], 64), ("end token", [], 64), ("length", [], 3)):
        seen: list[Any] = []
        engine._llm.llm_engine.step = lambda seen=seen: seen.extend(step()) or seen[-1:]
        engine.using(Sampling(greedy=True), stops).open([prompt], [0], [len(prompt) + limit])
        engine.next_turns()
        engine.close(0)
        output = seen[-1].outputs[0]
        answers[name] = {
            "ids": list(output.token_ids),
            "pieces": [policy.tokenizer.decode([i]) for i in output.token_ids],
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "logprobs": [{token: round(x.logprob, 4) for token, x in place.items()} for place in output.logprobs],
        }
    parameters = inspect.signature(vllm.SamplingParams).parameters
    simple = (int, float, str, bool, type(None))
    written = {
        "version": vllm.__version__,
        "LLM": [f.name for f in dataclasses.fields(vllm.EngineArgs)],
        "SamplingParams": {k: p.default if isinstance(p.default, simple) else None for k, p in parameters.items()},
        "LLMEngine": {name: list(inspect.signature(getattr(vllm.LLMEngine, name)).parameters) for name in METHODS},
        "RequestOutput": list(inspect.signature(RequestOutput).parameters),
        "CompletionOutput": [f.name for f in dataclasses.fields(CompletionOutput)],
        "Logprob": [f.name for f in dataclasses.fields(Logprob)],
        "LoRARequest": list(LoRARequest.__struct_fields__),
        "end_tokens": sorted(policy.chat.eos_ids),
        "answers": answers,
    }
    RECORD.write_text(json.dumps(written) + "\n", encoding="utf-8")
    print(f"      {RECORD.name}: vLLM {vllm.__version__}, answers of {', '.join(answers)}")


PARTS = {"record": record, "full": full, "lora": lora, "train": train}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        PARTS[sys.argv[1]]()
    else:
        for part in sys.argv[1:] or PARTS:
            print(part, flush=True)
            subprocess.run([sys.executable, __file__, part], check=True)
