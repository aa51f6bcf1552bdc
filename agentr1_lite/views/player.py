"""Play an episode action by action: pick the policy's next token, or type, and see what each action does.

`StepPlayer` is the state machine: it knows no screen. It shows itself in a notebook (with buttons where widgets
work) and in a terminal (``python -m agentr1_lite play --by token``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

from agentr1_lite import escape
from agentr1_lite.engine import EngineTurn, LocalEngine
from agentr1_lite.env import ToolEnv
from agentr1_lite.mdp import Action, State, Task, Trajectory, environmental_transition, generative_transition
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.rollout import record_turns, start_episode
from agentr1_lite.sampling import Sampling
from agentr1_lite.views.theme import Html, part, show, signed, templates
from agentr1_lite.views.trajectory import Token

HELP = (
    "a number picks that token, go lets the policy finish its turn, other text is typed, undo takes one of these back, "
    "undo 3 three, ? shows this line, quit leaves"
)


class Choice(NamedTuple):
    """A next token and π(token | state)."""

    token: int
    text: str
    probability: float


@dataclass(frozen=True)
class Step:
    """One action and what came of it; ``environmental`` is True where it completed a turn.

    ``reward`` is that of the transition: 0 on a generative one, the process reward of a turn, with the outcome
    at the end. ``probability`` is π(token | state), also of a token the policy did not choose.
    """

    token: int
    text: str
    probability: float
    environmental: bool = False
    observation: str = ""
    reward: float = 0.0
    done: bool = False


class StepPlayer:
    """One episode of ``task`` in ``env``, one token at a time; ``seed`` is the world's and the samples'.

    Attributes:
        state: ``s_t`` of the extended MDP.
        steps: what happened so far.
        trajectory: the record, as a rollout writes it; a turn enters it when it is complete.
    """

    def __init__(self, policy: QwenPolicy, env: ToolEnv, task: Task, seed: int = 0, temperature: float = 1.0) -> None:
        self.policy, self.env, self.task, self.seed = policy, env, task, seed
        self._engine = LocalEngine(policy, sampling=Sampling(temperature), stop_strings=env.stop_strings, max_rows=1)
        self._marks: list[int] = []  # how many steps there were before each action that undo takes back
        self._begin()

    def _begin(self) -> None:
        self._episode = start_episode(self.policy, self.env, self.task, seed=self.seed)
        tools = tuple(tool.name for tool in self._episode.env.tools)
        self.state = State(self.task, tuple(self._episode.prompt), tools=tools)
        self.steps: list[Step] = []
        self._row = None
        if not self.done:
            limits = [self._episode.turn_limit()]
            (self._row,) = self._engine.open([self._episode.prompt], [self.trajectory.seed], limits)

    @property
    def trajectory(self) -> Trajectory:
        return self._episode.trajectory

    @property
    def done(self) -> bool:
        return self._episode.done

    def choices(self, k: int = 5) -> list[Choice]:
        """The policy's k likeliest next tokens; none after the end."""
        if self.done:
            return []
        found = self._engine.top_choices(self._row, max(0, k))
        return [Choice(token, self.policy.chat.decode([token]), share) for token, share in found]

    def choose(self, token: int) -> Step:
        """Take this token as the action ``a_t``, whatever the policy thinks of it."""
        known = self.policy.head.known
        if not hasattr(token, "__index__") or not 0 <= int(token) < len(known) or not known[int(token)]:
            raise ValueError(f"token {token!r:.60} is not in the vocabulary of {len(self.policy.tokenizer)} tokens")
        return self._take([int(token)])[0]

    def sample(self) -> Step:
        """Let the policy draw the next token."""
        return self._take([None])[0]

    def finish_turn(self) -> list[Step]:
        """Let the policy draw until its turn is complete."""
        return self._take(repeat(None))

    def type_text(self, text: str, end: bool | None = None) -> list[Step]:
        """Take the tokens of ``text`` as actions, up to where a turn completes.

        ``end`` adds the end of turn; None adds it where the text ends in a call's or an answer's closing tag.
        """
        end = text.rstrip().endswith(self._closings()) if end is None else end
        ids = self.policy.chat.turn_ids(text)
        if not end and self.policy.chat.turn_end_id is not None:
            ids = ids[:-1]
        return self._take(ids)

    def _closings(self) -> tuple[str, ...]:
        tools = {tool.name: tool.text_parameter for tool in self.env.tools}
        return tuple(tag.replace("<", "</", 1) for tag in ("<answer>", *self.env.format.open_tags(tools)))

    def undo(self, count: int | None = None) -> None:
        """Take back what was done last (a chosen token, a typed text, a finished turn), or ``count`` tokens.

        The episode is played again up to there, with the same seed.
        """
        end = len(self.steps)
        end = max(0, end - count) if count is not None else max((m for m in self._marks if m < end), default=0)
        kept, marks = self.steps[:end], [mark for mark in self._marks if mark < end]
        if self._row is not None:
            self._engine.close(self._row)
        self._begin()
        for step in kept:
            self._take([step.token])
        self._marks = marks

    def _take(self, tokens: Iterable[int | None]) -> list[Step]:
        """Take actions up to where a turn completes; where there is None, the policy draws."""
        if self.done:
            reason = self.trajectory.stop_reason.value
            raise ValueError(f"the episode is over ({reason}); take back an action with undo() or make a new player")
        self._marks.append(len(self.steps))
        taken: list[Step] = []
        for token in tokens:
            if token is not None:
                self._engine.force(self._row, token)
            taken.append(self._advance())
            if taken[-1].environmental:
                break
        return taken

    def _advance(self) -> Step:
        before = dict(self._engine.top_choices(self._row, self.policy.head.vocabulary))
        turns = self._engine.step()
        action = Action(self._engine.tokens(self._row)[-1], completes_turn=bool(turns))
        self.state = generative_transition(self.state, action)
        step = Step(action.token, self.policy.chat.decode([action.token]), before[action.token])
        self.steps.append(self._answered(turns[0], step) if turns else step)
        return self.steps[-1]

    def _answered(self, turn: EngineTurn, step: Step) -> Step:
        """The step with the environment's answer to the turn that it completed."""
        follow = record_turns(self.policy, [(self._episode, turn)])[0]
        record = self.trajectory.turns[-1]
        feedback, reward = (follow[0] if follow else []), record.process_reward
        self.state = environmental_transition(self.state, feedback)
        if follow is None:
            self._engine.close(self._row)
            paid = sum(s.reward for s in self.steps) + reward  # shaping pays earlier turns at the end
            late = sum(turn.process_reward for turn in self.trajectory.turns) - paid
            self._row, reward = None, reward + self.trajectory.reward + late
        else:
            self._engine.extend(self._row, *follow)
        return replace(step, environmental=True, observation=record.observation, reward=reward, done=self.done)

    # Showing it

    def html(self, k: int = 5) -> Html:
        """The episode so far, the last transition, and the choices ahead."""
        rows = []
        for spoken, feedback in (*self.state.turns, (self.state.partial, ())):
            rows += [("agent", "agent", self._tokens("sa", spoken))] if spoken else []
            rows += [("reply", "world", self._tokens("so", feedback))] if feedback else []
        choices = [(visible(choice.text), choice.probability) for choice in self.choices(k)]
        return show(part(templates().player(self, rows, choices), label="an episode played step by step"))

    def _tokens(self, color: str, ids: Iterable[int]) -> list[Token]:
        return [Token(f"t {color}", self.policy.chat.decode([i])) for i in ids]

    def _repr_html_(self) -> str:
        return self.html().html

    def _ipython_display_(self) -> None:
        from IPython.display import display

        from agentr1_lite.views.controls import bundle, widgets_work

        page = show('<p class="note">Run the cell to play with buttons.</p>')
        below = bundle(self, page, self._buttons() if widgets_work() else None)
        self._handle = display(self.html(), display_id=True)
        display(below, raw=True)

    def _buttons(self, k: int = 5) -> Any:
        import ipywidgets as w

        picks = [w.Button(layout={"width": "auto", "min_width": "90px"}) for _ in range(k)]
        typed = w.Text(placeholder="or type text and press Enter", continuous_update=False)
        ahead = w.Button(description="Policy finishes its turn", layout={"width": "auto"})
        back = w.Button(description="Undo")

        def refresh() -> None:
            offered = self.choices(k)
            for n, button in enumerate(picks):
                button.disabled = n >= len(offered)
                button.description = "–" if button.disabled else f"{n + 1} · {visible(offered[n].text)}"
            ahead.disabled = typed.disabled = self.done
            back.disabled = not self.steps
            if hasattr(self, "_handle"):
                self._handle.update(self.html(k))

        def act(move: Callable[..., Any], *given: Any) -> None:
            move(*given)
            refresh()

        def send(change: dict[str, Any]) -> None:
            if change["new"]:
                typed.value = ""
                act(self.type_text, change["new"])

        for n, button in enumerate(picks):
            button.on_click(lambda _, n=n: act(self.choose, self.choices(k)[n].token))
        ahead.on_click(lambda _: act(self.finish_turn))
        back.on_click(lambda _: act(self.undo))
        typed.observe(send, names="value")
        refresh()
        return w.VBox([w.HBox(picks, layout={"flex_flow": "row wrap"}), w.HBox([typed, ahead, back])])

    def __repr__(self) -> str:
        state = f"over ({self.trajectory.stop_reason.value})" if self.done else "open"
        return f"<StepPlayer of {self.task.id!r}: {len(self.steps)} actions, {state}>"


def visible(text: str) -> str:
    """A token's text with spaces and line ends to be seen."""
    return escape.visible(text).replace(" ", "·").replace("\n", "↵")


def play_lines(player: StepPlayer, lines: Iterable[str], say: Callable[[str], None], k: int = 5) -> None:
    """Play in a terminal: each line is a number of a choice, ``go``, ``undo``, ``undo 3``, ``?`` or text to type."""
    tell, say = say, lambda text: tell(escape.visible(text))
    say(HELP)
    say(_offer(player, k))
    for line in lines:
        offered, before = player.choices(k), len(player.steps)
        word, _, count = line.lower().partition(" ")
        if line == "?":
            say(HELP)
        elif word == "undo" and (not count or count.strip().isdecimal()):
            for _ in range(min(int(count or 1), before)):
                player.undo()
        elif line.lower() == "go":
            player.finish_turn()
        elif line.isdecimal() and 1 <= int(line) <= len(offered):
            player.choose(offered[int(line) - 1].token)
        elif line.removeprefix("-").isdecimal():
            say(f"{line} is no choice; the numbers go from 1 to {len(offered)}")
        else:
            player.type_text(line.replace("\\n", "\n"))
        for step in player.steps[before:]:
            if step.environmental:
                say(f"agent> {player.trajectory.turns[-1].text}")
                say(f"world> {step.observation}" if step.observation else "world> (ends the episode)")
                say(f"[P_E, reward {signed(step.reward)}]")
        if player.done:
            end = player.trajectory
            say(f"[{end.stop_reason.value}] answer: {end.answer}; right: {' or '.join(player.task.golds)}")
            return
        say(_offer(player, k))


def _offer(player: StepPlayer, k: int) -> str:
    spoken = visible(player.policy.chat.decode(player.state.partial))
    rows = [f"  {n}) {visible(c.text):<24}{c.probability:.3f}" for n, c in enumerate(player.choices(k), 1)]
    return "\n".join([f"so far> {spoken}", *rows])
