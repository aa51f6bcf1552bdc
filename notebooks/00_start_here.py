# %% [markdown]
# # 00 · Start here
#
# **Aim.** See that your machine is ready, watch a small trained agent answer a question token by token, be the agent
# yourself for one episode, and learn how to break things here and mend them again.
#
# **Before this** you need Python and a little PyTorch. No reinforcement learning.
#
# **Time.** ≈ 20 min to read and do, {run_seconds} s to run on two cores.
#
# Run a cell with Shift+Enter. The first one finds the package, or fetches it.

# %% tags=["setup"]

# %%
import time

import torch
from IPython.display import display

from agentr1_lite import QwenPolicy, load_task, rollout
from agentr1_lite.course import check_machine, course_map
from agentr1_lite.exercises import check
from agentr1_lite.views import StepPlayer, figure, plan_panel, series, show, show_trajectory, sliders

# %% [markdown]
# ## Is this machine ready?
#
# One call looks at cores, memory, GPU, versions and files. Below it stands a ladder of policies: the same code drives
# all of them, from a model of a million parameters to one of three billion. **Lessons 00 to 10 need the first rung
# only**; the map at the end shows which of them exist now. The times on the ladder are estimates, not measurements of
# your machine.

# %%
check_machine()

# %% [markdown]
# A line with ✘ says in one sentence what to do. A line with △ is worth a look, and nothing breaks because of it.
#
# ## What would a larger model need?
#
# Memory decides what a card can train, and it can be counted before anything is loaded: from the model's shape and
# from what the code does in the three phases of a step. Here is Qwen2.5-3B in 4 bits on a free T4. Turn on *PPO*, turn
# off *four bits*: it still fits. Turn off *gradient checkpointing*: which phase breaks? In a terminal it is
# `python -m agentr1_lite plan qwen2.5-3b`; lesson 11 takes the plan apart.

# %%
plan_panel(model="qwen2.5-3b", gpu_memory_gib=15)

# %% [markdown]
# ## Meet the agent
#
# An **agent** is a language model that acts. It writes text; some of its text is a *call* of a tool; the world answers
# the call; the model reads the answer and goes on. Ours lives in **Atlas**, a made-up world of people, cities, rivers
# and companies. Every name is drawn at random, so the agent cannot know a fact from memory. It has to search.

# %%
policy = QwenPolicy("atlas-agent")  # shipped with this course; trained in about the time of a coffee
task_set = load_task("atlas", "dev", failing=0.0)  # questions about entities it has never met
env = task_set.env
task = next(t for t in task_set.tasks if t.kind == "bridge" and t.hops == 2)

weights = sum(p.numel() for p in policy.causal.parameters())
print(f"{weights:,} weights, {len(policy.tokenizer):,} tokens in its vocabulary")
print(f"{len(task_set)} questions, {len(task_set.passages)} passages to search")
print("question:", task.question)
print("right:   ", " or ".join(task.golds))

# %% [markdown]
# ## Token by token
#
# Here it answers live. At each step the policy $\pi_\theta$ gives every token of its vocabulary a probability, one token
# is drawn, and it joins the text. Watch the bars at the bottom: they are the five likeliest next tokens.

# %%
player = StepPlayer(policy, env, task, seed=1)
pause = 0.0 if FAST else 0.06  # seconds between tokens, so that you can watch

screen = display(player.html(), display_id=True)
while not player.done:
    step = player.sample()
    screen.update(player.html())
    time.sleep(pause)

# %% [markdown]
# Two things happened in turn, and all of the course is about the difference:
#
# | in the paper | in the package | what it is |
# |---|---|---|
# | $s_t$ | `player.state` | all the agent knows: prompt, closed turns, open turn |
# | $a_t$ | `player.choose(token)` | one token |
# | $P_G$ | a `Step` with `environmental=False` | **generative** transition: the token is appended, nothing else |
# | $P_E$ | a `Step` with `environmental=True` | **environmental** transition: the token completed a call or the answer, the world replies |
# | $r_t$ | `step.reward` | what the step earned |
#
# Most transitions are generative and earn nothing.

# %%
counts = {
    "generative": [s for s in player.steps if not s.environmental],
    "environmental": [s for s in player.steps if s.environmental],
}
for kind, steps in counts.items():
    print(f"{kind:<14} {len(steps):>3} transitions, rewards {sum(s.reward for s in steps):+.2f}")
print("stopped because:", player.trajectory.stop_reason.value, "| answer:", player.trajectory.answer)

# %% [markdown]
# The finished episode is a **trajectory**. This is its viewer, which you will meet in every lesson. Choose what the
# colours mean in the box above the text. Click a token, then move with the arrow keys: ← → by token, ↑ ↓ by turn.

# %%
show_trajectory(player.trajectory, color_by="source", tokenizer=policy.tokenizer)

# %% [markdown]
# ## How is a token drawn?
#
# Lay the probabilities side by side on a line from 0 to 1 and throw a dart: $u$, a random number in $[0, 1)$. The token
# whose piece is hit is drawn. A token of probability 0.7 owns 70 % of the line.
#
# **Temperature** $\tau$ changes the pieces before the throw:
#
# $$p_i = \frac{e^{z_i / \tau}}{\sum_j e^{z_j / \tau}}$$
#
# with the model's scores $z$ (logits). A small $\tau$ makes the likeliest token take nearly all; a large one makes the
# pieces equal. Move the sliders.

# %%
words = ["Arda", "Oslo", "the", "river", "?"]
logits = torch.tensor([2.0, 1.2, 0.3, -0.4, -1.0])


def wheel(temperature, u):
    shares = (logits / temperature).softmax(0)
    starts = shares.cumsum(0) - shares
    drawn = int((starts <= u).sum()) - 1
    fig, ax = figure(7, 1.7)
    for i, (word, start, share) in enumerate(zip(words, starts.tolist(), shares.tolist(), strict=True)):
        ax.barh(0, share, left=start, color=series(i), alpha=1.0 if i == drawn else 0.35)
        if share > 0.06:
            ax.text(start + share / 2, 0.62, f"{word}\n{share:.2f}", ha="center", va="center")
    ax.plot([u, u], [-0.6, 0.4], color="#1d2430", linewidth=2.5)
    ax.set(xlim=(0, 1), ylim=(-0.65, 0.95), yticks=[], xlabel="u, a random number")
    ax.set_title(f"u = {u:.2f} draws “{words[drawn]}”")
    return show(fig, alt=f"probabilities of five tokens on a line; u = {u:.2f} draws {words[drawn]}")


sliders(wheel, temperature=(0.2, 3.0, 0.1, 1.0), u=(0.0, 0.99, 0.01, 0.55), title="Throw the dart yourself")

# %% [markdown]
# **Exercise 1.** Write the throw. `probabilities` is a list that sums to 1, `u` lies in $[0, 1)$; return the place of
# the token that is hit: the first place where the running sum is *above* `u`. Replace the `...`, run the cell, then the
# check below it.


# %%
def draw_token(probabilities, u):
    total = 0.0
    ...  # your lines
    return ...


# %%
check("draw_token", draw_token)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def draw_token(probabilities, u):
#     total = 0.0
#     for i, p in enumerate(probabilities):
#         total += p
#         if total > u:
#             return i
# ```
#
# `Sampling.choose` does the same for a whole batch, with `cumsum` and `searchsorted`.
# </details>
#
# Every exercise works like this: a gap, a check that runs your function beside the solution on random inputs and knows
# the usual mistakes, and a folded solution. A wrong answer costs nothing, and the check says which part to read again.

# %% [markdown]
# ## Be the agent
#
# Now you choose. The buttons are the policy's five likeliest tokens; you may also type, or let the policy finish its
# turn. **Undo** takes the last of these back: a token, a typed text or a finished turn. Try to make it give a wrong
# answer, then undo and let it do better. In a terminal the same game, with another question, is
# `python -m agentr1_lite play --by token --policy atlas-agent`.

# %%
other = next(t for t in task_set.tasks if t.hops == 1)
yours = StepPlayer(policy, env, other, seed=2)
yours.type_text("<tool_call>")  # a first token, to show what typing does
yours

# %% [markdown]
# Without buttons (in a saved page, or where widgets are missing) the same moves are calls: `yours.choices()`,
# `yours.choose(token)`, `yours.finish_turn()`, `yours.undo()`. `yours.html()` shows where you are.
#
# ## How often is it right?
#
# One episode says little. Let it answer some questions greedily (always the likeliest token), and count.

# %%
number = 8 if FAST else 40
trajectories = rollout(policy, env, task_set.tasks[:number], greedy=True, seed=0)
answers = [t.answer for t in trajectories]
golds = [t.golds for t in trajectories]
for t in trajectories[:5]:
    mark = "✔" if t.reward == 1 else "✘"
    print(f"{mark} {t.question}\n    said {t.answer}, right is {' or '.join(t.golds)}, {len(t.turns)} turns")

# %% [markdown]
# **Exercise 2.** *Exact match* is the share of questions whose answer equals one of the right ones (the *golds*: a name
# and its aliases). Upper and lower case and spaces around do not count. An episode without an answer (`None`) is wrong,
# and counts.


# %%
def exact_match(answers, golds):
    right = ...
    return right


# %%
check("exact_match", exact_match)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def exact_match(answers, golds):
#     right = 0
#     for answer, accepted in zip(answers, golds, strict=True):
#         if answer is not None:
#             right += answer.strip().lower() in [gold.strip().lower() for gold in accepted]
#     return right / len(answers)
# ```
#
# Real benchmarks also drop articles and punctuation; `scoring.py` does it as each benchmark's own script does.
# </details>
#
# ## Break it and mend it
#
# Nothing here is fragile. Break the agent on purpose: add noise to all its weights, and ask again.


# %%
def accuracy(policy, tasks):
    """Share of right answers, greedy."""
    return sum(t.reward == 1 for t in rollout(policy, env, tasks, greedy=True, seed=0)) / len(tasks)


asked = task_set.tasks[: 4 if FAST else 20]
broken, found = QwenPolicy("atlas-agent"), []  # a second copy: `policy` stays whole
noises = [0.0, 0.01, 0.02, 0.04, 0.08]
start = {name: p.clone() for name, p in broken.causal.state_dict().items()}
for noise in noises:
    torch.manual_seed(0)
    broken.causal.load_state_dict({n: p + noise * torch.randn_like(p) for n, p in start.items()})
    found.append(accuracy(broken, asked))

fig, ax = figure(6, 2.6)
ax.plot(noises, found, "o-", color=series(0))
ax.set(xlabel="standard deviation of the noise on each weight", ylabel="exact match", ylim=(-0.05, 1.05))
ax.set_title(f"A broken agent, {len(asked)} questions")
show(fig, alt=f"exact match {found} at noise {noises}")

# %% [markdown]
# And mended: `QwenPolicy("atlas-agent")` reads the shipped weights again. That is how everything works here.
#
# | you broke | you mend it by |
# |---|---|
# | a variable, a function | run the cells again from the top; every lesson survives that without a restart |
# | the kernel (it hangs) | *Kernel → Restart*, then run again |
# | a lesson's text | `git checkout notebooks/` fetches the original; work in a copy if you like |
# | the shipped files | `python -m agentr1_lite data` makes them again, the same to the byte |
# | the environment | delete `.venv`, run `make setup` |
# | you are not sure | `python -m agentr1_lite doctor` looks at the machine, the files and a small rollout |
#
# No lesson writes outside the folder `runs/`, and no training changes a shipped policy.
#
# ## The map of the course

# %%
course_map()

# %% [markdown]
# ## Summary
#
# - An agent's text is a chain of tokens. Most are only appended ($P_G$); a token that completes a call or the answer
#   brings the world in ($P_E$).
# - A policy is a distribution over the next token; temperature decides how bold the draw is.
# - A trajectory keeps what was said, who said it, and what it earned. The viewer shows it.
# - Exact match counts right answers, the unanswered questions included.
#
# ## Where this lives in the package
#
# - [`views/player.py`](../agentr1_lite/views/player.py): `StepPlayer`, the episode played by hand
# - [`sampling.py`](../agentr1_lite/sampling.py): how the next token is drawn
# - [`rollout.py`](../agentr1_lite/rollout.py): many episodes at once
# - [`scoring.py`](../agentr1_lite/scoring.py): exact match and F1 as the benchmarks compute them
# - [`doctor.py`](../agentr1_lite/doctor.py), [`course.py`](../agentr1_lite/course.py): the checks of the first cell
#
# Next: [01 · The agent MDP](01_agent_mdp.ipynb)
