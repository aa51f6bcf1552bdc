"""ToolEnv: reads the policy's text, runs its calls, answers, and pays.

It is the environmental transition ``P_E(s' | s, a)`` and the reward of the
extended MDP (Agent-R1, arXiv 2511.14460 v1, section 2): the policy's turn goes
in as text, the observation comes out as messages. How a turn is read:

1. a final answer ends the episode, also beside calls, which are not run (flag
   ``answer_and_call``);
2. a call cut by the length limit ends the episode and nothing of the turn is
   run; so does a cut turn without any call;
3. a turn without answer and call ends the episode (``no_call``);
4. every call gets one reply, in order: its result, or the sentence that says
   what is wrong with it. A faulty call never ends the episode by itself;
5. what a turn holds beside its calls and was not read stands in a note before
   the first reply (flag ``left_out``).

With ``parallel_calls=False`` the first call of a turn runs and each further one
gets an error as its reply.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from agentr1_lite.forks import twin_of
from agentr1_lite.mdp import StopReason, Task, Turn, TurnKind
from agentr1_lite.rewards import Episode, Rewards, numbers, part_value
from agentr1_lite.scoring import score_answer
from agentr1_lite.toolcalls import CUT_REASONS, ToolCall, ToolCallError, get_format, read_turn
from agentr1_lite.tools import FunctionTool, Tool, ToolResult, as_result, clean_text, run_calls

FINAL_TOOL = "final_answer"
Message = dict[str, Any]


class StepResult(NamedTuple):
    """``info``: ``turn``, ``stop_reason``, ``answer``, and once done ``outcome`` and ``reward_parts``.

    ``reward`` is the turn's process reward; when done, plus the outcome and what shaping or normalisation then changed
    in earlier turns: an episode's rewards add up to ``ToolEnv.total_reward`` and ``Trajectory.total_reward``.
    """

    observation: list[Message]
    reward: float
    done: bool
    info: dict[str, Any]


class _Plan(NamedTuple):
    """A turn that was read but not played: each reply is an error, or None where a job will give it."""

    turn: Turn
    stop: StopReason | None
    answer: str | None
    replies: list[ToolResult | None]
    jobs: list[tuple[Tool, dict[str, Any]]]
    note: str = ""


_OF_ALL_EPISODES = ("tools", "format", "rewards", "tasks", "task", "episode", "_text_parameters")


class ToolEnv:
    """One episode at a time of one policy with tools; ``fork`` gives one env an episode.

    A subclass names in ``shared`` the attributes that all its episodes hold in common.

    Args:
        tools: what the policy may call.
        rewards: named parts and weights (``rewards.py``); None means ``{"em": 1.0}``.
        call_format: "hermes" or "tag" (``toolcalls.py``).
        system_prompt: None writes one from the call format, "" leaves it out.
        benchmark: whose scorer compares answers.
        max_turns: turns of the policy; the call of the last one still runs.
        max_turn_tokens, max_response_tokens, max_tool_tokens: limits in tokens, which the engine keeps.
        tool_timeout: seconds a call may take where its tool does not say.
        parallel_calls: several calls in one turn all run.
        max_tool_errors: failed calls in an episode that end it; None means no limit.
        final_answer: "tag" (``<answer>…</answer>``) or "tool" (a call of ``final_answer``).
        lenient: repair calls as ``toolcalls.py`` says, else only well-formed ones run.
        normalize_process: divide an episode's process rewards by max |Σ_{i≥t} r_i| at its end.
    """

    shared: tuple[str, ...] = ()

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        rewards: Mapping[str, Any] | None = None,
        call_format: str = "hermes",
        system_prompt: str | None = None,
        benchmark: str = "hotpotqa",
        max_turns: int = 5,
        max_turn_tokens: int = 1024,
        max_response_tokens: int = 8192,
        max_tool_tokens: int = 2048,
        tool_timeout: float = 10.0,
        parallel_calls: bool = True,
        max_tool_errors: int | None = None,
        final_answer: str = "tag",
        lenient: bool = True,
        normalize_process: bool = False,
    ):
        if final_answer not in ("tag", "tool"):
            raise ValueError(f"ToolEnv: final_answer={final_answer!r} is unknown; choose 'tag' or 'tool'")
        limits = {
            "max_turns": max_turns,
            "max_turn_tokens": max_turn_tokens,
            "max_response_tokens": max_response_tokens,
            "max_tool_tokens": max_tool_tokens,
            "tool_timeout": tool_timeout,
            "max_tool_errors": 1 if max_tool_errors is None else max_tool_errors,
        }
        for name, value in limits.items():
            if value <= 0:
                raise ValueError(f"ToolEnv: {name}={value!r} must be above 0")
        score_answer("", (), benchmark)  # an unknown benchmark is told here, not after the first rollout
        self.format, self.rewards = (
            get_format(call_format),
            Rewards({"em": 1.0} if rewards is None else rewards, normalize_process),
        )
        self.call_format, self.benchmark, self.final_answer = call_format, benchmark, final_answer
        self.max_turns, self.max_tool_errors = max_turns, max_tool_errors
        self.max_turn_tokens, self.max_response_tokens = max_turn_tokens, max_response_tokens
        self.max_tool_tokens, self.tool_timeout = max_tool_tokens, tool_timeout
        self.parallel_calls, self.lenient = parallel_calls, lenient
        self.tools = [*tools, *([_final_tool()] if final_answer == "tool" else [])]
        names = [tool.name for tool in self.tools]
        for name in names:
            if not name or names.count(name) > 1:
                raise ValueError(f"ToolEnv: tool name {name!r} is empty or taken; names must be unique")
        self.system_prompt = self.default_prompt() if system_prompt is None else system_prompt
        self._text_parameters = {tool.name: tool.text_parameter for tool in self.tools}
        self.episode: Episode | None = None
        self.task: Task | None = None
        self.tasks: Sequence[Task] = ()  # what a trainer draws from where it is given only the env

    # what a subclass may override

    def default_prompt(self) -> str:
        """The system prompt that is used where none is given."""
        parts = ["Answer the question. Think first, in <think>...</think>."]
        if self.tools:
            parts.append(self.format.instruction(self.tools))
        if self.final_answer == "tag":
            parts.append("Give the final answer in <answer>...</answer>.")
        return "\n".join(parts)

    def prompt(self, task: Task) -> list[Message]:
        """The messages an episode starts with."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": task.question}]

    def success(self) -> float:
        """The part ``task_success``: the last ``info["score"]`` of a tool, else EM of the answer."""
        scores = numbers(self.episode.results(), "score")
        return scores[-1] if scores else score_answer(self.episode.answer, self.task.golds, self.benchmark)["em"]

    def process_reward(self, turn: Turn) -> float:
        """A process reward beside the named parts; the turn is the episode's last."""
        return 0.0

    def anchor_text(self) -> str:
        """What identifies the state before the coming turn: the last observation, at first the question."""
        turns = self.episode.turns
        return turns[-1].observation if turns else self.episode.task.question

    # the episode

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """For the chat template's ``tools``; empty where the format describes them in the system prompt."""
        return [tool.schema() for tool in self.tools] if self.format.in_template else []

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Sampling stops after one of these; engines keep it in the turn's text."""
        answer = ("</answer>",) if self.final_answer == "tag" else ()
        return (*answer, *self.format.stop_strings(self._text_parameters, self.parallel_calls))

    def tool(self, name: str) -> Tool | None:
        """The tool of that name; after ``fork`` this episode's own copy."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def fork(self) -> ToolEnv:
        """An independent env for one episode: what a subclass holds is copied as ``forks.py`` says."""
        tools = [tool.fork() for tool in self.tools]
        memo = {id(tool): own for tool, own in zip(self.tools, tools, strict=True)}
        twin = twin_of(self, ToolEnv, (*_OF_ALL_EPISODES, *self.shared), memo)
        twin.tools, twin.episode, twin.task = tools, None, None
        return twin

    def reset(self, task: Task, seed: int = 0) -> list[Message]:
        """Start an episode and return its first messages; the same seed gives the same world."""
        self.task, self.episode = task, Episode(task, self.benchmark)
        self.rng = random.Random(f"{seed}:{task.id}")
        self.errors, self.done, self.outcome, self.reward_parts = 0, False, 0.0, {}
        for tool in self.tools:
            if tool.stateful:
                tool.reset(task, random.Random(f"{seed}:{task.id}:{tool.name}"))
        return self.prompt(task)

    def step(self, text: str, finish_reason: str = "stop") -> StepResult:
        """Play one turn of the policy."""
        return ToolEnv.batch_step([self], [text], [finish_reason])[0]

    @staticmethod
    def batch_step(
        envs: Sequence[ToolEnv], texts: Sequence[str], finish_reasons: Sequence[str] | None = None
    ) -> list[StepResult]:
        """One turn of many episodes; all their calls run concurrently."""
        reasons = ["stop"] * len(envs) if finish_reasons is None else finish_reasons
        plans = [env._read(text, reason) for env, text, reason in zip(envs, texts, reasons, strict=True)]
        jobs = [job for plan in plans for job in plan.jobs]
        limits = [env.tool_timeout for env, plan in zip(envs, plans, strict=True) for _ in plan.jobs]
        results = iter(run_calls(jobs, limits))
        return [env._play(plan, [next(results) for _ in plan.jobs]) for env, plan in zip(envs, plans, strict=True)]

    def finish(self, stop_reason: StopReason) -> tuple[float, dict[str, float]]:
        """Close the episode if it is open; return its outcome reward and the unweighted parts."""
        if self.episode is None:
            raise RuntimeError("ToolEnv: finish() came before reset(task)")
        if not self.done:
            self.done, self.episode.stop_reason = True, StopReason(stop_reason)
            self.episode.success = part_value(self.episode, "task_success", self.success)
            before = dict(self.reward_parts)
            self.outcome, parts = self.rewards.outcome(self.episode)
            self.reward_parts = {**before, **parts}
            self._flag_faults()
        return self.outcome, self.reward_parts

    @property
    def total_reward(self) -> float:
        """Outcome plus process rewards of the episode so far: its undiscounted return."""
        return self.outcome + sum(turn.process_reward for turn in self.episode.turns)

    def _flag_faults(self) -> None:
        if self.episode.faults and self.episode.turns and "reward_fault" not in self.episode.turns[-1].flags:
            self.episode.turns[-1].flags.append("reward_fault")

    def _read(self, text: str, finish_reason: str) -> _Plan:
        if self.episode is None or self.done:
            state = (
                "came before reset(task)" if self.episode is None else "came after the episode's end; call reset(task)"
            )
            raise RuntimeError(f"ToolEnv: step() {state}")
        text = clean_text(text)
        said = read_turn(text, self.call_format, finish_reason, self.lenient, self._text_parameters)
        checked = [self._check(call) for call in said.calls]
        if not self.parallel_calls:
            checked[1:] = [_refusal("not_run", "Error: one call a turn; this one was not run.")] * len(checked[1:])
        answer = said.answer if self.final_answer == "tag" else _final_answer(checked)
        stop, kind = None, TurnKind.TOOL_CALL
        if answer is not None:
            stop, kind = StopReason.ANSWER, TurnKind.ANSWER
        elif any(isinstance(c, ToolCallError) and c.reason == "truncated" for c in said.calls):
            stop, kind = StopReason.LENGTH, TurnKind.INVALID
        elif not said.calls:
            stop = StopReason.LENGTH if finish_reason in CUT_REASONS else StopReason.NO_CALL
            kind = TurnKind.TEXT
        elif not any(isinstance(item, tuple) for item in checked):
            kind = TurnKind.INVALID
        flags = [*said.flags, *(call.reason for call in said.calls if isinstance(call, ToolCallError))]
        if stop is StopReason.ANSWER and len(said.calls) > (self.final_answer == "tool"):
            flags.append("answer_and_call")
        turn = Turn(0, 0, 0, kind, text, [call.to_dict() for call in said.calls], finish_reason=finish_reason)
        turn.flags, turn.anchor = list(dict.fromkeys(flags)), anchor_of(self.anchor_text())
        if stop is not None:
            return _Plan(turn, stop, answer, [], [])
        replies = [None if isinstance(item, tuple) else item for item in checked]
        note = f"Note: left out of your turn: {'; '.join(said.left_out)}. Write each call in tags of its own."
        jobs = [item for item in checked if isinstance(item, tuple)]
        return _Plan(turn, None, None, replies, jobs, " ".join(note.split()) if said.left_out else "")

    def _check(self, call: ToolCall | ToolCallError) -> tuple[Tool, dict[str, Any]] | ToolResult:
        """A call as a job, or the reply that says what is wrong with it."""
        if isinstance(call, ToolCallError):
            return _refusal(call.reason, call.message)
        tool = self.tool(call.name)
        if tool is None:
            known = ", ".join(self._text_parameters) or "none"
            return _refusal(
                "unknown_tool", f"Error: there is no tool named {call.name[:60]!r}; the tools are: {known}."
            )
        try:
            arguments, error = tool.validate_args(call.arguments)
        except Exception as fault:  # a tool's own check
            arguments, error = {}, f"Error: {tool.name} could not check its arguments ({type(fault).__name__})."
        return (tool, arguments) if error is None else _refusal("invalid_arguments", error)

    def _play(self, plan: _Plan, results: list[ToolResult]) -> StepResult:
        """Close the turn with its replies and decide whether the episode goes on."""
        turn, episode, arrived = plan.turn, self.episode, iter(results)
        replies = [next(arrived) if reply is None else reply for reply in plan.replies]
        if plan.note:  # first, where no cut reaches it
            replies[0] = replace(replies[0], content=f"{plan.note}\n{replies[0].content}")
        turn.results = [reply.to_dict() for reply in replies]
        turn.observation = "\n".join(reply.content for reply in replies)
        turn.flags += [flag for flag in dict.fromkeys(f for r in replies for f in r.flags) if flag not in turn.flags]
        episode.turns.append(turn)
        episode.answer = plan.answer
        self.errors += sum(not reply.success for reply in replies)
        reward, parts = self.rewards.process(episode, turn)
        turn.process_reward = reward + part_value(episode, "process_reward", self.process_reward, turn)
        for name, value in parts.items():
            self.reward_parts[name] = self.reward_parts.get(name, 0.0) + value
        stop = plan.stop
        if stop is None and any(reply.info.get("done") is True for reply in replies):
            stop = StopReason.ENVIRONMENT
        if stop is None and self.max_tool_errors is not None and self.errors >= self.max_tool_errors:
            stop = StopReason.TOOL_ERROR_LIMIT
        if stop is None and len(episode.turns) >= self.max_turns:
            stop = StopReason.MAX_TURNS
        info: dict[str, Any] = {"turn": turn, "stop_reason": stop, "answer": plan.answer, "reward_parts": {}}
        paid = [t.process_reward for t in episode.turns]
        reward = paid[-1]
        if stop is not None:
            info["outcome"], info["reward_parts"] = self.finish(stop)
            late = sum(t.process_reward - p for t, p in zip(episode.turns, paid, strict=True))
            reward = reward + info["outcome"] + late
        elif episode.faults:
            self._flag_faults()
        messages = [{"role": "tool", "content": reply.content} for reply in replies]
        return StepResult(messages, reward, stop is not None, info)


def anchor_of(text: str) -> str:
    """A short hash that is the same in every process and run (unlike ``hash``)."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _refusal(flag: str, message: str) -> ToolResult:
    """An error as an observation, on one line whatever the policy wrote into it."""
    return as_result(ToolResult(" ".join(message.split()), False, flags=(flag,)))


def _final_tool() -> FunctionTool:
    text = {"type": "string", "description": "the answer, as short as possible"}
    schema = {"type": "object", "properties": {"answer": text}, "required": ["answer"], "additionalProperties": False}
    return FunctionTool(lambda answer: answer, FINAL_TOOL, "Give the final answer and end.", schema)


def _final_answer(checked: Sequence[Any]) -> str | None:
    """The answer of the last valid ``final_answer`` call of a turn."""
    found = [item[1]["answer"] for item in checked if isinstance(item, tuple) and item[0].name == FINAL_TOOL]
    return found[-1] if found else None
