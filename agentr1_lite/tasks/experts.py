"""Scripted experts: they know what must be found, but have to find it by searching.

What an expert reaches is the ceiling that retrieval and scorer set to a perfect reader. `play_out` lets one speak in
an environment; `expert` picks the script that a task can be played by.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

from agentr1_lite.env import ToolEnv
from agentr1_lite.mdp import Task
from agentr1_lite.rewards import Episode
from agentr1_lite.scoring import CLOSED_ANSWERS, normalize, title_key
from agentr1_lite.tasks.scripted import PLAYERS, play, say_answer, say_search

Script = Generator[str, str, None]  # yields the texts of its turns; the environment's reply is sent in
UNKNOWN = "unknown"


def say(thought: str, action: str) -> str:
    """A turn as the paper's format asks for it."""
    return f"<think> {thought} </think>\n{action}"


def follow_chain(task: Task, env: ToolEnv, seed: int) -> Script:
    """Atlas: the expert of ``scripted.py``, which knows the chain of facts."""
    return play(task, PLAYERS["expert"], random.Random(f"{seed}/expert/{task.id}"), env)


def find_evidence(task: Task, env: ToolEnv, seed: int) -> Script:
    """Search the question, then each gold title that was not shown, and answer with a gold that was read.

    It answers "unknown" where a gold title was never shown, or where no gold has all its words in what was read;
    "yes" and "no" need not stand there. The last turn that ``env`` allows is the answer.
    """
    read = yield say("I search the question itself.", say_search(task.question, env.call_format))
    turns = env.max_turns - 2  # beside this one and the answer
    for title in dict.fromkeys(task.evidence):
        if turns > 0 and not shows(read, title):
            read += "\n" + (yield say(f"{title} is still missing.", say_search(title, env.call_format)))
            turns -= 1
    yield say("I have read what there is.", say_answer(found_gold(task, read), env))


def shows(read: str, title: str) -> bool:
    """A passage of that title was among the replies, which begin each with ``title:``."""
    key = f"{title_key(title)}:"
    return any(title_key(line).replace(" :", ":").startswith(key) for line in read.split("\n"))


def found_gold(task: Task, read: str) -> str:
    """The first gold that the replies prove, else "unknown"."""
    words = set(normalize(read).split())
    for gold in task.golds if all(shows(read, title) for title in task.evidence) else ():
        form = normalize(gold)
        if form in CLOSED_ANSWERS or (form and words.issuperset(form.split())):
            return gold
    return UNKNOWN


# What a task must offer, and the script that plays it; the first that fits
EXPERTS: list[tuple[Callable[[Task], bool], Callable[[Task, ToolEnv, int], Script]]] = [
    (lambda task: "chain" in task.info, follow_chain),
    (lambda task: bool(task.evidence and task.golds), find_evidence),
]


def expert(task: Task, env: ToolEnv, seed: int = 0) -> Script:
    """The script for a task; raises ``ValueError`` where nothing says what is to be found, or nothing can search."""
    searching = env.tool("search")
    if searching is None or searching.text_parameter != "query":
        raise ValueError("scripted_expert: the environment has no tool search(query), which the scripts call")
    for fits, script in EXPERTS:
        if fits(task):
            return script(task, env, seed)
    raise ValueError(
        f"scripted_expert: task {task.id!r} has no info['chain'] and no evidence with golds; only tasks that say what "
        "is to be found can be scripted"
    )


def play_out(env: ToolEnv, task: Task, turns: Script, seed: int = 0) -> tuple[Episode, float]:
    """The episode in which ``turns`` speaks to its end, and its whole reward."""
    env = env.fork()
    env.reset(task, seed)
    text = next(turns)
    while True:
        step = env.step(text)
        if step.done:
            return env.episode, env.total_reward
        text = turns.send("\n".join(message["content"] for message in step.observation))
