"""The extended MDP of an LLM agent: its states, transitions and trajectories.

A static LLM appends one token after another to a prompt. An agent also acts on
a world: some token sequences are commands, and the world answers with tokens
that the policy did not choose. Symbols follow "Agent-R1" (arXiv 2511.14460 v1,
section 2): the state ``s_t = (w_p, T_1 .. T_k, T^partial)``, turns ``T_i`` made
of the agent's tokens and the environment's feedback, the generative transition
``P_G`` and the environmental transition ``P_E``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from agentr1_lite.jsonl import write_rows
from agentr1_lite.scoring import gold_list

ROUNDING = 1e-3  # how far above 0 the log-prob of a sure token may come out


class StopReason(str, Enum):
    """Why an episode ended; every trajectory carries one."""

    ANSWER = "answer"  # the policy gave a final answer
    NO_CALL = "no_call"  # a turn held neither a call nor an answer
    MAX_TURNS = "max_turns"  # the turn limit was reached
    LENGTH = "length"  # the token budget ran out
    TOOL_ERROR_LIMIT = "tool_error_limit"  # too many failing calls
    ENVIRONMENT = "environment"  # the environment itself ended the episode
    INTERRUPTED = "interrupted"  # a person or a signal stopped the run


class TurnKind(str, Enum):
    """What the environment read in the tokens of one turn."""

    TEXT = "text"
    TOOL_CALL = "tool_call"
    ANSWER = "answer"
    INVALID = "invalid"


@dataclass(frozen=True)
class Task:
    """One question: what the policy is asked and what is right.

    ``golds`` holds the accepted answers (the answer and its aliases),
    ``evidence`` the titles of the passages that prove it.
    """

    id: str
    question: str
    golds: tuple[str, ...] = ()
    kind: str = ""
    hops: int = 0
    evidence: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("golds", "evidence"):  # a text is one of them, not a list of letters
            object.__setattr__(self, name, tuple(gold_list(getattr(self, name), f"task {self.id!r}: {name}")))

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Task:
        return cls(**{**row, "golds": row["golds"]})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Action:
    """One token ``a_t``; ``completes_turn`` marks the token that ends the agent's turn."""

    token: int
    completes_turn: bool = False


@dataclass(frozen=True)
class State:
    """``s_t = (w_p, T_1 .. T_k, T^partial_{k+1})`` with what surrounds the tokens.

    The overview's richer state (history, environment state, long-term memory,
    tools available, task) is the same object: the history is ``turns``.
    """

    task: Task
    prompt: tuple[int, ...]
    turns: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    partial: tuple[int, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    memory: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens the policy conditions on: prompt, closed turns, open turn."""
        closed = tuple(t for spoken, feedback in self.turns for t in spoken + feedback)
        return self.prompt + closed + self.partial


def generative_transition(state: State, action: Action) -> State:
    """``P_G(s' | s, a) = 1`` iff ``s' = s ⊕ a``: the token joins the open turn."""
    return replace(state, partial=state.partial + (action.token,))


def environmental_transition(
    state: State,
    feedback: Iterable[int],
    environment: Mapping[str, Any] | None = None,
    memory: tuple[str, ...] | None = None,
) -> State:
    """One sample of ``P_E(s' | s, a)``: the open turn closes with the world's feedback tokens."""
    return replace(
        state,
        turns=state.turns + ((state.partial, tuple(feedback)),),
        partial=(),
        environment=state.environment if environment is None else environment,
        memory=state.memory if memory is None else memory,
    )


@dataclass
class Segment:
    """A run of tokens that stood in one context.

    Attributes:
        token_ids: the tokens as the model saw them, never re-encoded.
        action_mask: True where the policy sampled the token.
        logprobs: the sampling policy's log-probabilities; 0.0 off the mask.
    """

    token_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, ids: Iterable[int], logprobs: Iterable[float] | None = None) -> tuple[int, int]:
        """Append tokens and return their span; ``logprobs`` given means the policy sampled them."""
        ids = list(ids)
        values = [0.0] * len(ids) if logprobs is None else [float(x) for x in logprobs]
        if len(values) != len(ids):
            raise ValueError(f"{len(ids)} token ids came with {len(values)} log-probs; give one each")
        start = len(self.token_ids)
        self.token_ids += ids
        self.action_mask += [logprobs is not None] * len(ids)
        self.logprobs += values
        return start, len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return self.action_mask.index(True) if True in self.action_mask else len(self.token_ids)

    def check(self, where: str) -> None:
        """Raise ``ValueError``, which ``where`` begins, where the three lists do not fit together."""
        if not len(self.token_ids) == len(self.action_mask) == len(self.logprobs):
            raise ValueError(
                f"{where} has {len(self.token_ids)} token_ids, {len(self.action_mask)} action_mask "
                f"and {len(self.logprobs)} logprobs; all three need one length"
            )
        for t, (acted, logprob) in enumerate(zip(self.action_mask, self.logprobs, strict=True)):
            if not logprob <= ROUNDING or (not acted and logprob != 0.0):
                raise ValueError(
                    f"{where} token {t} has log-prob {logprob}; expected a number of at most 0, and 0 off the mask"
                )


@dataclass
class Turn:
    """One turn ``T_i`` as spans into a segment; half-open, in tokens.

    ``[start, end)`` are the sampled tokens, ``[observation_start,
    observation_end)`` the world's text; inserted tokens outside both are the
    template's seam. ``anchor`` identifies the observation the turn started
    from, so that turns of different rollouts can be compared (GiGPO).
    """

    segment: int
    start: int
    end: int
    kind: TurnKind = TurnKind.TEXT
    text: str = ""  # with what the template begins a turn with, such as <think>, though the prompt holds its tokens
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    observation_start: int = 0
    observation_end: int = 0
    observation: str = ""
    process_reward: float = 0.0
    finish_reason: str = "stop"
    flags: list[str] = field(default_factory=list)
    anchor: str = ""

    def check(self, where: str, mask: Sequence[bool], seen: int) -> int:
        """Raise ``ValueError``, which ``where`` begins, where the spans do not fit the segment's ``mask``.

        ``seen`` tokens belong to former turns; returns how many do after this one.
        """
        if self.process_reward and self.start == self.end:
            raise ValueError(f"{where} has process_reward {self.process_reward} and no sampled token to place it on")
        for name, start, end, acted in (
            ("span", self.start, self.end, True),
            ("observation span", self.observation_start, self.observation_end, False),
        ):
            if not 0 <= start <= end <= len(mask):
                raise ValueError(f"{where} {name} [{start}, {end}) lies outside its segment of {len(mask)} tokens")
            if start == end:
                continue
            if start < seen:
                raise ValueError(f"{where} {name} [{start}, {end}) begins before token {seen}, where another span ends")
            _check_mask(f"{where}, before its {name}", mask, seen, start, False)
            _check_mask(f"{where} {name}", mask, start, end, acted)
            seen = end
        return seen


def _check_mask(where: str, mask: Sequence[bool], start: int, end: int, acted: bool) -> None:
    """Raise ``ValueError`` at the first token of ``[start, end)`` whose mask is not ``acted``."""
    if (not acted) in mask[start:end]:
        said = "is not marked as sampled" if acted else "is marked as sampled; only a turn's own tokens may be"
        raise ValueError(f"{where}: token {mask.index(not acted, start)} {said}")


@dataclass
class Trajectory:
    """One episode: what was said, what the world answered, what it earned."""

    task_id: str
    group_id: str
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    question: str = ""
    golds: list[str] = field(default_factory=list)
    answer: str | None = None
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    stop_reason: StopReason = StopReason.INTERRUPTED
    policy: str = ""
    policy_version: int = 0
    seed: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def num_actions(self) -> int:
        return sum(sum(segment.action_mask) for segment in self.segments)

    @property
    def total_reward(self) -> float:
        """Outcome plus process rewards: the undiscounted return of the episode."""
        return self.reward + sum(turn.process_reward for turn in self.turns)

    def token_rewards(self) -> list[list[float]]:
        """Rewards per token and segment, each on a token the policy chose.

        A process reward lies on the last sampled token of its turn and the
        outcome on the last sampled token of the episode. A trajectory may end
        on a tool reply: a reward on that last, masked token would never reach
        an estimator (miles#1827).
        """
        rewards = [[0.0] * len(segment) for segment in self.segments]
        for turn in self.turns:
            if turn.process_reward and turn.end > turn.start:
                rewards[turn.segment][turn.end - 1] += turn.process_reward
        for index in reversed(range(len(self.segments))):
            mask = self.segments[index].action_mask
            if True in mask:
                rewards[index][len(mask) - 1 - mask[::-1].index(True)] += self.reward
                break
        return rewards

    def check(self) -> None:
        """Raise ``ValueError`` naming field and place where the trajectory is inconsistent.

        Turns and their observations follow each other, and up to the last of a segment exactly the turns' own tokens
        are sampled; behind it may stand those of a turn that was not recorded.
        """
        where = f"trajectory of task {self.task_id!r}"
        for i, segment in enumerate(self.segments):
            segment.check(f"{where}: segment {i}")
        seen = [0] * len(self.segments)  # tokens of each that the turns so far account for
        for i, turn in enumerate(self.turns):
            if not 0 <= turn.segment < len(self.segments):
                raise ValueError(f"{where}: turn {i} points to segment {turn.segment} of {len(self.segments)}")
            if i and turn.segment < self.turns[i - 1].segment:
                raise ValueError(f"{where}: turn {i} points to segment {turn.segment}, behind which turn {i - 1} lies")
            mask = self.segments[turn.segment].action_mask
            seen[turn.segment] = turn.check(f"{where}: turn {i}", mask, seen[turn.segment])

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self)
        row["stop_reason"] = StopReason(self.stop_reason).value
        for turn in row["turns"]:
            turn["kind"] = TurnKind(turn["kind"]).value
        for segment in row["segments"]:
            segment["action_mask"] = [int(x) for x in segment["action_mask"]]
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Trajectory:
        """The trajectory of a row of `to_dict`; raises ``ValueError`` naming the field that does not fit."""
        if isinstance(row, Mapping) and row.get("golds") is not None:
            row = {**row, "golds": gold_list(row["golds"])}
        row = _fitting(cls, row, "", ("segments", "turns", "stop_reason"))
        segments, turns = [], []
        for i, given in enumerate(row["segments"]):
            s = _fitting(Segment, given, f"segments[{i}].", ("token_ids", "action_mask", "logprobs"))
            segments.append(Segment(s["token_ids"], [bool(x) for x in s["action_mask"]], s["logprobs"]))
        for i, given in enumerate(row["turns"]):
            t = _fitting(Turn, given, f"turns[{i}].", ("kind",))
            turns.append(Turn(**{**t, "kind": TurnKind(t["kind"])}))
        return cls(**{**row, "segments": segments, "turns": turns, "stop_reason": StopReason(row["stop_reason"])})


_FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda x: isinstance(x, str),
    "str | None": lambda x: x is None or isinstance(x, str),
    "int": lambda x: isinstance(x, Integral),
    "float": lambda x: isinstance(x, Real) and abs(x) < math.inf,
    "dict[str, Any]": lambda x: isinstance(x, Mapping),
    "dict[str, float]": lambda x: isinstance(x, Mapping) and all(map(_FITS["float"], x.values())),
    "list[int]": lambda x: isinstance(x, list) and all(isinstance(i, Integral) for i in x),
    "list[bool]": lambda x: isinstance(x, list) and all(i in (0, 1) for i in x),
    "list[float]": lambda x: isinstance(x, list) and all(isinstance(i, Real) for i in x),
    "list[dict[str, Any]]": lambda x: isinstance(x, list) and all(isinstance(i, Mapping) for i in x),
    "StopReason": lambda x: x in list(StopReason),
    "TurnKind": lambda x: x in list(TurnKind),
}


def _fitting(cls: type, row: Any, where: str, needed: Iterable[str]) -> Mapping[str, Any]:
    """``row`` if its fields are those of ``cls`` in name and type; ``ValueError`` naming the first that is not."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where.rstrip('.') or 'the row'} is {type(row).__name__}; expected an object")
    known = {item.name: item for item in fields(cls)}
    if unknown := [name for name in row if name not in known]:
        raise ValueError(f"{where}{unknown[0]} is no field of a {cls.__name__}")
    for name, item in known.items():
        if name not in row:
            if name in needed or item.default is item.default_factory:  # both are MISSING
                raise ValueError(f"{where}{name} is missing")
        elif not _FITS.get(item.type, lambda x: isinstance(x, (list, tuple)))(row[name]):
            raise ValueError(f"{where}{name} is {row[name]!r:.60}; expected {item.type}")
    return row


def states(trajectory: Trajectory, task: Task | None = None) -> Iterator[tuple[State, Action | None, State]]:
    """Replay a one-segment trajectory as ``(s, a, s')``; ``a`` is None on an environmental transition."""
    if len(trajectory.segments) != 1:
        raise ValueError("states() replays episodes of one segment; these have several")
    ids = trajectory.segments[0].token_ids
    task = task or Task(trajectory.task_id, trajectory.question, tuple(trajectory.golds))
    first = trajectory.turns[0].start if trajectory.turns else len(ids)
    state = State(task, tuple(ids[:first]))
    ends = [*(turn.start for turn in trajectory.turns[1:]), len(ids)]
    for turn, end in zip(trajectory.turns, ends, strict=False):  # an episode may hold no turn
        for t in range(turn.start, turn.end):
            action = Action(ids[t], completes_turn=t == turn.end - 1)
            following = generative_transition(state, action)
            yield state, action, following
            state = following
        if end > turn.end:
            following = environmental_transition(state, ids[turn.end : end])
            yield state, None, following
            state = following


def save_jsonl(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one trajectory a line; the file appears only when it is whole, and `load_jsonl` reads each of its rows.

    Raises ``ValueError`` on a trajectory that could not be read again, such as one whose reward is NaN.
    """

    def rows() -> Iterator[dict[str, Any]]:
        for number, trajectory in enumerate(trajectories, 1):
            try:
                row = trajectory.to_dict()
                Trajectory.from_dict(row)
            except ValueError as error:
                raise ValueError(f"{path}: row {number} is no trajectory ({error}); nothing was written") from error
            yield row

    write_rows(path, rows())


def load_jsonl(path: str | Path) -> list[Trajectory]:
    """Read trajectories back; raises ``ValueError`` naming file and line of a broken row."""
    out = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                out.append(Trajectory.from_dict(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a trajectory ({error}); write it with save_jsonl"
                ) from error
    return out
