"""The memory plan as a picture: what each phase holds, as stacked bars against the card's line."""

from __future__ import annotations

from typing import Any

from agentr1_lite.footprint import PARTS
from agentr1_lite.planner import Plan, plan
from agentr1_lite.shapes import SHAPES
from agentr1_lite.views.controls import Panel, sliders
from agentr1_lite.views.theme import Html, esc, show

# part: colour and pattern (none, or lines in an angle), so that no two neighbours differ by colour alone
LOOK = {
    "weights": ("blue", None),
    "adapters": ("orange", None),
    "optimiser": ("purple", 45),
    "gradients": ("yellow", None),
    "activations": ("green", None),
    "logits": ("orange", 135),
    "KV cache": ("blue", 45),
    "overhead": ("grey", None),
}
LEFT, WIDTH, RIGHT, ROW, BAR = 78, 560, 92, 46, 26  # pixels


def plan_figure(made: Plan) -> Html:
    """Horizontal bars by phase, parts side by side in GiB, with the memory there is as a line, and the sentences."""
    most = max(made.memory_gib, made.peak_gib) * 1.04
    scale = WIDTH / most
    where = "GPU" if made.setting.device == "cuda" else "machine"
    shown = [part for part in PARTS if any(parts[part] * scale >= 0.5 for parts in made.phases.values())]
    line = LEFT + made.memory_gib * scale
    height = 30 + ROW * len(made.phases) + 26
    body = [_patterns(shown)]
    for row, (phase, parts) in enumerate(made.phases.items()):
        top, x = 30 + ROW * row, float(LEFT)
        body.append(_text(LEFT - 8, top + 18, phase, "end"))
        for part in shown:
            wide = parts[part] * scale
            if wide >= 0.5:
                tip = f"<title>{esc(part)}: {parts[part]:.2f} GiB</title>"
                body.append(
                    f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{BAR}" fill="{_fill(part)}" '
                    f'stroke="var(--ar1-paper)">{tip}</rect>'
                )
            x += wide
        over = made.totals[phase] > made.memory_gib
        said = f"{made.totals[phase]:.1f} GiB{' ✘' if over else ''}"
        right = line if x < line < x + 7 + 8 * len(said) else x  # a label does not stand on the line
        body.append(_text(right + 7, top + 18, said, fill="bad" if over else "ink"))
    foot = 30 + ROW * len(made.phases) - 8
    body.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="20" y2="{foot}" stroke="var(--ar1-ink)" stroke-width="2" '
        'stroke-dasharray="5 3"/>'
    )
    anchor = "end" if line > LEFT + WIDTH / 2 else "start"
    body.append(_text(line + (4 if anchor == "end" else -4), 13, f"{where}: {made.memory_gib:.1f} GiB", anchor))
    step = next(size for size in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1e9) if most / size <= 9)
    for tick in range(int(most / step) + 1):
        body.append(_text(LEFT + tick * step * scale, foot + 18, f"{tick * step:g}", "middle", "muted", 12))
    body.append(_text(LEFT + WIDTH + 26, foot + 18, "GiB", "start", "muted", 12))
    whole = LEFT + WIDTH + RIGHT
    svg = (
        f'<svg class="fig" role="img" aria-label="{esc(made.verdict())}" viewBox="0 0 {whole} {height}" '
        f'style="max-width:{whole}px" font-family="system-ui,sans-serif">{"".join(body)}</svg>'
    )
    keys = "".join(
        f'<span style="white-space:nowrap;margin-right:14px"><svg width="14" height="14" style="vertical-align:-2px">'
        f'<rect width="14" height="14" rx="2" fill="{_fill(part)}"/></svg> {esc(part)}</span>'
        for part in shown
    )
    verdict, *rest = made.sentences()
    mark = "✔" if made.fits else "✘"
    words = f"<p{'' if made.fits else ' class=bad'}><b>{mark} {esc(verdict)}</b></p>"
    words += "".join(f'<p class="note">{esc(sentence)}</p>' for sentence in rest)
    return show(f'{svg}<p class="legend">{keys}</p>{words}', alt=made.verdict())


def plan_panel(*, static: bool = False, **settings: Any) -> Panel:
    """`plan_figure` with controls on top; ``settings`` are further ones of `planner.plan`, which stay as given."""
    models = _first(settings.pop("model", "qwen2.5-3b"), [name for name in SHAPES if name != "atlas-agent"])
    algorithms = _first(settings.pop("algorithm", "GRPO"), ["GRPO", "PPO"])
    start = {"gpu_memory_gib": 16, "lora_rank": 16, "micro_batch_tokens": 4096, "group_size": 8, "max_rows": 32}
    start |= {"response_tokens": 2048} | {name: settings.pop(name) for name in list(settings) if name in RANGES}
    made = plan(models[0], start["gpu_memory_gib"], algorithm=algorithms[0])  # says what makes no sense
    start["gpu_memory_gib"] = max(1, round(made.memory_gib))
    ranges = {name: (low, max(high, start[name]), step) for name, (low, high, step) in RANGES.items()}

    def draw(**values: Any) -> Html:
        quantization = "nf4" if values.pop("four_bits") and values["lora_rank"] else None
        return plan_figure(plan(quantization=quantization, **values, **settings))

    panel = sliders(
        draw,
        title="Does it fit?",
        static=static,
        model=models,
        algorithm=algorithms,
        four_bits=settings.pop("quantization", "nf4") is not None,
        gradient_checkpointing=settings.pop("gradient_checkpointing", True),
        **{name: (*ranges[name], start[name]) for name in ranges},
    )
    for name, knob in panel.knobs.items():
        knob.edit = f"{name}={knob.value!r}"  # of this function, in the cell that calls it
    return panel


RANGES = {
    "gpu_memory_gib": (1, 192, 1),
    "lora_rank": (0, 128, 8),
    "micro_batch_tokens": (512, 32768, 512),
    "response_tokens": (256, 8192, 256),
    "group_size": (1, 32, 1),
    "max_rows": (1, 256, 1),
}


def _first(chosen: str, known: list[str]) -> list[str]:
    return [chosen, *(name for name in known if name != chosen)]


def _fill(part: str) -> str:
    color, angle = LOOK[part]
    return f"var(--ar1-{color})" if angle is None else f"url(#ar1-{part.replace(' ', '-')})"


def _patterns(parts: list[str]) -> str:
    made = "".join(
        f'<pattern id="ar1-{part.replace(" ", "-")}" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({LOOK[part][1]})"><rect width="7" height="7" fill="var(--ar1-paper)"/>'
        f'<rect width="4.5" height="7" fill="var(--ar1-{LOOK[part][0]})"/></pattern>'
        for part in parts
        if LOOK[part][1] is not None
    )
    return f"<defs>{made}</defs>"


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "ink", size: int = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="var(--ar1-{fill})">'
        f"{esc(text)}</text>"
    )
