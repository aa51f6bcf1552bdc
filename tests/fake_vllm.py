"""A stand-in for vLLM with its recorded interface (``golden/vllm_interface.json``), on any small model folder.

It reads what the bridge wrote: the model's folder, the adapters' folders. Names that vLLM does not know are refused.
What makes mistakes visible is there too: a prefix cache that outlives new weights, log-probs without the temperature
unless asked for otherwise, end tokens of the generation configuration unless they are switched off.
"""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

RECORD = json.loads((Path(__file__).parent / "golden" / "vllm_interface.json").read_text(encoding="utf-8"))


def structure(name: str, **values: Any) -> SimpleNamespace:
    """An object with exactly the recorded fields of ``name``."""
    unknown = set(values) - set(RECORD[name])
    if unknown:
        raise TypeError(f"{name} got an unexpected keyword argument {sorted(unknown)[0]!r}")
    return SimpleNamespace(**{**dict.fromkeys(RECORD[name]), **values})


def sampling_params(**values: Any) -> SimpleNamespace:
    known = structure("SamplingParams", **values)
    return SimpleNamespace(**{**vars(known), **RECORD["SamplingParams"], **values})


def lora_request(name: str, number: int, path: str) -> SimpleNamespace:
    return structure("LoRARequest", lora_name=name, lora_int_id=number, lora_path=path)


class LLMEngine:
    """One token of every request a step; a request that ended is told once, whole (FINAL_ONLY)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.path, self.options, self.tokenizer = path, options, AutoTokenizer.from_pretrained(path)
        self.requests: dict[str, SimpleNamespace] = {}
        self.adapters: dict[int, str] = {}
        self.asked: list[tuple[list[int], Any, Any]] = []
        self.prefixes: dict[tuple[Any, ...], torch.Tensor] = {}
        self.load()

    def load(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=getattr(torch, self.options["dtype"])).eval()
        self.ends = self.model.generation_config.eos_token_id

    def add_lora(self, lora_request: Any) -> bool:
        if isinstance(self.model, PeftModel):
            self.model.load_adapter(lora_request.lora_path, adapter_name=lora_request.lora_name)
        else:
            self.model = PeftModel.from_pretrained(
                self.model, lora_request.lora_path, adapter_name=lora_request.lora_name
            )
        self.adapters[lora_request.lora_int_id] = lora_request.lora_name
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self.model.delete_adapter(self.adapters.pop(lora_id))
        return True

    def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any = None) -> str:
        ids = prompt["prompt_token_ids"]
        if request_id in self.requests or len(ids) >= self.options["max_model_len"]:
            raise ValueError(f"request {request_id} of {len(ids)} tokens")
        self.asked.append((list(ids), params, lora_request))
        self.requests[request_id] = SimpleNamespace(
            prompt=list(ids),
            ids=[],
            logprobs=[],
            params=params,
            lora=lora_request,
            noise=torch.Generator().manual_seed(params.seed),
        )
        return request_id

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    @torch.no_grad()
    def logits(self) -> list[torch.Tensor]:
        """Next-token logits of every request, from the prefix cache or from one padded pass per adapter."""
        keys = [(r.lora and (r.lora.lora_name, r.lora.lora_path), *r.prompt, *r.ids) for r in self.requests.values()]
        new = {key for key in keys if key not in self.prefixes}
        for lora in {key[0] for key in new}:
            rows = [key for key in new if key[0] == lora]
            if lora:
                self.model.set_adapter(lora[0])
            width = max(map(len, rows))
            found = self.model(torch.tensor([[*row[1:], *[0] * (width - len(row))] for row in rows])).logits
            self.prefixes |= {row: found[i, len(row) - 2].float() for i, row in enumerate(rows)}
        return [self.prefixes[key] for key in keys]

    def step(self) -> list[SimpleNamespace]:
        if not self.requests:
            raise AssertionError("nothing to do: vLLM would wait for ever")
        outputs = []
        for (request_id, request), raw in zip(list(self.requests.items()), self.logits(), strict=True):
            params = request.params
            raw = raw.clone()
            for unwanted, bias in (params.logit_bias or {}).items():
                raw[unwanted] += bias
            scaled = (raw / (params.temperature or 1.0)).log_softmax(-1)
            token = int(
                raw.argmax() if not params.temperature else scaled.exp().multinomial(1, generator=request.noise)
            )
            given = scaled if self.options.get("logprobs_mode") == "processed_logprobs" else raw.log_softmax(-1)
            request.ids.append(token)
            request.logprobs.append({token: structure("Logprob", logprob=float(given[token]), rank=1)})
            finish, why = self.ended(request, token)
            if finish:
                del self.requests[request_id]
                done = structure(
                    "CompletionOutput",
                    index=0,
                    text="",
                    token_ids=request.ids,
                    logprobs=request.logprobs,
                    finish_reason=finish,
                    stop_reason=why,
                )
                outputs.append(structure("RequestOutput", request_id=request_id, outputs=[done], finished=True))
        return outputs

    def ended(self, request: Any, token: int) -> tuple[str | None, Any]:
        params = request.params
        if not params.ignore_eos and token in (self.ends if isinstance(self.ends, list) else [self.ends]):
            return "stop", None
        if token in (params.stop_token_ids or ()):
            return "stop", token
        text = self.tokenizer.decode(request.ids, skip_special_tokens=params.skip_special_tokens)
        for stop in params.stop if params.detokenize else ():
            if stop in text:
                return "stop", stop
        full = len(request.prompt) + len(request.ids) >= self.options["max_model_len"]
        return ("length", None) if full or len(request.ids) >= params.max_tokens else (None, None)


class LLM:
    made: list[LLM] = []

    def __init__(self, model: str, **options: Any) -> None:
        structure("LLM", model=model, **options)
        self.llm_engine = LLMEngine(model, options)
        self.reloads = 0
        LLM.made.append(self)

    def collective_rpc(self, method: str) -> list[None]:
        assert method == "reload_weights"
        self.reloads += 1
        self.llm_engine.load()
        return [None]

    def apply_model(self, function: Any) -> None:
        """The packed copies of matrices that it is needed for do not exist here."""

    def reset_prefix_cache(self) -> bool:
        self.llm_engine.prefixes.clear()
        return True


def modules(version: str = RECORD["version"]) -> dict[str, ModuleType]:
    """What to put into ``sys.modules``."""
    vllm = ModuleType("vllm")
    vllm.__spec__, vllm.__version__ = ModuleSpec("vllm", None), version
    vllm.LLM, vllm.SamplingParams = LLM, sampling_params
    vllm.sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final only"))
    vllm.lora = SimpleNamespace(request=SimpleNamespace(LoRARequest=lora_request))
    return {"vllm": vllm}
