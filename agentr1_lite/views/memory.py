"""The memory plan as a picture: what each phase holds, as stacked bars against the card's line."""

from __future__ import annotations

from typing import Any

from agentr1_lite.footprint import PARTS
from agentr1_lite.planner import Plan, plan
from agentr1_lite.shapes import SHAPES
from agentr1_lite.views.controls import Panel, sliders
from agentr1_lite.views.theme import COLORS, Html, figure, figure_svg, show, templates, tip

# part: colour and pattern, so that no two neighbours differ by colour alone
LOOK = {
    "weights": ("blue", ""),
    "adapters": ("orange", ""),
    "optimiser": ("purple", "///"),
    "gradients": ("yellow", ""),
    "activations": ("green", ""),
    "logits": ("orange", "\\\\\\"),
    "KV cache": ("blue", "///"),
    "overhead": ("grey", ""),
}
SEEN = 1e-3  # share of the picture's width from which on a part is drawn


def plan_figure(made: Plan) -> Html:
    """Horizontal bars by phase, parts side by side in GiB, with the memory there is as a line, and the sentences."""
    phases, limit = list(made.phases), made.memory_gib
    most = max(limit, made.peak_gib) * 1.04
    fig, axes = figure(8.4, 0.9 + 0.5 * len(phases))
    left = [0.0] * len(phases)
    for part in PARTS:
        sizes = [made.phases[phase][part] for phase in phases]
        if max(sizes) < SEEN * most:
            continue
        color, hatch = LOOK[part]
        look = {"facecolor": COLORS[color][0], "hatch": hatch, "hatch_linewidth": 1.8, "edgecolor": COLORS["paper"][0]}
        bars = axes.barh(phases, sizes, left=left, height=0.56, label=part, **look)
        for bar, size in zip(bars, sizes, strict=True):
            tip(bar, f"{part}: {size:.2f} GiB")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    ink, bad = COLORS["ink"][0], COLORS["bad"][0]
    axes.axvline(limit, color=ink, linestyle="--")
    for row, total in enumerate(made.totals.values()):
        over = total > limit
        place = limit if total < limit < total * 1.01 + 0.11 * most else total  # a label does not stand on the line
        axes.text(place + 0.01 * most, row, f"{total:.1f} GiB{' ✘' * over}", va="center", color=bad if over else ink)
    where = "GPU" if made.setting.device == "cuda" else "machine"
    axes.text(limit, -0.6, f"{where}: {limit:.1f} GiB", ha="right" if limit > most / 2 else "left", va="bottom")
    axes.set(xlim=(0, most), ylim=(len(phases) - 0.5, -0.6))
    axes.set_xlabel("GiB", loc="right")
    axes.tick_params(axis="y", labelcolor=ink)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    fig.get_layout_engine().set(w_pad=0.15)
    fig.legend(loc="outside lower left", ncols=8, frameon=False, handlelength=1.2, columnspacing=1.2)
    verdict, *rest = made.sentences()
    return show(figure_svg(fig, made.verdict()) + templates().memory(made, verdict, rest), alt=made.verdict())


RANGES = {
    "gpu_memory_gib": (1, 192, 1),
    "lora_rank": (0, 128, 8),
    "micro_batch_tokens": (512, 32768, 512),
    "response_tokens": (256, 8192, 256),
    "group_size": (1, 32, 1),
    "max_rows": (1, 256, 1),
}


def plan_panel(*, static: bool = False, **settings: Any) -> Panel:
    """`plan_figure` with controls on top; ``settings`` are further ones of `planner.plan`, which stay as given."""
    models = _first(settings.pop("model", "qwen2.5-3b"), [name for name in SHAPES if name != "atlas-agent"])
    algorithms = _first(settings.pop("algorithm", "GRPO"), ["GRPO", "PPO"])
    start = {"gpu_memory_gib": 16, "lora_rank": 16, "micro_batch_tokens": 4096, "group_size": 8, "max_rows": 32}
    start |= {"response_tokens": 2048} | {name: settings.pop(name) for name in list(settings) if name in RANGES}
    made = plan(models[0], start["gpu_memory_gib"], algorithm=algorithms[0])  # says what makes no sense
    start["gpu_memory_gib"] = max(1, round(made.memory_gib))

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
        **{name: (low, max(high, start[name]), step, start[name]) for name, (low, high, step) in RANGES.items()},
    )
    for name, knob in panel.knobs.items():
        knob.edit = f"{name}={knob.value!r}"  # of this function, in the cell that calls it
    return panel


def _first(chosen: str, known: list[str]) -> list[str]:
    return [chosen, *(name for name in known if name != chosen)]
