"""Rewards from named parts: what an episode earns at its end, and what single turns earn.

A specification maps names to weights, ``{"em": 1.0, "step_penalty": -0.01}``,
or to a weight with options, ``{"shaping": {"weight": 0.5, "gamma": 0.9}}``. The
outcome ``r_f`` is the weighted sum of the outcome parts, the process reward
``r_p`` of a turn that of the process parts (Agent-R1, arXiv 2511.14460 v1,
section 2). ``reward_parts`` of a trajectory holds the parts **before** the
weights (``em`` stays 0 or 1, a process part is summed over the turns), so a
part of weight 0 is a metric.

A part that raises, or gives anything but a finite number (True and False are 1
and 0), counts as 0: a warning names part, task and value, the last turn gets
the flag ``reward_fault``, and the run goes on.

Outcome parts read the parsed answer and the turns' own records; the text of a
tool never enters a score (Search-R1#79, ReZero#1).
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentr1_lite.mdp import StopReason, Task, Turn, TurnKind
from agentr1_lite.schema import shown
from agentr1_lite.scoring import evidence_found, score_answer
from agentr1_lite.toolcalls import strip_end


@dataclass
class Episode:
    """What rewards may look at; ``success`` is the environment's own verdict, in [0, 1]."""

    task: Task
    benchmark: str = "hotpotqa"
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None
    stop_reason: StopReason | None = None
    success: float = 0.0
    faults: list[str] = field(default_factory=list)  # reward parts that gave no number

    def results(self, turn: Turn | None = None) -> list[dict[str, Any]]:
        """The tools' results of one turn, or of the episode."""
        return [result for t in ([turn] if turn else self.turns) for result in t.results]


OutcomePart = Callable[..., float]  # (episode, **options)
ProcessPart = Callable[..., float]  # (episode, turn, **options); the turn is the episode's last
OUTCOME_PARTS: dict[str, OutcomePart] = {}
PROCESS_PARTS: dict[str, ProcessPart] = {}


def outcome_part(function: OutcomePart) -> OutcomePart:
    """Register an outcome part under the function's name."""
    OUTCOME_PARTS[function.__name__] = function
    return function


def process_part(function: ProcessPart) -> ProcessPart:
    """Register a process part under the function's name."""
    PROCESS_PARTS[function.__name__] = function
    return function


def names() -> list[str]:
    return sorted({*OUTCOME_PARTS, *PROCESS_PARTS, "shaping"})


@outcome_part
def em(episode: Episode) -> float:
    """1 if the answer equals a gold after the benchmark's normalisation."""
    return score_answer(episode.answer, episode.task.golds, episode.benchmark)["em"]


@outcome_part
def f1(episode: Episode) -> float:
    """Word overlap of the answer with the best gold."""
    return score_answer(episode.answer, episode.task.golds, episode.benchmark)["f1"]


@outcome_part
def cover_em(episode: Episode) -> float:
    """1 if a gold is a substring of the answer; pays for listing candidates, so better a metric than a reward."""
    return score_answer(episode.answer, episode.task.golds, episode.benchmark)["cover_em"]


@outcome_part
def task_success(episode: Episode) -> float:
    """The environment's verdict (``ToolEnv.success``): EM unless a tool or subclass says otherwise."""
    return episode.success


@outcome_part
def no_answer(episode: Episode) -> float:
    """1 if the episode ended without an answer; give it a negative weight."""
    return float(episode.answer is None)


@outcome_part
def cut(episode: Episode) -> float:
    """1 if the token or turn budget ended the episode; give it a negative weight."""
    return float(episode.stop_reason in (StopReason.LENGTH, StopReason.MAX_TURNS))


@outcome_part
def cost(episode: Episode) -> float:
    """Σ of ``info["cost"]`` over all results: what constrained RL bounds (a Lagrangian is its negative weight)."""
    return sum(numbers(episode.results(), "cost"))


_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def _block_in_format(turn: Turn, final: bool, think: bool) -> bool:
    text = strip_end(turn.text)
    thought = _THINK.match(text)
    if think and (thought is None or "<think>" in thought.group(1)):
        return False
    rest = text[thought.end() if thought else 0 :]
    if final:
        return turn.kind is TurnKind.ANSWER and "answer_and_call" not in turn.flags and rest.endswith(">")
    clean = all(call.get("flags") == [] for call in turn.calls)
    return turn.kind is TurnKind.TOOL_CALL and clean and rest.startswith("<") and rest.endswith(">")


@outcome_part
def format(episode: Episode, think: bool = True) -> float:
    """Share of turns in format: ``<think>…</think>`` and a call, the last ``<think>…</think>…<answer>…</answer>``.

    A call that needed any repair is not in format. ``think=False`` asks for no
    thoughts. (The authors' public script gives 0.5 per good block, at most 1.)
    """
    last = len(episode.turns) - 1
    good = [_block_in_format(turn, i == last, think) for i, turn in enumerate(episode.turns)]
    return sum(good) / len(good) if good else 0.0


@outcome_part
def agent_r1(episode: Episode, think: bool = True) -> float:
    """The paper's reward: EM if the format score is 1, else format - 1 (arXiv 2511.14460 v1)."""
    score = format(episode, think)
    return em(episode) if score == 1.0 else score - 1.0


@process_part
def step_penalty(episode: Episode, turn: Turn) -> float:
    """1 a turn; give it a negative weight."""
    return 1.0


@process_part
def tool_success(episode: Episode, turn: Turn) -> float:
    """Number of the turn's calls that succeeded."""
    return float(sum(bool(r["success"]) for r in turn.results))


@process_part
def tool_error(episode: Episode, turn: Turn) -> float:
    """Number of the turn's calls that failed or could not be read; give it a negative weight."""
    return float(sum(not r["success"] for r in turn.results))


@process_part
def repeated_call(episode: Episode, turn: Turn) -> float:
    """Number of the turn's calls that the episode held before, word for word; give it a negative weight."""
    seen, repeats = [], 0
    for t in episode.turns:
        for call in t.calls:
            key = (call.get("name"), call.get("arguments"))
            repeats += t is turn and "name" in call and key in seen
            seen.append(key)
    return float(repeats)


@process_part
def evidence(episode: Episode, turn: Turn) -> float:
    """Number of gold titles (``task.evidence``) found for the first time, from ``info["titles"]`` of results."""
    gold, earlier = episode.task.evidence, [title for t in episode.turns if t is not turn for title in _titles(t)]
    return float(len(evidence_found(gold, _titles(turn)) - evidence_found(gold, earlier)))


@process_part
def tool_reward(episode: Episode, turn: Turn) -> float:
    """Σ of ``info["reward"]`` over the turn's results: dense rewards that an environment's tools give."""
    return sum(numbers(turn.results, "reward"))


def _titles(turn: Turn) -> list[str]:
    found = [result["info"].get("titles") for result in turn.results]
    return [title for titles in found if isinstance(titles, list) for title in titles if isinstance(title, str)]


def numbers(results: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The finite numbers under ``info[key]`` of the results that have one; a warning names what is none."""
    values = [result["info"].get(key) for result in results]
    found = [finite(value) for value in values]
    for value in (v for v, number in zip(values, found, strict=True) if number is None and v is not None):
        warnings.warn(f"a tool's info[{key!r}] is {shown(value)}; it is left out, give a finite number", stacklevel=2)
    return [number for number in found if number is not None]


def finite(value: Any) -> float | None:
    """``value`` as a finite number, None where it is none; text never is."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # None, an integer too large, a tensor of several numbers, an object's own fault
        return None
    return number if math.isfinite(number) else None


def part_value(episode: Episode, name: str, part: Callable[..., Any], *args: Any, weight: float = 1.0, **options: Any):
    """What a reward part gives, 0 where that (times ``weight``) is no finite number: named, and noted in ``faults``."""
    try:
        value = part(*args, **options)
        number = finite(value)
        if number is not None and math.isfinite(weight * number):
            return number
        said = f"is {shown(value)}"
    except Exception as error:
        said = f"raised {type(error).__name__}: {error}"
    episode.faults.append(name)
    warnings.warn(
        f"reward part {name!r} of task {episode.task.id!r} {said}; it counts as 0 here, give a finite number",
        stacklevel=2,
    )
    return 0.0


def shape(final: float, intermediate: Sequence[float], gamma: float = 0.9) -> list[float]:
    """``r_t = r_final · γ^(T−t) + r_intermediate,t`` for turns t = 1..T."""
    last = len(intermediate) - 1
    return [final * gamma ** (last - t) + r for t, r in enumerate(intermediate)]


def normalize_process(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Process rewards of a batch, a row an episode, over max |Σ_{i≥t} r_i| (PRIME, arXiv 2502.01456).

    The largest return-to-go of the batch becomes ±1; all zeros stay zeros.
    """
    largest = 0.0
    for row in rows:
        total = 0.0
        for reward in reversed(row):
            total += reward
            largest = max(largest, abs(total))
    return [[reward / largest if largest else 0.0 for reward in row] for row in rows]


class Rewards:
    """A checked specification: ``process`` a turn at a time, ``outcome`` at the end."""

    def __init__(self, spec: Mapping[str, Any], normalize: bool = False):
        self.weights: dict[str, float] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.normalize = normalize
        for name, value in spec.items():
            if name not in names():
                raise ValueError(f"reward part {name!r} is unknown; allowed: {', '.join(names())}")
            options = dict(value) if isinstance(value, Mapping) else {"weight": value}
            weight = options.pop("weight", 1.0)
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ValueError(f"reward part {name!r} has the weight {weight!r}; give a finite number")
            self.weights[name], self.options[name] = float(weight), options
            self._check_options(name)

    def _check_options(self, name: str) -> None:
        part = {**OUTCOME_PARTS, **PROCESS_PARTS, "shaping": shape}[name]
        allowed = [p.name for p in inspect.signature(part).parameters.values() if p.default is not p.empty]
        for option in self.options[name]:
            if option not in allowed:
                known = ", ".join(["weight", *allowed])
                raise ValueError(f"reward part {name!r} has no option {option!r}; allowed: {known}")

    def _values(self, parts: Mapping[str, Callable[..., float]], episode: Episode, *args: Any) -> dict[str, float]:
        return {
            name: part_value(episode, name, parts[name], episode, *args, weight=weight, **self.options[name])
            for name, weight in self.weights.items()
            if name in parts
        }

    def process(self, episode: Episode, turn: Turn) -> tuple[float, dict[str, float]]:
        """``(reward, unweighted parts)`` of the turn that has just been played."""
        values = self._values(PROCESS_PARTS, episode, turn)
        return sum(self.weights[n] * v for n, v in values.items()), values

    def outcome(self, episode: Episode) -> tuple[float, dict[str, float]]:
        """``(r_final, unweighted parts)``; also writes shaping and normalisation into the turns."""
        values = self._values(OUTCOME_PARTS, episode)
        final = sum(self.weights[n] * v for n, v in values.items())
        turns = episode.turns
        if self.normalize:
            for turn, reward in zip(turns, normalize_process([[t.process_reward for t in turns]])[0], strict=True):
                turn.process_reward = reward
        if "shaping" in self.weights:
            # the last turn carries r_final · γ^0 already, as the outcome
            shares = shape(final, [0.0] * len(turns), **self.options["shaping"])[:-1]
            for turn, share in zip(turns, shares, strict=False):
                turn.process_reward += self.weights["shaping"] * share
            values["shaping"] = sum(shares)
        return final, values
