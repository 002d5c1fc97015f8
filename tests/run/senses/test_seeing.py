"""Pictures in conversations, against transformers (tests/golden/eyes.py): what the model sees, reuses and refuses."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from test_architectures import require_native

import edge
from edge.backends import engine_named
from edge.converters.convert import Conversion, convert
from edge.formats.gguf import read_gguf
from edge.model.model import Model
from edge.model.towers import read_tower
from edge.prompt_cache.cache import PromptCache
from edge.run.senses.seeing import Room, TowerEyes
from edge.run.senses.sight import Encoder
from edge.run.starting.senses import find_mmproj, open_eyes
from edge.types import FloatArray, IntArray

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
TEXT, EYES = GOLDEN / "eyes" / "smolvlm.gguf", GOLDEN / "eyes" / "mmproj.gguf"
VOCAB, PLACEHOLDER = 300, 290
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SAID: dict[str, list[tuple[str, ...]]] = {
    "text": [("user", "Hello there.")],
    "one": [("user", "[first]", "What is in the picture?")],
    "two": [("user", "[first]", "What is it?"), ("assistant", "A bar."), ("user", "And this:", "[second]", "?")],
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(TEXT.with_suffix(".npz")) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def session() -> Iterator[edge.Session]:
    with loaded("reference") as session:
        yield session


def loaded(backend: str, **options: Any) -> edge.Session:
    return edge.load(TEXT, backend=backend, mmproj=EYES, kv_dtype="f32", threads=1, **options)


def messages(name: str, golden: dict[str, Any]) -> list[dict[str, Any]]:
    def part(text: str) -> dict[str, Any]:
        if text[0] == "[":
            return {"type": "image", "image": golden[text[1:-1]]}
        return {"type": "text", "text": text}

    return [{"role": role, "content": [part(each) for each in parts]} for role, *parts in SAID[name]]


def tokens_of(model: Model, said: list[dict[str, Any]]) -> IntArray:
    tokens = model.chat_prompt(said).first(None)
    return np.where(tokens >= VOCAB, PLACEHOLDER, tokens)


def answer(session: edge.Session, said: list[dict[str, Any]], **options: Any) -> list[int]:
    """The greedy tokens of an answer."""
    found = list[int]()

    def look(tokens: IntArray, logits: FloatArray) -> None:
        found[:] = [*tokens.tolist(), int(logits.argmax())]

    count = options.pop("count", 12)
    for _ in session.stream(
        messages=said, max_tokens=count, ignore_eos=True, logits_processor=look, **options
    ):  # fmt: skip
        pass
    return found


def eyes_of(session: edge.Session) -> TowerEyes:
    assert isinstance(session.model.senses["picture"], TowerEyes)
    return session.model.senses["picture"]


@pytest.mark.parametrize("backend", ["reference", "cpu", "onnx"])
def test_tokens_logits_and_answers_are_those_of_transformers(backend: str, golden: dict[str, Any]) -> None:
    if backend == "cpu":
        require_native()
    if backend == "onnx":
        pytest.importorskip("onnxruntime")
    with loaded(backend, sinks=4) as session:
        for name in SAID:
            said = messages(name, golden)
            np.testing.assert_array_equal(tokens_of(session.model, said), golden[f"{name}.ids"])
            first = list[FloatArray]()
            session.generate(
                messages=said, max_tokens=1, logits_processor=lambda _, logits, first=first: first.append(logits.copy())
            )
            expected = golden[f"{name}.logits"]
            np.testing.assert_allclose(first[0], expected, atol=(2e-4, 2e-2)[backend == "cpu"] * np.abs(expected).max())
            if backend == "reference":
                session.reset()
                assert answer(session, said) == golden[f"{name}.greedy"].tolist()


def test_second_turn_reuses_first_picture(golden: dict[str, Any]) -> None:
    with loaded("reference") as session:
        two = messages("two", golden)
        answer(session, two[:1], count=1)
        before = eyes_of(session).looks.pictures
        assert answer(session, two) == golden["two.greedy"].tolist()
        report = session.report
        assert report.tokens.reused >= 40  # all of the first picture
        assert eyes_of(session).looks.pictures <= before + 1  # only the second was encoded
        looks = report.media
        assert (looks.pictures, looks.tokens) == (1, 20)
        answer(session, two)
        assert session.report.media is None  # its rows are there


def test_joined_branch_keeps_its_pictures(golden: dict[str, Any]) -> None:
    """Also where another branch has run in its sequence since."""
    said, other = messages("one", golden), messages("two", golden)[2:]
    options: dict[str, Any] = {"raw": True, "max_tokens": 4, "ignore_eos": True}
    with loaded("reference") as session:
        answer(session, said, count=4)
        alone = session.generate("And?", follow_up=True, **options)
        session.reset()
        with session.fork(2) as fork:
            for branch, asked in zip(fork, (said, other), strict=True):
                branch.generate(session.model.chat_prompt(asked), **options)
            fork.join(fork[0])
        assert session.generate("And?", follow_up=True, **options) == alone


def test_another_picture_reuses_no_rows(golden: dict[str, Any]) -> None:
    one = messages("one", golden)
    other = messages("one", golden | {"first": golden["first"][:, ::-1]})
    expected = {}
    with loaded("reference") as fresh:
        expected = {name: answer(fresh, said) for name, said in (("one", one), ("other", other))}
        fresh.reset()
    assert expected["one"] == golden["one.greedy"].tolist()
    cache = PromptCache(memory="4MiB")
    with loaded("reference", prompt_cache=cache) as session:
        for name, said in (("one", one), ("other", other), ("one", one)):
            session.reset()
            assert answer(session, said) == expected[name]
            report = session.report
            texts = int(np.flatnonzero(golden["one.ids"] == PLACEHOLDER)[0])
            if name == "other":
                assert report.tokens.reused <= texts


def test_latest_picture_rows_are_cached(session: edge.Session, golden: dict[str, Any]) -> None:
    pictures = [edge.Image(np.roll(golden["first"], step, axis=1)) for step in range(3)]
    room = Room(pixels=1 << 20, kept=2 * 20 * 32 * 4, limit=1 << 40)  # for two pictures of 20 rows
    encoder = Encoder(eyes_of(session).tower, engine_named("reference"), 1)
    eyes = TowerEyes(eyes_of(session).tower, encoder, room)

    def look(*numbers: int) -> int:
        for number in numbers:
            rows = eyes.look(pictures[number], eyes.layout(pictures[number]))
            assert [len(each) for each in rows] == [4] * 5
        return eyes.looks.pictures

    assert (look(0, 1, 0, 1), look(2, 1, 2), look(0)) == (2, 3, 4)


def test_evicted_pictures_are_freed(golden: dict[str, Any]) -> None:
    held: list[weakref.ref[edge.Image]] = []

    def picture(step: int) -> edge.Image:
        found = edge.Image(np.roll(golden["first"], step, axis=1))
        held.append(weakref.ref(found))
        return found

    def alive() -> int:
        gc.collect()
        return sum(each() is not None for each in held)

    with loaded("reference") as session:
        for step in range(3):
            session.generate("What is it?", images=[picture(step)], max_tokens=1)
        assert alive() == 1
        session.generate("Hello there.", max_tokens=1)
        assert alive() == 0


@pytest.mark.parametrize("name", ["qwen3vl", "lfm2", "gemma4"])
def test_plan_has_room_for_the_costliest_picture(name: str) -> None:
    tower = read_tower(read_gguf(GOLDEN / "towers" / f"{name}.gguf"))
    backend, room = engine_named("reference"), Room(pixels=0, kept=0, limit=0)
    reserved = TowerEyes(tower, Encoder(tower, backend, 1), room).wants
    rng = np.random.default_rng(0)
    for ratio, area in zip(np.exp(rng.uniform(-4, 4, 12)), rng.uniform(1e4, 64e6, 12), strict=True):
        layout = tower.layout(int(1 + (area * ratio) ** 0.5), int(1 + (area / ratio) ** 0.5))
        assert Encoder(tower, backend, 1).need(layout) <= 1.01 * reserved


def test_picture_beyond_the_planned_rows_is_refused(session: edge.Session, golden: dict[str, Any]) -> None:
    picture = edge.Image(golden["first"])
    encoder = Encoder(eyes_of(session).tower, engine_named("reference"), 1)
    tight = TowerEyes(eyes_of(session).tower, encoder, Room(pixels=0, kept=0, limit=1 << 20))
    with pytest.raises(edge.BudgetError, match="looking at the picture needs"):
        tight.look(picture, tight.layout(picture))


def test_special_tokens_of_a_text_stay_text(session: edge.Session, golden: dict[str, Any]) -> None:
    said = messages("one", golden)
    said[0]["content"][1]["text"] = "Is <image> a <row_1_col_1> token?"
    tokens = session.model.chat_prompt(said).first(None)
    rows = int((golden["one.ids"] == PLACEHOLDER).sum())
    assert (tokens >= VOCAB).sum() == rows
    assert (tokens == PLACEHOLDER).sum() == 0
    assert "<image> a <row_1_col_1>" in session.model.tokenizer.decode(tokens[tokens < VOCAB].tolist())


def test_template_without_pictures_gets_placeholders(
    session: edge.Session, golden: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "chatml.jinja"
    file.write_text(CHATML)
    model = session.model.with_template(file).with_senses(session.model.senses)
    tokens = tokens_of(model, messages("two", golden))
    assert (tokens == PLACEHOLDER).sum() == (golden["two.ids"] == PLACEHOLDER).sum()
    text = "".join(map(model.tokenizer.text, tokens.tolist())).replace("Ċ", "\n")
    assert text.startswith("<|im_start|>user\n<fake_token_around_image><row_1_col_1><image>")
    assert text.endswith("<fake_token_around_image>?<|im_end|>\n<|im_start|>assistant")


def test_images_come_as_files_or_bytes(session: edge.Session, golden: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "first.png"
    PIL.fromarray(golden["first"]).save(file)
    stream = BytesIO()
    PIL.fromarray(golden["first"]).save(stream, "PNG")
    said = {edge.Image(file), file, stream.getvalue()}
    expected = session.generate(messages=messages("one", golden), max_tokens=4, ignore_eos=True)
    for each in said:
        found = session.generate("What is in the picture?", images=[each], max_tokens=4, ignore_eos=True)
        assert found == expected


def test_refusals_raise_one_line(session: edge.Session, golden: dict[str, Any], tmp_path: Path) -> None:
    def refused(why: str, **options: Any) -> None:
        with pytest.raises(edge.InputError, match=why):
            session.generate(**options)

    shown = {"images": [golden["first"]]}
    refused("leave raw and follow_up out", prompt="hi", raw=True, **shown)
    refused("leave images and sounds out", messages=messages("one", golden), **shown)
    refused("images must be a list of pictures", prompt="hi", images=golden["first"].tobytes())
    refused("no such file", prompt="hi", images=["nowhere.png"])
    for url, why in {"https://example.com/a.png": "not fetched: send the picture itself", "": "no picture"}.items():
        part = {"type": "image_url", "image_url": {"url": url}}
        refused(why, messages=[{"role": "user", "content": [part]}])
    parts = [{"type": "image", "image": golden["first"]}, part]
    refused(r"content\[1\]: it has no picture", messages=[{"role": "user", "content": parts}])
    part = {"type": "image_url", "image_url": {"url": str(tmp_path)}}  # only {"type": "image"} names files
    refused("is no data URL", messages=[{"role": "user", "content": [part]}])
    with edge.load(TEXT, backend="reference", mmproj="off") as blind, pytest.raises(edge.InputError, match="mmproj"):
        blind.generate("hi", **shown)


def test_encoder_beside_the_model_is_found(tmp_path: Path) -> None:
    model = Path(shutil.copy(TEXT, tmp_path / "a.gguf"))
    assert find_mmproj(edge.open_model(model), edge.Options()) is None
    shutil.copy(EYES, tmp_path / "mmproj-a.gguf")
    other = Path(shutil.copy(GOLDEN / "llama-gqa-tied.gguf", tmp_path / "b.gguf"))
    assert find_mmproj(edge.open_model(model), edge.Options()) == tmp_path / "mmproj-a.gguf"
    assert find_mmproj(edge.open_model(other), edge.Options()) is None  # another model's
    with edge.load(other, backend="reference") as session:
        assert not session.model.senses


def test_encoder_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    model = Path(shutil.copy(TEXT, tmp_path / "a.gguf"))
    options = {"backend": "reference", "max_kv_size": 64}
    smallest = list[int]()
    for chosen in ({}, {"mmproj": EYES}):
        with pytest.raises(edge.BudgetError) as raised:
            edge.load(model, memory="8MiB", **options, **chosen)
        smallest.append(raised.value.smallest or 0)
    enough = sum(smallest) // 2  # for the text model alone
    with edge.load(model, memory=enough, **options) as session:
        assert not session.model.senses
    shutil.copy(EYES, tmp_path / "mmproj-a.gguf")
    with edge.load(model, memory=enough, **options) as session:
        assert not session.model.senses
    with edge.load(model, **options) as session:
        assert session.model.senses


def test_image_tokens_limit_rows_or_are_refused(golden: dict[str, Any]) -> None:
    model, picture = edge.open_model(TEXT), edge.Image(golden["first"])
    options = edge.Options(mmproj=EYES, backend="reference")

    def tokens(**changes: Any) -> int:
        eyes = open_eyes(model, options.updated(**changes))
        return eyes.layout(picture).tokens

    assert (tokens(), tokens(image_tokens=4), tokens(image_tokens="12"), tokens(max_kv_size=32)) == (20, 4, 4, 4)
    with pytest.raises(edge.InputError, match="--image-tokens must be at least 4"):
        tokens(image_tokens=3)


def test_pictures_shrink_to_small_contexts(tmp_path: Path) -> None:
    convert(GOLDEN / "pictures" / "qwen3vl", tmp_path / "m.gguf", Conversion("gguf"))
    model = edge.open_model(tmp_path / "m.gguf")
    eyes: Any = open_eyes(model, edge.Options(backend="reference"))
    assert eyes.tower.sizes[0] > model.spec.context == 512
    assert eyes.layout(edge.Image(np.zeros((720, 1280, 3), np.uint8))).tokens <= eyes.tokens == 256


def test_conversation_with_pictures_is_saved_and_goes_on(
    session: edge.Session, golden: dict[str, Any], tmp_path: Path
) -> None:
    def say(talk: edge.Conversation, text: str, *names: str) -> str:
        return "".join(talk.say(text, [golden[name] for name in names], max_tokens=4, ignore_eos=True))

    session.reset()
    talk = edge.Conversation(session)
    say(talk, "What is it?", "first")
    answers = [say(talk, "And this?", "second")]
    saved = tmp_path / "talk.json"
    talk.save(saved)
    talk.undo()
    answers.append(say(talk, "And this?", "second"))
    answers.append("".join(talk.retry(max_tokens=4, ignore_eos=True)))
    other = edge.Conversation(session)
    other.load(saved)
    np.testing.assert_array_equal([each.pixels for each in other.images], [golden["second"]])
    other.undo()
    answers.append(say(other, "And this?", "second"))
    assert len(set(answers)) == 1


def test_damaged_picture_keeps_the_conversation(session: edge.Session, golden: dict[str, Any], tmp_path: Path) -> None:
    PIL.fromarray(golden["first"]).save(path := tmp_path / "cut.png")
    path.write_bytes(path.read_bytes()[:-60])
    session.reset()
    talk = edge.Conversation(session)
    with pytest.raises(edge.InputError, match="damaged"):
        session.model.senses["picture"].check(edge.Image(path))  # as /image of edge chat does
    answers = []
    for asked in ("Hello there.", "And now?"):
        with pytest.raises(edge.InputError, match="damaged"):
            list(talk.say("What is it?", [path], max_tokens=4))
        answers.append("".join(talk.say(asked, max_tokens=4, ignore_eos=True)))
        assert [each["content"] for each in talk.messages if each["role"] == "user"][-1] == asked
    session.reset()
    assert answers[0] == "".join(edge.Conversation(session).say("Hello there.", max_tokens=4, ignore_eos=True))
