"""What the doctor checks: invariants of a run, each explained in one sentence.

A check is a pure function of a `Case` that returns ``(level, message)``, or None
where it has nothing to look at. Levels: "ok"; "warn", training goes on but will
teach little; "fail", a number is wrong. Thresholds are rules of thumb, beside
the checks; the invariants (lengths, masks, ratio, control ids) are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentr1_lite import credit
from agentr1_lite.batch import Batch
from agentr1_lite.mdp import StopReason, Trajectory, TurnKind

LESSONS = {
    0: "Start here",
    1: "The agent MDP",
    2: "Tools and environments",
    3: "Rollouts and action masks",
    4: "Rewards and credit",
    5: "Masked losses",
}
# |log ratio| between sampler and trainer on the same weights: rounding alone. bfloat16 keeps 8 bits, so logits of
# size 20 are off by up to 0.08; a base in 4 bits is multiplied by other kernels when few rows are decoded.
RATIO_BOUNDS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3, "nf4": 0.5}
# Mean |log-prob difference| of another engine, whose kernels add up in another order.
ENGINE_BOUNDS = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05, "nf4": 0.1}
CUTS = {
    StopReason.LENGTH: "environment.max_turn_tokens or max_response_tokens",
    StopReason.MAX_TURNS: "environment.max_turns",
}


class Gradients(NamedTuple):
    """Largest |∂loss/∂h| over the states before observation tokens, and over those before actions."""

    observations: float
    actions: float


@dataclass(frozen=True)
class Finding:
    """What one check says: ``level`` is "ok", "warn" or "fail", ``lesson`` the one of `LESSONS` that explains it."""

    level: str
    check: str
    message: str
    lesson: int = 0

    def __str__(self) -> str:
        told = self.level != "ok" and self.lesson in LESSONS
        more = f" (lesson {self.lesson:02d}, {LESSONS[self.lesson]})" if told else ""
        return f"{self.level:<4}  {self.check}: {self.message}{more}"


@dataclass
class Case:
    """What the checks look at; anything may be missing.

    Attributes:
        batch: as the update uses it (its action mask is the loss mask).
        metrics: this step's numbers: loss, grad_norm, clip_fraction, kl, entropy, first_log_ratio_max, …
        history: the metrics of earlier steps, oldest first.
        gradients: from `agentr1_lite.doctor.observation_gradient`.
        has_tools: whether the environment offers any.
    """

    trajectories: Sequence[Trajectory] = ()
    batch: Batch | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: Sequence[Mapping[str, float]] = ()
    policy: Any = None
    gradients: Gradients | None = None
    has_tools: bool = True

    def past(self, name: str) -> list[float]:
        return [row[name] for row in self.history if math.isfinite(row.get(name, math.nan))]


Verdict = tuple[str, str] | None
Check = Callable[[Case], Verdict]
CHECKS: dict[str, tuple[Check, int]] = {}


def check(lesson: int) -> Callable[[Check], Check]:
    """Register a check under its function's name, with the lesson that explains it."""

    def register(function: Check) -> Check:
        CHECKS[function.__name__] = function, lesson
        return function

    return register


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / max(whole, 1):.1%})"


# Tokens, masks, log-probs


@check(lesson=3)
def lengths(case: Case) -> Verdict:
    segments = [(t.task_id, s) for t in case.trajectories for s in t.segments]
    for task, s in segments:
        if not len(s.token_ids) == len(s.action_mask) == len(s.logprobs):
            sizes = f"{len(s.token_ids)} ids, {len(s.action_mask)} mask entries and {len(s.logprobs)} log-probs"
            return "fail", f"a segment of {task!r} has {sizes}; from the first gap on, log-probs belong to other tokens"
    return ("ok", f"ids, mask and log-probs of {len(segments)} segments have one length each") if segments else None


@check(lesson=3)
def logprobs(case: Case) -> Verdict:
    for t in case.trajectories:
        for s in t.segments:
            if not math.isfinite(sum(s.logprobs)) or max(s.logprobs, default=0.0) > 1e-6:
                return "fail", f"{t.task_id!r} has a log-prob that is not a number of at most 0"
            if any(compress(s.logprobs, map(not_, s.action_mask))):
                return "fail", f"{t.task_id!r} has a log-prob on a token that the policy did not sample"
    return ("ok", "every log-prob is finite, at most 0, and 0 off the action mask") if case.trajectories else None


@check(lesson=3)
def loss_mask(case: Case) -> Verdict:
    """The mask of the update against the record of who wrote each token."""
    if case.batch is None or not case.trajectories:
        return None
    extra = int((case.batch.action_mask & ~sampled_mask(case.batch, case.trajectories)).sum())
    if extra:
        return "fail", f"the loss covers {extra} tokens that the policy did not write: it learns to imitate its tools"
    return "ok", "the loss covers only tokens that the policy sampled"


@check(lesson=3)
def first_ratio(case: Case) -> Verdict:
    found, bound = case.metrics.get("first_log_ratio_max"), ratio_bound(case.policy)
    if found is None:
        return None
    if not found <= bound:
        said = f"before any update sampler and trainer disagree by {found:.2g} in a log-prob (bound {bound:g})"
        return "fail", f"{said}: another temperature, dropout, or tokens that were encoded again"
    return "ok", f"on the first pass every log-ratio is within {bound:g} of 0 (largest {found:.1g})"


@check(lesson=3)
def engine_difference(case: Case) -> Verdict:
    """Another engine's log-probs against the trainer's on the same weights; `first_ratio` compares the trainer's."""
    mean, most = (case.metrics.get(f"engine_difference_{name}") for name in ("mean", "max"))
    if mean is None:
        return None
    bound = ratio_bound(case.policy, ENGINE_BOUNDS)
    said = f"engine and trainer differ by {mean:.2g} in a log-prob on average, by {most:.2g} at most"
    if not mean <= bound:
        return "warn", f"{said} (bound {bound:g} on average); give both one dtype, and keep training.importance_cap on"
    return "ok", said


@check(lesson=5)
def observation_gradients(case: Case) -> Verdict:
    if case.gradients is None:
        return None
    if case.gradients.observations:
        return "fail", f"tokens that the policy did not write have a gradient of {case.gradients.observations:.2g}"
    if not case.gradients.actions:
        return "fail", "the loss has no gradient on any action token, so nothing is learned"
    return "ok", "the gradient on prompt, seam and observation tokens is exactly 0"


@check(lesson=3)
def control_ids(case: Case) -> Verdict:
    """Control ids between two turns are those of the template; text of a tool adds none."""
    if case.policy is None or not case.trajectories:
        return None
    chat, forged, odd = case.policy.chat, 0, 0
    added = case.policy.tokenizer.added_tokens_decoder.keys()
    framing = set(chat.eos_ids) | (added & set(chat.prompt_ids([{"role": "user", "content": "q"}])))
    expected: dict[tuple[int, int], int] = {}
    for t in case.trajectories:
        for turn, following in zip(t.turns, t.turns[1:], strict=False):
            if turn.segment != following.segment or turn.end == turn.start:
                continue
            ids = t.segments[turn.segment].token_ids
            key = max(len(turn.results), 1), ids[turn.end - 1]
            if key not in expected:
                replies = [{"role": "tool", "content": "q"}] * key[0]
                expected[key] = _count(chat.observation_ids(replies, ended_by=key[1]).ids, framing)
            forged += _count(ids[turn.end : following.start], framing) != expected[key]
            odd += _count(ids[turn.start : turn.end - 1], framing) > 0
    if forged:
        return "fail", f"{forged} observations hold control ids that are not the template's: a tool forged a turn"
    if odd:
        return "warn", f"in {odd} turns the policy wrote a control id before the end of its turn"
    return "ok", "control ids mark exactly the real turns"


def _count(ids: Iterable[int], wanted: set[int]) -> int:
    return sum(i in wanted for i in ids)


def ratio_bound(policy: Any, bounds: Mapping[str, float] = RATIO_BOUNDS) -> float:
    """The one of ``bounds`` for the policy's number type."""
    model = getattr(policy, "causal", None)
    if model is None:
        return bounds["float32"]
    kind = "nf4" if policy.quantized else str(model.dtype).removeprefix("torch.")
    return bounds.get(kind, bounds["float32"])


def sampled_mask(batch: Batch, trajectories: Sequence[Trajectory]) -> Tensor:
    """Who wrote each token, from the record alone: True where the policy did; (B, T)."""
    mask = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
    segments = [s for t in trajectories for s in t.segments if len(s)]
    for row, segment in enumerate(segments):
        mask[row, : len(segment)] = torch.tensor(segment.action_mask)
    return mask.to(batch.input_ids.device)


# Episodes and rewards


@check(lesson=4)
def rewards_on_actions(case: Case) -> Verdict:
    if case.batch is not None and bool((case.batch.rewards[~case.batch.action_mask] != 0).any()):
        return "fail", "a reward lies on a token that the policy did not sample, where no estimator sees it"
    lost = sum(abs(sum(map(sum, t.token_rewards())) - t.total_reward) > 1e-5 for t in case.trajectories)
    if lost:
        return "fail", f"{lost} trajectories earned a reward that lies on none of their action tokens"
    return ("ok", "every reward lies on an action token") if case.trajectories else None


@check(lesson=4)
def group_variance(case: Case) -> Verdict:
    groups = Counter(t.group_id for t in case.trajectories)
    if not groups:
        return None
    if max(groups.values()) == 1:
        return "warn", "every group has one rollout, so a group baseline gives advantage 0; raise training.group_size"
    flat = round(zero_variance_share(case.trajectories) * len(groups))
    said = f"{_share(flat, len(groups))} groups earned the same in every rollout and teach nothing"
    if flat == len(groups):
        return "warn", f"{said}: loss 0 is right, but nothing is learned; choose easier or harder questions"
    if flat > 0.7 * len(groups):
        return "warn", f"{said}; set training.resample_zero_variance=true or change the questions"
    return "ok", said


def zero_variance_share(trajectories: Sequence[Trajectory]) -> float:
    """Share of groups without an advantage (``frac_reward_zero_std``), decided as the estimators decide it."""
    size = [abs(t.reward) + sum(abs(turn.process_reward) for turn in t.turns) for t in trajectories]
    return credit.zero_variance_share([t.total_reward for t in trajectories], [t.group_id for t in trajectories], size)


@check(lesson=3)
def cut_short(case: Case) -> Verdict:
    counts = Counter(t.stop_reason for t in case.trajectories if t.stop_reason in CUTS)
    total = len(case.trajectories)
    if not total:
        return None
    if counts.total() * 4 >= total:
        reason = max(counts, key=counts.get)
        said = f"{_share(counts.total(), total)} trajectories were cut, most by {reason.value}"
        return "warn", f"{said}, and earn nothing however good they were; raise {CUTS[reason]}"
    return "ok", f"{_share(counts.total(), total)} trajectories were cut by a limit"


@check(lesson=1)
def tool_use(case: Case) -> Verdict:
    if not case.has_tools or not case.trajectories:
        return None
    calls = sum(len(turn.calls) for t in case.trajectories for turn in t.turns)
    if not calls:
        return "warn", "there is not one tool call: the policy needs demonstrations before reward can teach it"
    return "ok", f"{calls / len(case.trajectories):.1f} tool calls a trajectory"


@check(lesson=2)
def malformed_calls(case: Case) -> Verdict:
    turns = [turn for t in case.trajectories for turn in t.turns]
    bad = sum(turn.kind is TurnKind.INVALID for turn in turns)
    if bad * 4 > len(turns):
        return "warn", f"{_share(bad, len(turns))} turns hold a malformed call; demonstrations teach the format"
    return ("ok", f"{_share(bad, len(turns))} turns hold a malformed call") if turns else None


@check(lesson=2)
def invented_replies(case: Case) -> Verdict:
    turns = [turn for t in case.trajectories for turn in t.turns]
    fakes = sum("<tool_response>" in turn.text for turn in turns)
    if fakes:
        return "warn", f"in {_share(fakes, len(turns))} turns the policy wrote a tool's reply; check the stop strings"
    return ("ok", "the policy leaves the tools' replies to the tools") if turns else None


# Numbers of the update


@check(lesson=5)
def finite(case: Case) -> Verdict:
    scaled = case.metrics.get("loss_scale", 1.0) != 1.0  # then a gradient may overflow: its step is left out
    bad = [
        name
        for name, x in case.metrics.items()
        if isinstance(x, float) and not math.isfinite(x) and not (scaled and name.endswith("grad_norm"))
    ]
    if bad:
        return "fail", f"{', '.join(bad)} is not a number; lower training.lr and look at the step before"
    if case.policy is not None:
        sums = torch.stack([p.detach().sum().float() for p in case.policy.actor_parameters()])
        if not bool(sums.isfinite().all()):
            return "fail", "a weight is not a number; go back to the last checkpoint and lower training.lr"
    return ("ok", "loss, gradients and weights are finite") if case.metrics else None


@check(lesson=5)
def gradient_size(case: Case) -> Verdict:
    norm = case.metrics.get("grad_norm")
    if norm is None or not math.isfinite(norm):
        return None
    if norm == 0 and 0 < len(case.trajectories) and zero_variance_share(case.trajectories) < 1:
        return "fail", "rewards differ inside groups, yet the gradient is 0: the loss is cut off from the weights"
    past = case.past("grad_norm")[-20:]
    if len(past) >= 5 and norm > 20 * median(past):
        return "warn", f"the gradient norm jumped from {median(past):.2g} to {norm:.2g}; lower training.lr"
    return "ok", f"gradient norm {norm:.2g}"


@check(lesson=5)
def clipping(case: Case) -> Verdict:
    share = case.metrics.get("clip_fraction")
    if share is None:
        return None
    if share > 0.3:
        return (
            "warn",
            f"{share:.0%} of the tokens are clipped and teach nothing; lower training.lr or updates_per_batch",
        )
    return "ok", f"{share:.1%} of the tokens are clipped"


@check(lesson=5)
def kl_size(case: Case) -> Verdict:
    kl = case.metrics.get("kl")
    if kl is None or not math.isfinite(kl):
        return None
    usual = median([abs(x) for x in case.past("kl")[-20:]] or [abs(kl)])
    if kl > 1.0 or kl > 10 * usual and kl > 0.1:
        return "warn", f"the KL to the reference reached {kl:.2g} nats a token; lower training.lr or raise kl_weight"
    return "ok", f"KL to the reference {kl:.2g} nats a token"


@check(lesson=5)
def entropy_level(case: Case) -> Verdict:
    name = "entropy" if "entropy" in case.metrics else "entropy_estimate"
    now, past = case.metrics.get(name), case.past(name)
    if now is None:
        return None
    start = median(past[:3]) if len(past) >= 5 else now
    if now < 0.1 * start:
        said = f"entropy fell from {start:.2g} to {now:.2g} nats a token: rollouts become copies of each other"
        return "warn", f"{said}; lower training.lr or set entropy_weight"
    return "ok", f"entropy {now:.2g} nats a token"


@check(lesson=5)
def critic_fit(case: Case) -> Verdict:
    fit, past = case.metrics.get("explained_variance"), case.past("explained_variance")
    if fit is None:
        return None
    if len(past) >= 10 and fit < 0 and max(past[-4:]) < 0:
        return "warn", f"the critic is worse than the mean return (explained variance {fit:.2f}); raise critic_warmup"
    return "ok", f"the critic explains {max(fit, 0.0):.0%} of the returns' variance"


def examine(case: Case) -> list[Finding]:
    """Apply every registered check to a case; the worst findings first."""
    found = []
    for name, (function, lesson) in CHECKS.items():
        verdict = function(case)
        if verdict is not None:
            found.append(Finding(verdict[0], name, verdict[1], lesson))
    return sorted(found, key=lambda finding: ("fail", "warn", "ok").index(finding.level))
