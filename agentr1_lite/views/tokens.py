"""One trajectory as a table of tokens: what each says, who wrote it, in which turn, and its numbers.

The views draw this table and nothing else, so everything they need is checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from agentr1_lite.mdp import Trajectory
from agentr1_lite.views.reading import as_trajectory, is_finite, piece, splitter

SOURCES = ("prompt", "action", "seam", "observation")
Numbers = list[float | None]
Place = tuple[int, int, int, int]  # segment, turn, start, end
ALIASES = {"mask": "action_mask", "entropies": "entropy"} | {
    f"{name}s": name
    for name in ("advantage", "return", "reward", "value", "ratio", "logprob", "old_logprob", "ref_logprob")
}


@dataclass(frozen=True)
class TokenTable:
    """T tokens of a trajectory, its segments one after the other; every list has T entries.

    Attributes:
        pieces: the text of each token alone; bytes that are no whole character as ``⟨F0 9F⟩``.
        special: True where the tokenizer holds the token as a control token.
        source: one of `SOURCES`; "action" exactly where the action mask is True.
        turn: index of the turn, −1 before a segment's first turn.
        quantities: numbers by name, None where there is none; "action_mask" is always there.
        empty: turns that hold no token, as `blocks` gives them.
    """

    ids: list[int]
    pieces: list[str]
    special: list[bool]
    source: list[str]
    turn: list[int]
    segment: list[int]
    quantities: dict[str, Numbers] = field(default_factory=dict)
    has_text: bool = True
    empty: list[Place] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def value(self, name: str, t: int) -> float | None:
        """The number of that name on token ``t``; None where there is none."""
        return self.quantities[name][t] if name in self.quantities else None

    def turns(self) -> list[tuple[int, int]]:
        """Half-open spans of tokens with one segment and one turn, in order."""
        return runs(list(zip(self.segment, self.turn, strict=True)))

    def blocks(self) -> list[Place]:
        """(segment, turn, start, end) of every prompt and turn in order; start = end where it holds no token."""
        held = [(self.segment[a], self.turn[a], a, b) for a, b in self.turns()]
        return sorted(held + self.empty, key=lambda block: (block[0], block[2], block[1]))


def runs(keys: Sequence[Any]) -> list[tuple[int, int]]:
    """Half-open spans of equal neighbours."""
    edges = [0, *(i for i in range(1, len(keys)) if keys[i] != keys[i - 1]), len(keys)]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def token_table(
    trajectory: Any, tokenizer: Any = None, quantities: Mapping[str, Any] | None = None, *, index: int = 0
) -> TokenTable:
    """The table of a trajectory (or of anything `as_trajectory` reads).

    Args:
        tokenizer: a tokenizer, or a policy that has one. ``trajectory.info["pieces"]`` (a list of texts a segment)
            comes before it; without either the ids are shown.
        quantities: name → T numbers, flat or one list a segment; tensors of shape (T,) too; None where there is none.
            Ratio and KL are added where "logprob", and "ref_logprob", of the present policy are given.

    Raises:
        ValueError: naming the field and the place that is inconsistent.
    """
    tokenizer = splitter(tokenizer)
    trajectory = as_trajectory(trajectory, index, tokenizer)
    trajectory.check()
    where = f"trajectory of task {trajectory.task_id!r}"
    ids = [i for s in trajectory.segments for i in s.token_ids]
    mask = [m for s in trajectory.segments for m in s.action_mask]
    source, turns, segments = _places(trajectory)
    pieces, special = _texts(trajectory, ids, tokenizer, where)
    given: dict[str, Any] = {"action_mask": mask, "reward": trajectory.token_rewards()}
    logprobs = [x for s in trajectory.segments for x in s.logprobs]
    if any(x for m, x in zip(mask, logprobs, strict=True) if m):  # else made by hand or imported: nobody measured them
        given["sampled_logprob"] = [x if m else None for m, x in zip(mask, logprobs, strict=True)]
    if not isinstance(quantities or {}, Mapping):
        raise ValueError(f"{where}: quantities is {type(quantities).__name__}; give numbers by name, as credit() does")
    given |= {ALIASES.get(name, name): values for name, values in (quantities or {}).items()}
    table = {name: numbers(name, values, len(ids), where) for name, values in given.items()}
    _derive(table, mask)
    has_text = tokenizer is not None or "pieces" in trajectory.info
    firsts = list(accumulate((len(s) for s in trajectory.segments), initial=0))
    starts = {i: firsts[t.segment] + t.start for i, t in enumerate(trajectory.turns)}
    empty = [(trajectory.turns[i].segment, i, starts[i], starts[i]) for i in starts.keys() - set(turns)]
    return TokenTable(ids, pieces, special, source, turns, segments, table, has_text, empty)


def _places(trajectory: Trajectory) -> tuple[list[str], list[int], list[int]]:
    """Source, turn and segment of every token."""
    sources, turns, segments = [], [], []
    for index, segment in enumerate(trajectory.segments):
        length = len(segment)
        mine = sorted((t.start, t.end, i) for i, t in enumerate(trajectory.turns) if t.segment == index)
        first = min([segment.prompt_length, *(start for start, _, _ in mine)])
        source, turn = ["prompt"] * first + ["seam"] * (length - first), [-1] * length
        for start, _, i in mine:
            turn[start:] = [i] * (length - start)
            seen = slice(trajectory.turns[i].observation_start, trajectory.turns[i].observation_end)
            source[seen] = ["observation"] * len(source[seen])
        sources += ["action" if acted else name for acted, name in zip(segment.action_mask, source, strict=True)]
        turns += turn
        segments += [index] * length
    return sources, turns, segments


def _texts(trajectory: Trajectory, ids: list[int], tokenizer: Any, where: str) -> tuple[list[str], list[bool]]:
    if "pieces" in trajectory.info:  # the ids of an imported conversation may be no tokenizer's
        pieces = [str(p) for p in flat(trajectory.info["pieces"]) or []]
        if len(pieces) != len(ids):
            raise ValueError(f"{where}: info['pieces'] holds {len(pieces)} texts for {len(ids)} tokens; give one each")
        return pieces, [False] * len(ids)
    if tokenizer is None:
        return [f"{i} " for i in ids], [False] * len(ids)
    known = {i: piece(tokenizer, i) for i in set(ids)}
    return [known[i][0] for i in ids], [known[i][1] for i in ids]


def flat(values: Any) -> list[Any] | None:
    """The items of a list, a tensor, or a list of either; None of anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        return None
    out: list[Any] = []
    for x in values:
        x = x.tolist() if hasattr(x, "tolist") else x
        out += x if isinstance(x, (list, tuple)) else [x]
    return out


def numbers(name: str, given: Any, size: int, where: str, mask: Sequence[bool] | None = None) -> Numbers:
    """T finite numbers or None, from what `flat` reads.

    Under ``mask`` there must be a number on every masked token; what stands elsewhere does not count and becomes None.
    """
    if (values := flat(given)) is None:
        raise ValueError(f"{where}: {name} is {type(given).__name__}; give a list with one number a token")
    if len(values) != size:
        raise ValueError(f"{where}: {name} has {len(values)} numbers for {size} tokens; give one each, or None")
    kept = [x is not None for x in values] if mask is None else mask
    for t, x in enumerate(values):
        if kept[t] and not is_finite(x):
            other = ", or None where there is none" if mask is None else " on every sampled token"
            raise ValueError(f"{where}: {name} is {x!r:.60} at token {t}; give a finite number{other}")
    return [float(x) if keep else None for x, keep in zip(values, kept, strict=True)]


def _derive(table: dict[str, Numbers], mask: list[bool]) -> None:
    """Add ρ = π/π_old and the k3 estimate of KL(π ‖ π_ref) where their log-probs are there."""
    now, old = table.get("logprob"), table.get("old_logprob", table.get("sampled_logprob"))
    others = {"ratio": old, "kl": table.get("ref_logprob")}
    wanted = {name: other for name, other in others.items() if now and other and name not in table}
    if not wanted:
        return
    import torch

    from agentr1_lite.losses import kl, policy_ratio

    for name, other in wanted.items():
        there = [m and a is not None and b is not None for m, a, b in zip(mask, now, other, strict=True)]
        a, b = (torch.tensor([[x or 0.0 for x in side]], dtype=torch.float64) for side in (now, other))
        acted = torch.tensor([there])
        found = policy_ratio(a, b, acted) if name == "ratio" else kl(a, b, "k3", acted)
        table[name] = [x if m else None for x, m in zip(found[0].tolist(), there, strict=True)]
