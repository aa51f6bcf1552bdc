"""Tools: what an agent can do, and a way to run many calls that cannot hurt an episode.

A tool executes one atomic action and returns its raw outcome (Agent-R1, arXiv
2511.14460 v1): ``execute(args) -> {content, success}``. Whatever a tool does
(raise, hang, return nothing or 400 kB), the caller gets a :class:`ToolResult`
whose ``flags`` say what happened.

Flags of a result: ``raised``, ``timeout``, ``empty``, ``converted`` (not a
string), ``truncated_chars``, ``control_strings`` (looks like chat markup),
``invalid_text`` (lone surrogates replaced). What is not data (text, a finite
number, JSON) is a failure (``raised``): no ``repr`` reaches the policy.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from agentr1_lite.forks import twin_of
from agentr1_lite.mdp import Task
from agentr1_lite.schema import SchemaMismatch, check_object, parameters_of, read_schema

EMPTY_RESULT = "No results."
CUT_MARK = " [cut]"
MAX_CHARS = 32_768
DEFAULT_DEADLINE = 10.0
MAX_THREADS = 128
_CONTROL = re.compile(r"<\|[\w ]{1,40}\|>|</?tool_(?:call|response)>")


@dataclass(frozen=True)
class ToolCall:
    """A call the policy wrote: ``flags`` name every repair, ``raw`` is the text as it stood."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    raw: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments, "flags": list(self.flags)}


@dataclass(frozen=True)
class ToolCallError:
    """A call that cannot be run, as a value: ``message`` is the one line the model reads."""

    reason: str
    raw: str
    message: str

    def to_dict(self) -> dict[str, Any]:
        return {"error": self.reason, "raw": self.raw}


@dataclass(frozen=True)
class ToolResult:
    """What a tool replied; ``info`` is for rewards and views and never shown to the policy."""

    content: str
    success: bool = True
    seconds: float = 0.0
    flags: tuple[str, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "flags": list(self.flags)}


def clean_text(text: str) -> str:
    """``text`` with lone surrogates replaced: they would stop a tokenizer and the JSON Lines writer."""
    try:
        text.encode("utf-8")
        return str.__str__(text)  # a member of an enumeration has its name for str()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Tool(ABC):
    """One atomic action. A subclass sets the attributes it needs and writes ``execute``.

    Attributes:
        parameters: JSON schema of the arguments (see ``schema.check_object`` for what is read).
        timeout: seconds a call may take; None means the environment's ``tool_timeout``.
        inline: the call is pure, fast Python and runs in the caller's thread, without a deadline.
        batched: the calls of all episodes go to one ``batch_execute``, with one deadline.
        stateful: every episode gets its own copy, and ``reset`` is called on it.
        shared: names of attributes that such copies hold in common (an index, a lock).
        max_chars: longer replies are cut before anything counts their tokens.
    """

    name: str = ""
    description: str = ""
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}
    timeout: float | None = None
    inline: bool = False
    batched: bool = False
    stateful: bool = False
    shared: tuple[str, ...] = ()
    max_chars: int = MAX_CHARS

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        label = cls.name or cls.__name__
        for method in ("execute", "batch_execute", "validate_args", "reset"):
            _refuse_deferred(vars(cls).get(method), f"{label}.{method}")
        if isinstance(vars(cls).get("parameters"), Mapping):
            cls.parameters = read_schema(cls.parameters, label)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, read_schema(value, self.name) if name == "parameters" else value)

    @abstractmethod
    def execute(self, args: dict[str, Any]) -> ToolResult | str | dict[str, Any]:
        """Run one call with validated arguments."""

    def batch_execute(self, batch: Sequence[dict[str, Any]]) -> list[ToolResult]:
        """Run several calls; override it (and set ``batched``) where one request can serve them all."""
        return [run_call(self, args) for args in batch]

    def validate_args(self, args: Any) -> tuple[dict[str, Any], str | None]:
        """Return ``(clean arguments, None)`` or ``({}, one sentence for the model)``."""
        try:
            return check_object(args, self.parameters, ""), None
        except SchemaMismatch as error:
            return {}, f"Error: {self.name}: {error}."

    def schema(self) -> dict[str, Any]:
        """The tool as chat templates want it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def reset(self, task: Task, rng: Any) -> None:
        """Start of an episode, called on stateful tools; ``rng`` is the episode's ``random.Random``."""
        return

    def fork(self) -> Tool:
        """The tool for one episode: a copy where it is stateful, else itself."""
        if not self.stateful:
            return self
        return twin_of(self, Tool, ("parameters", *self.shared), {})

    @property
    def text_parameter(self) -> str:
        """The parameter a one-argument call format fills: the first required, else the first."""
        names = list(self.parameters.get("required") or ()) or list(self.parameters.get("properties") or ())
        return names[0] if names else ""


def _refuse_deferred(function: Any, label: str) -> None:
    """Raise ``TypeError`` where a call would give a coroutine or generator instead of a reply."""
    while isinstance(function, partial):
        function = function.func
    for f in (function, *(vars(cls).get("__call__") for cls in type(function).__mro__)):
        if inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f):
            raise TypeError(
                f"tool {label!r} is an async function; write a plain function, calls run concurrently anyway"
            )
        if inspect.isgeneratorfunction(f):
            raise TypeError(f"tool {label!r} is a generator function; return the whole reply instead of yielding")


class FunctionTool(Tool):
    """A tool around a function; calling the tool calls the function."""

    def __init__(self, function: Callable[..., Any], name: str, description: str, parameters: Mapping[str, Any]):
        _refuse_deferred(function, name)
        self.function, self.name, self.description, self.parameters = function, name, description, parameters

    def execute(self, args: dict[str, Any]) -> Any:
        return self.function(**args)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def tool(
    function: Callable[..., Any] | None = None, /, *, name: str = "", description: str = "", **options: Any
) -> Any:
    """Make a :class:`Tool` from a typed function; its docstring describes it.

    The first paragraph becomes the description, an ``Args:`` section the
    parameters' descriptions, type hints the schema. ``options`` set attributes
    of the tool: ``@tool(timeout=2.0, inline=True)``.
    """
    unknown = sorted(set(options) - {"timeout", "inline", "max_chars"})
    if unknown:
        raise TypeError(f"tool() got {', '.join(unknown)}; it takes name, description, timeout, inline and max_chars")

    def wrap(f: Callable[..., Any]) -> FunctionTool:
        label = name or getattr(f, "__name__", "")
        if not label:
            raise TypeError(f"tool() got {type(f).__name__} without a name of its own; pass name=")
        _refuse_deferred(f, label)
        summary, parameters = parameters_of(f, label)
        made = FunctionTool(f, label, description or summary, parameters)
        vars(made).update(options)
        return made

    return wrap if function is None else wrap(function)


def as_result(value: Any, max_chars: int = MAX_CHARS) -> ToolResult:
    """Whatever a tool returned, as a result with readable, bounded text and its flags."""
    result = value
    if isinstance(value, Mapping) and "content" in value:
        info = value.get("info") or {k: v for k, v in value.items() if k not in ("content", "success")}
        result = ToolResult(value["content"], bool(value.get("success", True)), info=info)
    elif not isinstance(value, ToolResult):
        result = ToolResult(value)
    text, flags = _as_text(result.content)
    if not text.strip():
        text, flags = EMPTY_RESULT, [*flags, "empty"]
    if len(text) > max_chars:
        text, flags = text[:max_chars].rstrip() + CUT_MARK, [*flags, "truncated_chars"]
    if _CONTROL.search(text):
        flags.append("control_strings")
    info = _plain(result.info) if result.info else {}
    return replace(result, content=text, flags=tuple(dict.fromkeys([*result.flags, *flags])), info=info)


def _as_text(content: Any) -> tuple[str, list[str]]:
    if content is None:
        return "", []
    flags = [] if isinstance(content, str) else ["converted"]
    if isinstance(content, (bytes, bytearray)):
        content = bytes(content).decode("utf-8", "replace")
    elif not isinstance(content, str):
        try:
            content = json.dumps(content, ensure_ascii=False, allow_nan=False, default=_as_json)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"it returned no data: {error}; return text, a number or what JSON can hold") from error
    clean = clean_text(content)
    return clean, flags if clean == content else [*flags, "invalid_text"]


def _as_json(value: Any) -> Any:
    """Numbers and arrays of NumPy and PyTorch, and mappings of any kind, as JSON; nothing else is data."""
    if isinstance(value, Mapping):
        return dict(value)
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        return value.tolist()
    if inspect.iscoroutine(value):
        value.close()
    raise TypeError(f"{type(value).__name__} is neither text nor a number nor JSON")


def _plain(info: Any) -> dict[str, Any]:
    """``info`` as JSON can hold it, since trajectories are saved without loss."""
    try:
        return json.loads(json.dumps(dict(info), default=str))
    except (TypeError, ValueError, RecursionError):
        return {"unreadable": type(info).__name__}


def _failure(tool: Tool, error: BaseException) -> ToolResult:
    try:
        reason = " ".join(str(error).split())[:200]
    except Exception:  # an exception whose own text raises
        reason = ""
    text = f"Error: {tool.name} failed ({type(error).__name__}{': ' + reason if reason else ''})."
    return as_result(ToolResult(text, False, flags=("raised",)))


def run_call(tool: Tool, args: dict[str, Any]) -> ToolResult:
    """One call in this thread; only Ctrl-C passes through."""
    return _guarded(tool, lambda: tool.execute(args))


def _guarded(tool: Tool, give: Callable[[], Any]) -> ToolResult:
    try:
        return as_result(give(), tool.max_chars)
    except (Exception, SystemExit) as error:
        return _failure(tool, error)


def _run_batch(tool: Tool, batch: list[dict[str, Any]]) -> list[ToolResult]:
    try:
        results = list(tool.batch_execute(batch))
        if len(results) != len(batch):
            raise ValueError(f"batch_execute gave {len(results)} results for {len(batch)} calls")
    except (Exception, SystemExit) as error:
        return [_failure(tool, error)] * len(batch)
    return [_guarded(tool, lambda result=result: result) for result in results]


@dataclass
class _Job:
    """A unit of work for one thread: the calls at ``places`` of one ``run_calls``."""

    work: Callable[[], list[ToolResult]]
    places: list[int]
    tool: Tool
    limit: float
    began: float = 0.0
    seconds: float = 0.0
    results: list[ToolResult] | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.results = self.work()
        except BaseException as error:
            self.results = [_failure(self.tool, error)] * len(self.places)
        self.seconds = time.monotonic() - self.began
        self.done.set()

    def settle(self) -> list[ToolResult]:
        self.done.wait(max(0.0, self.began + self.limit - time.monotonic()))
        # the call's own time decides, so that a reply does not depend on what else was in the batch
        if self.results is None or not self.done.is_set() or self.seconds > self.limit:
            text = f"Error: {self.tool.name} gave no reply within {self.limit:g} s."
            return [ToolResult(text, False, self.limit, ("timeout",))] * len(self.places)
        return [replace(r, seconds=self.seconds) for r in self.results]


class _Threads:
    """Daemon threads that are used again; one whose call hangs is simply never seen again.

    ``concurrent.futures`` joins its threads when the interpreter exits, so one
    hanging call would keep the process alive for ever.
    """

    def __init__(self) -> None:
        self.lock, self.idle = threading.Lock(), []

    def start(self, job: _Job) -> None:
        with self.lock:
            inbox = self.idle.pop() if self.idle else None
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), daemon=True, name="agentr1-tool").start()
        job.began = time.monotonic()
        inbox.put(job)

    def _serve(self, inbox: SimpleQueue) -> None:
        while True:
            inbox.get().run()
            with self.lock:
                if len(self.idle) >= MAX_THREADS:
                    return
                self.idle.append(inbox)


_THREADS = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_THREADS.__init__)


def run_calls(
    jobs: Sequence[tuple[Tool, dict[str, Any]]], deadline: float | Sequence[float] = DEFAULT_DEADLINE
) -> list[ToolResult]:
    """Run calls concurrently, each with its own deadline in seconds; results in the order of ``jobs``.

    ``deadline`` is one number or one a job; a tool's ``timeout`` goes before it.
    A call that takes longer is abandoned: its thread lives on as a daemon, its
    result is dropped.
    """
    limits = [deadline] * len(jobs) if isinstance(deadline, (int, float)) else list(deadline)
    results: list[ToolResult | None] = [None] * len(jobs)
    inline, batches, single = [], {}, []
    for place, (tool, _) in enumerate(jobs):
        if tool.batched:
            batches.setdefault(id(tool), []).append(place)
        else:
            (inline if tool.inline else single).append(place)

    def job_for(places: list[int]) -> _Job:
        tool, limit = jobs[places[0]][0], jobs[places[0]][0].timeout
        args = [jobs[place][1] for place in places]
        work = (lambda: _run_batch(tool, args)) if tool.batched else (lambda: [run_call(tool, args[0])])
        return _Job(work, places, tool, limits[places[0]] if limit is None else limit)

    def settle(job: _Job) -> None:
        for place, result in zip(job.places, job.settle(), strict=True):
            results[place] = result

    running: deque[_Job] = deque()
    for places in [*batches.values(), *([place] for place in single)]:
        if len(running) >= MAX_THREADS:
            settle(running.popleft())
        running.append(job_for(places))
        try:
            _THREADS.start(running[-1])
        except RuntimeError as error:  # the system gives no more threads
            job = running.pop()
            job.results = [_failure(job.tool, error)] * len(places)
            job.done.set()
            settle(job)
    for place in inline:
        results[place] = run_call(*jobs[place])
    while running:
        settle(running.popleft())
    return results
