"""Do the phases raise exact match on unseen entities, beyond chance? Several seeds, GRPO and PPO, one table.

    python tests/benchmarks/seeds.py --seeds 0 1 2 --algorithms GRPO PPO --output runs/seeds

Questions: the test split, greedy. The intervals are over questions; seeds of one question are averaged first.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from agentr1_lite import pipeline
from agentr1_lite.config import load_config
from agentr1_lite.evaluation import Report, difference, pool
from agentr1_lite.scoring import three_digits

PHASES = ("base", "imitation", "offline", "online")


def run(seed: int, algorithm: str, split: str, output: Path, overrides: list[str]) -> dict[str, Report]:
    """One run, or what a former call left of it."""
    folder = output / f"{algorithm}-{seed}"
    if not (folder / "summary.json").exists():
        recipe = "atlas-tiny" if algorithm == "GRPO" else "atlas-tiny-ppo"
        fixed = [f"training.seed={seed}", f"evaluation.split={split}", f"run.output={folder}", "run.progress=false"]
        pipeline.train(load_config(recipe, [*fixed, *overrides]), fresh=True)
    return {name: Report.load(folder / "evaluation" / f"{name}.json") for name in (*PHASES, *pipeline.BASELINES)}


def table(found: dict[int, dict[str, Report]]) -> list[str]:
    """Pooled over seeds: EM with a 95 % interval over questions, and the paired gain over the phase before."""
    lines, before = [], None
    for name in (*PHASES, *pipeline.BASELINES):
        report = pool(reports[name] for reports in found.values())
        seeds = " ".join(three_digits(reports[name].mean()) for reports in found.values())
        line = f"{name:<16} EM {report.shown()}  seeds {seeds}"
        if name in PHASES and before is not None:
            gain = difference(report, before)
            line += f"  gain {gain}"
        before = report if name in PHASES else before
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=["GRPO", "PPO"])
    parser.add_argument("--split", default="test", choices=("dev", "test"))
    parser.add_argument("--output", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--fresh", action="store_true", help="forget former runs")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value")
    args = parser.parse_args()
    if args.fresh:
        shutil.rmtree(args.output, ignore_errors=True)
    for algorithm in args.algorithms:
        found = {seed: run(seed, algorithm, args.split, args.output, args.set) for seed in args.seeds}
        print(f"\n{algorithm}, {args.split} split, {len(found)} seeds", *table(found), sep="\n")
        seconds = [
            json.loads((args.output / f"{algorithm}-{s}" / "summary.json").read_text())["seconds"] for s in found
        ]
        print("seconds", " ".join(f"{x['total']:.0f}" for x in seconds))


if __name__ == "__main__":
    main()
