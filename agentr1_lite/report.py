"""One HTML page for a run folder: what was reached, how it was learned, and how to do it again.

The page needs nothing from outside, follows the reader's light or dark theme and
prints. Whatever a model, a tool or a data set wrote is escaped. What a folder
lacks is said on the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from agentr1_lite.checks import LESSONS
from agentr1_lite.escape import esc
from agentr1_lite.evaluation import Difference, Report, difference, score_answer
from agentr1_lite.jsonl import DataError, write_text
from agentr1_lite.mdp import Trajectory, Turn
from agentr1_lite.plots import LABELS, PHASES, Curve, draw_summary, legend, svg_curves, svg_intervals, svg_stack
from agentr1_lite.report_style import page
from agentr1_lite.run_folder import Run, mapping, number
from agentr1_lite.scoring import three_digits

BASELINES = ("closed_book", "naive_rag", "base_tool_call", "scripted_expert")
MAX_CHARS = 1_500
# title, unit, metrics (the first that a run has), phases, drawn from 0 to 1
PANELS = (
    ("Reward", "mean return of an episode", ("reward",), ("online",), False),
    ("Exact match while training", "share of sampled episodes", ("em", "reward/em"), ("online",), True),
    ("Imitation and offline loss", "−log π of a token, nats", ("nll",), ("imitation", "offline"), False),
    ("Entropy", "nats a token", ("entropy", "entropy_estimate"), PHASES, False),
    ("KL to the reference", "nats a token", ("kl",), PHASES, False),
    ("Policy's tokens", "tokens an episode", ("action_tokens",), ("online",), False),
    ("Turns", "turns an episode", ("turns",), ("online",), False),
    ("Groups without variance", "share of questions", ("frac_reward_zero_std",), ("online",), True),
    ("Gradient norm", "before clipping", ("grad_norm",), PHASES, False),
    ("Clipped tokens", "share of tokens", ("clip_fraction",), ("online",), False),
    ("Critic", "explained variance", ("explained_variance",), ("online",), False),
)


def _section(title: str, body: str, note: str = "") -> str:
    lead = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{esc(title)}</h2>{lead}{body}</section>" if body else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


# Sections


def headline(run: Run) -> str:
    """EM of every phase beside the baselines, and what each phase added."""
    phases, others = run.estimates(PHASES), run.estimates(BASELINES)
    groups = [(name, rows) for name, rows in (("Phases", phases), ("Baselines", others)) if rows]
    if not groups:
        return ""
    n = number(run.summary.get("n")) or max((len(report) for report in run.reports.values()), default=0)
    chart = f'<div class="wide">{svg_intervals(groups, "exact match, share of questions")}</div>'
    gains = [(name, _gain(run, before.name, name)) for before, (name, *_) in zip(phases, phases[1:], strict=False)]
    rows = [(esc(LABELS[name]), _signed(gain)) for name, gain in gains if gain is not None]
    table = _table(("phase", "gain in EM over the phase before, paired by question"), rows) if rows else ""
    split = esc(run.summary.get("split", "held-out"))
    note = f"Answers to {n:,.0f} questions of the {split} split; bars are 95 % intervals over questions."
    return _section("Exact match", chart + table, note)


def _gain(run: Run, before: str, after: str) -> Difference | None:
    try:
        return difference(run.reports[after], run.reports[before])
    except (KeyError, ValueError):
        return None


def _signed(gain: Difference) -> str:
    beyond = gain.interval is not None and not gain.low <= 0 <= gain.high
    return f"{gain}{' · beyond chance' * beyond}".replace("-", "−")


def learning(run: Run) -> str:
    """Small charts of whatever the metrics hold."""
    charts = []
    for title, unit, keys, phases, share in PANELS:
        curves = run.curves(keys, phases)
        if any(value for curve in curves for value in curve.values):
            chart = svg_curves(curves, f"{title}: {unit}", share=share)
            charts.append(f"<figure><h3>{esc(title)} <small>{esc(unit)}</small></h3>{chart}</figure>")
    charts.insert(2, _stop_reasons(run))
    return _section("Learning curves", f'<div class="grid-of">{"".join(charts)}</div>' if any(charts) else "")


def _stop_reasons(run: Run) -> str:
    rows = {row["step"]: row for row in run.metrics if row.get("phase") == "online"}
    found = {key for row in rows.values() for key in row if key.startswith("stop/")}
    names = sorted(found, key=lambda key: (key != "stop/answer", key))
    if not names:
        return ""
    steps = sorted(rows)
    layers = [Curve(k.removeprefix("stop/"), steps, [number(rows[s].get(k)) or 0.0 for s in steps]) for k in names]
    chart = svg_stack(layers, "Why episodes ended: share of episodes") + legend([layer.name for layer in layers])
    return f"<figure><h3>Why episodes ended <small>share of episodes</small></h3>{chart}</figure>"


def breakdown(run: Run) -> str:
    """EM by hops and kind, a column an evaluation."""
    names = [name for name in (*BASELINES, *PHASES) if name in run.reports]
    names += [name for name in run.reports if name not in names]
    if not names:
        return ""
    rows = []
    for key, unit in (("hops", "hop"), ("kind", "")):
        parts = {name: run.reports[name].by(key) for name in names}
        for value in sorted({v for part in parts.values() for v in part if v}, key=str):
            label = f"{value} {unit}{'s' * (value != 1)}" if unit else value
            rows.append((esc(label), *(_cell(parts[name].get(value)) for name in names)))
    rows.append(("<b>all</b>", *(_cell(run.reports[name]) for name in names)))
    for metric, label in (("f1", "F1"), ("cover_em", "cover EM")):
        rows.append((label, *(three_digits(run.reports[name].mean(metric)) for name in names)))
    for metric in ("turns", "tool_calls", "action_tokens", "recall"):
        label = "evidence found" if metric == "recall" else metric.replace("_", " ")
        rows.append((label, *(three_digits(run.reports[name].mean(metric)) for name in names)))
    head = ("", *(esc(LABELS.get(name, name.replace("_", " "))) for name in names))
    return _section("By hops and kind of question", _table(head, rows, "numbers"), "Exact match with 95 % intervals.")


def _cell(report: Report | None) -> str:
    if report is None or (mean := report.mean("em")) is None:
        return "–"
    shown, bounds = esc(report.shown("em")).split(" ", 1)
    return f'<span class="heat" style="--share:{mean:.0%}">{shown}</span> <small>{bounds}</small>'


def episodes(run: Run) -> str:
    """A right answer with the most searches, a wrong one, and a wrong one from the first step."""
    right = [t for t in run.last if _is_right(t)]
    chosen = [("right", max(right, key=lambda t: sum(len(turn.calls) for turn in t.turns)))] if right else []
    chosen += [("wrong", t) for t in run.last if not _is_right(t) and t.turns][:1]
    chosen += [("wrong, at the first step", t) for t in run.first if not _is_right(t) and t.turns][:1]
    return _section(
        "Episodes", "".join(_episode(how, t) for how, t in chosen), "As sampled in training, word for word."
    )


def _is_right(trajectory: Trajectory) -> bool:
    return bool(trajectory.reward_parts.get("em", score_answer(trajectory.answer, trajectory.golds)["em"]))


def _episode(how: str, t: Trajectory) -> str:
    answer = "no answer" if t.answer is None else t.answer
    mark = "✓" if _is_right(t) else "✗"
    kind = "right" if mark == "✓" else "wrong"
    effort = f"{len(t.turns)} turn{'s' * (len(t.turns) != 1)} · {t.num_actions} tokens"
    facts = f"reward {three_digits(t.total_reward)} · {effort} · stopped by {t.stop_reason.value}"
    golds = f' <span class="note">right: {esc(" or ".join(map(str, t.golds)))}</span>' if t.golds else ""
    return (
        f'<article class="episode"><header><b class="{kind}">{esc(how)}</b><span class="note">{esc(facts)}</span>'
        f'</header><div class="turn question"><i>question</i><p>{_clip(t.question)}</p></div>'
        f"{''.join(_turn(turn) for turn in t.turns)}"
        f'<footer class="{kind}">{mark} <b>{_clip(answer)}</b>{golds}</footer></article>'
    )


def _turn(turn: Turn) -> str:
    """The policy's words, its calls as calls, and the replies."""
    said = re.sub(r"<tool_call>.*?(</tool_call>|$)", "", turn.text, flags=re.S) if turn.calls else turn.text
    parts = [f"<p>{_clip(said.strip())}</p>"] if said.strip() else []
    for call in turn.calls:
        if "name" in call:
            given = ", ".join(
                f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in mapping(call.get("arguments")).items()
            )
            parts.append(f"<code><b>{esc(call['name'])}</b>({_clip(given)})</code>")
        else:
            parts.append(f'<code class="bad">{_clip(call.get("raw", call))}</code>')
    flags = f' <span class="note">{esc(", ".join(turn.flags))}</span>' if turn.flags else ""
    results = turn.results or ([{"content": turn.observation}] if turn.observation else [])
    replies = "".join(_reply(result) for result in results)
    return f'<div class="turn agent"><i>agent</i><div>{"".join(parts)}{flags}</div></div>{replies}'


def _reply(result: dict[str, Any]) -> str:
    kind = "" if result.get("success", True) else " class=bad"
    return f'<div class="turn reply"><i>tool</i><p{kind}>{_clip(result.get("content", ""))}</p></div>'


def _clip(text: Any) -> str:
    text = str(text)
    more = f" … {len(text) - MAX_CHARS:,} more characters" if len(text) > MAX_CHARS else ""
    return esc(text[:MAX_CHARS]) + more


def doctor(run: Run) -> str:
    """Findings, one line a check, with the steps it was seen at."""
    found: dict[tuple[str, str], dict[Any, dict[str, Any]]] = {}
    for row in run.findings:
        found.setdefault((str(row["level"]), str(row["check"])), {})[row.get("step")] = row
    if not found:
        return _section(
            "Doctor", "<p>Nothing to report: every invariant held at every step.</p>" if run.metrics else ""
        )
    rows = []
    for (level, check), seen in sorted(found.items()):
        last = list(seen.values())[-1]
        lesson = last.get("lesson")
        when = [step for step in seen if step is not None]
        span = f"{when[0]}" if len(when) == 1 else f"{when[0]} to {when[-1]}, {len(when)} times" if when else ""
        rows.append(
            (
                f'<b class="{esc(level)}">{esc(level)}</b>',
                esc(check.replace("_", " ")),
                esc(last["message"]),
                span,
                f"{int(lesson):02d}" if lesson in LESSONS else "–",
            )
        )
    return _section("Doctor", _table(("", "check", "last seen", "steps", "lesson"), rows))


def setup(run: Run) -> str:
    """Time, commands, configuration and versions."""
    shown = _shown(run.folder)
    commands = [
        f"python -m agentr1_lite train {shown}/config.yaml run.output={shown}-again",
        f"python -m agentr1_lite evaluate {shown}/config.yaml --policy {shown}/policy",
        f"python -m agentr1_lite report {shown}",
    ]
    body = f"<h3>Commands</h3><pre>{esc(chr(10).join(commands))}</pre>"
    seconds = {k: s for k, v in mapping(run.summary.get("seconds")).items() if (s := number(v)) is not None}
    if seconds:
        body += "<h3>Time</h3>" + _table(
            ("part", "seconds"), [(esc(k), f"{v:.1f}") for k, v in seconds.items()], "numbers"
        )
    if run.config:
        body += f"<details><summary>Configuration</summary><pre>{esc(run.config)}</pre></details>"
    found = mapping(run.summary.get("versions")) or run.versions
    if found:
        body += (
            "<details><summary>Versions and machine</summary>"
            + _table(("", ""), [(esc(k), esc(v)) for k, v in found.items()])
            + "</details>"
        )
    return _section("The same again", body)


def _shown(folder: Path) -> str:
    """The folder as the reader would type it: from where the command ran, else its name alone."""
    folder, here = folder.resolve(), Path.cwd().resolve()
    return folder.relative_to(here).as_posix() if folder.is_relative_to(here) else folder.name


SECTIONS = (headline, learning, breakdown, episodes, doctor, setup)


def write_report(run_dir: str | Path, path: str | Path | None = None) -> Path:
    """Write ``report.html`` into the run folder (or to ``path``) and return where it lies."""
    run = Run(Path(run_dir))
    if not run.folder.is_dir():
        raise DataError(f"{run_dir}: no such run folder; train first or give another folder")
    body = "".join(_drawn(section, run) for section in SECTIONS)
    notes = "".join(f"<li>{esc(text)}</li>" for text in dict.fromkeys(run.missing))
    body += _section("What this folder lacks", f"<ul>{notes}</ul>" if notes else "")
    path = Path(path) if path else run.folder / "report.html"
    write_text(path, page(esc(f"Run {run.folder.resolve().name}"), _lead(run), body))
    return path


def _drawn(section: Callable[[Run], str], run: Run) -> str:
    """A section, or nothing where a file holds something else than the trainer writes: one bad file costs its part."""
    try:
        return section(run)
    except (TypeError, KeyError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
        run.missing.append(f"The part {section.__name__!r} cannot be drawn from these files ({error!r}).")
        return ""


def _lead(run: Run) -> str:
    """The page's first sentence: from where to where, in figures."""
    found = run.estimates(PHASES)
    facts = {"algorithm": "{}", "split": "{} questions", "seed": "seed {}"}
    settings = [words.format(run.summary[key]) for key, words in facts.items() if key in run.summary]
    small = f'<p class="note">{esc(" · ".join(settings))}</p>'
    if not found:
        return small
    last = found[-1]
    start, end = (esc(three_digits(e.mean)) for e in (found[0], last))
    before = f'<span class="from">{start}</span><span class="arrow">→</span>' if len(found) > 1 else ""
    words = (
        f"exact match, {LABELS[found[0].name].lower()} and after {LABELS[last.name].split('· ')[-1]}"
        if before
        else "exact match"
    )
    return f'<p class="hero">{before}<span class="to">{end}</span><small>{words}</small></p>{small}'


def demo_figure(run_dir: str | Path, path: str | Path) -> Path:
    """Draw the README's picture of a run as PNG: EM by phase beside baselines, online learning curves."""
    run = Run(Path(run_dir))
    wanted = {"reward": ("reward",), "exact match": ("em", "reward/em")}
    curves = {label: found[0] for label, keys in wanted.items() if (found := run.curves(keys, ("online",)))}
    if len(curves) == 2 and curves["reward"].values == curves["exact match"].values:
        del curves["reward"]
    n = run.summary.get("n")
    title = f"Unseen questions{f' (n = {n})' if n else ''}"
    names = ("closed_book", "naive_rag", *PHASES, "scripted_expert")
    algorithm = run.summary.get("algorithm")
    return draw_summary(
        path, run.estimates(names), curves, title=title, curve_title=f"Online RL{f', {algorithm}' if algorithm else ''}"
    )
