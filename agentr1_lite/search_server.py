"""A client of retrieval servers over HTTP: Search-R1's and Agent-R1's."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPException
from typing import Any
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


class HTTPRetriever(BatchRetriever):
    """A client of Search-R1's (``…/retrieve``) and Agent-R1's (``…/search``) retrieval servers.

    Search-R1 replies ``{"result": [[{"document": {"id", "contents"}, "score"}, …], …]}``, Agent-R1
    ``{"query_results": [{"query", "results": [{"document", "score"}, …]}, …]}``; a hit may also be the document alone.
    Sources: PeterGriffinJin/Search-R1 and 0russwest0/Agent-R1 (its ``wiki_search_server`` and ``kilt_search_server``).

    Args:
        url: where to post, ending in ``/retrieve`` or ``/search``.
        deadline: seconds for a search with all its tries.
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
        self._open = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else [])).open

    def find(self, queries: list[str], k: int) -> list[list[Passage]]:
        reply = self._post(json.dumps(self.request(queries, k)).encode())
        try:
            rows = json.loads(reply)[self.key]
            found = [_passages(row["results"] if isinstance(row, Mapping) else row)[:k] for row in rows]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            shown = reply[:80].decode("utf-8", "replace")
            raise RetrievalError(
                f"search server {self.url}: replied {shown!r}, not {self.key!r} with hits ({one_line(error)}); "
                "check that it speaks this interface"
            ) from error
        if len(found) != len(queries):
            raise RetrievalError(
                f"search server {self.url}: gave {len(found)} lists of hits for {len(queries)} queries"
            )
        return found

    def _post(self, body: bytes) -> bytes:
        end, last, sent = time.monotonic() + self.deadline, "", 0
        for attempt in range(self.tries):
            wait = self.pause * 2 ** (attempt - 1) if attempt else 0.0
            if time.monotonic() + wait >= end:
                break
            time.sleep(wait)
            sent += 1
            try:
                return self._read(body, end)
            except urllib.error.HTTPError as error:
                last = f"HTTP {error.code} {one_line(error.reason)}"
                with suppress(OSError, HTTPException):
                    last += f": {one_line(error.read(300).decode('utf-8', 'replace'))}"
                if error.code < 500 and error.code not in TRY_AGAIN:
                    break
            except (OSError, ValueError, HTTPException) as error:
                last = one_line(getattr(error, "reason", None) or error) or type(error).__name__
        raise RetrievalError(
            f"search server {self.url}: {sent} of {self.tries} tries in {self.deadline:g} s failed, the last with "
            f"{last!r}; start the server or check the URL"
        )

    def _read(self, body: bytes, end: float) -> bytes:
        """Post once; a server that drips bytes is cut off at the deadline too."""
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        reply = bytearray()
        with self._open(request, timeout=max(end - time.monotonic(), 0.01)) as response:
            while chunk := response.read1(1 << 16):
                reply += chunk
                if time.monotonic() > end:
                    raise TimeoutError("timed out while the reply arrived")
                if len(reply) > MAX_REPLY:
                    raise ValueError(f"the reply is longer than {MAX_REPLY >> 20} MiB")
        return bytes(reply)


def _passages(hits: Any) -> list[Passage]:
    """The hits of one query, each a document or a document with its score."""
    if not isinstance(hits, list):
        raise TypeError(f"hits are a {type(hits).__name__}, not a list")
    found = []
    for place, hit in enumerate(hits):
        document = hit.get("document", hit) if isinstance(hit, Mapping) else None
        if not isinstance(document, Mapping) or not any(isinstance(document.get(n), str) for n in ("text", "contents")):
            raise TypeError(f"hit {place} has no document with text or contents")
        score = hit.get("score")
        known = isinstance(score, (int, float)) and math.isfinite(score)
        found.append(replace(as_passage(document, place), score=float(score) if known else 0.0))
    return found
