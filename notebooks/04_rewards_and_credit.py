# %% [markdown]
# # 04 · Rewards and credit
#
# **Aim.** An episode earned something. Which of its tokens deserve it? Every algorithm of this field, PPO, GRPO,
# REINFORCE++ and the rest, is one answer to that question. You will see all of them on the same batch, turn their
# knobs, and measure against the exact gradient how wrong and how noisy each one is.
#
# **Before this** lesson 01 (both transitions, Two Boxes) and lesson 03 (the action mask).
#
# **Time.** ≈ 60 min to read and do, {run_seconds} s to run on two cores.

# %% tags=["setup"]

# %%
import warnings

import pandas as pd
import torch

from agentr1_lite import QwenPolicy, load_task, rollout
from agentr1_lite.advantages import compute_gae, estimate, names, normalise_process_rewards, zero_variance_share
from agentr1_lite.exercises import check
from agentr1_lite.rewards import shape
from agentr1_lite.tasks.solvable import WORDS, Boxes, exact_gradient, imitation, objective, probabilities, solve
from agentr1_lite.tasks.solvable_gradients import advantages, gradient_samples, policy_gradient, quality, sample
from agentr1_lite.views import COLORS, compare_html, credit, credit_html, figure, group_html, line, show, sliders

# %% [markdown]
# ## Words for what follows
#
# | in the papers | in the package | what it is |
# |---|---|---|
# | $r_t$ | `rewards` (B, T) | reward on token $t$ |
# | $M$ | `action_mask` (B, T) | 1 where the policy sampled the token |
# | $R$ | `rewards.sum(-1)` (B,) | all that a rollout earned |
# | $G_t$ | `Advantages.returns` | return: what is earned from token $t$ on |
# | $V_t$ | `values` (B, T) | a critic's guess of $G_t$, made before token $t$ |
# | $A_t$ | `Advantages.advantages` | advantage: by how much token $t$ was better than expected |
# | $g$ | `group_ids` (B,) | the group: rollouts of one question |
# | $\gamma$, $\lambda$ | `gamma`, `lam` | discount; how far GAE trusts rewards more than the critic |
# | $\Phi(s)$ | `potential` | a potential: how promising a state looks |
#
# $B$ rollouts, $T$ tokens, $G$ rollouts of a question.
#
# ## One batch to look at
#
# We use Two Boxes from lesson 01 again, an agent so small that its exact gradient is known. (In short: find the ball.
# `call peek` costs 0.02 and may be wrong, `call open` costs 0.1 and may fail, `answer left` or `answer right` ends the
# episode and earns 1 if the ball is there. So `left` and `right` are boxes here; `right` never means *correct*.) The
# policy has imitated a little: it tends to call first and then to believe the reply. Four rollouts of each question
# make our batch.

# %%
world = Boxes()
logits = imitation(world)  # (S, 2), a table of logits
value, _ = solve(world, logits)  # V of this policy, exact: (S,)

batch = sample(world, logits, groups=2, group_size=4, seed=318)
rows = world.rows.select(batch.index[0])  # tensors (B, T)
episodes = [
    world.trajectory(k, logits, f"group {g}") for k, g in zip(batch.index[0].tolist(), batch.group_ids, strict=True)
]
easy, hard = episodes[:4], episodes[4:]
for n, t in enumerate(hard, 1):  # every rollout hides its ball anew; the outcome of the answer tells where
    other = {"left": "right", "right": "left"}.get(t.answer)
    found = f"said the {t.answer} box, the ball was in the {t.answer if t.reward else other} box"
    print(f"#{n}:", found if t.answer else "never answered")
show(group_html(hard, name="GRPO", title="Four rollouts of the hard question"))

# %% [markdown]
# Open a row to read its rollout. The last column is already an answer to this lesson's question: GRPO's. Let us build
# up to it.
#
# ## Returns across tool spans
#
# The policy gradient theorem says how to change $\theta$ so that the mean return grows:
#
# $$\nabla J(\theta) = \mathbb{E}\Bigl[\sum_t M_t\, G_t\, \nabla \log \pi_\theta(a_t \mid s_t)\Bigr],
# \qquad G_t = \sum_{j \ge t} \gamma^{\,j - t}\, r_j .$$
#
# Make a token likelier in proportion to what came *after* it. Only sampled tokens count: as terms of the sum, and as
# steps of the discount. A tool's reply is one throw of the world's dice, however many tokens it has. So $j - t$ counts
# **action tokens**, and the sum runs *through* the reply. Two faults are common here, and both have shipped in public
# trainers: letting the return decay on each token of the reply, and starting it anew behind each reply.


# %%
def backwards(rewards, mask, gamma, at_reply):
    """Return-to-go of one row; ``at_reply`` says what a token off the mask does to the running sum."""
    out, running = [], 0.0
    for reward, acted in zip(reversed(rewards), reversed(mask), strict=True):
        running = reward + gamma * running if acted else at_reply(running)
        out.append(running if acted else 0.0)
    return [round(x, 3) for x in out[::-1]]


episode = hard[2]  # it met an error, tried again, and found the ball in the right box
rewards, mask = episode.token_rewards()[0], episode.segments[0].action_mask
gamma = 0.8
table = pd.DataFrame(
    {
        "token": [WORDS[i] for i in episode.segments[0].token_ids],
        "M": [int(m) for m in mask],
        "r": rewards,
        "G": backwards(rewards, mask, gamma, lambda running: running),
        "decays in replies": backwards(rewards, mask, gamma, lambda running: gamma * running),
        "reset by replies": backwards(rewards, mask, gamma, lambda running: 0.0),
    }
)
table.T

# %% [markdown]
# Read the last row from the right. The answer's two tokens hear of the reward, the two calls before them hear only of
# their own cost: a policy trained so would learn that calling a tool is a loss, always. In the row above, a longer page
# of search results would make the search before it worth less.
#
# The package agrees with the row $G$, and draws it. Each bar stands under the token it belongs to; every row has its
# own scale.

# %%
package = estimate("reinforce_pp", rows.rewards, rows.action_mask, gamma=gamma).returns[6]
print("equal:", [round(x, 3) for x in package.tolist()][: len(table)] == table["G"].tolist())


def draw_returns(gamma):
    shown = credit(episode, "reinforce_pp", hard, gamma=gamma, whiten=False)
    return credit_html(episode, shown, rows=("reward", "return"), title=f"Returns with γ = {gamma:g}")


sliders(draw_returns, title="How far back does the outcome reach?", gamma=(0.0, 1.0, 0.05, 0.8))

# %% [markdown]
# With $\gamma = 1$ every token before the outcome gets all of it. With $\gamma = 0$ each token gets only its own
# reward, and the calls look like pure cost. Language-model agents are mostly trained with $\gamma = 1$: the episodes are
# short, and we do want the first search to be credited for the answer.
#
# ### Exercise 1: returns
#
# Write the return for a batch: `rewards` and `action_mask` of shape $(B, T)$. Rewards lie on sampled tokens. Where the
# mask is off, return 0.


# %%
def returns_to_go(rewards: torch.Tensor, action_mask: torch.Tensor, gamma: float) -> torch.Tensor:
    out = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards))  # one sum for each row
    for t in reversed(range(rewards.shape[1])):
        acted = action_mask[:, t]
        running = ...  # torch.where is your friend
        out[:, t] = ...
    return out


# %%
check("returns_to_go", returns_to_go)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def returns_to_go(rewards, action_mask, gamma):
#     out = torch.zeros_like(rewards)
#     running = torch.zeros(len(rewards))
#     for t in reversed(range(rewards.shape[1])):
#         acted = action_mask[:, t]
#         running = torch.where(acted, rewards[:, t] + gamma * running, running)
#         out[:, t] = torch.where(acted, running, 0.0)
#     return out
# ```
# </details>
#
# ## What a group does
#
# The return is right on average, but it is loud. On an easy question everything looks good, the blunders too. What we
# want to know is whether a rollout was better **than could be expected**. So take something off that does not depend
# on the token: a *baseline* $b(s_t)$. It changes nothing on average, because
# $\mathbb{E}[\nabla \log \pi(a \mid s)] = 0$, and it can take away most of the noise.
#
# Where does a baseline come from without a critic? From trying the same question several times:
#
# $$A = \frac{R - \operatorname{mean}_g R}{\operatorname{std}_g R + \varepsilon}\quad\text{(GRPO)},\qquad
# A = R - \operatorname{mean}_g R\quad\text{(Dr. GRPO)},\qquad
# A = \tfrac{n}{n-1}\bigl(R - \operatorname{mean}_g R\bigr)\quad\text{(RLOO)}.$$

# %%
R = rows.rewards.sum(-1)
given = {"action_mask": rows.action_mask, "group_ids": batch.group_ids}
first = rows.action_mask.int().argmax(-1, keepdim=True)  # the same number on all tokens of a rollout: look at one
table = pd.DataFrame({"group": [WORDS[i] for i in rows.tokens[:, 0]], "R": R})
for name in ("grpo", "dr_grpo", "rloo"):
    table[name] = estimate(name, rows.rewards, **given).advantages.gather(1, first)[:, 0]
table["mean of the group"] = table.groupby("group").R.transform("mean")
table.round(3)

# %% [markdown]
# ### Groups that teach nothing
#
# If all rollouts of a question earn the same, the question teaches nothing: every advantage is 0. That sounds harmless,
# but look what plain arithmetic makes of it. Rewards are floats, the mean rounds, the std is next to nothing, and
# next to nothing divided by next to nothing is *something*:

# %%
equal = torch.full((8,), 1.3)
naive = (equal - equal.mean()) / (equal.std() + 1e-6)
ours = estimate("grpo", equal[:, None], torch.ones(8, 1), group_ids=[0] * 8).advantages[:, 0]
print("plain arithmetic:", [round(x, 3) for x in naive.tolist()][:3], "…   the package:", ours.tolist()[:3], "…")

with warnings.catch_warnings(record=True) as caught:  # a group of one
    warnings.simplefilter("always")
    alone = estimate("grpo", [[0.0, 1.0]], [[1, 1]], group_ids=["q"]).advantages
print("a group of one:", alone, "and a warning:", caught[0].message)
print("share of our two groups without variance:", zero_variance_share(R, batch.group_ids))

# %% [markdown]
# The package decides by *largest equals smallest*, and gives exactly 0. A group of one is such a group.
#
# How often does a group come out flat? That depends on its size and on how sure the policy is. For Two Boxes we can
# compute it: if a return $r$ has the probability $p_r$, a group of $G$ is flat with probability $\sum_r p_r^G$. Move
# both, the group's size and how many steps the policy has learned: the better it gets, the more of its groups are flat.


# %%
climb = [logits]  # the policy after 0, 10, 20 … steps along the exact gradient
for _ in range(20):
    table = climb[-1]
    for _ in range(10):
        table = table + 20.0 * exact_gradient(world, table)
    climb.append(table)


def flat_groups(policy, sizes):
    """P(all returns of a group are equal) for both questions and each group size."""
    chance = probabilities(world, policy)
    earned = world.rows.rewards.sum(-1).mul(1e6).round()
    out = []
    for question in range(2):
        own = world.rows.tokens[:, 0] == question
        _, place = earned[own].unique(return_inverse=True)
        p = torch.zeros(int(place.max()) + 1, dtype=torch.float64).index_add(0, place, chance[own])
        out.append([float((p**size).sum()) for size in sizes])
    return out


def draw_groups(group_size, steps):
    sizes = list(range(1, 17))
    fig, axes = figure(9.5, 3.1, cols=2)
    for question, shares in enumerate(flat_groups(climb[steps // 10], sizes)):
        name = WORDS[question]
        axes[0].plot(sizes, shares, **line(question), label=f"{name} {shares[group_size - 1]:.0%} at {group_size}")
    axes[0].axvline(group_size, color=COLORS["muted"][0], ls=":", lw=1.4)
    axes[0].set(xlabel="group size G", ylabel="share of flat groups", ylim=(0, 1.05), title="Groups without variance")
    axes[0].legend(loc="upper right")
    axes[1].plot(sizes, [1 - 1 / n for n in sizes], **line(2), label="R − mean (Dr. GRPO): (G − 1)/G")
    axes[1].plot(sizes[1:], [1.0] * 15, **line(3), label="leave one out (RLOO): 1")
    axes[1].axvline(group_size, color=COLORS["muted"][0], ls=":", lw=1.4)
    axes[1].set(xlabel="group size G", ylabel="share of the true gradient", ylim=(0, 1.15), title="What the mean eats")
    axes[1].legend(loc="lower right")
    return show(fig, alt=f"Flat groups and the gradient's share over the group size, marked at {group_size}")


sliders(draw_groups, title="The size of a group", group_size=(1, 16, 1, 4), steps=(0, 200, 10, 100))

# %% [markdown]
# The right picture is about a fault that is easy to miss. The group's mean holds the rollout's own return: it is *not*
# independent of the token, and it eats a share $1/G$ of the gradient. Leaving the own return out of the mean (RLOO)
# repairs that. Since the share is the same for all tokens, it is only a smaller learning rate.
#
# Dividing by the group's std is another matter: it weighs questions differently, those most on which the rollouts
# nearly agree. That changes the *direction*. We will measure how much.
#
# ### Exercise 2: the group's advantage
#
# Write GRPO's advantage for returns of shape $(B,)$ and group numbers of shape $(B,)$, with the unbiased std (divide by
# $n - 1$) and $\varepsilon = 10^{-6}$. A group whose returns are all equal, a group of one too, gets exactly 0.


# %%
def group_advantage(returns: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(returns)
    for group in group_ids.unique():
        own = returns[group_ids == group]
        out[group_ids == group] = ...
    return out


# %%
check("group_advantage", group_advantage)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def group_advantage(returns, group_ids):
#     out = torch.zeros_like(returns)
#     for group in group_ids.unique():
#         own = returns[group_ids == group]
#         if own.max() > own.min():  # else it stays exactly 0
#             out[group_ids == group] = (own - own.mean()) / (own.std() + 1e-6)
#     return out
# ```
# </details>
#
# ## What a critic does
#
# A group gives every token of a rollout the same advantage. A **critic** $V$ can tell tokens apart: it guesses, before
# each token, what is still to come. If the guess rises after a token, the token was good:
#
# $$\delta_t = r_t + \gamma V_{t+1} - V_t, \qquad
# A_t = \delta_t + \gamma\lambda\, A_{t+1} \quad\text{(GAE)}.$$
#
# $V_{t+1}$ belongs to the next **action** token; the reply between them is skipped. $\lambda = 0$ believes the critic
# alone, $\lambda = 1$ believes the rewards alone and keeps $V_t$ as a baseline. Move $\gamma$ and $\lambda$, and change
# the critic: the *exact* one knows this policy's true $V$, the *rough* one only knows how many tokens have passed.

# %%
length = torch.tensor([len(history) for history in world.states])
rough = torch.stack([value[length == n].mean() for n in length])
critics = {"exact": value, "rough": rough}


def along(episode_index, table):
    """A table (S,) as a list over the tokens of one trajectory, 0 off the mask."""
    states = rows.state[episode_index, : episodes[episode_index].num_tokens].tolist()
    return [float(table[s]) if s >= 0 else 0.0 for s in states]


def draw_gae(gamma, lam, critic):
    guesses = [along(i, critics[critic]) for i in range(4, 8)]
    shown = credit(episode, "gae", hard, gamma=gamma, lam=lam, values=guesses, whiten=False)
    title = f"GAE with γ = {gamma:g}, λ = {lam:g} and the {critic} critic"
    return credit_html(episode, shown, rows=("reward", "value", "advantage"), title=title)


sliders(
    draw_gae, title="γ, λ and the critic", gamma=(0.0, 1.0, 0.05, 1.0), lam=(0.0, 1.0, 0.05, 0.0), critic=list(critics)
)

# %% [markdown]
# With $\lambda = 0$ and the exact critic you can read the episode like a story: `open` was a fair try, its token could
# not know of the error that followed; but the error lowers the hope for what is left, and the bill for it is laid at
# the token before the reply. (That is the world's doing, not the token's. On average over many episodes it cancels.)
# With the rough critic the story is gone.
#
# By hand, for the first turn's two tokens, with the package's scalar version of the same recursion:

# %%
acted = [t for t, m in enumerate(mask) if m]
v = [along(6, value)[t] for t in acted]
r = [rewards[t] for t in acted]
delta = [r[0] + v[1] - v[0], r[1] + v[2] - v[1]]
print("δ by hand          ", [round(x, 4) for x in delta])
print("compute_gae, λ = 0 ", [round(x, 4) for x in compute_gae(v, r, gamma=1.0, lam=0.0)[:2]])

# %% [markdown]
# ## Every estimator on the same batch
#
# | name in the package | advantage | needs |
# |---|---|---|
# | `gae` (PPO) | GAE over action tokens, whitened over the batch | critic |
# | `turn_gae` | GAE over turns: one value, one reward a turn | critic |
# | `n_step` | $n$ rewards, then the critic | critic |
# | `grpo`, `dr_grpo`, `rloo` | see above | groups |
# | `opo` | $R$ minus the group's mean weighted by length | groups |
# | `gpg` | $R - \operatorname{mean}_g$, times rollouts over rollouts with a reward | groups |
# | `grpo_passk` | the best of a group gets its lead over the second, others 0 | groups |
# | `gigpo` | GRPO plus a comparison of turns that began with the same observation | groups, anchors |
# | `reinforce_pp` | $G_t$, whitened over the batch | nothing |
# | `reinforce_pp_baseline` | $R - \operatorname{mean}_g$, whitened over the batch | groups |
# | `remax` | $G_t$ minus the return of a greedy rollout | one more rollout |
#
# *Whitened* means: minus the mean, divided by the std, over all action tokens of the batch. Here they are on the rollout
# you know, each with its own scale (beside its name). Look at which tokens an estimator can tell apart.

# %%
A = {name: advantages(world, name, batch, values=value) for name in names()}  # (B, T) each
shown = {name: a[6, : episode.num_tokens].tolist() for name, a in A.items()}
show(credit_html(episode, shown, rows=names(), title="Every estimator on one rollout"))

# %%
table = {}
for name, a in A.items():
    per_rollout = [a[b][rows.action_mask[b]] for b in range(8)]
    table[name] = {
        "one number a rollout": all(float(x.max() - x.min()) < 1e-9 for x in per_rollout),
        "mean over the batch": float(a[rows.action_mask].mean()),
        "std over the batch": float(a[rows.action_mask].std()),
    }
pd.DataFrame(table).T.infer_objects().round(3)

# %% [markdown]
# The whitened ones have mean 0 and std 1. `grpo_passk` is silent on this rollout: the two best of its group earned the
# same, so the best has no lead.
#
# Two estimators can disagree about one token. Here are GRPO and PPO on the rollout that called three times and never
# answered; tokens on which they differ have a line above.

# %%
silent = 4
sides = tuple({"advantage": A[name][silent, : episodes[silent].num_tokens].tolist()} for name in ("grpo", "gae"))
show(compare_html(episodes[silent], episodes[silent], quantities=sides, labels=("GRPO", "PPO (GAE)")))

# %% [markdown]
# And on the language model that comes with the kit. Same functions, longer words. Choose another quantity to colour by,
# and walk through the tokens with the arrow keys.

# %%
policy = QwenPolicy("atlas-tiny")
task_set = load_task("atlas", "dev", failing=0.2, rewards={"em": 1.0, "step_penalty": -0.05})
played = rollout(policy, task_set.env, task_set.tasks[: 6 if FAST else 24], group_size=4, seed=2)
groups = [played[i : i + 4] for i in range(0, len(played), 4)]
real = max(groups, key=lambda g: (len({t.reward for t in g}), max(len(t.turns) for t in g)))
longest = max(real, key=lambda t: len(t.turns))
sides = tuple(credit(longest, name, real, gamma=0.98) for name in ("grpo", "reinforce_pp"))
show(compare_html(longest, longest, quantities=sides, labels=("GRPO", "REINFORCE++, γ = 0.98"), tokenizer=policy))

# %% [markdown]
# ## Bias and variance
#
# So many answers: which is right? There is a clean way to ask. An estimator turns a batch into a gradient
#
# $$\hat g = \frac{1}{B} \sum_b \sum_t M_{bt}\, A_{bt}\, \nabla \log \pi_\theta(a_{bt} \mid s_{bt}).$$
#
# Draw many batches, look at the cloud of $\hat g$, and compare with the exact $g = \nabla J$, which we have. First, one
# batch by hand. For a softmax over logits, $\nabla \log \pi$ is one-hot minus $\pi$:

# %%
g = exact_gradient(world, logits)  # (S, 2)
by_hand = torch.zeros_like(g)
for b in range(len(rows.tokens)):
    for t in rows.action_mask[b].nonzero().flatten():
        s, a = rows.state[b, t], rows.choice[b, t]
        one_hot = torch.nn.functional.one_hot(a, 2)
        by_hand[s] += A["rloo"][b, t] * (one_hot - logits[s].softmax(-1)) / len(rows.tokens)
package = policy_gradient(world, logits, batch.index, A["rloo"][None])[0]
print("one batch by hand equals the package's:", torch.allclose(by_hand, package))
print(f"length of the exact gradient {g.norm():.3f}, of this batch's estimate {by_hand.norm():.3f}")

# %% [markdown]
# One batch of eight rollouts is a poor guess. What matters is what many of them do. Four numbers tell it:
#
# - **gain** $\mathbb{E}\hat g \cdot g / |g|^2$: 1 if unbiased. Another constant is another learning rate.
# - **bias** $|\mathbb{E}\hat g - g| / |g|$: everything that is off, the constant too.
# - **angle** between $\mathbb{E}\hat g$ and $g$, in degrees: the part of the bias that no learning rate undoes.
# - **noise**: the standard deviation of $\hat g$, relative to the length of $\mathbb{E}\hat g$ along $g$.
#
# Behind each stands its 95 % interval (from the jackknife). The mean of $N$ noisy gradients is itself noisy, and would
# look biased for that reason alone; `quality` takes the noise's share off first.

# %%
N = 100 if FAST else 1000  # batches of 16 groups of 4 rollouts for each estimator
exact = g.flatten()


def measure(name, n=N, on=world, **options):
    """Quality of an estimator over n batches sampled in the world ``on``, against the true gradient."""
    return quality(gradient_samples(on, logits, name, n, groups=16, **options), exact)


found = {name: measure(name) for name in names()}
found["gae, not whitened"] = measure("gae", whiten=False)
found["return, no baseline"] = measure("reinforce_pp", whiten=False)
pd.DataFrame({name: {k: str(x) for k, x in q._asdict().items()} for name, q in found.items()}).T


# %%
def draw_quality(found):
    fig, axes = figure(9.5, 5.2, cols=2, sharey=True)
    for n, (key, label) in enumerate((("angle", "angle to the exact gradient, degrees"), ("noise", "noise / signal"))):
        for y, (_, q) in enumerate(reversed(found.items())):
            x = getattr(q, key)
            axes[n].plot([x.low, x.high], [y, y], color=line(n)["color"], ls="-", lw=3, alpha=0.5)
            axes[n].plot(x.value, y, line(n, True)["marker"], color=line(n)["color"], ms=7)
        axes[n].set(xlabel=f"{label} (95 % interval)", xlim=(0, None))
    axes[0].set_yticks(range(len(found)), list(reversed(found)))
    axes[0].set_title("Bias that stays")
    axes[1].set_title("Noise of one batch")
    return show(fig, alt="Angle and noise of every estimator with intervals; the numbers stand in the table above")


draw_quality(found)

# %% [markdown]
# Read the table with the theory in mind (and remember that of twenty such intervals one misses by luck):
#
# - `rloo`, `remax`, the plain return, `n_step` and `gae` without whitening are **unbiased**: their gain is 1, and the
#   intervals of bias and angle reach down to 0. (The critic is exact here. That is luxury.)
# - `dr_grpo` has a gain near $(G-1)/G = 3/4$, as the picture above promised, and no angle.
# - Everything *whitened* has a large gain, since it is divided by the batch's std, the same number for all tokens. That
#   is a learning rate, and the angle stays small.
# - `grpo` divides by the std of each **group**, and that turns the direction. Where all four rollouts found the ball, they
#   differ only in what their calls cost; the division makes that difference as large as hit against miss.
# - `gigpo` builds on GRPO, and compares turns by their last observation alone. In Two Boxes the earlier turns matter
#   too, so that comparison is biased as well.
# - `grpo_passk` serves another aim: the best of a group, not the mean. It *should* point elsewhere.
# - A good baseline takes noise away: compare `gae, not whitened` with the plain return. `remax` shows that not every
#   baseline is good: where the world throws dice, one greedy rollout is itself luck.
#
# None of this says which estimator trains best: that depends on how the noise, the step size and the clipping of
# lesson 05 play together, and GRPO trains well in practice. But you now know which part of the difference between two
# algorithms is a constant, which is bias, and which is luck.
#
# ### λ trades bias for noise, if the critic is wrong
#
# With the exact critic every $\lambda$ is right on average, and a small one is quieter. With a wrong critic a small
# $\lambda$ believes what is not so.

# %%
lams = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
n = 60 if FAST else 300
sweep = {
    name: [measure("gae", n, values=v, lam=lam, whiten=False, seed=2) for lam in lams] for name, v in critics.items()
}
fig, axes = figure(9.5, 3.2, cols=2)
for i, (name, qualities) in enumerate(sweep.items()):
    for ax, key in zip(axes, ("bias", "noise"), strict=True):
        figures = [getattr(q, key) for q in qualities]
        ax.fill_between(lams, [f.low for f in figures], [f.high for f in figures], color=line(i)["color"], alpha=0.2)
        ax.plot(lams, [f.value for f in figures], **line(i, True), label=f"{name} critic")
axes[0].set(xlabel="λ", ylabel="bias / length of g", ylim=(0, None), title="Bias")
axes[1].set(xlabel="λ", ylabel="noise / signal", ylim=(0, None), title="Noise")
axes[0].legend()
show(fig, alt="Bias and noise of GAE over lambda for the exact and the rough critic, with 95 % bands")

# %% [markdown]
# Measure what you like. Each move draws 150 batches anew, so the intervals are wide.


# %%
def draw_measured(estimator, group_size, gamma, lam, critic):
    n, options = 40 if FAST else 150, {"gamma": gamma, "lam": lam, "values": critics[critic]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # groups of one are allowed here
        q = measure(estimator, n, group_size=group_size, **options)
    fig, axes = figure(9.5, 1.9, cols=4)
    for i, (ax, (key, x)) in enumerate(zip(axes, q._asdict().items(), strict=True)):
        ax.plot([x.low, x.high], [0, 0], color=line(i)["color"], ls="-", lw=4, alpha=0.5)
        ax.plot(x.value, 0, line(i, True)["marker"], color=line(i)["color"], ms=8)
        ax.set(xlim=(min(0, x.low), max(x.high * 1.1, 1.2)), yticks=[], xlabel=str(x), title=key)
    return show(fig, alt=f"Gain, bias, angle and noise of {estimator}")


sliders(
    draw_measured,
    title="Your own measurement",
    estimator=["grpo", *[name for name in names() if name != "grpo"]],
    group_size=(1, 16, 1, 4),
    gamma=(0.0, 1.0, 0.05, 1.0),
    lam=(0.0, 1.0, 0.05, 1.0),
    critic=list(critics),
)

# %% [markdown]
# ## Process rewards
#
# An outcome at the very end is little to learn from. Can rewards on the way help? Three kinds are common.
#
# 1. **Costs and credits that we mean**: the price of a call, a bonus for evidence found. They belong to the task. In a
#    `ToolEnv` they are named parts with weights: `rewards={"em": 1.0, "evidence": 0.2, "step_penalty": -0.01}`.
# 2. **The outcome spread over the turns**: $r_t = r_{\text{final}}\,\gamma^{T-t} + r_{\text{intermediate}}$, the
#    overview's *shaped* reward (`"shaping"` in the same mapping). In this formula $t$ counts **turns** and $T$ is the
#    number of turns, not of tokens as in the table at the top.
# 3. **A learned judge's scores**, whose scale nobody knows. PRIME divides them by the largest
#    $|\sum_{j \ge t} r_j|$ of the batch.

# %%
print("outcome 1, γ = 0.9, three turns, costs 0.1:", [round(x, 3) for x in shape(1.0, [-0.1, -0.1, 0.0], gamma=0.9)])
scores = torch.tensor([[0.0, 3.0, 0.0, 2.0], [0.0, -1.0, 0.0, 4.0]])
print("scores, normalised:\n", normalise_process_rewards(scores, torch.ones(2, 4)))

# %% [markdown]
# ## Shaping
#
# Rewards on the way have a danger: the policy will do what is paid, not what was meant. Here is a well-meant bonus, the
# kind one adds after seeing a policy that never uses its tools: *pay for each call that returns something*. We give it
# to Two Boxes, let `solve` find the best policy **under the bonus**, and look at what that policy earns by the true
# rewards.


# %%
def outcome_of(shaped):
    """What the best policy under shaped rewards does, and earns by the true ones."""
    best = solve(shaped)[1].argmax(-1)
    chance = probabilities(world, torch.nn.functional.one_hot(best, 2).double().log())
    calls = torch.tensor([sum(edge.reply >= 0 for edge in path) for path in world.paths]).double()
    true = world.rows.rewards.sum(-1)
    return [[float((chance * x)[world.rows.tokens[:, 0] == q].sum()) for q in range(2)] for x in (true, calls)]


def draw_bonus(bonus):
    grid = [i / 20 for i in range(0, 41)]
    earned, calls = zip(*(outcome_of(Boxes(bonus=b)) for b in grid), strict=True)
    fig, axes = figure(9.5, 3.1, cols=2)
    for ax, values, label in ((axes[0], earned, "true return"), (axes[1], calls, "calls in an episode")):
        for q in range(2):
            ax.plot(grid, [v[q] for v in values], **line(q), label=WORDS[q])
        ax.axvline(bonus, color=COLORS["muted"][0], ls=":", lw=1.4)
        ax.set(xlabel="bonus for a call that returns something", ylabel=label)
    axes[0].legend(loc="lower left")
    now = outcome_of(Boxes(bonus=bonus))
    axes[0].set_title(f"earns {now[0][0]:.2f} and {now[0][1]:.2f}")
    axes[1].set_title(f"calls {now[1][0]:.2f} and {now[1][1]:.2f} times")
    return show(fig, alt="True return and number of calls of the policy that is best under the bonus, over the bonus")


sliders(draw_bonus, title="What the best policy does when calls are paid", bonus=(0.0, 2.0, 0.05, 0.2))

# %% [markdown]
# A small bonus already buys calls that are not needed. A large one buys an agent that calls to the last turn and never
# answers. Nothing went wrong in the *learning*: that policy is optimal for what we paid.
#
# ### Potential-based shaping
#
# There is one form of shaping that cannot do this (Ng, Harada and Russell, 1999). Choose any function $\Phi$ of the
# state, a *potential*, with $\Phi = 0$ behind the end, and pay for its change:
#
# $$F(s, s') = \gamma\,\Phi(s') - \Phi(s).$$
#
# Along an episode the terms cancel one another, and what is left is $-\Phi(s_0)$, the same for all episodes of a
# question. Whatever the policy does, its total changes by that constant; so the best policy stays the best. As our
# potential we take how sure one can be of the ball's place: the probability of the likelier box.

# %%
shaped = Boxes(potential=1.0)
k = int(batch.index[0, 6])
plain, extra = world.rows.rewards[k], shaped.rows.rewards[k] - world.rows.rewards[k]
pd.DataFrame(
    {
        "token": [WORDS[i] for i in world.rows.tokens[k].tolist() if i >= 0],
        "r": plain[: episode.num_tokens].tolist(),
        "F": extra[: episode.num_tokens].round(decimals=3).tolist(),
    }
).T

# %%
print("F adds up to", round(float(extra.sum()), 6), "in this episode, and over all episodes to",
      sorted({round(float(x), 6) for x in (shaped.rows.rewards - world.rows.rewards).sum(-1)}))  # fmt: skip
table = {}
kinds = {"true rewards": world, "potential": shaped, "bonus 0.2": Boxes(bonus=0.2), "bonus 1.5": Boxes(bonus=1.5)}
for name, other in kinds.items():
    same = solve(other)[1].argmax(-1) == solve(world)[1].argmax(-1)
    earned, calls = outcome_of(other)
    table[name] = {"same best policy": bool(same.all()), "true return": sum(earned) / 2, "calls": sum(calls) / 2}
pd.DataFrame(table).T

# %% [markdown]
# What is it good for, if it changes nothing? It changes *when* the policy hears of it. The token before a telling reply
# is paid at once, not after the answer. That does not help estimators that hand one number to the whole rollout (they
# see the sum, which is constant), but it does help those that look at returns or TD errors. Bad shaping, in contrast,
# learns fast as well, towards the wrong thing:

# %%
rows_of = {}
for name, other in kinds.items():
    q = measure("reinforce_pp", 2 * n, other, whiten=False, seed=3)
    rows_of[name] = {"gain": str(q.gain), "angle": str(q.angle), "noise": str(q.noise)}
pd.DataFrame(rows_of).T

# %%
fig, axes = figure(8, 3.2)
for i, (name, other) in enumerate(kinds.items()):
    table, curve = imitation(world), []
    for _ in range(80):
        curve.append(float(objective(world, table)))  # always by the true rewards
        table = table + 20.0 * exact_gradient(other, table)
    axes.plot(curve, **line(i), label=name)
axes.axhline(float(solve(world)[0][world.roots].mean()), color=COLORS["muted"][0], ls="-", lw=1)
axes.set(
    xlabel="step of exact gradient ascent", ylabel="true mean return", title="Trained on …, judged by the true rewards"
)
axes.legend(loc="center right")
show(fig, alt="True return while training on true rewards, with a potential, and with a bonus that misleads")

# %% [markdown]
# The curves of the true rewards and of the potential lie on each other: with exact gradients a potential changes nothing
# at all. With sampled gradients it changed the noise, as the table above shows.
#
# ### Exercise 3: shape it yourself
#
# Given the rewards of an episode's turns and the potential at the start of each turn, return the shaped rewards
# $r_k + \gamma\,\Phi(s_{k+1}) - \Phi(s_k)$. Behind the end $\Phi$ is 0.


# %%
def potential_shaping(rewards: torch.Tensor, potentials: torch.Tensor, gamma: float) -> torch.Tensor:
    following = ...  # Φ of the next turn's state, for each turn
    return ...


# %%
check("potential_shaping", potential_shaping)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def potential_shaping(rewards, potentials, gamma):
#     following = torch.cat([potentials[1:], torch.zeros(1)])  # 0 behind the end
#     return rewards + gamma * following - potentials
# ```
# </details>
#
# ## Summary
#
# - The return runs through tool replies; only action tokens are steps. Decay in a reply, or a reset at it, is a fault.
# - A group gives a baseline without a critic. Flat groups teach nothing and must give exactly 0; a group of one is flat.
# - A critic tells tokens apart. $\lambda$ decides how far to believe it: with a wrong critic, small $\lambda$ is biased.
# - Against an exact gradient, bias splits into a constant (a learning rate) and an angle. RLOO, ReMax and plain returns
#   have neither; the **group's** std in the divisor has both. The batch's std (whitening) is close to a constant alone.
# - Process rewards are part of the task or they are shaping. A potential keeps the best policy; other bonuses can
#   replace it.
#
# ## Where this lives in the package
#
# - [`advantages.py`](../agentr1_lite/advantages.py): every estimator, a function of some ten lines each
# - [`credit.py`](../agentr1_lite/credit.py): how rows lose their observations before any estimator sees them
# - [`rewards.py`](../agentr1_lite/rewards.py): named outcome and process parts, shaping, normalisation
# - [`tasks/solvable.py`](../agentr1_lite/tasks/solvable.py) and
#   [`tasks/solvable_gradients.py`](../agentr1_lite/tasks/solvable_gradients.py): Two Boxes, exact and sampled
# - [`views/credit.py`](../agentr1_lite/views/credit.py), [`views/group.py`](../agentr1_lite/views/group.py),
#   [`views/compare.py`](../agentr1_lite/views/compare.py): the pictures of this lesson
