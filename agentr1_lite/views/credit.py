"""Where credit goes: reward → return → advantage → loss contribution, token by token under the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_lite.mdp import Trajectory
from agentr1_lite.views.reading import as_trajectory
from agentr1_lite.views.theme import Html, part, templates
from agentr1_lite.views.tokens import TokenTable, numbers, runs, token_table
from agentr1_lite.views.trajectory import Scale, Sheet, facts, turn_kind

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
        """Flat lists, one a trajectory, as (B, T); 0 off the mask."""
        lists = [given] if len(group) == 1 else given
        if not hasattr(lists, "__len__") or getattr(lists, "ndim", 1) == 0 or len(lists) != len(group):
            raise ValueError(f"credit: {what} is {given!r:.60}; give a list of numbers for each trajectory")
        out = torch.zeros(mask.shape)
        sampled = []
        for t, own in zip(group, lists, strict=True):
            acted = [m for s in t.segments for m in s.action_mask]
            sampled += [x for x in numbers(what, own, t.num_tokens, "credit", acted) if x is not None]
        out[mask] = torch.tensor(sampled)
        return out

    places = ("group_ids", "turn_ids", "anchor_ids", "trajectory_index")
    inputs: dict[str, Any] = {place: getattr(batch, place) for place in places} | options
    found = {"reward": batch.rewards}
    if values is not None:
        found["value"] = inputs["values"] = rows(values, "values")
    to_go = estimate("reinforce_pp", batch.rewards, mask, gamma=gamma, trajectory_index=batch.trajectory_index)
    found["return"] = to_go.returns
    found["advantage"] = estimate(name, batch.rewards, mask, gamma=gamma, lam=lam, **inputs).advantages
    now = on_mask(batch.old_logprobs, mask, "logprobs") if logprobs is None else rows(logprobs, "logprobs")
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio_cap": None}
    loss: dict[str, Any] = {"kind": "ppo", "aggregation": "token-mean", "ratio": "token", **bounds}
    loss |= next((preset for key, preset in PRESETS.items() if fold(key) == fold(name)), {})
    given = {"kind": kind, "aggregation": aggregation, "clip_low": clip, "clip_high": clip}
    loss |= {key: value for key, value in given.items() if value is not None}
    if loss["kind"] not in KINDS:
        raise ValueError(f"credit: kind is {loss['kind']!r}; choose one of {', '.join(KINDS)}")
    ratio = policy_ratio(now, batch.old_logprobs, mask, loss["ratio"])
    losses = KINDS[loss["kind"]](ratio, now, found["advantage"], **{key: loss[key] for key in bounds})[0]
    weights = torch.zeros(mask.shape, requires_grad=True)  # an aggregation is linear: its gradient is its weights
    aggregate(weights, mask, loss["aggregation"]).backward()
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
) -> Html:
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
    blocks = []
    for _, index, start, end in table.blocks():
        spans = runs([table.source[t] == "action" for t in range(start, end)])
        parts = [_columns(sheet, table, start + a, start + b, scales) for a, b in spans]
        turn = trajectory.turns[index] if index >= 0 else None
        blocks.append(
            ("Prompt", "", "", parts) if turn is None else (f"Turn {index + 1}", turn_kind(turn), turn.text, parts)
        )
    head = templates().heading(title) + facts(trajectory)
    body = sheet.close(templates().credit(scales, blocks), head=head)
    return part(body, script=True, label=title or "Credit along a trajectory")


def _columns(sheet: Sheet, table: TokenTable, start: int, end: int, scales: Sequence[Scale]) -> tuple[list, str, int]:
    """Sampled tokens with their bars, or the words of tokens that were fed, and how many tokens there are."""
    if table.source[start] != "action":
        words = " ".join("".join(table.pieces[start:end]).split())
        return [], words if len(words) <= SHOWN else words[: SHOWN - 1] + "…", end - start
    tokens = sheet.tokens(table, start, end)
    bars = [[scale.look(table.value(scale.name, t)) for scale in scales] for t in range(start, end)]
    return list(zip(tokens, bars, strict=True)), "", end - start
