# %% [markdown]
# # 05 · Masked losses
#
# **Aim.** Turn advantages into a loss, and a loss into better weights. You will take PPO's loss apart (ratio, clip, KL,
# entropy, aggregation, value loss), see the gradient of every single token, do one step by hand that equals the
# package's, and at the end write the masked, advantage-weighted loss yourself.
#
# **Before this** lessons 03 (action mask) and 04 (advantages).
#
# **Time.** ≈ 40 min to read and do, {run_seconds} s to run on two cores.

# %% tags=["setup"]

# %%
import math

import pandas as pd
import torch

from agentr1_lite import QwenPolicy, estimate, load_config, load_task, rollout
from agentr1_lite.aggregation import AGGREGATIONS, aggregate
from agentr1_lite.batch import collate
from agentr1_lite.exercises import check
from agentr1_lite.losses import PRESETS, entropy, kl, policy_loss, value_loss
from agentr1_lite.views import compare_html, figure, line, panel, series, show, show_trajectory

policy = QwenPolicy("atlas-tiny")
chat = policy.chat
task_set = load_task("atlas", "train", failing=0.0)
questions = task_set.tasks[: 3 if FAST else 6]
episodes = rollout(policy, task_set.env, questions, group_size=6, temperature=1.0, seed=1)

batch = collate(episodes, pad_id=chat.pad_id)  # (B, T) throughout
mask, old = batch.action_mask, batch.old_logprobs
advantages = estimate("GRPO", batch.rewards, mask, group_ids=batch.group_ids).advantages
print(f"{len(episodes)} episodes, {int(mask.sum())} action tokens, mean reward {batch.rewards.sum(-1).mean():.2f}")

# %% [markdown]
# ## Words for what follows
#
# | in papers | in the package | what it is |
# |---|---|---|
# | $\log \pi_\theta(a_t \mid s_t)$ | `logprobs` | log-probability of token $t$ now |
# | $\log \pi_{\text{old}}(a_t \mid s_t)$ | `old_logprobs` | the same when it was sampled |
# | $\log \pi_{\text{ref}}(a_t \mid s_t)$ | `ref_logprobs` | the same under the frozen reference |
# | $A_t$ | `advantages` | how much better than expected (lesson 04) |
# | $M_t$ | `action_mask` | 1 where the policy chose token $t$ (lesson 03) |
# | $\rho_t$ | `policy_ratio(…)` | $\pi_\theta / \pi_{\text{old}}$ |
# | $\epsilon_{\text{low}}, \epsilon_{\text{high}}, c$ | `clip_low`, `clip_high`, `dual_clip` | how far one batch may push |
# | $\beta$, $H$ | `kl_weight`, `entropy` | price of leaving the reference; spread of the next-token choice |
#
# $B$ rows, $T$ tokens, $V$ words in the vocabulary, $N = \sum M_t$ action tokens.
#
# ## From logits to a log-prob
#
# The model gives logits at every place: at place $t$ those of token $t + 1$. So the log-prob of token $t$ is read one
# place earlier. Three things go wrong here most often: no shift, a forgotten temperature, a forgotten mask.


# %%
def token_logprobs(logits, ids, temperature=1.0):
    """log π of every token at its own place, 0 at place 0; logits (B, T, V), ids (B, T) → (B, T)."""
    logp = (logits[:, :-1] / temperature).log_softmax(-1)  # (B, T − 1, V)
    picked = logp.gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(picked[:, :1]), picked], dim=1)


toy_logits = torch.tensor([[[0.0, 1.0, 2.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])  # one row, three tokens, V = 3
toy_ids = torch.tensor([[0, 2, 0]])
print(token_logprobs(toy_logits, toy_ids).round(decimals=3))

# %% [markdown]
# ## The ratio
#
# The policy gradient says: raise $\log \pi_\theta(a_t \mid s_t)$ in proportion to $A_t$. After the first step the batch
# is no longer from the present policy. Importance weighting repairs that with the ratio
#
# $$\rho_t = \frac{\pi_\theta(a_t \mid s_t)}{\pi_{\text{old}}(a_t \mid s_t)} = \exp(\log \pi_\theta - \log \pi_{\text{old}}),
# \qquad L = -\frac{1}{N} \sum_t M_t \, \rho_t A_t .$$
#
# Before the first step $\rho_t = 1$ on every action token, to rounding. This is the best test of the whole chain from
# sampler to trainer; the package makes it in every run.

# %%
with torch.no_grad():
    now = policy.log_probs(batch, temperature=1.0).logprobs  # (B, T)
ratio = (now - old).exp()[mask]
print(f"ratio on the first pass: {ratio.min():.5f} to {ratio.max():.5f}")
assert (ratio - 1).abs().max() < 1e-3

# %% [markdown]
# At $\rho = 1$ the gradient of $\rho A$ is the gradient of $A \log \pi$, because $\nabla \rho = \rho \nabla \log \pi$.
# Away from 1 they differ:

# %%
for moved in (0.0, 0.4):  # how far log π has moved since it was sampled
    logp = torch.tensor(moved, requires_grad=True)
    (slope_ratio,) = torch.autograd.grad(torch.exp(logp - 0.0) * 2.0, logp)
    (slope_log,) = torch.autograd.grad(logp * 2.0, logp)
    print(f"log π moved by {moved}: slope of ρA is {slope_ratio:.3f}, slope of A log π is {slope_log:.3f}")

# %% [markdown]
# ## A step by hand
#
# Here is the whole of a policy-gradient step, written out: logits, log-probs, ratio, mask, mean, gradient, weights.

# %%
best = advantages.abs().sum(-1).argmax()
part = (batch.group_ids == batch.group_ids[best]).nonzero()[:, 0]  # the rollouts of one question are enough here
few, lr = batch.select(part), 0.1

by_hand = QwenPolicy("atlas-tiny")
logits = by_hand.causal(few.input_ids).logits.float()  # (B, T, V)
logp = token_logprobs(logits, few.input_ids, temperature=1.0)
rho = (logp - few.old_logprobs).exp()
loss_by_hand = -(rho * advantages[part] * few.action_mask).sum() / few.action_mask.sum()
loss_by_hand.backward()
with torch.no_grad():
    for weight in by_hand.actor_parameters():
        weight -= lr * weight.grad

# %% [markdown]
# The package does the same with less work: it computes logits only where actions were chosen, in chunks, and passes
# what rows have in common once. The numbers must agree.

# %%
package = QwenPolicy("atlas-tiny")
optimizer = torch.optim.SGD(package.actor_parameters(), lr=lr)
out = package.log_probs(few, temperature=1.0)
loss_of_package, stats = policy_loss(out.logprobs, few.old_logprobs, advantages[part], few.action_mask)
loss_of_package.backward()
optimizer.step()

assert torch.allclose(loss_by_hand, loss_of_package, atol=1e-5)
pairs = list(zip(by_hand.actor_parameters(), package.actor_parameters(), policy.actor_parameters(), strict=True))
moved = max((b - start).abs().max().item() for _, b, start in pairs)
apart = max((a - b).abs().max().item() for a, b, _ in pairs)
print(f"largest change of a weight {moved:.1e}, largest difference between the two ways {apart:.1e}")
assert moved > 0 and apart < 1e-3 * moved

# %% [markdown]
# ## Clipping
#
# One batch costs much (all those rollouts), so we would like to take several steps on it. But $\rho A$ has no end: a
# token with $A > 0$ can be pushed for ever. PPO ([1707.06347](https://arxiv.org/abs/1707.06347)) stops paying beyond a
# bound and always takes the more pessimistic of two numbers:
#
# $$L_t = -\min\big(\rho_t A_t,\ \text{clip}(\rho_t,\, 1 - \epsilon_{\text{low}},\, 1 + \epsilon_{\text{high}})\, A_t\big).$$
#
# - **Asymmetric clip** (DAPO): $\epsilon_{\text{high}} > \epsilon_{\text{low}}$ leaves rare good tokens more room to
#   grow.
# - **Dual clip** ([1912.09729](https://arxiv.org/abs/1912.09729)): for $A < 0$ and a huge ratio the loss has no bound;
#   it is cut at $-cA$, with $c > 1$.
#
# The controls below are made from the trainer's own configuration: names, bounds and help are its fields'.


# %%
def objective(rho, advantage, clip_low, clip_high, dual_clip=None):
    """What PPO wants to grow, per token; any shape."""
    clipped = rho.clamp(1 - clip_low, 1 + clip_high)
    out = torch.minimum(rho * advantage, clipped * advantage)
    if dual_clip is None:
        return out
    return torch.where(advantage < 0, torch.maximum(out, dual_clip * advantage), out)


def draw_objective(config):
    clip_low, clip_high, dual_clip = config.clip_low, config.clip_high, config.dual_clip
    fig, axes = figure(8, 3.2, cols=2)
    for ax, sign in zip(axes, (1.0, -1.0), strict=True):
        rho = torch.linspace(0, 4 if sign < 0 else 2, 400)
        A = torch.full_like(rho, sign)
        curves = {
            "no clip: ρA": rho * A,
            f"PPO: {clip_low:g} both sides": objective(rho, A, clip_low, clip_low),
            f"asymmetric: {clip_low:g} / {clip_high:g}": objective(rho, A, clip_low, clip_high),
            f"dual clip: c = {dual_clip}": objective(rho, A, clip_low, clip_high, dual_clip),
        }
        for i, (name, values) in enumerate(list(curves.items())[: 4 if sign < 0 else 3]):
            ax.plot(rho, values, label=name, **line((5, 0, 1, 2)[i]))
        ax.plot([1], [sign], "o", color=series(3), label="where the batch was sampled")
        ax.set(xlabel="ratio ρ", ylabel="objective", title=f"A = {sign:+.0f}")
        ax.legend(loc="upper left" if sign > 0 else "lower left", fontsize=8)
    return show(fig, alt="PPO's objective against the ratio, for a positive and a negative advantage")


config = load_config("atlas-tiny").training
config.clip_high = 0.28
bounds = {"clip_low": (0.05, 0.5, 0.05), "clip_high": (0.05, 0.8, 0.01), "dual_clip": (1.5, 6, 0.5)}
panel(config, draw_objective, bounds, title="Three settings of the trainer")

# %% [markdown]
# Where a curve is flat, the token gets **no gradient**. Read the four corners:
#
# | | $\rho < 1 - \epsilon_{\text{low}}$ | $\rho > 1 + \epsilon_{\text{high}}$ |
# |---|---|---|
# | $A > 0$ | it fell although it was good: full gradient, back up | it rose enough: flat |
# | $A < 0$ | it fell enough: flat | it rose although it was bad: full gradient, back down |
#
# The pessimistic $\min$ is what keeps the two "back" corners alive. ("Full" means $\rho A$: a token that fell to a tiny
# $\rho$ is pulled back only weakly.) Now watch it in a real update: four steps on the same batch. Each row holds the
# numbers *before* the step that follows.

# %%
trained = QwenPolicy("atlas-tiny")  # `policy` stays as it is: the reference
optimizer = torch.optim.AdamW(trained.actor_parameters())


def one_step(lr):
    """One step on the batch; returns the loss and its numbers before the step."""
    out = trained.log_probs(batch, temperature=1.0)
    loss, stats = policy_loss(out.logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained.actor_parameters(), 1.0)
    optimizer.step()
    return {"loss": loss.item()} | {k: float(v) for k, v in stats.items()}


history = [one_step(lr=5e-5) for _ in range(4)]
columns = ["loss", "clip_fraction", "ratio_min", "ratio_max", "approx_kl_k3"]
pd.DataFrame(history)[columns].rename_axis("steps taken").round(4)

# %%
with torch.no_grad():
    out = trained.log_probs(batch, temperature=1.0, entropy=True)
    ref = policy.log_probs(batch, temperature=1.0).logprobs


def scatter_ratios(ax, logprobs, ratios, **look):
    """One mark a token: how likely it was when sampled, and its ratio (drawn at 0.05 if it is smaller, at 20 if larger).

    Tokens that were likelier than 0.99 are left out: too many.
    """
    some = logprobs.exp() < 0.99
    ax.plot(logprobs[some].exp(), ratios[some].clamp(0.05, 20), linestyle="", alpha=0.7, **look)
    ax.set_yscale("log")
    ax.set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    ax.yaxis.minorticks_off()


fig, ax = figure(7.5, 3.2)
moved = (out.logprobs - old).exp()
for i, (name, where) in enumerate({"A > 0": advantages > 0, "A < 0": advantages < 0}.items()):
    look = {"label": name, "color": series(i), "marker": "os"[i], "markersize": 5}
    scatter_ratios(ax, old[mask & where], moved[mask & where], **look)
ax.axhspan(0.8, 1.2, color=series(5), alpha=0.25, lw=0)
ax.annotate("inside the clip", (0.4, 0.95), fontsize=8)
sure = mask & (old > math.log(0.99))
print(f"{100 * sure.sum() / mask.sum():.0f} % of the tokens were sampled with a probability above 0.99: not drawn;",
      f"their ratios lie between {moved[sure].min():.3f} and {moved[sure].max():.3f}")  # fmt: skip
far, fell = mask & (moved > 1.2), mask & (moved < 0.8)
right_way = (far & (advantages > 0)) | (fell & (advantages < 0))
wrong_way = (far & (advantages < 0)) | (fell & (advantages > 0))
print(f"outside the band: {right_way.sum()} tokens the right way (now flat), {wrong_way.sum()} the wrong way;",
      f"all ratios: {moved[mask].min():.3f} to {moved[mask].max():.3f}")  # fmt: skip
ax.set(xlabel="probability of the token when it was sampled", ylabel="ratio ρ", title="After four steps on one batch")
ax.legend(fontsize=8)
show(fig, alt="Ratio of every action token after four steps against its probability when sampled")

# %% [markdown]
# The tokens that are *not* drawn, those of which the policy was sure, hardly moved. Those where it had a choice (which
# name, search again or answer) moved further. Marks above the band with $A > 0$, and below it with $A < 0$, have gone
# the right way and far enough: their gradient is now 0. Marks on the other side went the wrong way, carried along by
# tokens that share the same weights, and are pushed back.
#
# The clip is no wall. It only takes the gradient away *beyond* the band; it does not stop a step that started inside.
# AdamW moves every weight by about the learning rate, however small its gradient, so a single step can leap over the
# band, and its momentum and the other tokens carry a clipped token on. Look at the table: a ratio fell below 0.05 in
# the first step and another leapt above 6 in the second, and both came nearer to 1 later. That is why learning rates
# are small, and why the run log shows `clip_fraction` and the ratios.
#
# ## Gradient per token
#
# What does the loss want of each token? Ask for its derivative with respect to $\log \pi$ of that token. It is $-\rho_t
# A_t / N$ where the clip lets it through, 0 where it does not, and **exactly** 0 off the mask.


# %%
def gradient_per_token(logprobs, **settings):
    """dL / d log π of every token; (B, T)."""
    leaf = logprobs.detach().clone().requires_grad_()
    policy_loss(leaf, old, advantages, mask, **settings)[0].backward()
    return leaf.grad


wish = {name: -gradient_per_token(out.logprobs, **PRESETS[name]) * mask.sum() for name in ("ppo", "cispo")}
assert all((g[~mask] == 0).all() for g in wish.values())

b = int((wish["cispo"] - wish["ppo"]).abs().sum(-1).argmax())  # where it matters most which of the two is used
length = int(batch.lengths[b])
shared = {"advantage": advantages[b], "ratio": torch.where(mask[b], moved[b], 1.0), "entropy": out.entropy[b]}
shared["kl"] = kl(out.logprobs, ref, "k3", mask)[b]
shared = {name: values[:length].tolist() for name, values in shared.items()}
ppo, cispo = ({"wish": wish[name][b, :length].tolist()} for name in ("ppo", "cispo"))
title = "What PPO's loss wants of each token after four steps"
show_trajectory(episodes[b], "wish", tokenizer=policy.tokenizer, title=title, quantities={**ppo, **shared})

# %% [markdown]
# In an episode with $A > 0$ every wish is "more of this", with $A < 0$ "less of this". Prompt, seam and tool reply are
# blank: no gradient, exactly. Blank *action* tokens are the clipped ones; switch to ratio to see how far they went.
#
# CISPO ([2506.13585](https://arxiv.org/abs/2506.13585)) clips the *weight* instead of the objective, so no token falls
# silent. The same episode under both; tokens with a line above differ:

# %%
labels = ("PPO: clipped tokens fall silent", "CISPO: none does")
options = {"color_by": "wish", "labels": labels, "tokenizer": policy.tokenizer}
show(compare_html(episodes[b], episodes[b], quantities=(ppo, cispo), **options))

# %% [markdown]
# ## The KL to a reference
#
# Reward alone can pull a policy far from sensible language. A price $\beta \, \mathrm{KL}(\pi_\theta \|
# \pi_{\text{ref}})$ holds it near a frozen reference. Exactly it is a sum over the vocabulary; on sampled tokens we
# estimate it, with $d = \log \pi_{\text{ref}} - \log \pi_\theta$ and samples **from** $\pi_\theta$:
#
# | estimator | formula | |
# |---|---|---|
# | $k_1$ | $-d$ | unbiased; negative on many samples |
# | $k_2$ | $\tfrac12 d^2$ | biased when policies are far apart; never negative |
# | $k_3$ | $e^{d} - d - 1$ | unbiased and never negative; explodes where $\pi_{\text{ref}} \gg \pi_\theta$ |
#
# For a small vocabulary nothing has to be sampled: mean and spread of each are sums we can do exactly.

# %%
generator = torch.Generator().manual_seed(0)
V = 50
ref_logits = 1.5 * torch.randn(V, generator=generator, dtype=torch.float64)
direction = torch.randn(V, generator=generator, dtype=torch.float64)


def exact(distance):
    """Exact KL, and mean and standard deviation of each estimator on one sample."""
    logp, logq = (ref_logits + distance * direction).log_softmax(0), ref_logits.log_softmax(0)
    p, d = logp.exp(), logq - logp
    estimates = {"k1": -d, "k2": 0.5 * d**2, "k3": d.exp() - d - 1}
    means = {name: (p * k).sum() for name, k in estimates.items()}
    spreads = {name: (p * (k - means[name]) ** 2).sum().sqrt() for name, k in estimates.items()}
    return (p * -d).sum(), means, spreads


results = [exact(x) for x in torch.logspace(-1.5, 0.5, 40)]
true = torch.stack([r[0] for r in results])
fig, axes = figure(8, 3.1, cols=2)
for i, name in enumerate(("k1", "k2", "k3")):
    mean, spread = (torch.stack([r[n][name] for r in results]) for n in (1, 2))
    axes[0].plot(true, 100 * (mean - true) / true, label=name, **line(i))
    axes[1].plot(true, spread / true, label=name, **line(i))
axes[0].set(xscale="log", xlabel="exact KL (nats)", ylabel="bias (% of the KL)", title="Mean against the truth")
axes[1].set(xscale="log", yscale="log", xlabel="exact KL (nats)", ylabel="spread of one sample / KL")
axes[1].set_title("How noisy one token is")
axes[0].legend()
show(fig, alt="Bias and spread of the KL estimators k1, k2, k3 against the exact KL")

# %% [markdown]
# Near the reference $k_3$ is far less noisy than $k_1$ at the same mean, which is why GRPO uses it. Far away the order
# turns: rare tokens that the reference likes make $k_3$ wild, so the package clamps it. $k_1$ stays the honest one for
# the reward, where its sign may vary.
#
# **As a loss** a second question counts: what is the *gradient* of the estimator? Again exact, over the vocabulary:

# %%
theta = (ref_logits + 0.5 * direction).requires_grad_()
logq = ref_logits.log_softmax(0)


def expected_gradient(estimator):
    """E over samples of π of the gradient of the estimator; what training on it follows on average."""
    logp = theta.log_softmax(0)
    weighted = (logp.exp().detach() * estimator(logq - logp)).sum()  # the samples do not depend on θ
    return torch.autograd.grad(weighted, theta)[0]


logp = theta.log_softmax(0)
of_kl = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), theta)[0]
of_reverse = torch.autograd.grad((logq.exp() * (logq - theta.log_softmax(0))).sum(), theta)[0]
rows = {
    name: (g := expected_gradient(k), g.norm().item(), (g - of_kl).norm().item(), (g - of_reverse).norm().item())[1:]
    for name, k in {"k1": lambda d: -d, "k2": lambda d: 0.5 * d**2, "k3": lambda d: d.exp() - d - 1}.items()
}
about = ["length", "distance to ∇KL(π‖π_ref)", "distance to ∇KL(π_ref‖π)"]
pd.DataFrame(rows, index=about).T.round(4)

# %% [markdown]
# $k_1$ as a loss pushes nowhere on average: put it into the reward. $k_2$ follows the KL we meant. $k_3$ follows the KL
# with both policies swapped, which is a pull to the same reference in another way; near it the two hardly differ. In
# the package, `kl_in="reward"` and `kl_in="loss"` choose the place.
#
# Now on real tokens. We let the policy go further, eight steps at ten times the learning rate, play again, and estimate
# how far it has moved from the reference on the tokens **it** sampled. The last line is the sum over the vocabulary at
# the same places.

# %%
for _ in range(8):
    one_step(lr=5e-4)
fresh = rollout(trained, task_set.env, questions, group_size=6, temperature=1.0, seed=5)
fresh_batch = collate(fresh, pad_id=chat.pad_id)
acted = fresh_batch.action_mask
with torch.no_grad():
    mine, theirs = (p.log_probs(fresh_batch).logprobs[acted] for p in (trained, policy))  # (N,) each
    logits = (p.causal(fresh_batch.input_ids).logits[:, :-1][acted[:, 1:]] for p in (trained, policy))
    here, there = (z.float().log_softmax(-1) for z in logits)  # (N, V) each
rows = {name: kl(mine, theirs, name) for name in ("k1", "k2", "k3")}
rows["sum over V"] = (here.exp() * (here - there)).sum(-1)
table = {name: (x.mean(), x.std() / len(x) ** 0.5, (x < -1e-4).float().mean()) for name, x in rows.items()}
pd.DataFrame(table, index=["mean (nats)", "standard error", "share below 0"]).T.astype(float).round(4)

# %% [markdown]
# $k_1$ and $k_3$ find the sum to within a few standard errors, $k_1$ with many tokens below zero. $k_2$ counts large
# moves too much: this policy has left the region where it is a fair estimate.
#
# ## Entropy
#
# $$H_t = -\sum_v \pi_\theta(v \mid s_t) \log \pi_\theta(v \mid s_t)$$
#
# is 0 where the policy is sure and $\log V$ where it has no idea. Most tokens of a tool call are forced by the format;
# the choices stand out:

# %%
turn = max(episodes[b].turns, key=lambda t: float(out.entropy[b, t.start : t.end].sum()))
span = slice(turn.start, turn.end)
pieces = [chat.decode([i]).replace("\n", "↵") for i in batch.input_ids[b, span].tolist()]
fig, ax = figure(8, 2.9)
ax.bar(range(len(pieces)), out.entropy[b, span].tolist(), color=series(0))
ax.set_xticks(range(len(pieces)), pieces, rotation=60, ha="right", fontsize=8)
top = entropy(torch.zeros(len(chat.tokenizer)))
ax.set(ylabel="entropy (nats)", title=f"Where the policy has a choice (log V = {top:.1f})")
show(fig, alt="Entropy of each token of one turn")

# %% [markdown]
# RL makes a policy sure of itself, at times too early. An entropy bonus subtracts $\eta H$ from the loss
# (`entropy_weight`). It also flattens tokens that *should* be forced, so keep it small, or watch the curve and do
# without.
#
# ## Aggregation
#
# Tokens have losses; the optimiser wants one number. Every choice is a sum divided by something, and the choice decides
# **how much a trajectory weighs**. Take a short and a long episode:

# %%
toy_mask = torch.zeros(2, 20, dtype=torch.bool)
toy_mask[0, :4], toy_mask[1, :20] = True, True


def token_weights(action_mask, mode):
    """The weight each token's loss gets; (B, T). It is the gradient of the aggregate."""
    losses = torch.zeros(action_mask.shape, requires_grad=True)
    aggregate(losses, action_mask, mode).backward()
    return losses.grad


names = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
fig, axes = figure(8, 3.2, cols=2)
for i, mode in enumerate(names):
    weight = token_weights(toy_mask, mode)
    share = 100 * weight.sum(-1) / weight.sum()
    axes[0].barh([i - 0.2, i + 0.2], share, height=0.38, color=[series(0), series(1)], hatch=["", "//"])
    real = token_weights(mask, mode)
    look = {"marker": "os^D"[i], "color": series(i), "markersize": 9 - 2 * i, "alpha": 0.8}
    axes[1].plot(mask.sum(-1), 100 * real.sum(-1) / real.sum(), linestyle="", label=mode, **look)
axes[0].set_yticks(range(4), names)
axes[0].invert_yaxis()
axes[0].bar_label(axes[0].containers[0], ["4 tokens", "20 tokens"], padding=3, fontsize=8)
axes[0].set(xlabel="share of the loss (%)", title="A short and a long episode", xlim=(0, 100))
axes[1].set(xlabel="action tokens of the episode", ylabel="share of the loss (%)", title="Our batch")
axes[1].legend(fontsize=8)
show(fig, alt="Share of the loss of short and long episodes under four aggregations")

# %%
pd.DataFrame(
    {mode: [float(token_weights(toy_mask, mode)[i, 0]) for i in (0, 1)] for mode in AGGREGATIONS},
    index=["a token of the short one", "a token of the long one"],
).T.round(4).rename_axis("weight of one token")

# %% [markdown]
# - **token-mean**: all action tokens weigh the same, so a long episode weighs more. PPO's usual choice.
# - **seq-mean-token-mean** (GRPO's paper): all episodes weigh the same, so a token of a long one weighs less. A long
#   wrong answer is punished less per token than a short wrong one, and answers may grow.
# - **seq-mean-token-sum** and **constant** (Dr. GRPO): as token-mean, with a divisor that does not depend on how long
#   this batch happened to be.
#
# Divide by the *whole batch's* number, also when it is cut into micro-batches: averages of averages are another loss
# ([trl#3021](https://github.com/huggingface/trl/issues/3021)). `normalizer_for` gives that number.
#
# ## The value loss
#
# A critic (PPO) predicts returns $G_t$. Its loss is a squared error, clipped in the same spirit: the value may not run
# away from what it was, $V_{\text{old}}$, in one batch, and the larger of two losses counts:
#
# $$L^V_t = \tfrac12 \max\big((V_t - G_t)^2,\ (\text{clip}(V_t, V_{\text{old}} \pm \epsilon_V) - G_t)^2\big).$$

# %%
target, old_value, clip_value = 1.0, 0.0, 0.5
v = torch.linspace(-1.2, 2.2, 300)
one = torch.ones(1, 1, dtype=torch.bool)


def loss_at(x, clip):
    given = (torch.full((1, 1), float(n)) for n in (x, old_value, target))
    return float(value_loss(*given, one, clip=clip)[0])


fig, ax = figure(7, 2.8)
ax.plot(v, [loss_at(x, None) for x in v], label="½ (V − G)²", **line(5))
ax.plot(v, [loss_at(x, clip_value) for x in v], label=f"clipped at V_old ± {clip_value}", **line(0))
for x, text in ((target, "G"), (old_value, "V_old")):
    ax.axvline(x, color=series(3), linestyle=":", linewidth=1)
    ax.annotate(text, (x, ax.get_ylim()[1]), xytext=(4, -12), textcoords="offset points", fontsize=9)
ax.set(xlabel="value V", ylabel="loss", title="Flat once it has moved far enough towards the return")
ax.legend(fontsize=8)
show(fig, alt="Value loss against the value, plain and clipped")

# %% [markdown]
# ## Temperature and top-p
#
# The sampler divides logits by a temperature $\tau$. The trainer must do the same, or its $\pi_\theta$ is another
# distribution than the one that acted. Sample at 1.3, and compute the ratio of the first pass with both:

# %%
heat = 1.3
warm = rollout(policy, task_set.env, questions, group_size=2 if FAST else 4, temperature=heat, seed=2)
warm_batch = collate(warm, pad_id=chat.pad_id)
with torch.no_grad():
    warm_mask, warm_old = warm_batch.action_mask, warm_batch.old_logprobs
    ratios = {t: (policy.log_probs(warm_batch, temperature=t).logprobs - warm_old).exp() for t in (heat, 1.0)}


def kept_mass(logp, top_p):
    """Mass of the smallest set of likeliest tokens that reaches top_p; logp (N, V) → (N,)."""
    ordered = logp.exp().sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    return torch.where(before < top_p, ordered, 0.0).sum(-1)


# %% [markdown]
# **Top-p** is quieter. The sampler draws from the likeliest tokens that together hold the share $p$, and divides their
# probabilities by the kept mass $m_t$. If it writes *those* log-probs down, the trainer finds $\rho_t = m_t$ on the
# first pass, a little under 1 and different at every token; over an episode the factors multiply. And what was cut can
# never be tried, so it can never be learned.

# %%
with torch.no_grad():
    logits = policy.causal(warm_batch.input_ids).logits[:, :-1][warm_mask[:, 1:]].float()  # (N, V)
cases = {
    f"sampled at {heat}, trained at 1": ratios[1.0][warm_mask],
    "sampled with top-p 0.9": kept_mass(logits.log_softmax(-1), 0.9),
    f"both at {heat}": ratios[heat][warm_mask],
}
fig, ax = figure(7.5, 3.2)
for i, (name, values) in enumerate(cases.items()):
    look = {"label": name, "color": series((1, 2, 0)[i]), "marker": "s^o"[i], "markersize": 5 - i}
    scatter_ratios(ax, warm_old[warm_mask], values, **look)
ax.axhspan(0.8, 1.2, color=series(5), alpha=0.25, lw=0)
ax.set(xlabel="probability of the token when it was sampled", ylabel="ratio ρ on the first pass")
ax.set_title("Before anything was learned")
ax.legend(fontsize=8, loc="lower right")
show(fig, alt="Ratio of the first pass when sampler and trainer agree, and when temperature or top-p differ")

# %%
for name, values in cases.items():
    outside = ((values < 0.8) | (values > 1.2)).float().mean()
    print(f"{name:>30}: ratio {values.min():.3f} to {values.max():.3f}, outside the clip {100 * outside:.1f} %")
masses = cases["sampled with top-p 0.9"].split(warm_mask.sum(-1).tolist())
whole = [m.log().sum().exp().item() for m in masses]
print(f"top-p 0.9, product over an episode: {min(whole):.3f} to {max(whole):.3f}")

# %% [markdown]
# With a wrong temperature some tokens start outside the clip: they lose their gradient or get a wrong weight, and the
# run still looks healthy. That is why the package gives one temperature to both sides, keeps top-p for chat and
# evaluation, and checks $\rho = 1$ on the first pass.
#
# ## Exercises
#
# **1. The clipped loss.** Per token: $-\min(\rho A, \text{clip}(\rho, 1 - \epsilon_{\text{low}}, 1 +
# \epsilon_{\text{high}}) A)$. `ratio` and `advantages` are $(N,)$; so is what you return.


# %%
def clipped_loss(ratio, advantages, clip_low, clip_high):
    free = ...
    held = ...
    return ...


# %%
check("clipped_loss", clipped_loss)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def clipped_loss(ratio, advantages, clip_low, clip_high):
#     free = ratio * advantages
#     held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
#     return -torch.minimum(free, held)
# ```
# </details>
#
# **2. Three estimators.** From the log-probs of tokens that $\pi_\theta$ sampled, under both policies, return $(k_1,
# k_2, k_3)$, each $(N,)$.


# %%
def kl_estimators(logprobs, ref_logprobs):
    d = ...
    return ...


# %%
check("kl_estimators", kl_estimators)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def kl_estimators(logprobs, ref_logprobs):
#     d = ref_logprobs - logprobs
#     return -d, 0.5 * d**2, d.exp() - d - 1
# ```
# </details>
#
# **3. The loss of a tool-using agent.** All of it: from logits $(B, T, V)$, ids, old log-probs, advantages and action
# mask $(B, T)$ and the sampler's temperature to one number. Clip at 0.2 on both sides; mean over the action tokens. You
# may use `clipped_loss` from above.


# %%
def agent_loss(logits, ids, old_logprobs, advantages, action_mask, temperature):
    logprobs = ...  # (B, T − 1), of tokens 1 … T − 1
    ratio = ...
    losses = ...
    return ...


# %%
check("agent_loss", agent_loss)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def agent_loss(logits, ids, old_logprobs, advantages, action_mask, temperature):
#     logp = (logits[:, :-1] / temperature).log_softmax(-1)
#     logprobs = logp.gather(-1, ids[:, 1:, None])[..., 0]  # (B, T − 1)
#     ratio = (logprobs - old_logprobs[:, 1:]).exp()
#     A, M = advantages[:, 1:], action_mask[:, 1:]
#     losses = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
#     return losses[M].mean()
# ```
#
# `losses[M].mean()` and not `(losses * M).sum() / M.sum()`: what stands off the mask may be anything, and $0 \cdot
# \infty$ is not a number.
# </details>
#
# Let it teach: three steps with your loss (or, while the gap is open, the package's) on a fresh copy of the policy. The
# advantage-weighted change of $\log \pi$ should be above zero: that is what the loss asked for. Where the policy was
# sure already, $\log \pi$ has no room to rise, so look at the tokens where it had a choice.


# %%
def package_loss(logits, ids, old_logprobs, advantages, action_mask, temperature):
    return policy_loss(token_logprobs(logits, ids, temperature), old_logprobs, advantages, action_mask)[0]


loss_function = agent_loss if check("agent_loss", agent_loss) else package_loss
rows = (advantages != 0).any(-1).nonzero()[:18, 0]  # the others have nothing to teach
some = batch.select(rows)
A, M = advantages[rows], some.action_mask
pupil = QwenPolicy("atlas-tiny")
optimizer = torch.optim.SGD(pupil.actor_parameters(), lr=0.02)
for _ in range(3):
    loss = loss_function(pupil.causal(some.input_ids).logits.float(), some.input_ids, some.old_logprobs, A, M, 1.0)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(pupil.actor_parameters(), 1.0)
    optimizer.step()
with torch.no_grad():
    change = pupil.log_probs(some).logprobs - some.old_logprobs
choice = M & (some.old_logprobs < -0.05)
print(f"taught by {loss_function.__name__}; advantage-weighted change {(A * change)[M].mean():+.4f}")
for name, where in (("above 0", A > 0), ("below 0", A < 0)):
    print(f"A {name}: log π changed by {change[where & choice].mean():+.3f} where the policy had a choice")
assert (A * change)[M].mean() > 0

# %% [markdown]
# ## Summary
#
# - The loss of an agent: log-probs at the sampler's temperature, ratio to the sampling policy, times the advantage,
#   clipped, on action tokens only, averaged over action tokens.
# - The ratio is 1 on the first pass. If it is not, sampler and trainer disagree: temperature, top-p, drift (lesson 03),
#   dropout.
# - The clip silences a token that has moved far enough in its own direction, and never one that must come back.
# - $k_1$ belongs into the reward; $k_2$ and $k_3$ may be losses; none of them is the KL on one token.
# - Aggregation decides which episodes weigh more; the divisor belongs to the whole batch.
# - The value loss is clipped the same way; entropy says where the policy still has a choice.
#
# **Break it and mend it.** Set `lr=5e-4` in the four steps and look at the ratios; leave the mask out of "A step by
# hand"; give `policy_loss` the setting `aggregation="seq-mean-token-mean"` and compare the wishes.
#
# ## Where this lives in the package
#
# | here | there |
# |---|---|
# | ratio, clip, dual clip, CISPO, KL, entropy, value loss | [`losses.py`](../agentr1_lite/losses.py) |
# | aggregation and its divisor | [`aggregation.py`](../agentr1_lite/aggregation.py) |
# | log-probs at action positions | [`forward.py`](../agentr1_lite/forward.py), [`policy.py`](../agentr1_lite/policy.py) |
# | the whole step | `actor_gradient` in [`update.py`](../agentr1_lite/update.py) |
# | temperature and top-p of the sampler | [`sampling.py`](../agentr1_lite/sampling.py) |
#
# To come: lesson 06, imitation, which uses the same loss with $A = 1$ and demonstrations instead of rollouts.
