"""The policy: one model with its tokenizer, a frozen reference and a critic.

``lora_rank > 0``: one base model carries three adapters, "actor", "reference"
(the actor's weights when a phase started) and "critic" (its own LoRA and a value
head), so that PPO fits where the actor fits. ``lora_rank = 0``: every weight is
trained, and reference and critic are copies.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentr1_lite import forward, loading, storage
from agentr1_lite.chat import ChatFormat
from agentr1_lite.forward import Head
from agentr1_lite.loading import PolicyError
from agentr1_lite.selfcheck import checked_head

CRITIC_FILE = "critic.safetensors"


class LogProbs(NamedTuple):
    """``logprobs`` (B, T), exactly 0.0 off the action mask; ``entropy`` (B, T) or None."""

    logprobs: Tensor
    entropy: Tensor | None = None


class QwenPolicy:
    """π_θ over the tokens of a causal language model.

    Args:
        name_or_path: ``atlas-tiny``, ``smollm2-135m``, ``qwen2.5-0.5b`` …, a folder
            (full weights or an adapter folder that ``save`` wrote) or a hub id.
        lora_rank: rank of the adapters; 0 trains all weights.
        lora_alpha: scale of the adapters, 2 × rank if not given.
        quantization: ``nf4`` loads the base in 4 bits; needs ``lora_rank > 0``.
        dtype, device: see ``loading.pick_dtype`` and ``loading.pick_device``.
        seed: of the adapters' and the value head's first weights.
        gradient_checkpointing: recompute layers in the backward pass (big models).
        template_options: variables of the chat template (``ChatFormat``); saved with the policy, and if not given
            those it was saved with.
    """

    def __init__(
        self,
        name_or_path: str | Path = "atlas-tiny",
        *,
        lora_rank: int = 0,
        lora_alpha: int | None = None,
        quantization: str | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        seed: int = 0,
        gradient_checkpointing: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        source = loading.resolve(name_or_path)
        adapter, lora = loading.adapter_settings(source), None
        base, base_name = source, storage.lasting_name(name_or_path)
        if adapter is not None:
            lora = storage.adapter_config(Path(source))
            lora_rank = lora.r
            base, base_name = storage.find_base(Path(source), adapter["base"])
        if quantization and not lora_rank:
            raise PolicyError("quantised weights cannot be trained themselves; set lora_rank, for example to 16")
        where = loading.pick_device(device)
        number = loading.pick_dtype(dtype, where, frozen_base=lora_rank > 0)
        tokenizer = loading.load_tokenizer(source if lora is None or loading.has_tokenizer(source) else base)
        model = loading.load_model(base, dtype=number, device=where, quantization=quantization)
        lora = lora or _lora(lora_rank, lora_alpha)
        self._build(model, tokenizer, str(name_or_path), lora, seed, gradient_checkpointing, template_options)
        self._base_name, self._folder = base_name, Path(source)
        if adapter is not None:
            storage.read_adapter(self._folder, self.model, "actor")

    def __deepcopy__(self, memo: dict[int, Any]) -> QwenPolicy:
        return self  # an environment may hold one, and forks for every episode

    @classmethod
    def from_parts(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "parts",
        lora_rank: int = 0,
        lora_alpha: int | None = None,
        seed: int = 0,
        gradient_checkpointing: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> QwenPolicy:
        """A policy around a model and a tokenizer that are already in memory."""
        policy = cls.__new__(cls)
        loading.without_dropout(model)
        lora = _lora(lora_rank, lora_alpha)
        policy._build(model, tokenizer, name, lora, seed, gradient_checkpointing, template_options)
        return policy

    def _build(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        lora: Any,
        seed: int,
        checkpointing: bool,
        template_options: Mapping[str, Any] | None,
    ) -> None:
        if getattr(model, "peft_config", None):
            raise PolicyError(
                f"model {name!r} carries an adapter already; give the plain model (peft: merge_and_unload)"
            )
        self.name, self.version, self.seed, self.lora_rank = name, 0, seed, lora.r if lora else 0
        self.tokenizer, self._base_name, self._folder = tokenizer, "", None
        saved = tokenizer.init_kwargs.get("template_options")
        self.template_options = dict((saved if template_options is None else template_options) or {})
        try:
            self.chat = ChatFormat(tokenizer, getattr(model, "generation_config", None), self.template_options)
        except ValueError as error:
            raise PolicyError(str(error)) from error
        self.context_length = loading.context_length(model.config)
        self.gradient_checkpointing = checkpointing
        self.value_head: nn.Linear | None = None
        self._reference: PreTrainedModel | None = None
        self._critic: nn.Module | None = None
        self._active = "actor"
        self.causal: PreTrainedModel = model
        self._lora = lora
        self.model: nn.Module = self._add_lora() if lora else model
        self._checkpoint_layers(model)
        self.model.requires_grad_(True) if not lora else None
        self.model.eval()
        self.head, self.shares = checked_head(model, tokenizer, name, recomputing=checkpointing)

    @property
    def quantized(self) -> bool:
        """Whether the base is stored in 4 bits."""
        return bool(getattr(self.causal, "is_loaded_in_4bit", False))

    @property
    def device(self) -> torch.device:
        return self.causal.get_input_embeddings().weight.device

    # Adapters

    def _add_lora(self) -> nn.Module:
        from peft import get_peft_model

        settings = copy.deepcopy(self._lora)
        settings.lora_dropout = 0.0  # a pass must repeat; the saved value is written again
        with self._seeded(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is on its way out
            try:
                return get_peft_model(self.causal, settings, adapter_name="actor")
            except (ValueError, TypeError, RuntimeError) as error:
                why = loading.reason(error)
                raise PolicyError(f"the adapter does not fit {self.name!r} ({why}); give it the right base") from error

    def _add_adapter(self, name: str) -> None:
        if name not in self.model.peft_config:
            with self._seeded():
                self.model.add_adapter(name, copy.deepcopy(self.model.peft_config["actor"]))
        with torch.no_grad():
            for mine, actors in zip(self._named(name).values(), self._actor_weights().values(), strict=True):
                mine.copy_(actors)
        self._activate("actor")

    def _activate(self, name: str) -> None:
        """Make an adapter the one that is applied; what is trained does not change with it."""
        self._active = name
        if self.lora_rank:
            self.model.set_adapter(name, inference_mode=name == "reference")
            trained = [n for n in ("actor", "critic") if n in self.model.peft_config]
            self.model.set_requires_grad(trained, True)

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[None]:
        former = self._active
        if name != former:
            self._activate(name)
        try:
            yield
        finally:
            if name != former:
                self._activate(former)

    def _checkpoint_layers(self, model: PreTrainedModel) -> None:
        if not self.gradient_checkpointing:
            return
        options: dict[str, Any] = {"use_reentrant": False}
        if self.lora_rank:  # a layer is recomputed with the adapter it was computed with
            options["context_fn"] = lambda: (contextlib.nullcontext(), self._using(self._active))
        enable: Callable[..., None] = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable(options)

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield

    # Reference and critic

    def freeze_reference(self) -> None:
        """Keep the actor's present weights as the reference of the KL terms.

        A phase calls this when it starts. Switching adapters off would give the
        base model, not the policy that the former phase ended with (trl#3194).
        """
        if self.lora_rank:
            self._add_adapter("reference")
            return
        if self._reference is None:
            self._reference = _frozen_copy(self.causal)
            self._reference_head = Head(self._reference, self.head.known, self.head.plain)
        else:
            _copy_weights(self.causal, self._reference)

    @property
    def has_reference(self) -> bool:
        return "reference" in self.model.peft_config if self.lora_rank else self._reference is not None

    @property
    def has_critic(self) -> bool:
        return self.value_head is not None

    def add_critic(self) -> None:
        """Add V: the actor's present backbone (a copy, or an adapter of its own) and a value head that starts at 0."""
        if self.has_critic:
            return
        if self.lora_rank:
            self._add_adapter("critic")
        else:
            self._critic = _frozen_copy(self.causal.base_model).requires_grad_(True)
            self._checkpoint_layers(self._critic)
        self.value_head = nn.Linear(self.causal.config.get_text_config().hidden_size, 1).to(self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        file = self._folder / CRITIC_FILE if self._folder else None
        if file is not None and file.is_file():
            storage.assign(self._critic_weights(), storage.read_tensors(file), str(file))

    def _critic_weights(self) -> dict[str, nn.Parameter]:
        body = self._named("critic") if self.lora_rank else dict(self._critic.named_parameters())
        return {**body, **{f"value_head.{k}": p for k, p in self.value_head.named_parameters()}}

    def _named(self, adapter: str) -> dict[str, nn.Parameter]:
        return {k: p for k, p in self.model.named_parameters() if f".{adapter}." in f"{k}."}

    def _actor_weights(self) -> dict[str, nn.Parameter]:
        return self._named("actor") if self.lora_rank else dict(self.causal.named_parameters())

    def actor_parameters(self) -> list[nn.Parameter]:
        return list(self._actor_weights().values())

    def critic_parameters(self) -> list[nn.Parameter]:
        return list(self._critic_weights().values()) if self.has_critic else []

    # Passes

    @contextlib.contextmanager
    def inference(self) -> Iterator[PreTrainedModel]:
        """The actor as rollouts use it: no gradient, no checkpointing."""
        with torch.inference_mode(), self._using("actor"):
            yield self.causal

    @contextlib.contextmanager
    def _recomputing(self, module: nn.Module, grad: bool) -> Iterator[bool]:
        """Whether layers of this pass are recomputed in its backward: those of big models where there will be one.

        The mode counts when a layer is called; dropout is off in both, and a rollout never runs in it
        (checkpointing would drop its cache, transformers#36051).
        """
        wanted = self.gradient_checkpointing and grad
        module.train(wanted)
        try:
            yield wanted
        finally:
            module.eval()

    def log_probs(
        self,
        batch: forward.Rows,
        *,
        temperature: float = 1.0,
        which: str = "actor",
        entropy: bool = False,
        chunk: int | None = None,
        share_prompt: bool = True,
    ) -> LogProbs:
        """``log π(token t | tokens before t)`` at action positions, float32, (B, T).

        The logits are divided by ``temperature``, as the sampler did (trl#3029).
        ``which="reference"`` needs no gradient and gets none. With ``share_prompt``
        a prompt of several rows, and a row that occurs several times, is passed once.
        """
        if which not in ("actor", "reference"):
            raise PolicyError(f"which={which!r} is not known; use 'actor' or 'reference'")
        if which == "reference" and not self.has_reference:
            raise PolicyError("the policy has no reference; call policy.freeze_reference() when the phase starts")
        model = self._reference if which == "reference" and not self.lora_rank else self.causal
        head = self.head if model is self.causal else self._reference_head
        grad = torch.is_grad_enabled() and which == "actor"
        vocabulary = head.vocabulary
        with self._using(which), torch.set_grad_enabled(grad), self._recomputing(model, grad) as recomputed:
            hidden, state, index = forward.action_states(
                model.base_model, batch, share=share_prompt, cached=not recomputed
            )
            chosen = batch.input_ids.reshape(-1)[index]
            if not bool(head.known[chosen].all()):
                wrong = int(chosen[~head.known[chosen]][0])
                raise PolicyError(f"the rows hold {wrong} as an action, an id without a token; sample them anew")
            # the same token in the same state is read once, however many rows it stands in
            read, which_read = torch.unique(state * vocabulary + chosen, return_inverse=True)
            logprobs, spread = (
                None if x is None else forward.scatter(x[which_read], index, batch.input_ids)
                for x in forward.token_log_probs(
                    head,
                    hidden.index_select(0, read // vocabulary),
                    read % vocabulary,
                    temperature=temperature,
                    entropy=entropy,
                    chunk=chunk,
                )
            )
        return LogProbs(logprobs, spread)

    def values(self, batch: forward.Rows, *, share_prompt: bool = True) -> Tensor:
        """``V(s_t)`` of the state before token t, at action positions, else 0: (B, T)."""
        if not self.has_critic:
            raise PolicyError("the policy has no critic; call policy.add_critic() first")
        body = self.causal.base_model if self.lora_rank else self._critic
        with self._using("critic"), self._recomputing(body, torch.is_grad_enabled()) as recomputed:
            hidden, state, index = forward.action_states(body, batch, share=share_prompt, cached=not recomputed)
        return forward.scatter(self.value_head(hidden[state].float())[:, 0], index, batch.input_ids)

    # Weights in and out

    def state_dict(self) -> dict[str, Tensor]:
        """All weights a resumed run needs, by "actor.", "reference." and "critic." (tied weights once)."""
        parts = {"actor": self._actor_weights()}
        if self.has_reference:
            parts["reference"] = self._reference_weights()
        if self.has_critic:
            parts["critic"] = self._critic_weights()
        return {f"{part}.{key}": p.detach() for part, weights in parts.items() for key, p in weights.items()}

    def _reference_weights(self) -> dict[str, nn.Parameter]:
        return self._named("reference") if self.lora_rank else dict(self._reference.named_parameters())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put ``state_dict`` back, adding the reference and the critic it holds."""
        of = {part: {k[len(part) + 1 :]: v for k, v in state.items() if k.startswith(part + ".")} for part in _PARTS}
        if of["reference"] and not self.has_reference:
            self.freeze_reference()
        if of["critic"]:
            self.add_critic()
        weights = {"actor": self._actor_weights, "reference": self._reference_weights, "critic": self._critic_weights}
        for part in _PARTS:
            if of[part]:
                storage.assign(weights[part](), of[part], f"the {part}'s saved weights")

    def save(self, path: str | Path, *, dtype: torch.dtype | None = None, critic: bool = True) -> Path:
        """Write a Hugging Face folder: weights or adapter, tokenizer, and the critic beside them.

        The folder appears whole or not at all: written under another name, then
        renamed; a former checkpoint stays until the new one is complete.
        """
        return self._whole(path, lambda folder: self._write(folder, dtype, critic))

    def merge(self, path: str | Path, *, dtype: torch.dtype | None = None) -> Path:
        """Write the actor as a plain model that needs neither ``peft`` nor ``bitsandbytes``: W + s · B A, s = α/r.

        A base in 4 bits is written as the adapter was trained on it, that is dequantised (W = its 16 values × scales),
        so the merged model is the trained policy and not its adapter on other weights.
        """
        target = Path(path)
        if self.lora_rank and (target / "adapter_config.json").exists():
            raise PolicyError(
                f"{str(target)!r} holds an adapter, which the merged model would replace; give a new folder"
            )

        def write(folder: Path) -> None:
            if self.lora_rank:
                storage.write_merged(folder, self.causal, "actor", dtype or self.causal.dtype)
                self.tokenizer.save_pretrained(folder)
            else:
                self._write(folder, dtype, critic=False)

        return self._whole(path, write)

    def _whole(self, path: str | Path, write: Callable[[Path], None]) -> Path:
        """Check that ``path`` may be written, then let ``write`` fill it."""
        path = Path(path) if Path(path).name else Path(path).resolve()
        storage.check_target(path)
        if self.lora_rank and self._base_name and path.exists() and path.samefile(loading.resolve(self._base_name)):
            raise PolicyError(f"{str(path)!r} holds the base of this adapter; save the adapter into another folder")
        self.tokenizer.init_kwargs.pop("template_options", None)
        if self.template_options:  # goes into tokenizer_config.json
            self.tokenizer.init_kwargs["template_options"] = self.template_options
        return storage.write_whole(path, write)

    def _write(self, folder: Path, dtype: torch.dtype | None, critic: bool) -> None:
        if self.lora_rank:
            base, dropout = self._base_name or storage.BASE_FOLDER, self._lora.lora_dropout
            storage.write_adapter(folder, self.model, "actor", base_model_name_or_path=base, lora_dropout=dropout)
        if not self.lora_rank or not self._base_name:  # a base that only lives in memory travels with its adapter
            target = folder / storage.BASE_FOLDER if self.lora_rank else folder
            storage.write_model(target, self.causal, dtype)
            self.tokenizer.save_pretrained(target)
        self.tokenizer.save_pretrained(folder)
        if critic and self.has_critic:
            storage.write_tensors(folder / CRITIC_FILE, self._critic_weights())


_PARTS = ("actor", "reference", "critic")


def _lora(rank: int, alpha: int | None) -> Any:
    """PEFT's configuration of new adapters on every linear layer; None for rank 0."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=alpha or 2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _frozen_copy(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    twin.zero_grad(set_to_none=True)
    return twin


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)
