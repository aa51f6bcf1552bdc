"""Where credit goes: reward → return → advantage → loss contribution, token by token under the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_lite.mdp import Trajectory, TurnKind
from agentr1_lite.views.theme import esc, part
from agentr1_lite.views.tokens import TokenTable, as_trajectory, flat, is_finite, runs, token_table
from agentr1_lite.views.trajectory import Scale, Sheet, facts, heading, number

ROWS = ("reward", "return", "advantage", "loss")
SHOWN = 60  # characters of what the world wrote


def credit(
    trajectory: Trajectory,
    name: str = "GRPO",
    group: Sequence[Trajectory] | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    values: Sequence[Sequence[float]] | Sequence[float] | None = None,
    *,
    logprobs: Sequence[Sequence[float]] | Sequence[float] | None = None,
    aggregation: str | None = None,
    kind: str | None = None,
    clip: float | None = None,
    **options: Any,
) -> dict[str, list[float]]:
    """What each token of one trajectory earns under an estimator; T numbers a name, 0 off the action mask.

    reward r_t as `Trajectory.token_rewards` places it, return G_t = r_t + γ G_{t+1} over action tokens, advantage A_t
    of ``name``, loss = this token's share of the group's policy loss (they sum to it), and value where given. The loss
    is that of ``losses.PRESETS`` where ``name`` is there, else PPO's; ratio, where log-probs are given, is 1 off it.

    Args:
        group: the rollouts to compare with, ``trajectory`` among them; without it the trajectory alone.
        values: V of the state before each token, a flat list for each trajectory of the group.
        logprobs: log π now, in the same form; without them the ratio is 1, as on the first pass.
        aggregation, kind, clip (both sides): in place of the preset's, see `agentr1_lite.losses.policy_loss`.
        options: further options of `agentr1_lite.advantages.estimate`.

    Raises:
        ValueError: where the trajectory is not in the group, or as `estimate` does.
    """
    import torch

    from agentr1_lite.advantages import estimate
    from agentr1_lite.aggregation import aggregate, on_mask
    from agentr1_lite.batch import collate
    from agentr1_lite.losses import KINDS, PRESETS, policy_ratio
    from agentr1_lite.settings import fold

    group = [trajectory] if group is None else list(group)
    mine = next((i for i, other in enumerate(group) if other is trajectory), None)
    if mine is None:
        raise ValueError(
            f"credit: the trajectory of task {trajectory.task_id!r} is not in the group; pass its own group"
        )
    batch = collate(group)
    mask = batch.action_mask

    def rows(given: Any, what: str) -> torch.Tensor:
        """Flat lists, one a trajectory, as (B, T)."""
        whole = len(group) == 1 or not hasattr(given, "__len__") or getattr(given, "ndim", 1) == 0
        lists = [flat(x) for x in ([given] if whole else given)]
        if None in lists:
            raise ValueError(f"credit: {what} is {given!r:.60}; give a list of one number a token for each trajectory")
        out = torch.zeros(mask.shape)
        sizes = [t.num_tokens for t in group]
        if [len(x) for x in lists] != sizes:
            raise ValueError(f"credit: {what} has {[len(x) for x in lists]} numbers for trajectories of {sizes} tokens")
        numbers = iter(x for part in lists for x in part)
        for row, length in enumerate(batch.lengths.tolist()):
            for t, acted in enumerate(mask[row, :length].tolist()):
                x = next(numbers)
                if acted and not is_finite(x):
                    raise ValueError(f"credit: {what} is {x!r:.60} on sampled token {t}; give a finite number")
                out[row, t] = x if acted else 0.0
        return out

    inputs: dict[str, Any] = {
        "group_ids": batch.group_ids,
        "turn_ids": batch.turn_ids,
        "anchor_ids": batch.anchor_ids,
        "trajectory_index": batch.trajectory_index,
    } | options
    found = {"reward": batch.rewards}
    if values is not None:
        found["value"] = inputs["values"] = rows(values, "values")
    to_go = estimate("reinforce_pp", batch.rewards, mask, gamma=gamma, trajectory_index=batch.trajectory_index)
    found["return"] = to_go.returns
    found["advantage"] = estimate(name, batch.rewards, mask, gamma=gamma, lam=lam, **inputs).advantages
    now = on_mask(batch.old_logprobs, mask, "logprobs") if logprobs is None else rows(logprobs, "logprobs")
    terms: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio_cap": None}
    terms |= next((preset for key, preset in PRESETS.items() if fold(key) == fold(name)), {})
    terms |= {} if clip is None else {"clip_low": clip, "clip_high": clip}
    kind = kind or terms.pop("kind", "ppo")
    aggregation = aggregation or terms.pop("aggregation", "token-mean")
    if kind not in KINDS:
        raise ValueError(f"credit: kind is {kind!r}; choose one of {', '.join(KINDS)}")
    ratio = policy_ratio(now, batch.old_logprobs, mask, terms.pop("ratio", "token"))
    limits = {key: terms[key] for key in ("clip_low", "clip_high", "dual_clip", "ratio_cap")}
    losses = KINDS[kind](ratio, now, found["advantage"], **limits)[0]
    weights = torch.zeros(mask.shape, requires_grad=True)  # an aggregation is linear: its gradient is its weights
    aggregate(weights, mask, aggregation).backward()
    found["loss"] = losses * weights.grad
    if logprobs is not None:
        found["ratio"] = torch.where(mask, ratio, 1.0)
    own = [row for row, index in enumerate(batch.trajectory_index.tolist()) if index == mine]
    lengths = batch.lengths.tolist()
    return {key: [x for row in own for x in tensor[row, : lengths[row]].tolist()] for key, tensor in found.items()}


def credit_html(
    trajectory: Any,
    quantities: Mapping[str, Any],
    tokenizer: Any = None,
    *,
    rows: Sequence[str] = ROWS,
    title: str = "",
) -> str:
    """Bars under every sampled token, a row for each of ``rows`` that ``quantities`` holds.

    A bar above the line is positive, one below it, striped, negative; every row has its own scale, beside its name.
    What the world wrote is one grey box: no reward lies there and no gradient.
    """
    trajectory = as_trajectory(trajectory, 0, tokenizer)
    table = token_table(trajectory, tokenizer, quantities)
    rows = [name for name in rows if name in table.quantities]
    if not rows:
        raise ValueError(f"credit_html: none of the rows is among {', '.join(table.quantities)}; see `credit`")
    sheet = Sheet([table], "advantage" if "advantage" in rows else rows[0])
    scales = [sheet.scales[name] for name in rows]
    names = "".join(f"<b>{esc(s.label)} <small>±{number(s.span)}</small></b>" for s in scales)
    blocks: list[str] = []
    for _, index, start, end in table.blocks():
        spans = runs([table.source[t] == "action" for t in range(start, end)])
        parts = [_columns(sheet, table, start + a, start + b, scales) for a, b in spans]
        if not parts:
            parts = [f'<p class="note">no token was sampled: {esc(trajectory.turns[index].text)}</p>']
        what = "Prompt" if index < 0 else f"Turn {index + 1}"
        kind = "" if index < 0 else TurnKind(trajectory.turns[index].kind).value.replace("_", " ")
        keys = f'<div class="col names"><i></i>{names}</div>' if index >= 0 else "<span></span>"
        blocks.append(
            f'<details class="turn" open><summary><b>{what}</b> <span class="note">{kind}</span></summary>'
            f'<div class="columns">{keys}<div class="cols">{"".join(parts)}</div></div></details>'
        )
    head = heading(title) + facts(trajectory)
    return part(sheet.close("".join(blocks), head=head), script=True, label=title or "Credit along a trajectory")


def _columns(sheet: Sheet, table: TokenTable, start: int, end: int, scales: Sequence[Scale]) -> str:
    """Sampled tokens with their bars, or one box for tokens that were fed."""
    if table.source[start] != "action":
        text = "".join(table.pieces[start:end])
        words = " ".join(text.split())
        shown = words if len(words) <= SHOWN else words[: SHOWN - 1] + "…"
        return f'<span class="gap"><bdi>{esc(shown)}</bdi><br>{end - start} tokens fed: no loss</span>'
    out = []
    for t in range(start, end):
        bars = []
        for scale in scales:
            kind, strength = scale.look(table.quantities[scale.name][t])
            bars.append(f'<b class="{kind}" style="--m:{strength:.2f}"></b>' if kind else "<b></b>")
        out.append(f'<span class="col">{sheet.tokens(table, t, t + 1)}{"".join(bars)}</span>')
    return "".join(out)
