"""The G rollouts of one question as rows: what each did, what it earned, what the comparison makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_lite.mdp import Trajectory
from agentr1_lite.views.credit import credit
from agentr1_lite.views.theme import esc, part
from agentr1_lite.views.tokens import flat, is_finite
from agentr1_lite.views.trajectory import asked, heading, number, view_html

_TITLES = ("rollout", "answer", "turns", "tokens", "stop reason", "reward", "advantage")


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
) -> str:
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
    by = f"by {esc(name)}" if advantages is None and quantities is None else "as given"
    if quantities is None:
        quantities = [credit(t, name, group) for t in group]
    if advantages is None:
        advantages = [_of_rollout(t, q) for t, q in zip(group, quantities, strict=True)]
    from agentr1_lite.credit import zero_variance_share

    span = max((abs(a) for a in advantages), default=0.0) or 1.0
    rows = []
    for i, (t, a, q) in enumerate(zip(group, advantages, quantities, strict=True)):
        inside = view_html(t, color_by, tokenizer, q) if viewers else ""
        cells = "".join(f'<span class="c{n}">{cell}</span>' for n, cell in enumerate(_cells(i, t, a, span)))
        rows.append(f'<details class="roll"><summary>{cells}</summary>{inside}</details>')
    rewards = [t.total_reward for t in group]
    mean = sum(rewards) / len(rewards)
    same = "all earned the same" if zero_variance_share(rewards, ["g"] * len(group)) else "every advantage is 0"
    note = "" if any(advantages) else f" · {same}: nothing to learn from"
    head = (
        f"{heading(title)}"
        f'{asked(group[0])}<p class="note">{len(group)} rollouts · mean reward '
        f"{number(mean)} · advantage {by}{note}</p>"
    )
    titles = "".join(f'<span class="c{n}">{text}</span>' for n, text in enumerate(_TITLES))
    body = f'{head}<div class="rolls"><div class="titles">{titles}</div>{"".join(rows)}</div>'
    return part(body, script=viewers, label=title or "Rollouts of one question")


def _of_rollout(trajectory: Trajectory, quantities: Mapping[str, Any]) -> float:
    """The mean advantage of a rollout's action tokens: for a group estimator the number they share."""
    mask = [m for s in trajectory.segments for m in s.action_mask]
    given = flat(quantities.get("advantage", quantities.get("advantages", ()))) or ()
    found = [a for a, m in zip(given, mask, strict=False) if m and is_finite(a)]
    return sum(found) / len(found) if found else 0.0


def _cells(index: int, t: Trajectory, advantage: float, span: float) -> tuple[str, ...]:
    parts = "".join(f"<small>{esc(k)} {number(v)}</small> " for k, v in t.reward_parts.items())
    steps = sum(turn.process_reward for turn in t.turns)
    parts += f"<small>process {number(steps)}</small>" if steps else ""
    kind = "p" if advantage > 0 else "n"
    bar = f'<b class="{kind}" style="--m:{abs(advantage) / span:.2f}"></b>' if advantage else '<b class="o"></b>'
    signed = f"+{number(advantage)}" if advantage > 0 else number(advantage)
    answer = "no answer" if t.answer is None else esc(t.answer)
    return (
        f"#{index + 1}",
        f"<bdi>{answer}</bdi>",
        str(len(t.turns)),
        f"{t.num_actions} <small>of {t.num_tokens}</small>",
        t.stop_reason.value.replace("_", " "),
        f"{number(t.total_reward)} {parts}",
        f'<span class="adv">{bar}</span>{signed}',
    )
