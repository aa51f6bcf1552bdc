"""Where credit goes: reward → return → advantage → loss contribution, token by token under the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_lite.mdp import Trajectory, TurnKind
from agentr1_lite.views.theme import esc, part
from agentr1_lite.views.tokens import TokenTable, as_trajectory, runs, token_table
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
    aggregation: str = "token-mean",
    kind: str = "ppo",
    clip: float = 0.2,
    **options: Any,
) -> dict[str, list[float]]:
    """What each token of one trajectory earns under an estimator; T numbers a name, 0 off the action mask.

    reward r_t as `Trajectory.token_rewards` places it, return G_t = r_t + γ G_{t+1} over action tokens, advantage A_t
    of ``name``, loss = this token's share of the group's policy loss (they sum to it), and value where given.

    Args:
        group: the rollouts to compare with, ``trajectory`` among them; without it the trajectory alone.
        values: V of the state before each token, a flat list for each trajectory of the group.
        logprobs: log π now, in the same form; without them the ratio is 1, as on the first pass.
        options: further options of `agentr1_lite.advantages.estimate`.

    Raises:
        ValueError: where the trajectory is not in the group, or as `estimate` does.
    """
    import torch

    from agentr1_lite.advantages import estimate
    from agentr1_lite.aggregation import aggregate
    from agentr1_lite.batch import collate
    from agentr1_lite.losses import KINDS, policy_ratio

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
        lists = [given] if len(group) == 1 and not hasattr(given[0], "__len__") else list(given)
        out = torch.zeros(mask.shape)
        sizes = [t.num_tokens for t in group]
        if [len(x) for x in lists] != sizes:
            raise ValueError(f"credit: {what} has {[len(x) for x in lists]} numbers for trajectories of {sizes} tokens")
        flat = iter(x for numbers in lists for x in numbers)
        for row, length in enumerate(batch.lengths.tolist()):
            out[row, :length] = torch.tensor([float(next(flat)) for _ in range(length)])
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
    now = batch.old_logprobs if logprobs is None else rows(logprobs, "logprobs")
    ratio = policy_ratio(now, batch.old_logprobs, mask)
    limits = {"clip_low": clip, "clip_high": clip, "dual_clip": None, "ratio_cap": None}
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
    trajectory = as_trajectory(trajectory)
    table = token_table(trajectory, tokenizer, quantities)
    rows = [name for name in rows if name in table.quantities]
    if not rows:
        raise ValueError(f"credit_html: none of the rows is among {', '.join(table.quantities)}; see `credit`")
    sheet = Sheet([table], "advantage" if "advantage" in rows else rows[0])
    scales = [sheet.scales[name] for name in rows]
    names = "".join(f"<b>{esc(s.label)} <small>±{number(s.span)}</small></b>" for s in scales)
    blocks: list[str] = []
    for start, end in table.turns():
        spans = runs([table.source[t] == "action" for t in range(start, end)])
        parts = [_columns(sheet, table, start + a, start + b, scales) for a, b in spans]
        index = table.turn[start]
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
