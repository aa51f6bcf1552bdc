from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
import threading
import types
import warnings
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentr1_lite.env import ToolEnv
from agentr1_lite.jsonl import DataError, write_rows
from agentr1_lite.mdp import Task
from agentr1_lite.retrieval import BM25, Passage, make_search_tool, words
from agentr1_lite.retrievers import Dense, HTTPRetriever, RetrievalError, make_retriever, recall_at_k
from agentr1_lite.tasks import load_task
from agentr1_lite.tasks.multihop import check_corpus

CORPUS = [
    Passage("Oslo", "Oslo is the capital of Norway."),
    Passage("Norway", "Norway is a country in the north of Europe."),
    Passage("Bergen", "Bergen is a rainy city in Norway."),
    Passage("Lund", "Lund is a city in Sweden."),
]
TASK = Task("t", "Where is Lund?", ("Sweden",), evidence=("Lund",))
QUERY_BGE = "Represent this sentence for searching relevant passages: "
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>'


def bag_of_words(texts, size=64):
    """A stand-in for an encoder: each word counts in a place given by its checksum."""
    vectors = np.zeros((len(texts), size))
    for row, text in zip(vectors, texts, strict=True):
        for word in words(text):
            row[zlib.crc32(word.encode()) % size] += 1
    return vectors


class FakeIndex:
    """What Dense uses of faiss.IndexFlatIP."""

    def __init__(self, size):
        self.size, self.vectors = size, None

    def add(self, vectors):
        assert vectors.dtype == np.float32 and vectors.shape[1] == self.size
        self.vectors = vectors

    def search(self, queries, k):
        places = np.argsort(-(queries @ self.vectors.T), axis=1)[:, :k]
        return np.take_along_axis(queries @ self.vectors.T, places, 1), places


@pytest.fixture(params=["without faiss", "with faiss"])
def faiss(request, monkeypatch):
    found = types.SimpleNamespace(IndexFlatIP=FakeIndex) if request.param == "with faiss" else None
    monkeypatch.setitem(sys.modules, "faiss", found)


# Names


def test_retrievers_come_by_name(tmp_path):
    write_rows(tmp_path / "corpus.jsonl", [{"title": p.title, "text": p.text} for p in CORPUS])
    for options in ({"passages": CORPUS}, {"path": tmp_path / "corpus.jsonl", "url": None}):
        for kind, more in (("bm25", {}), ("dense", {"encoder": bag_of_words})):
            found = make_retriever(kind, **options, **more)
            assert [p.title for p in found.search("rainy Bergen", 1)] == ["Bergen"]
            assert found.passages == BM25(CORPUS).passages
    assert make_retriever("bm25", passages=CORPUS, k1=2.0).k1 == 2.0


@pytest.mark.parametrize(
    "kind, options, reason",
    [
        ("bm52", {}, "retriever 'bm52' is unknown; choose one of bm25, dense, http"),
        ("bm25", {"url": "http://h/search"}, "retriever 'bm25' has no option 'url'; it takes passages, path, k1, b"),
        ("http", {}, "retriever 'http' needs 'url'; give it"),
        ("bm25", {"passages": CORPUS, "path": "x"}, "got passages and a path; give one"),
        ("bm25", {"path": "gone.jsonl"}, "gone.jsonl: cannot be read"),
        ("bm25", {"path": 5}, "path 5 is a int, not a path; give a file or a folder as text"),
        ("dense", {"path": ["a"]}, "path ['a'] is a list, not a path"),
        ("bm25", {"path": "~nobody-of-this-name/x"}, "write the folder out"),
        ("dense", {"passages": CORPUS, "encoder": 5}, "encoder 5 is neither a model's name nor a function"),
        (["bm25"], {}, "retriever ['bm25'] is unknown; choose one of bm25"),
        ("http", {"url": "localhost:8000"}, "expected http://host:port/retrieve"),
        ("http", {"url": "http://localhost:8000"}, "expected http://host:port/retrieve"),
        ("http", {"url": "file:///etc/search"}, "expected http://host:port/retrieve"),
        ("http", {"url": "http://[::1/search"}, "expected http://host:port/retrieve"),
        ("http", {"url": "http://h/search", "tries": 0}, "tries 0 at least 1"),
        ("http", {"url": "http://h/search", "deadline": 0.0}, "deadline 0.0 must be above 0"),
    ],
)
def test_wrong_names_and_options_are_one_sentence(kind, options, reason):
    with pytest.raises(DataError) as caught:
        make_retriever(kind, **options)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


# Dense


def test_dense_scores_are_cosines_worked_out_by_hand(faiss):
    index = Dense(
        ["a", "b", "c"], encoder=lambda texts: [{"a": (3, 4), "b": (0, 2), "q": (1, 0)}.get(t, (0, 0)) for t in texts]
    )
    found = index.search("q", 3)
    assert [p.text for p in found] == ["a", "b", "c"]  # b and c tie at 0 and keep corpus order
    assert [p.score for p in found] == pytest.approx([0.6, 0.0, 0.0])


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 15), st.integers(0, 2**16))
def test_dense_search_is_the_sorted_product_of_unit_vectors(n, queries, k, seed):
    rng = np.random.default_rng(seed)
    table = {f"p{i}": v for i, v in enumerate(rng.normal(size=(n, 6)))} | {
        f"q{i}": v for i, v in enumerate(rng.normal(size=(queries, 6)))
    }
    index = Dense([f"p{i}" for i in range(n)], encoder=lambda texts: np.stack([table[t] for t in texts]))
    asked = [f"q{i}" for i in range(queries)]
    for query, found in zip(asked, index.search_batch(asked, k), strict=True):
        cosines = {
            t: v @ table[query] / np.linalg.norm(v) / np.linalg.norm(table[query])
            for t, v in table.items()
            if t[0] == "p"
        }
        best = sorted(cosines, key=lambda t: -cosines[t])[:k]
        assert [p.text for p in found] == best
        assert [p.score for p in found] == pytest.approx([cosines[t] for t in best], abs=1e-5)


@pytest.mark.parametrize("query", ["", "   ", None])
def test_empty_queries_and_corpora_find_nothing(faiss, query):
    index = Dense(CORPUS, encoder=bag_of_words)
    assert index.search(query, 3) == [] and index.search("Oslo", 0) == []
    assert make_search_tool(index).execute({"query": query}).content == "No results."
    assert Dense([], encoder=bag_of_words).search("Oslo", 3) == []
    assert len(index.search("Oslo", 99)) == len(index) == 4


def test_dense_is_saved_beside_its_passages_and_not_encoded_again(faiss, tmp_path):
    index = Dense(CORPUS, encoder=bag_of_words)
    index.save(tmp_path / "index")
    calls = []
    loaded = Dense.load(tmp_path / "index", encoder=lambda texts: calls.append(texts) or bag_of_words(texts))
    assert calls == [] and loaded.passages == index.passages
    assert loaded.search_batch(["rainy city", "capital"], 3) == index.search_batch(["rainy city", "capital"], 3)
    assert calls == [["rainy city", "capital"]]
    with pytest.raises(DataError, match="was made with an encoder of your own; pass it"):
        Dense.load(tmp_path / "index")
    with pytest.raises(DataError, match="was made with encoder '', not 'some/encoder'; index the passages again"):
        make_retriever("dense", path=tmp_path / "index", encoder="some/encoder")
    with pytest.raises(DataError, match="holds a dense index, not a bm25 one"):
        BM25.load(tmp_path / "index")
    other = Dense.load(tmp_path / "index", encoder=lambda texts: bag_of_words(texts, 32))
    with pytest.raises(RetrievalError, match="vectors of 32 numbers and the index holds 64"):
        other.search("Oslo")
    (tmp_path / "index").rename(tmp_path / "index.former")  # as a killed save leaves it
    assert Dense.load(tmp_path / "index", encoder=bag_of_words).passages == index.passages
    assert make_retriever("dense", path=tmp_path / "index", encoder=bag_of_words).passages == index.passages
    write_rows(tmp_path / "index.former" / "mine.jsonl", [])
    with pytest.raises(DataError, match=r"index.former: holds something else \(mine.jsonl\)"):
        index.save(tmp_path / "index")
    assert not (tmp_path / "index").exists()
    Dense([], encoder=bag_of_words).save(tmp_path / "empty")
    assert Dense.load(tmp_path / "empty", encoder=bag_of_words).search("x") == []


@pytest.mark.parametrize("vectors", [[[1.0, float("nan")]] * 4, [1.0, 2.0, 3.0, 4.0], [[1.0, 2.0]] * 3])
def test_an_encoder_that_gives_no_vectors_is_told(vectors):
    with pytest.raises(RetrievalError, match=r"encoder gave \(.*\) numbers for 4 texts; expected finite \(N, D\)"):
        Dense(CORPUS, encoder=lambda texts: vectors)


@pytest.mark.filterwarnings("ignore:.*guessed by its name")
@pytest.mark.parametrize(
    "name, query, passage",
    [
        ("BAAI/bge-small-en-v1.5", "Represent this sentence for searching relevant passages: x", "Oslo\n"),
        ("intfloat/e5-base-v2", "query: x", "passage: Oslo\n"),
        ("some/other", "x", "Oslo\n"),
    ],
)
def test_named_encoders_get_the_prefixes_of_their_family(monkeypatch, name, query, passage):
    asked, built = [], []

    class SentenceTransformer:
        def __init__(self, name, device):
            built.append((name, device))

        def encode(self, texts, **options):
            asked.append(texts)
            return bag_of_words(texts)

    monkeypatch.setitem(
        sys.modules, "sentence_transformers", types.SimpleNamespace(SentenceTransformer=SentenceTransformer)
    )
    make_retriever("dense", passages=CORPUS, encoder=name, device="cpu").search("x")
    assert built == [(name, "cpu")] and asked[1] == [query] and asked[0][0].startswith(passage)


QUESTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"


@pytest.fixture
def encoder(monkeypatch):
    """A stand-in for a sentence-transformers model, whose texts are noted as the model sees them."""

    class SentenceTransformer:
        prompts, default_prompt_name, seen = {}, None, []

        def __init__(self, name, device):
            self.seen.clear()

        def encode(self, texts, prompt_name=None, prompt=None, **options):
            if prompt is None:
                prompt = self.prompts.get(prompt_name or self.default_prompt_name, "")
            self.seen.append([prompt + text for text in texts])
            return bag_of_words(texts)

        def encode_query(self, texts, **options):
            return self.encode(texts, **{"prompt_name": "query", **options})

        def encode_document(self, texts, **options):
            return self.encode(texts, **{"prompt_name": "document", **options})

    monkeypatch.setitem(
        sys.modules, "sentence_transformers", types.SimpleNamespace(SentenceTransformer=SentenceTransformer)
    )
    return SentenceTransformer


E5_TASKS = {f"{name}_query": f"{name}: " for name in ("sts", "summarization", "bitext", "web_search")}


@pytest.mark.parametrize(
    "name, prompts, default, query, passage",
    [
        ("intfloat/multilingual-e5-large-instruct", {"query": "Own: "}, None, "Own: ", ""),
        ("Qwen/Qwen3-Embedding-0.6B", {"query": QUESTION, "document": ""}, None, QUESTION, ""),
        ("a/b", {"query": "Q: ", "document": "", "passage": "P: "}, "query", "Q: ", "P: "),
        ("a/b", {"query": "Q: ", "corpus": "C: "}, "query", "Q: ", "C: "),
        ("intfloat/e5-base-v2", {"query": "q: ", "passage": "p: "}, None, "q: ", "p: "),
        ("intfloat/e5-mistral-7b-instruct", E5_TASKS, None, "web_search: ", ""),
        ("a/b", E5_TASKS, "sts_query", "sts: ", ""),
        ("jina", {"retrieval.query": "RQ: ", "text-matching": "x", "retrieval.passage": "RP: "}, None, "RQ: ", "RP: "),
        ("stella", {"s2s_query": "s: ", "s2p_query": "p: "}, None, "p: ", ""),
        ("google/embeddinggemma", {"query": "task: ", "document": "title: ", "STS": "x"}, None, "task: ", "title: "),
        ("a/b-e5-x", {"clustering": "c: "}, "clustering", "", ""),
        # nothing in the settings: guessed by the name
        ("intfloat/multilingual-e5-large-instruct", {}, None, f"{QUESTION} ", ""),
        ("Qwen/Qwen3-Embedding-8B", {"query": "", "document": ""}, None, QUESTION, ""),
        ("intfloat/multilingual-e5-base", {}, None, "query: ", "passage: "),
        ("nomic-ai/nomic-embed-text-v1.5", None, None, "search_query: ", "search_document: "),
        ("Snowflake/snowflake-arctic-embed-l-v2.0", {}, None, "query: ", ""),
        ("Snowflake/snowflake-arctic-embed-m-v1.5", {}, None, QUERY_BGE, ""),
        ("BAAI/bge-m3", {}, None, "", ""),
        ("thenlper/gte-base", {}, None, "", ""),
    ],
)
def test_an_encoder_gets_the_prompts_it_names(encoder, tmp_path, name, prompts, default, query, passage):
    encoder.prompts, encoder.default_prompt_name = prompts, default
    told = query and not any((prompts or {}).values()) or prompts is E5_TASKS or name == "stella"
    with pytest.warns(UserWarning, match="guessed by its name|of its prompts") if told else contextlib.nullcontext():
        index = make_retriever("dense", passages=CORPUS[:1], encoder=name)
    index.search("x")
    assert encoder.seen == [[f"{passage}Oslo\nOslo is the capital of Norway."], [f"{query}x"]]
    index.save(tmp_path / "index")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dense.load(tmp_path / "index").search("x")
    assert encoder.seen == [[f"{query}x"]]
    Dense(CORPUS[:1], encoder=name, instruction="Mine: ", vectors=index.vectors).search("x")
    assert encoder.seen == [["Mine: x"]]


def test_a_real_encoder_sees_each_prompt_once(tmp_path):
    st = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    vocabulary = {word: i for i, word in enumerate("[UNK] q : p oslo is the capital of norway . x".split())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    module = models.StaticEmbedding(tokenizer, embedding_weights=np.eye(len(vocabulary)))
    own = st.SentenceTransformer(modules=[module], prompts={"query": "q : ", "passage": "p : "}, device="cpu")
    own.default_prompt_name = "query"
    own.save(str(tmp_path / "model"))
    index = Dense([Passage("", "x"), Passage("", "norway")], encoder=str(tmp_path / "model"), device="cpu")
    at = [vocabulary[word] for word in ("p", ":", "x")]
    assert np.flatnonzero(index.vectors[0]).tolist() == sorted(at)
    # mean of q, :, x against the mean of p, :, x: two of three words in common
    assert index.search("x", 1)[0].score == pytest.approx(2 / 3, abs=1e-6)


def test_an_encoder_that_cannot_be_had_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(DataError, match=r"needs sentence-transformers .*; install the extra: .*agentr1_lite\[dense\]"):
        make_retriever("dense", passages=CORPUS)

    def gone(name, device):
        raise OSError(f"no {name}\nanywhere")

    monkeypatch.setitem(sys.modules, "sentence_transformers", types.SimpleNamespace(SentenceTransformer=gone))
    with pytest.raises(DataError, match="'a/b' cannot be loaded .no a/b anywhere.; check name and network") as caught:
        make_retriever("dense", passages=CORPUS, encoder="a/b")
    assert "\n" not in str(caught.value)


# A server


class Server(ThreadingHTTPServer):
    """Speaks Search-R1's /retrieve and Agent-R1's /search over CORPUS; ``replies`` are sent first."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.index, self.requests, self.replies, self.shape = BM25(CORPUS), [], [], "contents"
        self.release = threading.Event()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"

    def hits(self, query, k, scores):
        for p in self.index.search(query, k):
            text = (
                {"contents": f'"{p.title}"\n{p.text}'}
                if self.shape == "contents"
                else {"title": p.title, "text": p.text}
            )
            document = {"id": p.id, **text}
            yield {"document": document, "score": p.score} if scores else document

    def answer(self, path, asked):
        self.requests.append((path, asked))
        if path == "/retrieve":
            scores = asked.get("return_scores", False)
            return {"result": [list(self.hits(q, asked["topk"], scores)) for q in asked["queries"]]}
        lists = [{"query": q, "results": list(self.hits(q, asked["top_k"], True))} for q in asked["queries"]]
        return {"query_results": lists, "total_time": 0.1, "search_time": 0.1}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(("GET", self.path))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"result": [[]], "query_results": [[]]}')

    def drip(self, before, after):
        """Spaces one by one until the test is over, or the client has waited far too long and gets its answer."""
        with contextlib.suppress(OSError):
            self.wfile.write(before)
            for _ in range(200):
                if self.server.release.wait(0.02):
                    break
                self.wfile.write(b" ")
            self.wfile.write(after)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, body = 200, json.dumps(self.server.answer(self.path, asked))
        if self.server.replies:
            status, body, *headers = self.server.replies.pop(0)
        else:
            headers = []
        if status == "drip":
            self.drip(headers[0], headers[1] + body.encode())
            return
        if status is None:  # says nothing until the test is over
            self.server.release.wait(30)
            return
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("path", ["/retrieve", "/search"])
@pytest.mark.parametrize("shape", ["contents", "title and text"])
def test_both_servers_give_what_their_index_finds(server, path, shape):
    server.shape = shape
    client = make_retriever("http", url=server.url(path))
    queries = ["city in Norway", "capital", "", "zzz", None]
    assert client.search_batch(queries, 2) == server.index.search_batch(queries, 2)
    ((asked_path, asked),) = server.requests
    k = {"/retrieve": {"topk": 2, "return_scores": True}, "/search": {"top_k": 2}}[path]
    assert (asked_path, asked) == (path, {"queries": ["city in Norway", "capital", "zzz"], **k})
    assert copy.deepcopy(client) is client and client.passages == []


def test_hits_without_scores_and_in_other_shapes(server):
    hits = [
        {"id": 7, "contents": "Moi\nMoi is a village."},
        {"document": {"title": "Vik", "contents": '"Vik"\nVik is a town.'}},
        {"document": {"title": "Lom", "contents": "Lom has a church.\nIt is old."}, "score": -0.5},
        {"document": {"contents": "one line"}, "score": 2},
    ]
    server.replies.append((200, json.dumps({"result": [hits]})))
    assert HTTPRetriever(server.url("/retrieve")).search("x", 9) == [
        Passage("Moi", "Moi is a village.", 0.0, "7"),
        Passage("Vik", "Vik is a town."),
        Passage("Lom", "Lom has a church.\nIt is old.", -0.5),
        Passage("", "one line", 2.0),
    ]


def lists_of(*queries, name="query"):
    rows = [{name: q, "results": [{"document": {"title": q, "text": "x"}, "score": 1.0}]} for q in queries]
    return json.dumps({"query_results": rows})


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(["Oslo", "Lund", "Bergen"]))
def test_hits_go_to_the_query_they_name(server, order):
    asked = ["Oslo", "Lund", "Bergen"]
    server.replies = [(200, lists_of(*order)), (200, lists_of(*order, name="q"))]
    found = [HTTPRetriever(server.url("/search")).search_batch(asked, 1) for _ in range(2)]
    assert [hits[0].title for hits in found[0]] == asked
    assert [hits[0].title for hits in found[1]] == order  # nothing names a query, so place says it


@pytest.mark.parametrize("named", [("Oslo", "Moss"), ("Oslo", "Oslo"), ("lund", "Oslo")])
def test_hits_of_queries_that_nobody_asked_are_refused(server, named):
    server.replies = [(200, lists_of(*named))]
    with pytest.raises(RetrievalError, match="gave hits of other queries, none of 'Lund'"):
        HTTPRetriever(server.url("/search")).search_batch(["Oslo", "Lund"], 1)


@pytest.mark.parametrize(
    "score", ["1" + "0" * 400, "1" + "0" * 5000, "NaN", "-Infinity", '"nan"', '"0.5"', "null", "true", "[1]"]
)
def test_a_score_that_is_no_finite_number_is_one_sentence(server, score):
    server.replies = [(200, '{"result": [[{"document": {"text": "x"}, "score": ' + score + "}]]}")]
    with pytest.raises(RetrievalError, match="not 'result' with hits .*; check that it speaks") as caught:
        HTTPRetriever(server.url("/retrieve")).search("Oslo")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_told_and_not_followed(server, status):
    where = server.url("/elsewhere")
    server.replies = [(status, "", ("Location", where))]
    with pytest.raises(RetrievalError, match=f"1 of 3 tries .* 'HTTP {status} .* to {where}'"):
        HTTPRetriever(server.url("/retrieve")).search("Oslo")
    assert len(server.requests) == 1


DRIPS = {
    "status": (b"HTTP/1.0 200 ", b"\r\n\r\n"),
    "headers": (b"HTTP/1.0 200 OK\r\nX-Slow:", b"\r\n\r\n"),
    "body": (b"HTTP/1.0 200 OK\r\n\r\n", b""),
}


@pytest.mark.parametrize("part", DRIPS)
def test_a_server_that_drips_meets_the_deadline(server, part):
    reply = json.dumps({"result": [[{"text": "x", "title": "Lund"}]]})
    server.replies = [("drip", reply, *DRIPS[part])] * 2
    client = HTTPRetriever(server.url("/retrieve"), deadline=0.2)
    with pytest.raises(RetrievalError, match="1 of 3 tries in 0.2 s failed, the last with '.*timed out"):
        client.search("Oslo")
    with pytest.raises(DataError, match="in 0.2 s failed, the last with '.*timed out"):
        check_corpus(client, [TASK])


def test_answers_are_kept_by_query_and_k(server):
    client = HTTPRetriever(server.url("/search"))
    client.cached = 3
    first = client.search("Oslo", 2)
    first.clear()
    assert client.search_batch(["Oslo", "Oslo ", "Lund"], 2)[0] == server.index.search("Oslo", 2)
    client.search("Oslo", 1)
    client.search("Oslo", 2)
    assert [asked["queries"] for _, asked in server.requests] == [["Oslo"], ["Lund"], ["Oslo"]]
    client.search("Bergen", 2)  # the fourth: Lund, asked longest ago, is dropped
    client.search_batch(["Oslo", "Lund"], 2)
    assert [asked["queries"] for _, asked in server.requests][3:] == [["Bergen"], ["Lund"]]


def test_a_server_in_trouble_is_asked_again(server):
    server.replies = [(503, "busy"), (429, "slow down")]
    client = HTTPRetriever(server.url("/retrieve"), pause=0.0)
    assert client.search("Oslo", 1) == server.index.search("Oslo", 1)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "reply, reason",
    [
        (
            (500, "out of\nmemory"),
            "3 of 3 tries in 8 s failed, the last with 'HTTP 500 Internal Server Error: out of memory'",
        ),
        ((422, '{"detail": "k"}'), "1 of 3 tries in 8 s failed, the last with 'HTTP 422 "),
        ((200, "<html>"), "replied '<html>', not 'result' with hits"),
        ((200, '{"results": []}'), "not 'result' with hits ('result')"),
        ((200, '{"result": {"a": 1}}'), "not a list"),
        ((200, '{"result": [null]}'), "hits are a NoneType, not a list"),
        ((200, '{"result": ["abc"]}'), "hits are a str, not a list"),
        ((200, '{"result": [[{"document": {"id": 1}}]]}'), "hit 0 has no document with text or contents"),
        ((200, '{"result": [["text"]]}'), "hit 0 has no document"),
        ((200, '{"result": []}'), "gave 0 lists of hits for 1 queries"),
        ((200, "[" * 100_000), "not 'result' with hits"),
    ],
)
def test_what_a_server_cannot_say_is_one_sentence(server, reply, reason):
    server.replies = [reply] * 3
    with pytest.raises(RetrievalError) as caught:
        HTTPRetriever(server.url("/retrieve"), pause=0.0).search("Oslo")
    assert (
        reason in str(caught.value) and "\n" not in str(caught.value) and server.url("/retrieve") in str(caught.value)
    )


def test_a_server_that_is_silent_or_absent_is_one_sentence(server):
    server.replies = [(None, "")] * 9
    with pytest.raises(
        RetrievalError, match="1 of 3 tries in 0.1 s failed, the last with '.*timed out'; start the server"
    ):
        HTTPRetriever(server.url("/search"), deadline=0.1).search("Oslo")
    closed = Server()
    closed.server_close()
    with pytest.raises(RetrievalError, match="2 of 2 tries in 8 s failed, the last with '.*refused"):
        HTTPRetriever(closed.url("/search"), tries=2, pause=0.0).search("Oslo")


# Behind the search tool


def test_an_episode_searches_a_server_and_survives_its_failure(server):
    client = HTTPRetriever(server.url("/retrieve"), tries=1)
    env = ToolEnv([make_search_tool(client, k=1)], tool_timeout=0.001)
    envs = [env.fork() for _ in range(3)]
    for each in envs:
        each.reset(TASK)
    steps = ToolEnv.batch_step(envs, [CALL % "Lund", CALL % "rainy", CALL % "Lund"])
    assert [s.observation[0]["content"][:5] for s in steps] == ["Lund:", "Berge", "Lund:"]
    assert steps[0].info["turn"].results[0]["info"]["titles"] == ["Lund"]
    assert [asked["queries"] for _, asked in server.requests] == [["Lund", "rainy"]]
    server.replies = [(500, "broken")]
    step = envs[0].step(CALL % "Oslo")
    (result,) = step.info["turn"].results
    assert not step.done and not result["success"] and "raised" in result["flags"]
    assert "HTTP 500" in step.observation[0]["content"]


def test_calls_of_a_stochastic_tool_that_fail_are_not_searched():
    asked = []

    class Index(Dense):
        def search_batch(self, queries, k=5):
            asked.append(list(queries))
            return super().search_batch(queries, k)

    tool = make_search_tool(Index(CORPUS, encoder=bag_of_words), k=1, failing=0.5, noisy=0.5).fork()
    tool.reset(TASK, random.Random(0))
    results = tool.batch_execute([{"query": "Oslo"}] * 200)
    failed = [not r.success for r in results]
    assert 60 < sum(failed) < 140 and [len(a) for a in asked] == [200 - sum(failed)]
    assert all(r.flags == ("failed",) for r in results if not r.success)
    assert any("noisy" in r.flags for r in results) and not tool.inline and tool.batched


def test_noise_needs_the_corpus():
    with pytest.raises(ValueError, match="noisy 0.1 draws from the corpus, which is empty or not here"):
        make_search_tool(HTTPRetriever("http://h/search"), noisy=0.1)


def test_threads_share_a_retriever():
    index = Dense(CORPUS, encoder=bag_of_words)
    index.cached = 2
    alone, found = index.search_batch(["Oslo", "rainy", "Sweden", "north"], 2), [None] * 8

    def work(place):
        for _ in range(50):
            found[place] = index.search_batch(["Oslo", "rainy", "Sweden", "north"], 2)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 8


# Tasks


ROW = {
    "_id": "a",
    "question": "Which city in Norway is rainy?",
    "answer": "Bergen",
    "supporting_facts": [["Bergen", 0], ["Norway", 0]],
    "context": [["Bergen", ["Bergen is rainy."]], ["Norway", ["A country."]]],
}


def test_a_task_searches_a_server_that_is_tried_before_anything_starts(server, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [ROW])
    knobs = {"path": tmp_path / "rows.jsonl", "retriever": "http"}
    found = load_task("hotpotqa", **knobs, url=server.url("/search"))
    assert isinstance(found.index, HTTPRetriever) and found.passages == [] and len(server.requests) == 1
    server.index = BM25(["a rainy city of another encyclopedia"])
    with pytest.warns(UserWarning, match="server shows no evidence of the first 1 questions .* another dump"):
        load_task("hotpotqa", **knobs, url=server.url("/search"))
    server.replies = [(404, "no such path")]
    with pytest.raises(DataError, match="HTTP 404 Not Found: no such path"):
        load_task("hotpotqa", **knobs, url=server.url("/search"))
    with pytest.raises(DataError, match="'http' needs 'url'"):
        load_task("hotpotqa", **knobs)


@pytest.mark.parametrize(
    "knobs, reason",
    [
        ({"retriever": "http", "corpus": "x", "url": "http://h/search"}, "'http' has no option 'corpus'; it takes url"),
        ({"retriever": "http", "encoder": "x", "url": "http://h/search"}, "no option 'encoder'; it takes url"),
        ({"url": "http://h/search"}, "'bm25' has no option 'url'; it takes corpus"),
        ({"encoder": "x"}, "'bm25' has no option 'encoder'; it takes corpus"),
        ({"retriever": "dense", "url": "x"}, "'dense' has no option 'url'; it takes corpus, encoder"),
        ({"retriever": 5}, "retriever 5 is unknown; choose one of bm25, dense, http"),
        ({"corpus": 5}, "corpus 5 is a int, not a path"),
        ({"corpus": {"a": 1}}, "corpus {'a': 1} is a dict, not a path"),
    ],
)
def test_a_task_speaks_of_its_own_knobs_and_before_it_reads_anything(knobs, reason):
    with pytest.raises(DataError) as caught:
        load_task("hotpotqa", path="gone.jsonl", **knobs)
    assert reason in str(caught.value)
    assert not any(word in str(caught.value) for word in ("k1", "passages", "instruction", "deadline"))


def test_a_task_searches_dense_vectors(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [ROW])
    found = load_task("hotpotqa", path=tmp_path / "rows.jsonl", retriever="dense", encoder=bag_of_words)
    assert isinstance(found.index, Dense) and [p.title for p in found.index.search("rainy", 1)] == ["Bergen"]


# Recall


def test_recall_at_k_worked_out_by_hand():
    class Index:
        passages = CORPUS

        def search_batch(self, queries, k):
            return [[Passage(t, "") for t in {"one": "abcd", "two": "ddef"}[q]][:k] for q in queries]

    tasks = [Task("1", "one", evidence=("b", "d")), Task("2", "two", evidence=("e", "x", "f", "d")), Task("3", "three")]
    # one: b at 2, d at 4; two: d at 1, e at 3, f at 4, x never
    assert recall_at_k(Index(), tasks, (1, 2, 3, 4)) == {1: 1 / 8, 2: 3 / 8, 3: 4 / 8, 4: 7 / 8}
    for wrong in ({"tasks": tasks[2:]}, {"tasks": tasks, "ks": ()}, {"tasks": tasks, "ks": (0, 1)}):
        with pytest.raises(ValueError, match="recall_at_k: . questions with evidence"):
            recall_at_k(Index(), **wrong)


def test_recall_finds_titles_in_other_writing():
    corpus = [
        Passage("Simon &amp; Garfunkel", "folk duo"),
        Passage("Beyonce\u0301", "singer"),
        Passage("Ice", "frozen"),
    ]
    gold = ("Simon & Garfunkel", "Beyonc\u00e9", "ICE")
    tasks = [Task("1", "folk duo singer frozen", evidence=gold)]
    assert recall_at_k(BM25(corpus), tasks, (3,)) == {3: pytest.approx(2 / 3)}
