"""policy × environment × tasks → trajectories.

The engine samples turns, the environment answers them; this file keeps the
record. Sampled ids enter a trajectory as sampled and observations as fed:
nothing is decoded and encoded again (trl#5224, verl#3960).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agentr1_lite.cache import FIRST_SLOTS
from agentr1_lite.chat import Observation
from agentr1_lite.engine import Engine, EngineTurn, LocalEngine, Sampling
from agentr1_lite.env import StepResult, ToolEnv
from agentr1_lite.mdp import Segment, StopReason, Task, Trajectory
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.retrieval import is_count

MAX_ROWS = 256
LEAST_OBSERVATION = 16  # an observation cut below this many tokens says nothing


def episode_seed(seed: int, task_index: int, rollout_index: int) -> int:
    """The seed of one episode: of its tokens and of its environment; 53 bits, exact in any JSON reader."""
    words = np.random.SeedSequence([seed, task_index, rollout_index]).generate_state(1, np.uint64)
    return int(words[0]) >> 11


@dataclass
class Episode:
    """One row of a rollout: its own environment and what happened so far."""

    index: int
    env: ToolEnv
    trajectory: Trajectory
    prompt: list[int]
    budget: int
    done: bool = False
    segment: Segment = field(init=False)

    def __post_init__(self) -> None:
        self.segment = self.trajectory.segments[0]

    def turn_limit(self) -> int:
        """Tokens the row may hold when its next turn is over."""
        return min(len(self.segment) + self.env.max_turn_tokens, self.budget)

    def close(self, reason: StopReason, reward: float, parts: dict[str, float], answer: str | None = None) -> None:
        trajectory = self.trajectory
        trajectory.stop_reason, trajectory.reward, trajectory.answer = reason, float(reward), answer
        trajectory.reward_parts = dict(parts)
        self.done = True

    def cut(self, reason: StopReason) -> None:
        """End an episode that the environment did not end."""
        reward, parts = self.env.finish(reason)
        self.close(reason, reward, parts)


def start_episode(
    policy: QwenPolicy, env: ToolEnv, task: Task, *, seed: int, task_index: int = 0, rollout_index: int = 0
) -> Episode:
    """Reset a copy of the environment and encode the prompt, once."""
    own = episode_seed(seed, task_index, rollout_index)
    env = env.fork()
    messages = env.reset(task, seed=own)
    prompt = policy.chat.prompt_ids(messages, tools=env.tool_schemas or None)
    trajectory = Trajectory(
        task_id=task.id,
        group_id=f"{task.id}#{seed}.{task_index}",
        segments=[Segment()],
        question=task.question,
        golds=list(task.golds),
        policy=policy.name,
        policy_version=policy.version,
        seed=own,
        info={"kind": task.kind, "hops": task.hops},
    )
    budget = min(len(prompt) + env.max_response_tokens, policy.context_length)
    episode = Episode(task_index, env, trajectory, prompt, budget)
    if len(prompt) >= budget:
        trajectory.info["prompt_tokens"] = len(prompt)  # too long for the model: nothing to train on, but counted
        episode.cut(StopReason.LENGTH)
    else:
        episode.segment.extend(prompt)
    return episode


def record_turns(
    policy: QwenPolicy, played: Sequence[tuple[Episode, EngineTurn]]
) -> list[tuple[list[int], int] | None]:
    """Hand finished turns to their environments, in one batch, and write down what came of them.

    Returns for each the observation's ids and the limit of the next turn, or
    None where the episode is over.
    """
    texts = [_text(policy, turn) for _, turn in played]
    reasons = [turn.finish_reason for _, turn in played]
    environments = [episode.env for episode, _ in played]
    results = type(environments[0]).batch_step(environments, texts, reasons)
    return [_record(policy, episode, turn, r) for (episode, turn), r in zip(played, results, strict=True)]


def _text(policy: QwenPolicy, turn: EngineTurn) -> str:
    """The turn as the environment and the rewards read it, with the words that the prompt began it with."""
    return policy.chat.prefill + policy.chat.decode(turn.ids if turn.ended_by is None else turn.ids[:-1])


def _record(
    policy: QwenPolicy, episode: Episode, played: EngineTurn, result: StepResult
) -> tuple[list[int], int] | None:
    turn, segment = result.info["turn"], episode.segment
    turn.segment, turn.finish_reason = 0, played.finish_reason
    turn.start, turn.end = segment.extend(played.ids, played.logprobs)
    turn.observation_start = turn.observation_end = turn.end
    episode.trajectory.turns.append(turn)
    if result.done:
        info = result.info  # a reply to the last turn stays text: no token would be sampled after it
        episode.close(info["stop_reason"], info["outcome"], info["reward_parts"], info["answer"])
        return None
    room = episode.budget - len(segment) - 1  # the next turn needs a token
    seen = _observe(policy, episode.env, result.observation, played.ended_by, room)
    if seen is None:
        episode.cut(StopReason.LENGTH)
        return None
    start, _ = segment.extend(seen.ids)
    turn.observation_start, turn.observation_end = start + seen.start, start + seen.end
    turn.flags.extend(flag for flag in seen.flags if flag not in turn.flags)
    return seen.ids, episode.turn_limit()


def _observe(
    policy: QwenPolicy, env: ToolEnv, messages: list[dict[str, str]], ended_by: int | None, room: int
) -> Observation | None:
    """The observation's ids, cut to what still fits; None where next to nothing would be left of it."""
    seen = policy.chat.observation_ids(messages, ended_by=ended_by, max_tokens=env.max_tool_tokens)
    excess = len(seen.ids) - room
    if excess > 0:
        left = seen.end - seen.start - excess
        if left < LEAST_OBSERVATION:
            return None
        seen = policy.chat.observation_ids(messages, ended_by=ended_by, max_tokens=left)
    return seen if len(seen.ids) <= room else None


def row_slots(policy: QwenPolicy, env: ToolEnv) -> int | None:
    """Room for a whole row from the start, where memory is not given lazily: a cache that grows is there twice."""
    if policy.device.type == "cpu":
        return None
    return min(policy.context_length, FIRST_SLOTS + env.max_response_tokens)


def rollout(
    policy: QwenPolicy,
    env: ToolEnv,
    tasks: Sequence[Task],
    *,
    group_size: int = 1,
    temperature: float | None = None,
    seed: int = 0,
    greedy: bool | None = None,
    top_p: float | None = None,
    max_batch: int | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
) -> list[Trajectory]:
    """Play ``group_size`` episodes of every task; task-major order.

    A row's tokens depend on (seed, task index, rollout index) and on its own
    logits, not on which rows it is batched with.

    Args:
        temperature: of sampling, 1 if not given; use the same in ``policy.log_probs``.
        greedy: always the likeliest token.
        top_p: nucleus sampling, for evaluation and chat only (see ``Sampling``).
        max_batch: rows decoded at once, 256 if not given; bounds the cache's memory.
        on_trajectory: called with each trajectory as it ends.
        progress: called with (episodes ended, episodes in all).
        engine: another engine, which samples as it was made to; the local one if not given.

    Raises:
        ValueError: a count that is none, or an ``engine`` made for another policy, sampling or environment.
    """
    for name, count in (("group_size", group_size), ("max_batch", max_batch)):
        if count is not None and not is_count(count):
            raise ValueError(f"rollout: {name} is {count!r}; give a whole number of at least 1")
    total = len(tasks) * group_size
    trajectories: list[Trajectory | None] = [None] * total
    rows = max(1, min(total, max_batch or MAX_ROWS))
    asked = {"temperature": temperature, "greedy": greedy, "top_p": top_p}
    asked = {name: value for name, value in asked.items() if value is not None}
    if engine is None:
        options = {"stop_strings": env.stop_strings, "max_rows": rows, "slots": row_slots(policy, env)}
        engine = LocalEngine(policy, sampling=Sampling(**asked), **options)
    else:
        _check_engine(engine, policy, env, asked)
    waiting = _episodes(policy, env, tasks, group_size, seed)
    playing: dict[int, Episode] = {}
    ended = 0

    def finish(episode: Episode) -> None:
        nonlocal ended
        ended += 1
        trajectories[episode.index] = episode.trajectory
        if on_trajectory is not None:
            on_trajectory(episode.trajectory)
        if progress is not None:
            progress(ended, total)

    try:
        while ended < total:
            new: list[Episode] = []
            free = engine.free_rows if max_batch is None else min(engine.free_rows, rows - len(playing))
            if not playing and free < 1:
                raise ValueError("rollout: every row of the engine is open; close those of other rollouts first")
            for episode in itertools.islice(waiting, free):
                finish(episode) if episode.done else new.append(episode)
            opened = engine.open(
                [e.prompt for e in new], [e.trajectory.seed for e in new], [e.turn_limit() for e in new]
            )
            playing.update(zip(opened, new, strict=True))
            turns = engine.next_turns()
            played = [(playing[turn.row], turn) for turn in turns]
            for turn, follow in zip(turns, record_turns(policy, played) if played else [], strict=True):
                if follow is not None:
                    engine.extend(turn.row, *follow)
                    continue
                engine.close(turn.row)
                finish(playing.pop(turn.row))
    finally:  # interrupted, or a tool let something through: the engine may serve again
        for row in playing:
            engine.close(row)
    return [trajectory for trajectory in trajectories if trajectory is not None]


def _check_engine(engine: Engine, policy: QwenPolicy, env: ToolEnv, asked: dict[str, Any]) -> None:
    """Refuse what an engine that is already made would do otherwise than ``rollout`` was asked."""
    sampling = getattr(engine, "sampling", None)
    if asked and (sampling is None or replace(sampling, **asked) != sampling):
        given = ", ".join(f"{name}={value}" for name, value in asked.items())
        how = f"samples by {sampling}" if sampling else "does not say how it samples"
        raise ValueError(f"rollout: {given} was given beside an engine that {how}; make the engine so, or leave it out")
    if getattr(engine, "policy", policy) is not policy:
        raise ValueError("rollout: the engine samples from another policy; make one for the policy that is given")
    stops = getattr(engine, "stop_strings", env.stop_strings)
    if {*stops} - {""} != {*env.stop_strings} - {""}:
        raise ValueError(
            f"rollout: the engine ends turns at {list(stops)}, the environment at {list(env.stop_strings)}; "
            "make the engine with stop_strings=env.stop_strings"
        )


def _episodes(policy: QwenPolicy, env: ToolEnv, tasks: Sequence[Task], group_size: int, seed: int) -> Iterator[Episode]:
    for i, task in enumerate(tasks):
        for j in range(group_size):
            episode = start_episode(policy, env, task, seed=seed, task_index=i, rollout_index=j)
            episode.index = i * group_size + j
            yield episode


def collect_trajectory(env: ToolEnv, policy: QwenPolicy, task: Task | None = None, **options: Any) -> Trajectory:
    """Play one episode; without ``task`` one of the environment's own. ``options`` are those of ``rollout``."""
    if options.get("group_size", 1) != 1:
        raise ValueError("collect_trajectory plays one episode; for a group call rollout(…, group_size=…)")
    if task is None:
        known = env.tasks or ([env.task] if env.task is not None else [])
        if not known:
            raise ValueError(
                "collect_trajectory was given no task and the environment holds none; pass task=… or set env.tasks"
            )
        task = known[options.get("seed", 0) % len(known)]
    return rollout(policy, env, [task], **options)[0]
