"""Questions to an index, from Python: `session.stream(question, documents=edge.Documents("manuals"))`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edge.documents.encoder import MINILM, check_encoder, embed_question, load_encoder, open_encoder
from edge.documents.pace import affordable
from edge.documents.packing import fitting, pack
from edge.documents.pruning import AUTO, parse_prune, prune_texts, ranked_by
from edge.documents.searching import RERANKED, By, Found, check_by, rerank, search
from edge.documents.store import Store
from edge.errors import InputError
from edge.options import Options
from edge.run.arguments import check_text
from edge.run.grounding import Grounded, Reader
from edge.run.session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10 has none

    from edge.keywords import Keywords

TOP = 5  # passages of a prompt


class Documents:
    """An index that questions are asked of. Use it as a context manager, or call `close`.

        with edge.Documents("manuals") as documents, edge.load("smollm2-135m") as session:
            print(session.generate("How is a disk encrypted?", documents=documents))
            print(session.report.sources)

    name: of the index. by: search by "words", by "vectors" or by "both". top: passages of a prompt, at most. reranker:
    a model that reads the best candidates together with the question. prune: the most of the passages that stays, by
    whole sentences, such as 0.4, but at least the best sentence; "auto": as much as there is room for. The reranker
    ranks sentences, else BM25. The keywords are options, of which memory, threads and backend hold for the encoder and
    the reranker; those are loaded with the first question, and stay.

    waiting: the passages that no encoder has seen yet, which are found by their words alone. Raises InputError for an
    index that is not there or is empty, and the errors of `edge.load` for its encoder.
    """

    def __init__(
        self, name: str, *, by: By = "both", top: int = TOP, reranker: str | None = None,
        prune: float | str | None = None,
        options: Options | None = None, **keywords: Unpack[Keywords],
    ) -> None:  # fmt: skip
        self.name, self.by, self.top, self.reranker = name, check_by(by), _check_top(top), reranker
        self.prune = parse_prune(prune)
        self._options = Options.of(options, **keywords)
        self._loaded: dict[str, Session] = {}
        self._last: tuple[tuple[str, int], list[Found]] = ("", 0), []  # of the last question
        self._opened = ExitStack()
        self._store = self._opened.enter_context(Store(name))
        try:
            _, passages, self.waiting = self._store.counts()
            if not passages:
                raise InputError(f"the index {name} has no passages: edge index {name} FILE adds some")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Documents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.release()
        self._opened.close()

    def release(self) -> None:
        """Free the encoder and the reranker, so that another model may have their memory. The next question loads
        them again."""
        for session in self._loaded.values():
            session.close()
        self._loaded.clear()

    @property
    def peaks(self) -> dict[str, int]:
        """The peak that the plan of each model that is loaded predicts, in bytes."""
        return {name: session.plan.predicted_peak for name, session in self._loaded.items()}

    def load(self) -> None:
        """Load the encoder and the reranker, if they are not: before another model plans with the memory that is
        left."""
        if self.by != "words":
            self._encoder()
        if self.reranker:
            self._session(self.reranker)

    def search(self, question: str, top: int | None = None) -> list[Found]:
        """The passages that fit a question best, the best first. top: at most this many. Raises InputError for an empty
        question."""
        check_text("the question", question)
        if not question or not question.strip():
            raise InputError("the question is empty")
        most = self.top if top is None else _check_top(top)
        if (question, most) == self._last[0]:
            return self._last[1]
        vector = None
        if self.by != "words":
            vector = embed_question(self._encoder(), question)
        wanted = max(most, RERANKED) if self.reranker else most
        found = search(self._store, "" if self.by == "vectors" else question, vector, most=wanted)
        if self.reranker and found:
            found = rerank(self._session(self.reranker), question, found)
        self._last = (question, most), found[:most]
        return found[:most]

    def ground(self, question: str, reader: Reader, room: int) -> Grounded:
        """The question behind passages that answer it: at most `room` tokens, and no more than leave half of the
        reader's --time and --energy to the answer."""
        encode, most = reader.model.tokenizer.encode, affordable(reader.model, reader.options)
        room = room if most is None else min(room, most)

        def count(text: str) -> int:
            return encode(text, start=False).size

        found = self.search(question)
        if self.prune is None or not found:
            return pack(question, found, count, room)
        texts = [each.passage.text for each in found]
        keep = fitting(question, found, count, room) if self.prune == AUTO else float(self.prune)
        ranker = self._session(self.reranker) if self.reranker else None
        by = "BM25" if ranker is None else f"{ranker.model.name} and BM25"
        score = None if ranker is None else ranked_by(ranker, question)
        kept, pruned = prune_texts(texts, question, keep, count, score, by)
        shorter = [
            replace(each, passage=replace(each.passage, text=text)) for each, text in zip(found, kept, strict=True)
        ]
        return replace(pack(question, [each for each in shorter if each.passage.text], count, room), pruned=pruned)

    def _encoder(self) -> Session:
        return self._session(self._store.encoder or MINILM, of_index=True)

    def _session(self, name: str, *, of_index: bool = False) -> Session:
        if name not in self._loaded:
            model = open_encoder(name, self._options)
            if of_index:
                check_encoder(self._store, model)
            self._loaded[name] = load_encoder(model, self._options, "embedding model" if of_index else "reranker")
        return self._loaded[name]


def _check_top(top: Any) -> int:
    if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= 100:
        raise InputError(f"--top must be a whole number from 1 to 100, not {top!r:.40}")
    return top
