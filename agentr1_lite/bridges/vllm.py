"""vLLM as the engine of a rollout: the kit's rows on paged attention and continuous batching, for a GPU.

Token ids go in and come out; nothing is decoded and encoded again. What the adapter relies on, read from vLLM's
source:

* ``logprobs_mode="processed_logprobs"`` gives log-probs of the distribution that was sampled from, after the
  temperature, from 0.10.2 on (vllm#22387); 0.10.0 knows the name but leaves the temperature out.
* ``ignore_eos`` with ``stop_token_ids`` makes the policy's end tokens the only ones, whatever the model's
  ``generation_config.json`` lists. The end token stays in the ids, as does the token that completes a stop string.
* A prompt is looked up in the prefix cache under the adapter's name, so a new adapter needs a new name; after new
  weights under the same name the cache is emptied.

The trainer keeps weights of its own, so the GPU holds the model twice. vLLM's kernels round otherwise than the
trainer's: `agentr1_lite.importance` corrects for that. A row has its own seed, but its log-probs depend in their
last bits on the rows beside it, so a run repeats only nearly.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentr1_lite import loading, storage
from agentr1_lite.engine import EngineTurn, check_prompts
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.sampling import Sampling

LEAST = (0, 10, 2)
RANKS = (8, 16, 32, 64, 128, 256, 512)  # values of max_lora_rank that every version takes
UNREAD = ("use_dora", "rank_pattern", "alpha_pattern")  # fields of an adapter's configuration that vLLM passes over
INSTALL = 'pip install "agentr1_lite[vllm]" (Linux), or set training.engine to local'


def require() -> None:
    """Raise ``ValueError`` with one sentence where vLLM is not installed; nothing is imported, so it takes no time."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"the vLLM engine needs the package vllm, which is not installed; {INSTALL}")


def _load() -> Any:
    require()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, one GPU context, no child to outlive it
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise ValueError(f"the package vllm cannot be imported ({error}); install it again: {INSTALL}") from error
    version = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if version < LEAST:
        least = ".".join(map(str, LEAST))
        raise ValueError(f"vllm {vllm.__version__} gives log-probs without the temperature; install {least} or newer")
    return vllm


@dataclass
class Row:
    """Tokens a row holds and may hold, its seed, tokens drawn so far; the request that samples, or the ended turn."""

    ids: list[int]
    limit: int
    seed: int
    drawn: int = 0
    request: str = ""
    turn: EngineTurn | None = None


class VLLMEngine:
    """The four calls of `agentr1_lite.engine.Engine` on a ``vllm.LLM``.

    Args:
        policy: whose actor samples. LoRA: its base is loaded once and its adapter after every update. Full weights:
            all of them are written and read again after every update, which pays for small models only.
        sampling: temperature or greedy; a ``top_p`` is refused, see `Sampling`.
        stop_strings: texts of the environment that end a turn.
        max_rows: rows that can be open at once.
        memory: share of the GPU's memory for vLLM's weights and cache; the trainer needs the rest.
        handover: see `agentr1_lite.engine.LocalEngine`.
        options: any argument of ``vllm.LLM``.

    Weights are compared with the policy's whenever rows are opened, by version and checksum, and loaded where they
    changed; when loading fails, the engine counts as holding none and tries again at the next call.

    Raises:
        ValueError: vLLM is missing, too old or cannot start, or the sampling cannot be reproduced by the trainer.
    """

    def __init__(
        self,
        policy: QwenPolicy,
        *,
        sampling: Sampling | None = None,
        stop_strings: Sequence[str] = (),
        max_rows: int = 256,
        memory: float = 0.4,
        handover: float = 0.25,
        **options: Any,
    ) -> None:
        vllm = _load()
        self._vllm, self.policy, self.max_rows, self.handover = vllm, policy, max_rows, handover
        self._rows: dict[int, Row] = {}
        self._asked = self._loads = 0
        # the trainer gives ids without a token no share; vLLM has no lower bias than this, a factor of 4e-44
        self._unknown = dict.fromkeys((~policy.head.known).nonzero()[:, 0].tolist(), -100.0) or None
        self._adapter: Any = None
        self.using(sampling or Sampling(), stop_strings)
        self._folder = tempfile.TemporaryDirectory(prefix="agentr1-vllm-")  # goes with the engine
        defaults = {
            "dtype": str(policy.causal.dtype).removeprefix("torch."),
            "max_model_len": policy.context_length,
            "max_num_seqs": max_rows,
            "gpu_memory_utilization": memory,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "seed": policy.seed,
        }
        if policy.lora_rank:
            unread = [name for name in UNREAD if getattr(policy.model.peft_config["actor"], name)]
            if unread:
                todo = "set training.engine to local, or merge the adapter into its base"
                raise ValueError(f"vLLM does not read the {unread[0]} of an adapter and would sample otherwise; {todo}")
            rank = next((rank for rank in RANKS if rank >= policy.lora_rank), policy.lora_rank)
            defaults |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        if policy.quantized:
            defaults["quantization"] = "bitsandbytes"
        if policy.device.type == "cpu":  # compiling outlasts a lesson; 0.32 cannot cut a seeded row's prompt there
            defaults |= {"enforce_eager": True, "enable_chunked_prefill": False}
        mark = fingerprint(policy)
        try:
            self._llm = vllm.LLM(model=self._base(), **{**defaults, **options})
        except (RuntimeError, ValueError) as error:
            reason = f"{str(error).strip().splitlines()[0]:.300}" if str(error).strip() else type(error).__name__
            todo = "change training.engine_memory, or set training.engine to local"
            raise ValueError(f"vLLM could not start ({reason}); {todo}") from error
        self._held = None if policy.lora_rank else mark

    def using(self, sampling: Sampling, stop_strings: Sequence[str]) -> VLLMEngine:
        """Sample otherwise from now on: one loaded model serves training, greedy baselines and several environments."""
        if self._rows:
            raise ValueError(f"{len(self._rows)} rows are open; close them before the sampling changes")
        if sampling.top_p < 1:
            raise ValueError("the vLLM engine records log-probs for training, so top_p must be 1")
        self.sampling, self.stop_strings = sampling, tuple(s for s in stop_strings if s)
        return self

    # The protocol of a rollout

    @property
    def free_rows(self) -> int:
        return self.max_rows - len(self._rows)

    def open(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]) -> list[int]:
        """Add rows; row i may sample until it holds ``limits[i]`` tokens."""
        if not prompts:
            return []
        check_prompts(prompts, self.free_rows, self.max_rows)
        self._refresh()
        numbers = [i for i in range(self.max_rows) if i not in self._rows][: len(prompts)]
        for number, prompt, seed, limit in zip(numbers, prompts, seeds, limits, strict=True):
            self._rows[number] = Row(list(prompt), limit, seed % 2**64)
        return numbers

    def next_turns(self) -> list[EngineTurn]:
        """Decode until ``handover`` of the rows in play have ended their turns; the others go on in the next call."""
        if self._rows and self.policy.version != self._held[0]:
            raise ValueError("the policy was updated while rows are open; close them, they were sampled by the former")
        for row in self._rows.values():
            if not row.request and row.turn is None:
                self._ask(row)
        asked = {row.request: number for number, row in self._rows.items() if row.request}
        while asked and not self._enough(len(asked)):
            for output in self._llm.llm_engine.step():
                if output.finished and output.request_id in asked:
                    self._end(asked.pop(output.request_id), output.outputs[0])
        return [row.turn for _, row in sorted(self._rows.items()) if row.turn is not None]

    def extend(self, row: int, ids: Sequence[int], limit: int) -> None:
        """Give an ended row its observation; it may sample again until it holds ``limit`` tokens."""
        state = self._rows.get(row)
        if state is None or state.turn is None:
            raise ValueError(f"row {row} has not ended its turn, so it cannot take an observation")
        state.ids += ids
        state.limit, state.turn = limit, None

    def close(self, row: int) -> None:
        """Let a row go, whatever it was doing."""
        state = self._rows.pop(row, None)
        if state is not None and state.request:
            self._llm.llm_engine.abort_request([state.request])

    # Inside

    def _enough(self, decoding: int) -> bool:
        ended = len(self._rows) - decoding
        return ended > 0 and ended >= self.handover * len(self._rows)

    def _ask(self, row: Row) -> None:
        """Hand the row's tokens to vLLM; those of earlier turns come from its prefix cache."""
        self._asked += 1
        row.request = str(self._asked)
        noise = np.random.SeedSequence([row.seed, row.drawn]).generate_state(1)[0]
        parameters = self._vllm.SamplingParams(
            temperature=0.0 if self.sampling.greedy else self.sampling.temperature,
            seed=int(noise) >> 1,
            max_tokens=max(1, row.limit - len(row.ids)),
            logprobs=0,  # of the sampled token alone
            stop=list(self.stop_strings),
            include_stop_str_in_output=True,
            stop_token_ids=sorted(self.policy.chat.eos_ids),
            ignore_eos=True,
            detokenize=bool(self.stop_strings),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            logit_bias=self._unknown,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"type": "token", "prompt_token_ids": list(row.ids)}
        self._llm.llm_engine.add_request(row.request, prompt, parameters, lora_request=self._adapter)

    def _end(self, number: int, output: Any) -> None:
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM gave up a request: {output.finish_reason}")
        row, ids = self._rows[number], list(output.token_ids)
        logprobs = [float(place[token].logprob) for token, place in zip(ids, output.logprobs, strict=True)]
        ended_by = ids[-1] if ids[-1] in self.policy.chat.eos_ids else None
        row.turn = EngineTurn(number, ids, logprobs, output.finish_reason, ended_by)
        row.ids += ids
        row.drawn += len(ids)
        row.request = ""

    # Weights

    def _place(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _base(self) -> str:
        """What vLLM loads once: the policy's own folder, or the model below its adapter."""
        saved = self.policy.save(self._place("policy"), critic=False)
        adapter = loading.adapter_settings(str(saved))
        if adapter is None:
            return str(saved)
        base, _ = storage.find_base(saved, adapter["base"])
        if not base.endswith(".gguf"):
            return base
        storage.write_model(self._place("base"), self.policy.causal, None)
        self.policy.tokenizer.save_pretrained(self._place("base"))
        return str(self._place("base"))

    def _refresh(self) -> None:
        """Load the policy's weights where they changed; until that is done the engine counts as holding none."""
        mark = fingerprint(self.policy)
        if mark == self._held:
            return
        if self._rows:
            raise ValueError("the policy was updated while rows are open; close them, they were sampled by the former")
        self._held = None
        self._load_adapter() if self.policy.lora_rank else self._load_weights()
        self._held = mark

    def _load_adapter(self) -> None:
        former, self._adapter = self._adapter, None
        self._loads += 1
        name = f"actor-{self._loads}"
        saved = self.policy.save(self._place(name), critic=False)
        adapter = self._vllm.lora.request.LoRARequest(name, self._loads, str(saved))
        engine = self._llm.llm_engine
        if former is not None:
            engine.remove_lora(former.lora_int_id)
            shutil.rmtree(former.lora_path, ignore_errors=True)
        engine.add_lora(adapter)
        self._adapter = adapter

    def _load_weights(self) -> None:
        self.policy.save(self._place("policy"), critic=False)
        self._llm.collective_rpc("reload_weights")
        if self.policy.device.type == "cpu":
            self._llm.apply_model(_pack_head)
        if self._llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not empty its prefix cache, which holds keys and values of former weights")


def fingerprint(policy: QwenPolicy) -> tuple[int, float]:
    """The policy's version and the sum of its actor's weights: phases that only imitate leave the version as it is."""
    return policy.version, float(sum(p.detach().sum(dtype=torch.float64) for p in policy.actor_parameters()))


def _pack_head(model: torch.nn.Module) -> None:
    """The CPU backend multiplies by a packed copy of each matrix; 0.32 reloads a tied output layer but not its copy."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
