"""The command line: ``python -m agentr1_lite train | evaluate | chat | plan | play | merge | data | doctor | report``.

Exit codes: 0 done, 1 a check failed, 2 wrong input (one sentence on standard error), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from agentr1_lite.escape import visible

Command = Callable[[argparse.Namespace], int]
COMMANDS: dict[str, tuple[Command, Callable[[argparse.ArgumentParser], None]]] = {}


def command(arguments: Callable[[argparse.ArgumentParser], None]) -> Callable[[Command], Command]:
    """Register a function under its name; its docstring is the help text."""

    def register(function: Command) -> Command:
        COMMANDS[function.__name__] = (function, arguments)
        return function

    return register


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="YAML file or recipe name (default: atlas-tiny)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over the file")


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in run.output (default settings: those it began with)"
    )
    parser.add_argument("--fresh", action="store_true", help="remove a former run in run.output first")
    parser.add_argument("--report", action="store_true", help="write the report page at the end")


@command(_train_arguments)
def train(args: argparse.Namespace) -> int:
    """Train through the phases of a configuration, evaluate after each, write summary.json."""
    from agentr1_lite import pipeline
    from agentr1_lite.config import load_config
    from agentr1_lite.report import write_report

    config = _config(args)
    began_with = Path(config.run.output, "config.yaml")
    if args.resume and args.config is None and began_with.exists():
        config = load_config(began_with, args.overrides)
    summary = pipeline.train(config, resume=args.resume, fresh=args.fresh)
    if not summary:  # another process leads
        return 0
    print(f"Saved in {config.run.output} after {summary['seconds']['total']:.0f} s.")
    if args.report:
        print(f"Report: {write_report(config.run.output)}")
    return 0


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument(
        "--policy", help="policy or run to evaluate, under the settings of its run (default: model.base_model)"
    )
    parser.add_argument("--baseline", help="closed_book, naive_rag, base_tool_call or scripted_expert instead")
    parser.add_argument("--output", help="write the report as JSON here")


@command(_evaluate_arguments)
def evaluate(args: argparse.Namespace) -> int:
    """Answer held-out questions greedily and print EM, cover-EM and F1 with intervals."""
    from agentr1_lite import evaluation, pipeline

    config = _config_of_policy(args)
    if args.baseline and args.baseline not in evaluation.BASELINES:
        raise ValueError(f"--baseline {args.baseline!r} is unknown; choose one of {', '.join(evaluation.BASELINES)}")
    policy, task_set = pipeline.make_policy(config), pipeline.held_out(config)
    options = {"seed": config.evaluation.seed, "temperature": config.evaluation.temperature}
    options["max_batch"] = config.training.max_rows
    if args.baseline:
        report = evaluation.run_baseline(args.baseline, policy, task_set, **options)
    else:
        report = evaluation.evaluate(policy, task_set, name=policy.name, **options)
    say(report.table())
    if args.output:
        report.save(args.output)
    return 0


def _chat_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument(
        "--policy", help="policy or run to talk to, under the settings of its run (default: model.base_model)"
    )
    parser.add_argument("--question", help="ask this one question and leave")
    parser.add_argument("--split", default="test", choices=("train", "dev", "test"), help="world it searches")


@command(_chat_arguments)
def chat(args: argparse.Namespace) -> int:
    """Ask a policy questions; it searches the task's corpus and shows every turn."""
    from agentr1_lite import pipeline
    from agentr1_lite.mdp import Task
    from agentr1_lite.rollout import collect_trajectory

    if args.question is not None and not args.question.strip():
        raise ValueError("--question is empty; ask something, or leave the option out to be asked for questions")
    config = _config_of_policy(args)
    policy, task_set = pipeline.make_policy(config), pipeline.make_task(config, args.split)
    if not args.question:
        say("Questions of this world, in these words and names; quit leaves:")
        say(*(f"  {t.question}" for t in task_set.tasks[:3]))
    for question in [args.question] if args.question else _lines("you> "):
        known = next((t for t in task_set.tasks if t.question == question), None)
        trajectory = collect_trajectory(task_set.env, policy, known or Task("chat", question), greedy=True)
        for turn in trajectory.turns:
            say(f"agent> {turn.text}")
            if turn.observation:
                say(f"world> {turn.observation}")
        say(f"[{trajectory.stop_reason.value}] answer: {trajectory.answer}")
    return 0


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="YAML file, recipe or model (default: qwen2.5-3b)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over it")
    parser.add_argument(
        "--gpu", type=float, metavar="GIB", help="plan for a GPU of so many GiB instead of this machine (a T4 shows 15)"
    )
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS", help="longest prompt (default: 512)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


@command(_plan_arguments)
def plan(args: argparse.Namespace) -> int:
    """Say whether a run fits into memory, by phase, and what to change if not; nothing is loaded."""
    import json

    from agentr1_lite import planner

    name, overrides = args.config or "qwen2.5-3b", args.overrides
    if "=" in name and not Path(name).exists():
        name, overrides = "qwen2.5-3b", [name, *overrides]
    made = planner.plan_for(planner.config_of(name, overrides), args.gpu, prompt_tokens=args.prompt)
    if args.json:
        print(json.dumps(made.to_dict()))
    else:
        say(made.table(), *made.sentences())
    return int(not made.fits)


def _play_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument("--split", default="dev", choices=("train", "dev", "test"), help="split the question is from")
    parser.add_argument("--number", type=int, default=0, help="which question")
    parser.add_argument(
        "--by", choices=("turn", "token"), default="turn", help="type whole turns, or pick a policy's next tokens"
    )
    parser.add_argument("--policy", help="policy whose tokens are offered (default: model.base_model)")


@command(_play_arguments)
def play(args: argparse.Namespace) -> int:
    """Be the policy: type turns, or pick tokens, and see observation, reward and end of an episode."""
    from agentr1_lite import pipeline
    from agentr1_lite.toolcalls import ToolCall, render_tool_call
    from agentr1_lite.views.player import StepPlayer, play_lines, signed

    config = _config(args)
    task_set = pipeline.make_task(config, args.split)
    if not 0 <= args.number < len(task_set.tasks):
        raise ValueError(f"--number {args.number}: the split has questions 0 to {len(task_set.tasks) - 1}")
    env, task = task_set.env.fork(), task_set.tasks[args.number]
    if args.by == "token":
        config.model.base_model = args.policy or config.model.base_model
        player = StepPlayer(pipeline.make_policy(config), env, task, config.training.seed)
        say(f"question> {task.question}")
        play_lines(player, _lines("you> "), say)
        return 0
    for message in env.reset(task, seed=config.training.seed):
        say(f"{message['role']}> {message['content']}")
    print("Type a search, 'answer: …' to finish, or a whole turn with its tags on one line; quit leaves.")
    for line in _lines("you> "):
        if line.lower().startswith("answer:"):
            line = f"<answer> {line[7:].strip()} </answer>"
        elif "<" not in line and env.tools:
            line = render_tool_call(ToolCall(env.tools[0].name, {env.tools[0].text_parameter: line}), env.call_format)
        result = env.step(line)
        say(*(f"world> {m['content']}" for m in result.observation))
        print(f"[reward {signed(result.reward)}{', end: ' + result.info['stop_reason'].value if result.done else ''}]")
        if result.done:
            say(f"right: {' or '.join(task.golds)}")
            break
    return 0


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="*",
        help="worlds, demonstrations, offline-logs, atlas-tiny, atlas-agent (default: all but the last two)",
    )
    parser.add_argument("--output", default="data", help="folder to write to (default: data)")


@command(_data_arguments)
def data(args: argparse.Namespace) -> int:
    """Remake the shipped files."""
    from agentr1_lite.tasks.build import MAKERS

    wanted = args.what or [name for name in MAKERS if not name.startswith("atlas-")]
    unknown = [name for name in wanted if name not in MAKERS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not among {', '.join(MAKERS)}")
    for name in wanted:
        print(*MAKERS[name](Path(args.output)), sep="\n")
    return 0


@command(lambda parser: None)
def doctor(args: argparse.Namespace) -> int:
    """Check the machine, the versions, the shipped files, and the invariants of a rollout."""
    from agentr1_lite.doctor import machine_check, self_test

    findings = [*machine_check(), *self_test()]
    for finding in findings:
        say(finding)
    return int(any(finding.level == "fail" for finding in findings))


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder, or the folder of a saved policy")
    parser.add_argument("--output", required=True, help="folder to write the plain model to")
    parser.add_argument("--dtype", default="auto", help="float16, bfloat16 or float32 (default: that of the base)")


@command(_merge_arguments)
def merge(args: argparse.Namespace) -> int:
    """Add a policy's adapter to its base and write a plain model that any program loads."""
    from agentr1_lite.config import load_config
    from agentr1_lite.loading import DTYPES
    from agentr1_lite.policy import QwenPolicy

    if args.dtype not in ("auto", *DTYPES):
        raise ValueError(f"--dtype {args.dtype!r} is not known; use auto or one of {', '.join(DTYPES)}")
    folder, began_with = _policy_folder(args.run)
    quantization = load_config(began_with).model.quantization if began_with else None
    policy = QwenPolicy(folder, quantization=quantization)
    print(policy.merge(args.output, dtype=DTYPES.get(args.dtype)))
    return 0


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", default="runs/demo", help="run folder")
    parser.add_argument("--figure", help="draw the summary as a PNG here too")


@command(_report_arguments)
def report(args: argparse.Namespace) -> int:
    """Write a run's page, report.html, into its folder."""
    from agentr1_lite.report import demo_figure, write_report
    from agentr1_lite.runlog import holds_run

    if not holds_run(Path(args.run)):
        raise ValueError(f"{args.run} is not a run folder; train one first")
    picture = Path(args.figure) if args.figure else None
    if picture and (picture.is_dir() or not picture.parent.is_dir() or picture.suffix != ".png"):
        raise ValueError(f"--figure {args.figure}: give the name of a .png file in a folder that exists")
    print(write_report(args.run))
    if args.figure:
        print(demo_figure(args.run, args.figure))
    return 0


def _config(args: argparse.Namespace) -> Any:
    from agentr1_lite.config import load_config

    if args.config is not None and "=" in args.config and not Path(args.config).exists():
        args.config, args.overrides = None, [args.config, *args.overrides]
    return load_config(args.config or "atlas-tiny", args.overrides)


def _policy_folder(name: str) -> tuple[str, Path | None]:
    """A policy, or that of a run folder, and the settings of the run that it lies in, where it does."""
    path = Path(name)
    run = path if (path / "config.yaml").is_file() else path.absolute().parent
    if not (run / "config.yaml").is_file() or run != path and path.name != "policy":
        return name, None
    if not (run / "policy").is_dir():
        raise ValueError(
            f"{name}: the run has not ended and holds no policy yet; go on with train --resume run.output={run}"
        )
    return str(run / "policy"), run / "config.yaml"


def _config_of_policy(args: argparse.Namespace) -> Any:
    """The configuration with ``--policy`` as its model; without one the settings of the run it came from."""
    from agentr1_lite.config import load_config

    if not args.policy:
        return _config(args)
    args.policy, began_with = _policy_folder(args.policy)
    config = _config(args)
    if began_with is not None and args.config is None:
        config = load_config(began_with, args.overrides)
    config.model.base_model = args.policy
    return config


def say(*lines: Any) -> None:
    """Print lines; nothing that a model, a tool or a file wrote moves the cursor or hides text."""
    print(*map(visible, lines), sep="\n")


def _lines(prompt: str) -> Any:
    """Lines from the keyboard until it ends or says quit."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            print()
            return
        if line.lower() in ("quit", "exit"):
            return
        if line:
            yield line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence instead of a page of usage."""
        self.exit(2, f"{self.prog}: {message}; --help shows what it takes\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m agentr1_lite", description="Learn and do RL of LLM agents.")
    choices = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (function, add) in COMMANDS.items():
        add(choices.add_parser(name, help=function.__doc__, description=function.__doc__))
    args, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") or not hasattr(args, "overrides") for word in rest):
        choices.choices[args.command].error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes positional arguments in one piece; settings may also stand behind an option
        args.overrides += rest
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    warnings.formatwarning = lambda message, *_: f"warning: {visible(message)}\n"
    try:
        return COMMANDS[args.command][0](args)
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        named = isinstance(error, OSError) and error.filename and error.strerror
        said = f"{error.filename}: {error.strerror}; give a path that can be written" if named else str(error)
        print(f"agentr1_lite {args.command}: {visible(' '.join(said.split()))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
