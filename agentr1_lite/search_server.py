"""A client of retrieval servers over HTTP: Search-R1's and Agent-R1's."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agentr1_lite.jsonl import DataError
from agentr1_lite.retrieval import BatchRetriever, Passage, RetrievalError, as_passage, one_line

# By the end of the URL: the request, and where the reply holds a list of hits for each query
INTERFACES: dict[str, tuple[Callable[[list[str], int], dict[str, Any]], str]] = {
    "/retrieve": (lambda queries, k: {"queries": queries, "topk": k, "return_scores": True}, "result"),
    "/search": (lambda queries, k: {"queries": queries, "top_k": k}, "query_results"),
}
MAX_REPLY = 64 * 2**20
TRY_AGAIN = (408, 425, 429)
T = TypeVar("T")


class AnyStatus(urllib.request.HTTPErrorProcessor):
    """Hands every reply over as it came: a redirect that urllib follows turns the POST into a GET."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def within(seconds: float, work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, :class:`TimeoutError` after so many seconds.

    urllib's own timeout starts anew with every read, so a server that drips its headers would never meet it. Work that
    is late lives on in a daemon thread.
    """
    done: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except Exception as error:
            done.put((None, error))

    threading.Thread(target=run, daemon=True, name="agentr1-search").start()
    try:
        value, error = done.get(timeout=max(seconds, 0.01))
    except Empty:
        raise TimeoutError("timed out") from None
    if error is not None:
        raise error
    return value


class HTTPRetriever(BatchRetriever):
    """A client of Search-R1's (``…/retrieve``) and Agent-R1's (``…/search``) retrieval servers.

    Search-R1 replies ``{"result": [[{"document": {"id", "contents"}, "score"}, …], …]}``, Agent-R1
    ``{"query_results": [{"query", "results": [{"document", "score"}, …]}, …]}``; a hit may also be the document alone.
    Sources: PeterGriffinJin/Search-R1 and 0russwest0/Agent-R1 (its ``wiki_search_server`` and ``kilt_search_server``).

    Args:
        url: where to post, ending in ``/retrieve`` or ``/search``.
        deadline: seconds for a search with all its tries, from the first connection to the last byte.
        tries: how often a request is sent that is refused, times out or meets a server's error.
        pause: seconds before the second try, doubled before each further one.

    A search raises :class:`RetrievalError`: one sentence with the last error.
    """

    def __init__(self, url: str, *, deadline: float = 8.0, tries: int = 3, pause: float = 0.2):
        super().__init__([])
        try:
            parts = urlsplit(str(url))
        except ValueError:  # such as a bracket that is not closed
            parts = urlsplit("")
        ending = next((end for end in INTERFACES if parts.path.rstrip("/").endswith(end)), "")
        if parts.scheme not in ("http", "https") or not parts.hostname or not ending:
            raise DataError(
                f"retriever url {url!r}: expected http://host:port/retrieve (Search-R1) or …/search (Agent-R1)"
            )
        if not deadline > 0 or tries < 1:
            raise DataError(f"retriever url {url!r}: deadline {deadline} must be above 0 and tries {tries} at least 1")
        self.url, self.deadline, self.tries, self.pause = str(url).rstrip("/"), deadline, tries, pause
        self.request, self.key = INTERFACES[ending]
        self.timeout = deadline + 2.0  # of the tool: this client's own sentence comes first
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")  # which no proxy can reach
        proxies = [urllib.request.ProxyHandler({})] if local else []
        self._open = urllib.request.build_opener(AnyStatus, *proxies).open

    def find(self, queries: list[str], k: int) -> list[list[Passage]]:
        reply = self._post(json.dumps(self.request(queries, k)).encode())
        try:
            rows = json.loads(reply)[self.key]
            asked = [row.get("query") if isinstance(row, Mapping) else None for row in rows]
            found = [_passages(row["results"] if isinstance(row, Mapping) else row)[:k] for row in rows]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            shown = reply[:80].decode("utf-8", "replace")
            raise RetrievalError(
                f"search server {self.url}: replied {shown!r}, not {self.key!r} with hits ({one_line(error)}); "
                "check that it speaks this interface"
            ) from error
        if len(found) != len(queries):
            raise RetrievalError(
                f"search server {self.url}: gave {len(found)} lists of hits for {len(queries)} queries"
            )
        if not all(isinstance(query, str) for query in asked):
            return found  # nothing says whose they are, so they are in order
        if sorted(asked) != sorted(queries):
            wrong = next(query for query in queries if query not in asked)
            raise RetrievalError(f"search server {self.url}: gave hits of other queries, none of {wrong[:80]!r}")
        return [found[asked.index(query)] for query in queries]

    def _post(self, body: bytes) -> bytes:
        end, last, sent = time.monotonic() + self.deadline, "", 0
        for attempt in range(self.tries):
            wait = self.pause * 2 ** (attempt - 1) if attempt else 0.0
            if time.monotonic() + wait >= end:
                break
            time.sleep(wait)
            sent += 1
            try:
                status, said, reply = within(end - time.monotonic(), partial(self._read, body, end))
            except (OSError, ValueError, HTTPException) as error:
                last = one_line(getattr(error, "reason", None) or error) or type(error).__name__
                continue
            if 200 <= status < 300:
                return reply
            last = f"HTTP {status} {said}: {one_line(reply.decode('utf-8', 'replace'))}".rstrip(": ")
            if status < 500 and status not in TRY_AGAIN:
                break
        raise RetrievalError(
            f"search server {self.url}: {sent} of {self.tries} tries in {self.deadline:g} s failed, the last with "
            f"{last!r}; start the server or check the URL"
        )

    def _read(self, body: bytes, end: float) -> tuple[int, str, bytes]:
        """Post once: status, its meaning and the reply, of an error's only the beginning."""
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        reply = bytearray()
        with self._open(request, timeout=max(end - time.monotonic(), 0.01)) as response:
            said = one_line(" to ".join(filter(None, (response.reason, response.headers["Location"]))))
            if not 200 <= response.status < 300:
                with suppress(OSError, HTTPException):
                    reply += response.read1(300)
                return response.status, said, bytes(reply)
            while chunk := response.read1(1 << 16):
                reply += chunk
                if time.monotonic() > end:
                    raise TimeoutError("timed out while the reply arrived")
                if len(reply) > MAX_REPLY:
                    raise ValueError(f"the reply is longer than {MAX_REPLY >> 20} MiB")
        return response.status, said, bytes(reply)


def _passages(hits: Any) -> list[Passage]:
    """The hits of one query, each a document or a document with its score."""
    if not isinstance(hits, list):
        raise TypeError(f"hits are a {type(hits).__name__}, not a list")
    found = []
    for place, hit in enumerate(hits):
        document = hit.get("document", hit) if isinstance(hit, Mapping) else None
        if not isinstance(document, Mapping) or not any(isinstance(document.get(n), str) for n in ("text", "contents")):
            raise TypeError(f"hit {place} has no document with text or contents")
        score = hit.get("score", 0.0)
        if type(score) not in (int, float) or not math.isfinite(score):
            raise TypeError(f"hit {place} has the score {score!r}, not a finite number")
        found.append(replace(as_passage(document, place), score=float(score)))
    return found
