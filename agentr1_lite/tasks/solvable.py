"""Two Boxes: an agent MDP so small that every trajectory can be written down.

A ball lies in the left or the right box. A turn of the agent is two tokens: ``call peek``, ``call open``, ``answer
left`` or ``answer right``. ``peek`` is cheap and may be wrong (how often depends on the question), ``open`` tells the
truth, costs more and sometimes fails; the reply is two observation tokens. An answer ends the episode and earns 1 if
it is right; the call of the last turn runs, but nobody reads its reply.

The policy conditions on the tokens so far, as a language model does; where the ball lies is the environment's secret,
so ``P_E`` is what the tokens so far make of it (Bayes). The policy is a table θ (S, 2) of logits: two tokens are
legal in each of the S states in which the policy acts. All K trajectories of all questions are enumerated once, so
J(θ), ∇J(θ), V and the optimum are exact, and a rollout is one draw among the K (`solvable_gradients`). All of it is
float64 on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, TurnKind

WORDS = ("easy?", "hard?", "call", "answer", "peek", "open", "reply", "left", "right", "error")
EASY, HARD, CALL, ANSWER, PEEK, OPEN, REPLY, LEFT, RIGHT, ERROR = range(len(WORDS))


class Edge(NamedTuple):
    """One way on from a state: what the policy chose, what the world made of it.

    ``following`` is the next state's number, −1 behind the end; ``reply`` the observation's second token or −1;
    ``probability`` is P(s' | s, a), 1 on a generative transition.
    """

    state: int
    choice: int
    following: int
    probability: float = 1.0
    reward: float = 0.0
    reply: int = -1


class Rows(NamedTuple):
    """Trajectories as they lie in a batch, (B, T) each; ``state`` and ``choice`` are −1 off the action mask."""

    tokens: Tensor
    action_mask: Tensor
    rewards: Tensor
    turn_ids: Tensor
    anchor_ids: Tensor
    state: Tensor
    choice: Tensor

    def select(self, index: Tensor) -> Rows:
        return Rows(*(x[index] for x in self))


@dataclass(frozen=True)
class Boxes:
    """The world; its tables are made on first use.

    Args:
        accuracy: how often ``peek`` is right, a number for each question (two at most).
        failing: share of ``open`` calls that return ``error``.
        peek_cost, open_cost: process rewards −cost of a turn that calls.
        max_turns: turns of an episode.
        bonus: process reward of every call whose reply is not ``error`` (a bad shaping, on purpose).
        potential: weight of the shaping γΦ(s') − Φ(s) over turns with γ = 1, Φ the probability of the likelier box,
            0 behind the end.
    """

    accuracy: tuple[float, ...] = (0.9, 0.65)
    failing: float = 0.3
    peek_cost: float = 0.02
    open_cost: float = 0.1
    max_turns: int = 3
    bonus: float = 0.0
    potential: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.accuracy) <= 2 or not all(0 <= p <= 1 for p in (*self.accuracy, self.failing)):
            raise ValueError(
                f"Boxes: accuracy={self.accuracy} and failing={self.failing} are probabilities, one accuracy for each "
                "of at most two questions"
            )
        if not 1 <= self.max_turns <= 4:
            raise ValueError(f"Boxes: max_turns is {self.max_turns}; give 1 to 4, trajectories grow fivefold a turn")

    def replies(self, tool: int, question: int) -> dict[int, tuple[float, float]]:
        """P(reply | the ball is left), P(reply | it is right) for each reply of a tool."""
        if tool == PEEK:
            p = self.accuracy[question]
            return {LEFT: (p, 1 - p), RIGHT: (1 - p, p)}
        works = 1 - self.failing
        return {LEFT: (works, 0.0), RIGHT: (0.0, works), ERROR: (self.failing, self.failing)}

    @cached_property
    def states(self) -> list[tuple[int, ...]]:
        """The tokens before each decision; a turn's second token has its own state."""
        return self._tables[0]

    @cached_property
    def ways(self) -> list[list[Edge]]:
        """The edges that leave each state."""
        return self._tables[1]

    @cached_property
    def legal(self) -> Tensor:
        """(S, 2): the two tokens the policy chooses from."""
        second = {CALL: (PEEK, OPEN), ANSWER: (LEFT, RIGHT)}
        return torch.tensor([second.get(history[-1], (CALL, ANSWER)) for history in self.states])

    @cached_property
    def _tables(self) -> tuple[list[tuple[int, ...]], list[list[Edge]]]:
        states: list[tuple[int, ...]] = []
        ways: list[list[Edge]] = []

        def grow(history: tuple[int, ...], weight: tuple[float, float], question: int, turn: int) -> int:
            """Number the state at a turn's start and all behind it; ``weight`` is P(replies so far, ball) per box."""
            start = len(states)
            call, answer = start + 1, start + 2
            states.extend([history, (*history, CALL), (*history, ANSWER)])
            ways.extend([[Edge(start, 0, call), Edge(start, 1, answer)], [], []])
            left = weight[0] / sum(weight)
            known = max(left, 1 - left)
            for choice, belief in enumerate((left, 1 - left)):
                for right, p in ((1.0, belief), (0.0, 1 - belief)):
                    if p:
                        ways[answer].append(Edge(answer, choice, -1, p, right - self.potential * known))
            last = turn + 1 == self.max_turns
            for choice, (tool, cost) in enumerate(((PEEK, self.peek_cost), (OPEN, self.open_cost))):
                for reply, (if_left, if_right) in self.replies(tool, question).items():
                    after = weight[0] * if_left, weight[1] * if_right
                    if not sum(after):
                        continue
                    reward = (self.bonus if reply != ERROR else 0.0) - cost
                    reward += self.potential * ((0.0 if last else max(after) / sum(after)) - known)
                    words = (*history, CALL, tool, REPLY, reply)
                    following = -1 if last else grow(words, after, question, turn + 1)
                    ways[call].append(Edge(call, choice, following, sum(after) / sum(weight), reward, reply))
            return start

        for question in range(len(self.accuracy)):
            grow((EASY + question,), (0.5, 0.5), question, 0)
        return states, ways

    @cached_property
    def roots(self) -> Tensor:
        """(Q,): the state in which each question starts."""
        return torch.tensor([i for i, history in enumerate(self.states) if len(history) == 1])

    @cached_property
    def paths(self) -> list[list[Edge]]:
        """The K trajectories, each as its edges, question by question."""

        def follow(state: int) -> list[list[Edge]]:
            if state < 0:
                return [[]]
            return [[edge, *rest] for edge in self.ways[state] for rest in follow(edge.following)]

        return [path for root in self.roots.tolist() for path in follow(root)]

    @cached_property
    def chance(self) -> Tensor:
        """(K,): Π P_E, the environment's share of a trajectory's probability."""
        return torch.tensor([math.prod(e.probability for e in path) for path in self.paths], dtype=torch.float64)

    @cached_property
    def rows(self) -> Rows:
        """The K trajectories as (K, T) tensors."""
        shape = (len(self.paths), 4 * self.max_turns - 1)
        rewards, mask = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
        rows = Rows(*(torch.full(shape, -1) for _ in Rows._fields))._replace(action_mask=mask, rewards=rewards)
        for k, path in enumerate(self.paths):
            for edge in path:
                t = len(self.states[edge.state])
                rows.tokens[k, :t] = torch.tensor(self.states[edge.state])
                rows.tokens[k, t] = self.legal[edge.state, edge.choice]
                rows.action_mask[k, t] = True
                rows.rewards[k, t] = edge.reward
                rows.turn_ids[k, t] = turn = (t - 1) // 4
                rows.anchor_ids[k, t] = rows.tokens[k, 4 * turn]  # the last thing seen: the question or a reply
                rows.state[k, t], rows.choice[k, t] = edge.state, edge.choice
        return rows

    def trajectory(self, k: int, logits: Tensor, group_id: str = "") -> Trajectory:
        """Trajectory k as an object, its log-probs those of the policy; replies are observations."""
        path, log_policy = self.paths[k], logits.detach().log_softmax(-1)
        prompt = self.states[path[0].state]
        question, segment = WORDS[prompt[0]], Segment()
        segment.extend(prompt)
        out = Trajectory(question, group_id or question, [segment], question=question)
        for first, second in zip(path[::2], path[1::2], strict=True):
            ids = [int(self.legal[edge.state, edge.choice]) for edge in (first, second)]
            start, end = segment.extend(ids, [float(log_policy[edge.state, edge.choice]) for edge in (first, second)])
            words = [WORDS[i] for i in ids]
            turn = Turn(0, start, end, text=" ".join(words), anchor=WORDS[self.states[first.state][-1]])
            turn.observation_start = turn.observation_end = end
            out.turns.append(turn)
            if ids[0] == ANSWER:
                turn.kind, out.stop_reason = TurnKind.ANSWER, StopReason.ANSWER
                out.answer, out.reward = words[1], second.reward
                continue
            turn.kind, out.stop_reason = TurnKind.TOOL_CALL, StopReason.MAX_TURNS
            turn.observation, turn.process_reward = WORDS[second.reply], second.reward
            turn.calls = [{"name": words[1], "arguments": {}}]
            turn.results = [{"content": turn.observation, "success": second.reply != ERROR}]
            if second.following >= 0:
                turn.observation_start, turn.observation_end = segment.extend((REPLY, second.reply))
        out.info["pieces"] = [[f"{WORDS[i]} " for i in segment.token_ids]]
        return out


def imitation(world: Boxes, strength: float = 1.0) -> Tensor:
    """Logits (S, 2) as after imitating: call, either tool alike, until one names a box, then answer what it said."""
    logits = torch.zeros(len(world.states), 2, dtype=torch.float64)
    for number, history in enumerate(world.states):
        named = [word for word in history if word in (LEFT, RIGHT)]
        if history[-1] not in (CALL, ANSWER):
            logits[number, 1 if named else 0] = strength
        elif history[-1] == ANSWER and named:
            logits[number, named[-1] - LEFT] = strength
    return logits


# Exact


def solve(world: Boxes, logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """V (S,) and Q (S, 2) by backward induction: of the policy, or of the best one where ``logits`` is None.

    Q(s, a) = Σ_{s'} P(s' | s, a) (r + V(s')),  V(s) = Σ_a π(a | s) Q(s, a) or max_a Q(s, a);  γ = 1.
    """
    policy = None if logits is None else logits.detach().softmax(-1)
    q = torch.zeros(len(world.states), 2, dtype=torch.float64)
    v = torch.zeros(len(world.states) + 1, dtype=torch.float64)  # the last is V behind the end, index −1
    for state in reversed(range(len(world.states))):  # what follows a state has a larger number
        for edge in world.ways[state]:
            q[state, edge.choice] += edge.probability * (edge.reward + v[edge.following])
        v[state] = q[state].max() if policy is None else policy[state] @ q[state]
    return v[:-1], q


def probabilities(world: Boxes, logits: Tensor) -> Tensor:
    """(K,): P(τ | its question) = Π π · Π P_E; differentiable."""
    rows = world.rows
    spoken = logits.log_softmax(-1)[rows.state, rows.choice]  # −1 picks some number, which the mask drops
    return torch.where(rows.action_mask, spoken, 0.0).sum(-1).exp() * world.chance


def objective(world: Boxes, logits: Tensor) -> Tensor:
    """J(θ) = mean over the questions of Σ_τ P(τ) R(τ), by enumeration; differentiable."""
    return probabilities(world, logits) @ world.rows.rewards.sum(-1) / len(world.roots)


def exact_gradient(world: Boxes, logits: Tensor) -> Tensor:
    """∇J(θ), (S, 2)."""
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(objective(world, logits), logits)[0]
