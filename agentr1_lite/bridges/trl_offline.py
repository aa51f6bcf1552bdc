"""Trajectories into TRL's SFTTrainer and DPOTrainer, token for token.

Nothing is re-encoded on the way: rows carry the ids that were sampled and the action mask that belongs to them.
How TRL 1.16 treats them, read from its source:

* ``SFTTrainer`` takes ``input_ids`` + ``labels`` as they are; the loss is the token mean over labels != -100, with one
  normaliser for a whole accumulated batch.
* ``DPOTrainer`` encodes every data set again in ``_prepare_dataset`` and knows no tool tokens; its loss, however, sums
  log-probs where the collator's ``completion_mask`` is 1. A subclass that leaves the rows alone and a collator that
  puts the action mask there make it token-exact.
* On a CPU both project every position through the LM head, masked or not, and compute its entropy for their metrics:
  a step of the tiny policy takes about twice the time of a loop that projects action positions only.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from agentr1_lite.batch import collate
from agentr1_lite.mdp import Trajectory
from agentr1_lite.preferences import PreferencePair, episode_logprobs

if TYPE_CHECKING:
    from agentr1_lite.policy import QwenPolicy

IGNORED = -100  # the label that TRL leaves out of the loss
OnStep = Callable[[dict[str, float]], "bool | None"]  # sees the metrics of a step; False stops the run


def sft_rows(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, list[int]]]:
    """``input_ids`` and ``labels`` of every segment that holds an action; -100 off the action mask."""
    for trajectory in trajectories:
        for segment in trajectory.segments:
            if any(segment.action_mask):
                pairs = zip(segment.token_ids, segment.action_mask, strict=True)
                labels = [token if acted else IGNORED for token, acted in pairs]
                yield {"input_ids": list(segment.token_ids), "labels": labels}


def sft_dataset(trajectories: Iterable[Trajectory]) -> Dataset:
    """Token-exact rows for ``SFTTrainer``: prompt, tool replies and template seams carry no label."""
    rows = list(sft_rows(trajectories))
    if not rows:
        raise ValueError("no trajectory holds a token that a policy chose; give at least one demonstration")
    return Dataset.from_list(rows)


def sft_trainer(policy: QwenPolicy, trajectories: Iterable[Trajectory], folder: str, **arguments: Any) -> SFTTrainer:
    """``SFTTrainer`` on the policy's own model; ``arguments`` are fields of ``SFTConfig``."""
    return silent(SFTTrainer)(
        model=policy.causal,
        args=config(SFTConfig, policy, folder, max_length=None, **arguments),
        train_dataset=sft_dataset(trajectories),
        processing_class=policy.tokenizer,
    )


def run_sft(
    policy: QwenPolicy,
    trajectories: Iterable[Trajectory],
    *,
    lr: float = 1e-4,
    epochs: float = 1.0,
    batch_size: int = 32,
    seed: int = 0,
    on_step: OnStep | None = None,
    **arguments: Any,
) -> list[dict[str, float]]:
    """Phase 1, ``max_θ Σ_t M_t log π_θ(a_t | s_t)``, through TRL; returns the metrics of every step."""
    given = _common(lr, epochs, batch_size, seed) | arguments
    return _run(policy, partial(sft_trainer, policy, trajectories, **given), on_step)


def pair_row(pair: PreferencePair) -> dict[str, list[int]]:
    """Whole sequences as they were sampled, each with its action mask as 0/1."""
    row: dict[str, list[int]] = {}
    for side, trajectory in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if len(trajectory.segments) != 1:
            raise ValueError(
                f"trajectory of task {trajectory.task_id!r} has {len(trajectory.segments)} segments, TRL's DPO takes "
                "one sequence; use the kit's offline phase for it"
            )
        segment = trajectory.segments[0]
        row[f"{side}_ids"], row[f"{side}_mask"] = list(segment.token_ids), [int(m) for m in segment.action_mask]
    return row


class PairCollator:
    """Rows of pairs → TRL's preference batch: chosen above rejected, the action mask as ``completion_mask``.

    Attention masks come from lengths; the action mask never enters attention.
    """

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row[f"{side}_ids"]) for side in ("chosen", "rejected") for row in rows]
        masks = [torch.tensor(row[f"{side}_mask"]) for side in ("chosen", "rejected") for row in rows]
        pad = partial(pad_sequence, batch_first=True)
        return {
            "input_ids": pad(ids, padding_value=self.pad_id),  # (2B, T)
            "attention_mask": pad([torch.ones_like(x) for x in ids]),  # (2B, T)
            "completion_mask": pad(masks),  # (2B, T)
            "ref_chosen_logps": torch.tensor([row["ref_chosen_logps"] for row in rows]),  # (B,)
            "ref_rejected_logps": torch.tensor([row["ref_rejected_logps"] for row in rows]),  # (B,)
        }


class TokenDPOTrainer(DPOTrainer):
    """``DPOTrainer`` for rows that are ids already and bring the reference's log-prob sums along."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset


def dpo_trainer(policy: QwenPolicy, pairs: Sequence[PreferencePair], folder: str, **arguments: Any) -> DPOTrainer:
    """TRL's DPO on token-exact pairs; the policy's frozen reference is read once, before the first step.

    A reference that is frozen is a constant: its sums are computed by ``policy.log_probs`` (one adapter swap for LoRA,
    no second model in the trainer), so every step is one forward and backward pass of the policy.
    """
    if not pairs:
        raise ValueError("no preference pairs: no task has two episodes with different rewards; log more of them")
    rows = []
    for pair in pairs:
        row = pair_row(pair)
        batch = collate(list(pair), pad_id=policy.tokenizer.pad_token_id or 0).to(policy.device)
        with torch.no_grad():
            chosen, rejected = episode_logprobs(policy, batch, "reference").tolist()
        rows.append({**row, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected})
    fixed = {"max_length": None, "remove_unused_columns": False, "precompute_ref_log_probs": True}
    return silent(TokenDPOTrainer)(
        model=policy.causal,
        args=config(DPOConfig, policy, folder, **fixed, **arguments),
        data_collator=PairCollator(policy.tokenizer.pad_token_id or 0),
        train_dataset=Dataset.from_list(rows),
        processing_class=policy.tokenizer,
    )


def run_dpo(
    policy: QwenPolicy,
    pairs: Sequence[PreferencePair],
    *,
    beta: float = 0.1,
    lr: float = 1e-5,
    epochs: float = 1.0,
    batch_size: int = 16,
    seed: int = 0,
    on_step: OnStep | None = None,
    **arguments: Any,
) -> list[dict[str, float]]:
    """DPO through TRL, with the loss of `preferences.dpo_step`; returns the metrics of every step.

    The reference is the policy as it stands when this is called.
    """
    policy.freeze_reference()
    given = _common(lr, epochs, batch_size, seed) | {"beta": beta} | arguments
    return _run(policy, partial(dpo_trainer, policy, pairs, **given), on_step)


class _Report(TrainerCallback):
    def __init__(self, on_step: OnStep | None):
        self.on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if self.on_step and logs and "loss" in logs and self.on_step(dict(logs, step=state.global_step)) is False:
            control.should_training_stop = True


def silent(trainer: type) -> type:
    """The trainer without its start-up message to TRL's makers: a lesson sends nothing."""
    return type(trainer.__name__, (trainer,), {"_send_telemetry": lambda self: None})


def config(kind: type, policy: QwenPolicy, folder: str, **fields: Any) -> Any:
    """A TRL configuration that keeps a run to its steps: no checkpoints, no progress bars, no reports, no autocast.

    TRL switches gradient checkpointing and bf16 on by default: both only slow a small model on a CPU.
    """
    quiet = {
        "output_dir": folder,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "bf16": False,
        "lr_scheduler_type": "constant",
        "use_cpu": torch.device(policy.device).type == "cpu",
        "dataloader_pin_memory": False,
    }
    with warnings.catch_warnings():  # newer transformers calls the checkpointing field by another name
        warnings.simplefilter("ignore", FutureWarning)
        return kind(**quiet | fields)


def _common(lr: float, epochs: float, batch_size: int, seed: int) -> dict[str, Any]:
    return {"learning_rate": lr, "num_train_epochs": epochs, "per_device_train_batch_size": batch_size, "seed": seed}


@contextmanager
def lent(policy: QwenPolicy) -> Iterator[None]:
    """Put back what a TRL trainer leaves on a model: a patched ``forward``, the pad ids, the training mode.

    The trainers get ``policy.causal``, adapters inside: TRL's own paths for PEFT models expect an adapter "default".
    """
    model = policy.causal
    forward, training = model.__dict__.get("forward"), model.training
    pads = model.config.pad_token_id, model.generation_config.pad_token_id
    if policy.lora_rank:  # else transformers refuses a quantised model whose adapters it did not add itself
        model._hf_peft_config_loaded = True
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
        model.__dict__.pop("_hf_peft_config_loaded", None)
        if forward is not None:
            model.forward = forward
        model.config.pad_token_id, model.generation_config.pad_token_id = pads
        model.train(training)
        model.zero_grad(set_to_none=True)


def _run(policy: QwenPolicy, build: Callable[..., Any], on_step: OnStep | None) -> list[dict[str, float]]:
    """Build a trainer, train, return its log. The optimiser is made in ``train``."""
    with tempfile.TemporaryDirectory() as folder, lent(policy):
        weights = [(p, p.data) for p in policy.causal.parameters() if p.requires_grad]
        trainer = build(folder=folder)
        for parameter, data in weights:  # TRL casts the adapters of a 4-bit base to bfloat16
            parameter.data = data
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Report(on_step))
        trainer.train()
        return [row for row in trainer.state.log_history if "loss" in row]
