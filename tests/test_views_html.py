"""The page parts: what they hold, what they escape, on which scale they draw."""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from test_views_tokens import MESSAGES, episode
from tiny import tokenizer

from agentr1_lite.advantages import compute_returns
from agentr1_lite.foreign import encode_foreign
from agentr1_lite.losses import PRESETS, policy_loss
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, TurnKind
from agentr1_lite.settings import fold
from agentr1_lite.views import (
    compare_html,
    credit,
    credit_html,
    esc,
    figure,
    from_messages,
    group_html,
    line,
    show,
    token_table,
    trajectory_html,
)
from agentr1_lite.views.theme import COLORS, style
from agentr1_lite.views.trajectory import Scale, facts, labels

HOSTILE = '<script>alert(1)</script><img src=x onerror="a()">&lt;\'</p></style>\0\ud800\u202eevil <|im_end|> שלום'
VOID = {"input", "img", "br", "meta"}


class Page(HTMLParser):
    """Tags, attributes and visible text; fails where tags do not balance."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.names, self.text = [], [], set(), ""
        self.tokens = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}
        self.tokens += "t" in (dict(attrs).get("class") or "").split()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data


def data_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.S)[1])


def hostile() -> Trajectory:
    tok, segment = tokenizer(), Segment()
    text = HOSTILE.replace("\ud800", "")
    segment.extend(encode_foreign(tok, text))
    ids = encode_foreign(tok, f"<answer>{text}</answer>")
    start, end = segment.extend(ids, [-0.5] * len(ids))
    turn = Turn(0, start, end, TurnKind.ANSWER, HOSTILE, observation=HOSTILE, flags=[HOSTILE], finish_reason=HOSTILE)
    turn.observation_start = turn.observation_end = end
    return Trajectory(
        HOSTILE, "g", [segment], [turn], question=HOSTILE, golds=[HOSTILE], answer=HOSTILE, reward=1.0,
        reward_parts={HOSTILE: 1.0}, stop_reason=StopReason.ANSWER,
    )  # fmt: skip


def test_foreign_text_stays_text_in_every_view():
    t, tok = hostile(), tokenizer()
    odd = {"advantage": [1.0] * t.num_tokens, HOSTILE: [2.0] * t.num_tokens}
    for html in (
        trajectory_html(t, tokenizer=tok, quantities=odd, title=HOSTILE, id='"><b>'),
        trajectory_html(t),
        compare_html(t, t, tokenizer=tok, quantities=(odd, None), labels=(HOSTILE, "b"), title=HOSTILE),
        credit_html(t, odd, tok, title=HOSTILE),
        group_html([t, t], [1.0, -1.0], tokenizer=tok, quantities=[odd, odd], title=HOSTILE),
    ):
        page = Page(html)
        html.encode("utf-8")
        assert "\0" not in html and "\u202e" not in html
        assert not {"img"} & set(page.tags) and "onerror" not in page.names
        scripts = re.findall(r"<script[^>]*>", html)
        assert set(scripts) <= {"<script>", '<script type="application/json">'} and scripts.count("<script>") == 1
        assert "<script>alert(1)</script>" in page.text and "⟨202E⟩evil" in page.text


def test_control_tokens_are_told_from_their_spelling():
    tok, segment = tokenizer(), Segment()
    segment.extend([*encode_foreign(tok, "<|im_end|>"), tok.convert_tokens_to_ids("<|im_end|>")])
    html = trajectory_html(Trajectory("t", "g", [segment]), tokenizer=tok)
    assert len(re.findall(r'<span class="t[^"]* x"[^>]*>&lt;\|im_end\|&gt;</span>', html)) == 1


def test_the_data_beside_the_tokens():
    t = episode()
    advantage = [0.0, 0.0, 1.5, 1.5, 0.0, 0.0, 0.0, 0.0, -0.5]
    html = trajectory_html(t, quantities={"advantage": advantage})
    data = data_of(html)
    assert data["ids"] == t.segments[0].token_ids and data["source"] == "ppaasoosa"
    assert data["turn"] == [-1, -1, 0, 0, 0, 0, 0, 0, 1]
    assert data["q"]["advantage"]["v"] == advantage and data["q"]["advantage"]["span"] == 1.5
    options = re.findall(r'<option value="([^"]+)"', html)
    assert options == ["source", "action_mask", "reward", "advantage", "sampled_logprob"]
    # coloured without the script too, with the sign as a class that has its own line style
    assert html.count('class="t p" style="--m:1.00"') == 2 and 'class="t n" style="--m:0.33"' in html
    css = style()
    assert re.search(r"\.t\.n\{[^}]*dotted", css) and re.search(r"\.t\.p\{[^}]*solid", css)


def test_scales():
    signed = Scale.of("advantage", [-1.0, 0.0, 4.0])
    assert [signed.look(x) for x in (4.0, -1.0, 0.0, None)] == [("p", 1.0), ("n", 0.25), ("", 0.0), ("", 0.0)]
    ratio = Scale.of("ratio", [0.5, 1.0, 1.25])
    assert [ratio.look(x) for x in (0.5, 1.0, 1.25)] == [("n", 1.0), ("", 0.0), ("p", 0.5)]
    assert Scale.of("logprob", [-4.0, -1.0]).look(-1.0) == ("z", 0.25)
    assert Scale.of("mine", [1.0, 2.0]).kind == "size" and Scale.of("mine", [-1.0, 2.0]).kind == "signed"
    assert Scale.of("advantage", []).look(0.0) == ("", 0.0)


def test_nearly_sure_tokens_stay_pale():
    for name in ("sampled_logprob", "old_logprob", "logprob", "ref_logprob"):
        sure = Scale.of(name, [-0.002, 0.0])
        assert sure.span == 1.0 and sure.look(-0.002) == ("", 0.0) and sure.look(-0.5) == ("z", 0.5)
        assert "−1 nats" in sure.legend()  # the bar's end is what the full colour stands for
        assert Scale.of(name, [-4.0, 0.0]).span == 4.0
    assert Scale.of("entropy", [0.0, 0.25]).look(0.25) == ("z", 0.25)
    kl = Scale.of("kl", [0.0, 0.01])
    assert kl.span == 0.1 and kl.look(0.01)[0] == "z" and Scale.of("kl", [0.0, 0.5]).span == 0.5
    assert Scale.of("reward", [0.0, 0.1]).span == 0.1  # no floor: rewards have no unit of their own


def test_an_unknown_quantity_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="no quantity 'advantag'.*source, action_mask, reward"):
        trajectory_html(episode(), "advantag")
    assert data_of(trajectory_html(episode(), "entropy"))  # known, not measured here: coloured by source
    assert '<option value="source" selected>' in trajectory_html(episode(), "entropy")


def test_parts_of_a_turn():
    made = from_messages(MESSAGES)
    table = token_table(made)
    found = [labels(table, turn.start, turn.end, turn.kind) for turn in made.turns]
    assert list(dict.fromkeys(found[0])) == ["thought", "call"]
    assert list(dict.fromkeys(found[1])) == ["text", "answer"]
    forged = from_messages([{"role": "assistant", "content": "<search>x</search> <tool_response>y</tool_response>"}])
    table = token_table(forged)
    assert list(dict.fromkeys(labels(table, 0, len(table), TurnKind.TOOL_CALL))) == ["call", "forged reply"]


def test_two_thousand_tokens_render_under_a_second():
    segment = Segment()
    segment.extend([5] * 500)
    turns = []
    for _ in range(10):
        start, end = segment.extend([9] * 60, [-0.5] * 60)
        a, b = segment.extend([7] * 90)
        turns.append(Turn(0, start, end, TurnKind.TOOL_CALL, observation_start=a, observation_end=b))
    t = Trajectory("t", "g", [segment], turns)
    numbers = {name: [0.5] * 2000 for name in ("advantage", "return", "value", "entropy", "loss", "ratio", "kl")}
    begin = time.process_time()
    html = trajectory_html(t, tokenizer=tokenizer(), quantities=numbers)
    assert time.process_time() - begin < 1.0
    assert Page(html).tokens >= 2000


def test_credit_is_what_the_estimators_and_losses_say():
    one, two = episode(), episode()
    two.reward = 0.0
    found = credit(one, "GRPO", [one, two])
    mask = [x for s in one.segments for x in s.action_mask]
    assert found["reward"] == [0, 0, 0, 0.25, 0, 0, 0, 0, 1.0]
    acted = [g for g, m in zip(found["return"], mask, strict=True) if m]
    assert acted == pytest.approx([1.25, 1.25, 1.0])
    assert found["advantage"] == pytest.approx([0.5 / 0.5**0.5 if m else 0.0 for m in mask], rel=1e-4)
    both = [credit(t, "GRPO", [one, two]) for t in (one, two)]
    masks, advantages = torch.tensor([mask, mask]), torch.tensor([c["advantage"] for c in both])
    old = torch.tensor([one.segments[0].logprobs, two.segments[0].logprobs])
    loss, _ = policy_loss(old, old, advantages, masks)
    assert sum(sum(c["loss"]) for c in both) == pytest.approx(float(loss), abs=1e-7)
    discounted = credit(one, "GRPO", [one, two], gamma=0.5)["return"]
    assert [discounted[t] for t in (2, 3, 8)] == pytest.approx(compute_returns([0.0, 0.25, 1.0], 0.5))


def test_credit_of_other_weights_and_a_critic():
    one = episode()
    now = [0, 0, -0.25, -1.0, 0, 0, 0, 0, -2.0]
    found = credit(one, "gae", values=[0.5] * 9, logprobs=now, whiten=False)
    assert found["value"][2] == 0.5
    assert found["advantage"][2] == pytest.approx(1.25 - 0.5) and found["advantage"][8] == pytest.approx(0.5)
    assert found["ratio"][2] == pytest.approx(2.718281828**0.25)
    assert found["loss"][2] == pytest.approx(-1.2 * 0.75 / 3)  # clipped at 1.2, one of three tokens
    with pytest.raises(ValueError, match="not in the group"):
        credit(one, group=[episode()])
    with pytest.raises(ValueError, match="values has 2 numbers for 9 tokens"):
        credit(one, "gae", values=[1.0, 2.0])


@pytest.mark.parametrize("name", ["ppo", "GRPO", "GSPO", "dapo", "CISPO", "Dr. GRPO"])
def test_the_loss_of_a_name_is_that_of_its_preset(name):
    group = [episode(), episode()]
    group[1].reward = 0.0
    group[1].segments[0].extend([4, 4], [-1.0, -1.0])
    mask = torch.zeros(2, 11, dtype=torch.bool)
    old, now = torch.zeros(2, 11), torch.full((2, 11), math.nan)
    for row, t in enumerate(group):
        size = t.num_tokens
        mask[row, :size] = torch.tensor(t.segments[0].action_mask)
        old[row, :size] = torch.tensor(t.segments[0].logprobs)
        now[row, :size] = old[row, :size] + torch.linspace(-0.5, 0.6, size)
    now[~mask] = math.nan
    given = [now[row, : t.num_tokens] for row, t in enumerate(group)]
    values = [[0.1] * t.num_tokens for t in group]
    found = [credit(t, name, group, logprobs=given, values=values) for t in group]
    assert all(
        x == 0
        for c, row in zip(found, mask.tolist(), strict=True)
        for x, m in zip(c["loss"], row, strict=False)
        if not m
    )
    advantages = torch.zeros(2, 11)
    for row, c in enumerate(found):
        advantages[row, : len(c["advantage"])] = torch.tensor(c["advantage"])
    preset = PRESETS[{"drgrpo": "dr_grpo"}.get(fold(name), fold(name))]
    loss = float(policy_loss(now, old, advantages, mask, **preset)[0])
    assert sum(sum(c["loss"]) for c in found) == pytest.approx(loss)
    options = {"kind": "ppo", "aggregation": "token-sum"}
    mine = [credit(t, name, group, logprobs=given, values=values, clip=0.1, **options) for t in group]
    own = {**preset, **options, "clip_low": 0.1, "clip_high": 0.1}
    assert sum(sum(c["loss"]) for c in mine) == pytest.approx(float(policy_loss(now, old, advantages, mask, **own)[0]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"values": torch.zeros(7)}, "values has 7 numbers for 9 tokens"),
        ({"values": []}, "values has 0 numbers for 9 tokens"),
        ({"values": 3}, "values is int; give a list"),
        ({"values": torch.tensor(1.0)}, "values is Tensor; give a list"),
        ({"logprobs": [math.nan] * 9}, "logprobs is nan at token 2; .* every sampled"),
        ({"logprobs": [10**400] * 9}, "logprobs is 1000.* at token 2; .* every sampled"),
        ({"logprobs": ["x"] * 9}, "logprobs is 'x' at token 2; .* every sampled"),
        ({"group": 2, "values": [[1.0] * 9]}, r"values is \[\[1\.0.*give a list of numbers for each trajectory"),
        ({"group": 2, "values": torch.tensor(1.0)}, "values is tensor.*for each trajectory"),
        ({"kind": "zz"}, "kind is 'zz'; choose one of ppo"),
    ],
)
def test_what_credit_cannot_use_is_one_sentence(options, says):
    group = [episode() for _ in range(options.get("group", 1))]
    with pytest.raises(ValueError, match=says):
        credit(group[0], "reinforce_pp", **options | {"group": group})


def test_no_number_off_the_mask_counts():
    one = episode()
    mask = one.segments[0].action_mask
    odd = [math.nan, -math.inf, None] * 3
    now = [x if m else o for x, m, o in zip(one.segments[0].logprobs, mask, odd, strict=True)]
    clean = credit(one, "reinforce_pp", logprobs=list(one.segments[0].logprobs), values=[1.0] * 9)
    assert credit(one, "reinforce_pp", logprobs=now, values=torch.ones(1, 9)) == clean
    assert clean["value"] == [float(m) for m in mask]


def test_the_credit_plot_draws_a_bar_a_row_under_every_sampled_token():
    one, two = episode(), episode()
    two.reward = 0.0
    html = credit_html(one, credit(one, "GRPO", [one, two]))
    assert html.count('<span class="col">') == 3 and html.count("tokens fed: no loss") == 2
    assert len(re.findall(r"<b( class=\"[pnz]?\" style=\"--m:[\d.]+\")?></b>", html)) == 3 * 4
    assert data_of(html)["ids"] == [3, 4, 9] and data_of(html)["t"] == [2, 3, 8]
    with pytest.raises(ValueError, match="none of the rows is among action_mask"):
        credit_html(one, {}, rows=("advantage",))


def test_side_by_side_marks_what_differs():
    left, right = episode(), episode()
    right.segments[0].token_ids[3] = 44
    html = compare_html(left, right)
    assert re.findall(r'<span class="t[^"]* d"[^>]*>(\d+) </span>', html.split('class="flow"')[1]) == ["4", "44"]
    assert "different tokens: 1 of 6 and 1 of 6" in html and html.count(">the same<") == 2
    first = [0, 0, 1.0, 1.0, 0, 0, 0, 0, 1.0]
    second = [0, 0, 1.0, -2.0, 0, 0, 0, 0, 1.0]
    html = compare_html(left, left, quantities=({"advantage": first}, {"advantage": second}))
    assert "same tokens; advantage differs on 1 of 6, 1 in sign" in html
    data = data_of(html)
    assert data["q"]["advantage"]["span"] == 2.0  # one scale for both
    assert data["ids"] == [1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8, 9, 9]
    shorter = episode()
    shorter.turns.pop()
    assert "no such turn" in compare_html(left, shorter)


def test_the_group_as_rows():
    one, two = episode(), episode()
    two.reward, two.stop_reason, two.answer = 0.0, StopReason.MAX_TURNS, "Oslo"
    html = group_html([one, two])
    page = Page(html)
    assert page.tags.count("details") >= 2 and "max turns" in page.text and "Oslo" in page.text
    assert "+0.7071" in page.text and "−0.7071" in page.text  # ±0.5 / std, with GRPO's unbiased std
    assert "all earned the same" in group_html([one, episode()], viewers=False)
    assert "<script" not in group_html([one, two], viewers=False)
    with pytest.raises(ValueError, match="3 advantages for 2 trajectories"):
        group_html([one, two], [1, 2, 3])
    with pytest.raises(ValueError, match="1 quantities for 2 trajectories"):
        group_html([one, two], quantities=[{}])
    with pytest.raises(ValueError, match="no trajectory"):
        group_html([])
    assert "advantage by GRPO" in html
    own = group_html([one, two], [0.5, -0.5], viewers=False)
    assert "advantage as given" in own and "GRPO" not in own and "nothing to learn" not in own
    three, four = episode(), episode()
    for t, reward in ((three, 0.1 + 0.2), (four, 0.3)):
        t.reward, t.turns[0].process_reward = reward, 0.0
    assert "all earned the same: nothing to learn from" in group_html([three, four], viewers=False)
    assert "every advantage is 0: nothing to learn from" in group_html([one, two], [0, 0], viewers=False)


TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is four"}]


def test_a_conversation_shows_its_text_with_a_tokenizer_too():
    tok = tokenizer()
    ones = {"advantage": [1.0] * from_messages(TALK, tok).num_tokens}
    for html in (
        trajectory_html(TALK, tokenizer=tok),
        trajectory_html(TALK, tokenizer=SimpleNamespace(tokenizer=tok)),
        trajectory_html(from_messages(TALK), tokenizer=tok),
        compare_html(TALK, from_messages(TALK), tokenizer=tok),
        credit_html(TALK, ones, tok, rows=["advantage"]),
    ):
        assert "It is four" in Page(html).text.replace("↵", "")
    assert data_of(trajectory_html(TALK, tokenizer=tok))["ids"] == from_messages(TALK, tok).segments[0].token_ids
    for view in (trajectory_html, from_messages):
        with pytest.raises(ValueError, match="tokenizer is 'qwen'; give a tokenizer"):
            view(TALK, tokenizer="qwen")


def test_a_turn_without_tokens_is_an_empty_block():
    t = episode()
    first = Turn(0, 2, 2, text="NOTHING", flags=["odd"])
    t.turns = [first, *t.turns, Turn(0, 9, 9, text="LOST", finish_reason="length")]
    table = token_table(t)
    assert [block[1:] for block in table.blocks()] == [(-1, 0, 2), (0, 2, 2), (1, 2, 8), (2, 8, 9), (3, 9, 9)]
    for html in (trajectory_html(t), compare_html(t, episode()), compare_html(t, t)):
        page = Page(html).text
        assert all(f"Turn {n}" in page for n in (1, 2, 3, 4))
        assert "NOTHING" in page and "odd" in page and "LOST" in page and "ended by length" in page
    page = Page(credit_html(t, credit(t, "reinforce_pp"))).text
    assert "NOTHING" in page and "LOST" in page and "Turn 4" in page
    t.turns = [t.turns[1], first, t.turns[2]]
    assert [block[1:] for block in token_table(t).blocks()] == [(-1, 0, 2), (0, 2, 8), (1, 2, 2), (2, 8, 9)]
    said = Page(trajectory_html([TALK[0], {"role": "assistant", "content": ""}])).text
    assert "Turn 1" in said and "0 sampled, 0 fed" in said
    second = Segment()
    second.extend([7])
    two = Trajectory("t", "g", [Segment(), second], [Turn(0, 0, 0, text="EARLY"), Turn(1, 1, 1, text="LATE")])
    assert [block[:2] for block in token_table(two).blocks()] == [(0, 0), (1, -1), (1, 1)]


def test_an_id_goes_to_the_frame_whatever_the_text_says():
    t = episode()
    t.question = "what is data-lm-suppress?"
    html = trajectory_html(t, id="me")
    Page(html)
    head = html[: html.index(">")]
    assert ' id="me"' in head and 'aria-label="Trajectory: what is data-lm-suppress?"' in head


def test_a_figure_follows_the_theme():
    def draw():
        fig, axes = figure(4, 2)
        axes.plot([0, 1], [1, 0], **line(0), label="<a>")
        axes.set(xlabel="step", ylabel="reward")
        axes.text(0.5, 0.5, "said")
        axes.legend()
        return show(fig, alt="falls <from> 1")

    html = draw()
    assert html == draw()  # the same bytes
    page = Page(html)
    assert "svg" in page.tags and "said" in page.text and "<a>" in page.text
    svg = html[html.index("<svg") :]
    assert 'aria-label="falls &lt;from&gt; 1"' in svg
    for name in ("blue", "muted", "rule"):
        assert f"var(--ar1-{name})" in svg and COLORS[name][0] not in svg
    assert set(re.findall(r"[: ]#[0-9a-f]{6}\b", svg)) == set()
    fig, axes = figure(4, 2, cols=2)
    axes[0].plot([0, 1])
    used = set(re.findall(r'\bid="([^"]+)"', svg))
    assert used.isdisjoint(re.findall(r'\bid="([^"]+)"', show(fig)))
    with pytest.raises(ValueError, match="show got int"):
        show(3)


def test_the_theme_asks_the_host_before_the_system():
    css = style()
    places = [css.index(x) for x in ("prefers-color-scheme:dark", 'data-jp-theme-light="false"', "vscode-dark")]
    assert places == sorted(places) and "html[theme=dark]" in css
    assert esc("\0<\ud800a\u202eb\n") == "⟨0000⟩&lt;⟨D800⟩a⟨202E⟩b\n"
    assert show("<p>x</p>", alt="p").startswith('<div class="ar1') and show(show("x")) == show("x")


@pytest.mark.parametrize(
    ("golds", "reward", "parts", "scored"),
    [
        ([], 0.0, {"em": 0.0}, False),
        (["Oslo"], 0.0, {"em": 0.0}, True),
        ([], 1.0, {"em": 0.0}, True),
        ([], 0.0, {"task_success": 0.0}, True),
    ],
)
def test_a_question_without_a_known_answer_is_not_scored(golds, reward, parts, scored):
    made = Trajectory("t", "g", segments=[Segment()], golds=golds, reward=reward, reward_parts=parts, answer="no")
    assert ("reward 0" in facts(made) or "reward 1" in facts(made)) is scored
    assert ("not scored" in facts(made)) is not scored
