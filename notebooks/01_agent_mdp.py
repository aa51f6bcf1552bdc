# %% [markdown]
# # 01 · The agent MDP
#
# **Aim.** Reinforcement learning speaks of states, actions, transitions and rewards. You will find each of them in a
# language model that uses tools, hold them as objects, step through an episode by hand, and solve one small agent
# completely, so that later you know what all the estimating is after.
#
# **Before this** lesson 00. No reinforcement learning is needed.
#
# **Time.** ≈ 40 min to read and do, {run_seconds} s to run on two cores.

# %% tags=["setup"]

# %%
import random
from dataclasses import replace

import pandas as pd
import torch

from agentr1_lite import QwenPolicy, load_task, rollout
from agentr1_lite.advantages import estimate
from agentr1_lite.batch import collate
from agentr1_lite.exercises import check
from agentr1_lite.mdp import Action, Segment, State, Task, environmental_transition, generative_transition, states
from agentr1_lite.tasks.solvable import WORDS, Boxes, exact_gradient, imitation, probabilities, solve
from agentr1_lite.views import COLORS, credit_html, figure, line, show, show_trajectory, sliders

# %% [markdown]
# ## Words for what follows
#
# | in the papers | in the package | what it is |
# |---|---|---|
# | $s_t$ | `State` | what the agent knows before its next move |
# | $a_t \in V$ | `Action` | one token of the vocabulary |
# | $P_G$ | `generative_transition` | a token joins the text; nothing random |
# | $P_E$ | `environmental_transition` | the world answers; may be random |
# | $r_f$, $r_p$ | `Trajectory.reward`, `Turn.process_reward` | reward at the end, reward of a turn on the way |
# | $\tau$ | `Trajectory` | one whole episode |
# | $J(\theta)$ | `objective` | the mean return of the policy $\pi_\theta$ |
# | $V(s)$, $Q(s, a)$ | `solve` | what the policy will still earn from $s$, and from $s$ with $a$ |
#
# ## The classic MDP
#
# A **Markov decision process** is a game against chance. It has states $S$, actions $A$, a transition
# $P(s' \mid s, a)$, a reward $R(s, a, s')$ and a discount $\gamma \in [0, 1]$ that says how much later rewards count.
# *Markov* means: the state holds all of the past that matters.
#
# Our example through this lesson is a small one, **Two Boxes**. A ball lies in the left or the right box, and the
# agent is asked which. It may
#
# - `call peek`: cheap (it costs 0.02), but the reply is sometimes wrong,
# - `call open`: the truth, but it costs 0.1 and fails now and then,
# - `answer left` or `answer right`: the end; 1 if right, else 0.
#
# There are two questions. On `easy?` a peek is right nine times in ten, on `hard?` only in 65 of 100. Seen as a classic
# MDP, a *turn* is an action, and the state is what the agent has been told so far. Here is all that can happen in the
# first turn of the hard question.

# %%
world = Boxes()


def say(ids):
    return " ".join(WORDS[i] for i in ids)


def read(text):
    return tuple(WORDS.index(word) for word in text.split())


def turn_options(start):
    """All (action, P, R, s') of a whole turn from a state at a turn's start."""
    rows = []
    for first in world.ways[start]:
        for second in world.ways[first.following]:
            words = world.legal[first.state, first.choice], world.legal[second.state, second.choice]
            following = say(world.states[second.following]) if second.following >= 0 else "the end"
            rows.append((say(words), round(second.probability, 3), second.reward, following))
    return pd.DataFrame(rows, columns=["action a", "P(s' | s, a)", "R(s, a, s')", "next state s'"])


easy, hard = world.roots.tolist()  # the states in which the two questions start
turn_options(hard)

# %% [markdown]
# Every row is one thing that can happen. The probabilities of one action add up to 1. That table, for every state, *is*
# the MDP: nothing else is needed to play, and nothing else is needed to solve it.
#
# ## The token MDP
#
# A language model does not choose whole turns. It chooses **tokens**. For a model that only writes, the MDP is:
#
# - state $s_t = (w_p, w_1, \dots, w_t)$: the prompt and the tokens so far,
# - action: the next token from the vocabulary $V$,
# - transition: append it. $P(s' \mid s, a) = 1$ exactly for $s' = s \oplus a$,
# - reward: $r_f$ once, for the finished text.
#
# Nothing in it is random except the policy's own choice. The package has this as an object and a function:

# %%
state = State(Task("box", "Where is the ball?"), prompt=read("hard?"), tools=("peek", "open"))
for token in read("call peek"):
    action = Action(token, completes_turn=WORDS[token] == "peek")
    state = generative_transition(state, action)
    print(f"a = {WORDS[token]:5}  s' = {say(state.token_ids)!r}  turns {state.turns}, open turn {state.partial}")

# %% [markdown]
# The state did not change its mind about anything; it grew by one token. The old state is still there, since states
# are values here and a transition makes a new one.
#
# ## The agent MDP
#
# Now the agent's turn is complete, and it was a **command**. What comes next is not chosen by the policy: the tool
# runs, and the world appends its reply. So an agent has *two* transitions.
#
# | part | static LLM | LLM agent |
# |---|---|---|
# | state | $s_t = (w_p, w_1 \dots w_t)$ | $s_t = (w_p, T_1 \dots T_k, T^{\text{partial}}_{k+1})$; a turn $T_i$ is the agent's tokens, then the world's |
# | action | next token | next token; some token sequences are commands |
# | transition | append | **generative** $P_G$: append, or **environmental** $P_E(s' \mid s, a)$ where the action completes a command |
# | reward | $r_f$ at the end | $r_f$ at the end, $r_p(s, a, s')$ at an event on the way, else 0 |
#
# (After "Agent-R1", arXiv 2511.14460 v1, section 2.)

# %%
rng = random.Random(4)
edges = [edge for edge in world.ways[world.states.index(state.token_ids[:2])] if edge.choice == 0]  # behind `call peek`
edge = rng.choices(edges, weights=[edge.probability for edge in edges])[0]
print("P_E:", {WORDS[edge.reply]: round(edge.probability, 3) for edge in edges})

state = environmental_transition(state, feedback=(*read("reply"), edge.reply))
print(f"reply {WORDS[edge.reply]!r}, process reward {edge.reward}")
print(f"s' = {say(state.token_ids)!r}  turns {state.turns}, open turn {state.partial}")

# %% [markdown]
# The open turn closed: it moved into `turns` as a pair (what the agent said, what the world said), and a new, empty
# turn began. A picture of the first turn shows where each transition stands. Solid blue is a choice of the policy,
# dashed orange is a throw of the world's dice.


# %%
def draw_turn(root):
    fig, axes = figure(9, 4.6)
    leaves = iter(range(99))

    def grow(state, depth):
        """Draw what follows ``state``; returns its height."""
        ways = {}
        for edge in world.ways[state]:
            ways.setdefault(edge.choice, []).append(edge)
        heights = []
        for choice, edges in ways.items():
            token = WORDS[world.legal[state, choice]]
            if depth == 0:
                y = grow(edges[0].following, 1)
            else:
                ends = [next(leaves) for _ in edges]
                y = sum(ends) / len(ends)
                for edge, end in zip(edges, ends, strict=True):
                    axes.plot([2, 3], [y, end], **line(1), lw=1.6)
                    what = WORDS[edge.reply] if edge.reply >= 0 else ("right" if edge.reward else "wrong")
                    axes.text(3.05, end, f"{what}, P = {edge.probability:.2f}, r = {edge.reward:g}", va="center")
            heights.append((y, token))
        middle = sum(y for y, _ in heights) / len(heights)
        for y, token in heights:
            axes.plot([depth, depth + 1], [middle, y], **line(0), lw=1.6)
            box = {"facecolor": COLORS["paper"][0], "edgecolor": "none", "pad": 2}
            axes.text(depth + 0.5, (middle + y) / 2, token, ha="center", va="center", weight="bold", bbox=box)
        return middle

    question = say(world.states[root])
    axes.text(-0.05, grow(root, 0), question, ha="right", va="center", weight="bold")
    axes.set(xlim=(-0.5, 4.3), xticks=[0.5, 1.5, 2.5], yticks=[])
    axes.set_xticklabels(["P_G: first token", "P_G: second token", "P_E: the world"])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.invert_yaxis()
    return show(fig, alt=f"The first turn of the question {question} as a tree of choices and chances")


draw_turn(hard)

# %% [markdown]
# ## One system, two descriptions
#
# You will meet the agent MDP in two forms. The paper writes states, two transitions and two rewards. An
# encyclopaedia-like overview of the same system writes a tuple $(S, A, P, R, \gamma, T, O, \pi_\theta)$. They describe
# one thing:
#
# | overview | paper | package |
# |---|---|---|
# | $S$: history, environment state, long-term memory, tools available, task | $s_t = (w_p, T_1 \dots T_k, T^{\text{partial}})$: the tokens | `State`: `prompt`, `turns`, `partial` are the tokens; `environment`, `memory`, `tools`, `task` the rest |
# | $A$, hierarchical: text, tool call, API request, interaction | a token; a *sequence* can be a command | `Action` is a token; `Turn.kind` says what the finished sequence was |
# | $P$ | $P_G$ and $P_E$ | `generative_transition`, `environmental_transition` |
# | $R$: sparse, shaped, dense | $r_f$, $r_p$, 0 elsewhere | `Trajectory.reward`, `Turn.process_reward` |
# | $\gamma$ | in the estimators | `gamma`, counted in action tokens |
# | $T$: the tools | the commands | `ToolEnv.tools` |
# | $O$: observation function, what is seen of the world | the feedback tokens $w_{e_i}$ | `chat.observation_ids`: what a tool returned, as tokens |
# | $\pi_\theta(a \mid s)$ | the same | `QwenPolicy` |
#
# Two cautions. The letter $T$ is the tools on the left and a turn in the middle; in this kit it is also the number of
# tokens in a tensor of shape $(B, T)$. And where the overview says *partially observed*, the paper has no such word:
# it takes the tokens themselves as the state. Both are right, and Two Boxes shows why.
#
# Where the ball lies is hidden from the policy (that is $O$ at work). But to the policy, the hidden ball is just
# randomness in the next reply: $P_E(\text{reply} \mid \text{tokens so far})$. After one peek that said *left*, the
# chance that a second peek says *left* again is $0.9 \cdot 0.9 + 0.1 \cdot 0.1$ on the easy question. Compare with a
# simulation that does know the ball:

# %%
seen = read("easy? call peek reply left call")
exact = {edge.reply: edge.probability for edge in world.ways[world.states.index(seen)] if edge.choice == 0}

rng, first_left, again = random.Random(0), 0, 0
for _ in range(20_000):
    ball = rng.choice("LR")
    peeks = [ball if rng.random() < 0.9 else {"L": "R", "R": "L"}[ball] for _ in range(2)]
    first_left += peeks[0] == "L"
    again += peeks == ["L", "L"]
print(f"P_E in the tables {exact[WORDS.index('left')]:.3f}, simulated with a hidden ball {again / first_left:.3f}")

# %% [markdown]
# ## Two transitions on a real trajectory
#
# Now a real agent: the small language model that comes with the kit, a search tool, and a made-up world called Atlas.
# The search fails one time in five, so $P_E$ is random here too. `rollout` plays episodes; we take one with at least
# two searches.

# %%
policy = QwenPolicy("atlas-agent")
task_set = load_task("atlas", "dev", failing=0.2, rewards={"em": 1.0, "step_penalty": -0.05})
played = rollout(policy, task_set.env, task_set.tasks[: 8 if FAST else 24], group_size=4, seed=1)
episode = max(played, key=lambda t: (min(len(t.turns), 3), t.reward))
show_trajectory(episode, color_by="source", tokenizer=policy)

# %% [markdown]
# Blue tokens were sampled by the policy, green ones were written by the world, yellow ones (the *seam*) by the chat
# template. Click a token, then walk with the arrow keys.
#
# `states` replays an episode as $(s, a, s')$, with $a$ = None where the world moved:

# %%
rows = []
for t, (before, action, after) in enumerate(states(episode)):
    new = after.token_ids[len(before.token_ids) :]
    kind = "environmental" if action is None else "generative"
    rows.append((t, kind, len(before.token_ids), len(new), policy.chat.decode(list(new))[:60]))
steps = pd.DataFrame(rows, columns=["t", "transition", "tokens in s", "tokens added", "text added"])
around = int((steps.transition == "environmental").argmax())
steps.iloc[max(0, around - 3) : around + 4].set_index("t")

# %%
fig, axes = figure(8, 3.2)
sizes = [len(after.token_ids) for _, _, after in states(episode)]
axes.step(range(len(sizes)), sizes, where="mid", color=line(0)["color"], label="generative: one token")
for n, t in enumerate(steps.index[steps.transition == "environmental"]):
    axes.plot([t - 0.5] * 2, [sizes[t - 1], sizes[t]], **line(1), lw=2.6, label="environmental" if n == 0 else None)
axes.set(xlabel="transition t", ylabel="tokens in the state", title="A state grows by a token, or by a whole reply")
axes.legend(loc="upper left")
show(fig, alt="Length of the state after each transition: slope one where the policy speaks, a jump at each reply")

# %% [markdown]
# Most transitions are generative, most *tokens* may well come from the world. That difference is the reason for the
# action mask in lesson 03: only the generative transitions are the policy's doing.
#
# The same call in the same state can end differently. We send one turn to eight copies of the environment, which differ
# in nothing but their seed:

# %%
task = next(task for task in task_set.tasks if task.id == episode.task_id)
for seed in range(8):
    env = task_set.env.fork()
    env.reset(task, seed=seed)
    print(seed, repr(env.step(episode.turns[0].text).info["turn"].observation[:70]))

# %% [markdown]
# ### Exercise 1: name the transitions
#
# An action mask says for every token of a finished episode whether the policy sampled it. List the transitions of the
# episode: `"generative"` for each sampled token, and `"environmental"` **once** for each run of other tokens that
# follows a sampled one. The prompt is the first state, not a transition.
#
# For `[False, False, True, True, False, False, True]` that is generative, generative, environmental, generative.


# %%
def transition_kinds(action_mask: list[bool]) -> list[str]:
    kinds = []
    for t, acted in enumerate(action_mask):
        ...  # append what belongs here, if anything
    return ...


# %%
check("transition_kinds", transition_kinds)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def transition_kinds(action_mask):
#     kinds = []
#     for t, acted in enumerate(action_mask):
#         if acted:
#             kinds.append("generative")
#         elif t > 0 and action_mask[t - 1]:  # the first token of a reply stands for all of it
#             kinds.append("environmental")
#     return kinds
# ```
# </details>
#
# ## Where rewards lie
#
# The paper gives a reward at two places: $r_f$ at the end, and $r_p$ where something noteworthy happens on the way.
# In this kit a process reward belongs to a *turn*, and lies on the last token that the policy sampled in it. The
# outcome lies on the last token that the policy sampled at all.
#
# Why not on the very last token? Because an episode may end with a tool's reply, and no estimator looks at tokens that
# the policy did not choose. A reward put there is lost without a word. Our episode was rolled out with
# `rewards={"em": 1.0, "step_penalty": -0.05}`: 1 for the exact answer, and a small price for every turn.

# %%
rewards = episode.token_rewards()[0]
for t, reward in enumerate(rewards):
    if reward:
        token = policy.chat.decode([episode.segments[0].token_ids[t]])
        print(f"token {t:3} {token!r:16} reward {reward:+.2f}")
print("stopped by", episode.stop_reason.value, "· return", round(episode.total_reward, 3), "· tokens", len(rewards))
show(credit_html(episode, {}, policy, rows=("reward",), title="Rewards lie under sampled tokens"))

# %% [markdown]
# ### Exercise 2: place the rewards
#
# Write `token_rewards` yourself. `turn_ends[k]` is one behind the last sampled token of turn $k$ (half-open spans, as
# everywhere in Python), `process[k]` the reward of that turn. Both rewards may meet on one token.


# %%
def place_rewards(action_mask: list[bool], turn_ends: list[int], process: list[float], outcome: float) -> list[float]:
    rewards = [0.0] * len(action_mask)
    ...
    return ...


# %%
check("place_rewards", place_rewards)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def place_rewards(action_mask, turn_ends, process, outcome):
#     rewards = [0.0] * len(action_mask)
#     for end, reward in zip(turn_ends, process):
#         rewards[end - 1] += reward
#     last = max(t for t, acted in enumerate(action_mask) if acted)
#     rewards[last] += outcome
#     return rewards
# ```
# </details>
#
# ## Trajectory level and step level
#
# So far an episode was *one* growing text. That is the **trajectory level**. Some agents cannot work so: the text would
# outgrow the model's context, so each turn is played in a context of its own, say the prompt and the last reply only.
# Then an episode is a list of **steps** $(o_t, a_t, e_t, r_t, o_{t+1})$: what was seen, what was said, what the
# environment did, what it paid, what was seen next.


# %%
def short(text, n=44):
    text = " ".join(text.split())
    return text if len(text) <= n else text[: n - 1] + "…"


table, seen = [], episode.question
for turn, after in zip(episode.turns, [*episode.turns[1:], None], strict=True):
    said = short(" ".join(str(call.get("arguments")) for call in turn.calls) or turn.text)
    ran = ", ".join("ran" if result["success"] else "failed" for result in turn.results) or "ended"
    paid = turn.process_reward + (episode.reward if after is None else 0.0)
    table.append((short(seen), said, ran, round(paid, 2), short(turn.observation) or "-"))
    seen = turn.observation
pd.DataFrame(table, columns=["o (what is new in it)", "a", "e", "r", "next o"])

# %% [markdown]
# One type holds both levels. A `Trajectory` has `Segment`s: runs of tokens that stood in one context. An append-only
# episode has one segment; a windowed episode has one for each turn. Here is our episode cut into windows. (We only cut
# it. In a real windowed rollout the policy would have *sampled* in the short contexts, with other log-probs.)


# %%
def step_level(trajectory, window=1):
    """Each turn in a context of its own: the prompt, the last ``window`` turns with their replies, the turn."""
    whole, turns = trajectory.segments[0], trajectory.turns
    prompt, segments, moved = whole.token_ids[: turns[0].start], [], []
    for k, turn in enumerate(turns):
        segment = Segment()
        segment.extend(prompt + whole.token_ids[turns[max(0, k - window)].start : turn.start])
        span = slice(turn.start, turn.end)
        start, end = segment.extend(whole.token_ids[span], whole.logprobs[span])
        segments.append(segment)
        moved.append(replace(turn, segment=k, start=start, end=end, observation_start=end, observation_end=end))
    return replace(trajectory, segments=segments, turns=[replace(turn, observation="") for turn in moved])


steps = step_level(episode)
for name, trajectory in (("trajectory level", episode), ("step level", steps)):
    batch = collate([trajectory])
    print(
        f"{name:16} rows x tokens {tuple(batch.input_ids.shape)}, tokens in all {trajectory.num_tokens}, "
        f"actions {trajectory.num_actions}, trajectory_index {batch.trajectory_index.tolist()}"
    )
show_trajectory(steps, color_by="source", tokenizer=policy, title="The same episode, a context for each turn")

# %% [markdown]
# The sampled tokens are the same, and so are the rewards; what surrounds them differs. `trajectory_index` remembers
# which rows belong together, so that credit still flows from the last step back to the first. The return of every
# sampled token is the same at both levels:

# %%
found = []
for trajectory in (episode, steps):
    batch = collate([trajectory])
    returns = estimate(
        "reinforce_pp", batch.rewards, batch.action_mask, gamma=0.99, trajectory_index=batch.trajectory_index
    ).returns
    found.append(returns[batch.action_mask])
print("first and last returns:", [round(x, 4) for x in (*found[0][:2].tolist(), *found[0][-2:].tolist())])
print("equal at both levels:", torch.equal(*found))

# %% [markdown]
# ## A tiny MDP solved exactly
#
# For Two Boxes we can write down *everything*. An episode has at most three turns, so there are few enough histories to
# visit each one. The best value of a state obeys Bellman's equation,
#
# $$V^*(s) = \max_a \sum_{s'} P(s' \mid s, a)\,\bigl(R(s, a, s') + \gamma V^*(s')\bigr),$$
#
# and since no history comes twice, plain recursion solves it, with $\gamma = 1$:


# %%
def best_value(state):
    """V*(s): what the best policy still earns from a state of Two Boxes."""
    if state < 0:  # behind the end
        return 0.0
    q = [0.0, 0.0]  # two tokens are legal in each state
    for edge in world.ways[state]:
        q[edge.choice] += edge.probability * (edge.reward + best_value(edge.following))
    return max(q)


value, q = solve(world)  # the package's: the same backwards, all states at once
for question, root in enumerate(world.roots.tolist()):
    print(f"{WORDS[question]} V* = {best_value(root):.4f}, solve says {value[root]:.4f}")
print(len(world.states), "states,", len(world.paths), "trajectories")

# %%
rows = []
for question, root in enumerate(world.roots.tolist()):
    worth = {"answer left": q[root + 2, 0], "call peek": q[root + 1, 0], "call open": q[root + 1, 1]}
    rows.append({"question": WORDS[question], **{name: round(float(x), 3) for name, x in worth.items()}})
pd.DataFrame(rows).set_index("question").rename_axis(columns="Q* of the first turn")

# %% [markdown]
# Guessing earns one half. On the easy question one peek is enough; on the hard one it pays to open, although opening
# costs five times as much. Move the controls: how good must a peek be before it beats opening? When is a tool not worth
# its price?


# %%
def draw_first_turn(accuracy, failing):
    here = Boxes(accuracy=(accuracy,), failing=failing)
    q = solve(here)[1]
    worth = {"answer at once": q[2, 0], "call open": q[1, 1], "call peek": q[1, 0]}
    fig, axes = figure(7.5, 2.4)
    best = max(worth.values())
    for n, (name, x) in enumerate(worth.items()):
        axes.barh(name, float(x), color=line(0)["color"], alpha=1.0 if x == best else 0.45)
        axes.text(float(x) + 0.01, n, f"{x:.3f}{'  best' if x == best else ''}", va="center")
    axes.set(xlim=(0, 1.12), xlabel="Q* of the first turn: expected return, best play afterwards")
    axes.grid(axis="y", visible=False)
    return show(fig, alt="Value of the three first turns: " + ", ".join(f"{k} {v:.2f}" for k, v in worth.items()))


sliders(draw_first_turn, title="What is a tool worth?", accuracy=(0.5, 1.0, 0.05, 0.65), failing=(0.0, 1.0, 0.05, 0.3))

# %% [markdown]
# ### From solving to learning
#
# A language model has no table of all states. It has parameters $\theta$, and it learns by following the gradient of
#
# $$J(\theta) = \sum_\tau P_\theta(\tau)\, R(\tau), \qquad
# P_\theta(\tau) = \prod_t \pi_\theta(a_t \mid s_t) \cdot \prod P_E(s' \mid s, a).$$
#
# The policy's factors depend on $\theta$, the world's do not. For Two Boxes we can add up all trajectories and take
# the exact gradient. Our policy is a table with two logits a state. We climb from two places: from nothing (all logits
# 0), and from a policy that has imitated a sensible habit a little: call until a tool names a box, then answer that.

# %%
returns = world.rows.rewards.sum(-1)  # R(τ) of every trajectory
asked = [world.rows.tokens[:, 0] == question for question in read("easy? hard?")]


def climb(logits, steps=250, rate=20.0):
    """Expected return of both questions before each step of exact gradient ascent."""
    curve = []
    for _ in range(steps):
        chance = probabilities(world, logits)  # P(τ)
        curve.append([float((chance * returns)[own].sum()) for own in asked])
        logits = logits + rate * exact_gradient(world, logits)
    return curve


starts = {"from nothing": imitation(world, 0.0), "after imitation": imitation(world, 1.0)}
fig, axes = figure(9, 3.2, cols=2, sharey=True)
for question, name in enumerate(("easy?", "hard?")):
    axes[question].axhline(float(value[world.roots[question]]), color=COLORS["muted"][0], ls="-", lw=1)
    axes[question].set(xlabel="step of gradient ascent", ylim=(0.3, 0.95), title=name)
for n, (name, logits) in enumerate(starts.items()):
    for question, values in enumerate(zip(*climb(logits), strict=True)):
        axes[question].plot(values, **line(n), label=name)
axes[0].set_ylabel("expected return $V(s_0)$")
axes[1].legend(loc="lower right")
show(fig, alt="Expected return over the steps of exact gradient ascent, for both questions and both starts")

# %% [markdown]
# The thin line is the optimum. No agent was sampled and no noise was in it, and still the climb from nothing stops at
# guessing on the hard question: at first a call is worth nothing, because the policy does not yet listen to the
# reply; so it stops calling, and then never learns to listen. A little imitation is enough to get over that. This is
# why the kit trains in three phases, and why imitation comes first (lesson 06, to come).
#
# It is also what reinforcement learning would be if we could see everything. From here on we cannot. Lesson 04 measures how well each estimator guesses this very gradient from a handful of episodes.
#
# ### Exercise 3: a Bellman backup
#
# Write one backup for an MDP given as tensors: `P[s, a, s']`, `R[s, a, s']` and the present values `V[s']`, of shapes
# $(S, A, S)$, $(S, A, S)$ and $(S,)$. Return the new values, shape $(S,)$.


# %%
def bellman_backup(P: torch.Tensor, R: torch.Tensor, V: torch.Tensor, gamma: float) -> torch.Tensor:
    q = ...  # (S, A)
    return ...


# %%
check("bellman_backup", bellman_backup)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def bellman_backup(P, R, V, gamma):
#     q = (P * (R + gamma * V)).sum(-1)  # the expectation over s'
#     return q.max(-1).values  # the best action
# ```
# </details>
#
# ## Summary
#
# - An MDP is states, actions, transitions, rewards and a discount. For a language model the state is the text, an
#   action a token.
# - An agent has **two transitions**: $P_G$ appends the policy's token and is never random; $P_E$ appends what the world
#   answers and may be.
# - What the world hides becomes randomness in $P_E$, once the tokens are taken as the state. So the paper's description
#   and the overview's tuple agree.
# - Rewards lie on tokens that the policy sampled: a process reward at the end of its turn, the outcome on the last one.
# - One episode can be one row (trajectory level) or several (step level); credit flows the same way.
# - Where all trajectories can be written down, value, optimum and gradient are exact. Everywhere else we estimate.
#
# ## Where this lives in the package
#
# - [`mdp.py`](../agentr1_lite/mdp.py): `State`, `Action`, both transitions, `Segment`, `Turn`, `Trajectory`, `states`
# - [`batch.py`](../agentr1_lite/batch.py): trajectories as tensors of shape $(B, T)$
# - [`tasks/solvable.py`](../agentr1_lite/tasks/solvable.py): Two Boxes, its value, optimum and exact gradient
# - [`env.py`](../agentr1_lite/env.py), [`rewards.py`](../agentr1_lite/rewards.py): who makes $P_E$ and $r_f$, $r_p$:
#   lesson 02
