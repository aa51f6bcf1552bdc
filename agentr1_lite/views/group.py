"""The G rollouts of one question as rows: what each did, what it earned, what the comparison makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_lite.mdp import Trajectory
from agentr1_lite.views.credit import credit
from agentr1_lite.views.theme import Html, number, part, templates
from agentr1_lite.views.tokens import flat, is_finite
from agentr1_lite.views.trajectory import view_html


def group_html(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | None = None,
    *,
    name: str = "GRPO",
    tokenizer: Any = None,
    quantities: Sequence[Mapping[str, Any]] | None = None,
    color_by: str = "advantage",
    title: str = "",
    viewers: bool = True,
) -> Html:
    """One row a rollout; opening a row shows its trajectory.

    Args:
        advantages: one number a rollout; computed by the estimator ``name`` if not given.
        quantities: one mapping a rollout for its viewer, see `token_table`; the credit of ``name`` if not given.
        viewers: False leaves the trajectories out, for a small page.
    """
    group = list(trajectories)
    if not group:
        raise ValueError("group_html got no trajectory; give the rollouts of one question")
    for what, given in (("advantages", advantages), ("quantities", quantities)):
        if given is not None and len(given) != len(group):
            raise ValueError(f"group_html: {len(given)} {what} for {len(group)} trajectories; give one each")
    by = f"by {name}" if advantages is None and quantities is None else "as given"
    if quantities is None:
        quantities = [credit(t, name, group) for t in group]
    if advantages is None:
        advantages = [_of_rollout(t, q) for t, q in zip(group, quantities, strict=True)]
    from agentr1_lite.credit import zero_variance_share

    viewed = [view_html(t, color_by, tokenizer, q) if viewers else "" for t, q in zip(group, quantities, strict=True)]
    rewards = [t.total_reward for t in group]
    mean = sum(rewards) / len(rewards)
    same = "all earned the same" if zero_variance_share(rewards, ["g"] * len(group)) else "every advantage is 0"
    note = "" if any(advantages) else f" · {same}: nothing to learn from"
    said = f"{len(group)} rollouts · mean reward {number(mean)} · advantage {by}{note}"
    span = max(map(abs, advantages)) or 1.0
    body = templates().group(title, group[0].question, said, list(zip(group, advantages, viewed, strict=True)), span)
    return part(body, script=viewers, label=title or "Rollouts of one question")


def _of_rollout(trajectory: Trajectory, quantities: Mapping[str, Any]) -> float:
    """The mean advantage of a rollout's action tokens: for a group estimator the number they share."""
    mask = [m for s in trajectory.segments for m in s.action_mask]
    given = flat(quantities.get("advantage", quantities.get("advantages", ()))) or ()
    found = [a for a, m in zip(given, mask, strict=False) if m and is_finite(a)]
    return sum(found) / len(found) if found else 0.0
