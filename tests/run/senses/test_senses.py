"""Pictures and sounds in conversations, against transformers (tests/golden/eyes.py, heard.py): what a model perceives,
reuses and refuses."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import weakref
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, require
from golden.sounds import SHORT, chirp
from test_cli import edge as forked
from test_cli import edge_here as edge_command
from test_cli import json_here as edge_json

import edge
from edge.backends import engine_named
from edge.backends.llamacpp.eyes import why_not
from edge.converters.convert import Conversion, convert
from edge.converters.huggingface.reader import convert_folder
from edge.formats.gguf import read_gguf
from edge.media.recording import wav_of
from edge.model import towers
from edge.model.model import Model
from edge.model.towers import read_tower
from edge.prompt_cache.cache import PromptCache
from edge.run.senses.mtmd import MtmdEyes
from edge.run.senses.seeing import Room, TowerEyes
from edge.run.senses.sight import Encoder
from edge.run.starting.senses import find_mmproj, open_ears_of, open_eyes
from edge.types import FloatArray, IntArray

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
VOCAB, PLACEHOLDER = 300, 290
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MERGER = GOLDEN / "towers" / "qwen3vl.gguf"
SOUNDS = {"first": chirp(SHORT), "second": chirp(SHORT - 4000, 210.0)}


@dataclass(frozen=True)
class Sense:
    """A golden model that sees or hears, and conversations with it: what stands in brackets is a picture or a sound."""

    kind: str  # of the parts of messages
    text: Path
    mmproj: Path
    said: dict[str, list[tuple[str, ...]]]

    @cached_property
    def golden(self) -> dict[str, Any]:
        with np.load(self.text.with_suffix(".npz")) as arrays:
            return dict(arrays)

    def load(self, backend: str = "reference", **options: Any) -> edge.Session:
        return edge.load(self.text, backend=backend, mmproj=self.mmproj, kv_dtype="f32", threads=1, **options)

    def thing(self, name: str) -> Any:
        return self.golden[name] if self.kind == "image" else SOUNDS[name]

    def messages(self, name: str) -> list[dict[str, Any]]:
        def part(text: str) -> dict[str, Any]:
            if text[0] == "[":
                return {"type": self.kind, self.kind: self.thing(text[1:-1])}
            return {"type": "text", "text": text}

        return [{"role": role, "content": [part(each) for each in parts]} for role, *parts in self.said[name]]


EYES = Sense("image", GOLDEN / "eyes" / "smolvlm.gguf", GOLDEN / "eyes" / "mmproj.gguf", {
    "text": [("user", "Hello there.")],
    "one": [("user", "[first]", "What is in the picture?")],
    "two": [("user", "[first]", "What is it?"), ("assistant", "A bar."), ("user", "And this:", "[second]", "?")],
})  # fmt: skip
EARS = Sense("audio", GOLDEN / "heard" / "qwen2.gguf", GOLDEN / "heard" / "qwen2audio.gguf", {
    "one": [("user", "[first]", "What is heard?")],
    "two": [("user", "[first]", "What is it?"), ("assistant", "A tone."), ("user", "And this: ", "[second]", "?")],
})  # fmt: skip
both = pytest.mark.parametrize("sense", [EYES, EARS], ids=["eyes", "ears"])


def tokens_of(model: Model, said: list[dict[str, Any]]) -> IntArray:
    tokens = model.chat_prompt(said).first(None)
    return np.where(tokens >= VOCAB, PLACEHOLDER, tokens)


def answer(session: edge.Session, said: list[dict[str, Any]], count: int = 12) -> tuple[list[int], FloatArray]:
    """The greedy tokens of an answer, and the logits behind the prompt."""
    found, first = list[int](), list[FloatArray]()

    def look(tokens: IntArray, logits: FloatArray) -> None:
        found[:] = [*tokens.tolist(), int(logits.argmax())]
        if not first:
            first.append(logits.copy())

    for _ in session.stream(messages=said, max_tokens=count, ignore_eos=True, logits_processor=look):
        pass
    return found, first[0]


def close(found: FloatArray, expected: FloatArray, part: float) -> None:
    np.testing.assert_allclose(found, expected, atol=part * np.abs(expected).max())


@pytest.mark.parametrize(("sense", "backend"), [
    (EYES, "reference"), (EYES, "cpu"), (EYES, "onnx"), (EARS, "reference"), (EARS, "cpu"), (EARS, "onnx"),
])  # fmt: skip
def test_tokens_logits_and_answers_are_those_of_transformers(sense: Sense, backend: str) -> None:
    require(backend)
    with sense.load(backend) as session:
        for name in sense.said:
            said = sense.messages(name)
            np.testing.assert_array_equal(tokens_of(session.model, said), sense.golden[f"{name}.ids"])
            session.reset()
            found, first = answer(session, said)
            close(first, sense.golden[f"{name}.logits"], 2e-2 if backend == "cpu" else 2e-4)
            if backend == "reference":
                assert found == sense.golden[f"{name}.greedy"].tolist()


@pytest.mark.parametrize(
    ("folder", "golden"), [("qwen2audio", "qwen2"), ("qwen3asr", "qwen3asr"), ("gemma4", "gemma4")]
)
def test_folders_hear_as_transformers(folder: str, golden: str, tmp_path: Path) -> None:
    """Whole folders: the text model, the encoder, and the template."""
    heard = Sense("audio", GOLDEN / "heard" / f"{golden}.gguf", tmp_path / "mmproj-m.gguf", EARS.said)
    report = convert(GOLDEN / "heard" / folder, tmp_path / "m.gguf", Conversion("gguf"))
    assert set(report.files) == {"m.gguf", "mmproj-m.gguf"}
    with edge.load(tmp_path / "m.gguf", backend="reference", kv_dtype="f32", threads=1) as session:
        said = heard.messages("one")
        np.testing.assert_array_equal(tokens_of(session.model, said), heard.golden["one.ids"])
        found, first = answer(session, said)
        assert found == heard.golden["one.greedy"].tolist()
        close(first, heard.golden["one.logits"], 5e-3)


@both
def test_second_turn_reuses_the_first_picture_or_sound(sense: Sense) -> None:
    two = sense.messages("two")
    with sense.load() as session:
        answer(session, two[:1], count=1)
        assert answer(session, two)[0] == sense.golden["two.greedy"].tolist()
        media = session.report.media
        assert (media.pictures, media.sounds) == ((1, 0) if sense is EYES else (0, 1))  # only the second was encoded
        assert session.report.tokens.reused >= (40 if sense is EYES else 20)  # all of the first
        answer(session, two)
        assert session.report.media is None  # its rows are there


@both
def test_another_picture_or_sound_reuses_no_rows(sense: Sense) -> None:
    one, other = sense.messages("one"), sense.messages("one")
    thing = sense.thing("first")
    other[0]["content"][0][sense.kind] = thing[:, ::-1] if sense is EYES else thing[::-1].copy()
    with sense.load() as fresh:
        expected = answer(fresh, other)[0]
    with sense.load(prompt_cache=PromptCache(memory="4MiB")) as session:
        for said in (one, other, one):
            session.reset()
            found, _ = answer(session, said)
            assert found == (expected if said is other else sense.golden["one.greedy"].tolist())
            if said is other:
                texts = int(np.flatnonzero(sense.golden["one.ids"] == PLACEHOLDER)[0])
                assert session.report.tokens.reused <= texts


@both
def test_special_tokens_of_a_text_stay_text(sense: Sense) -> None:
    said = sense.messages("one")
    said[0]["content"][1]["text"] = typed = "Is <image> a <row_1_col_1> or <|AUDIO|> token?"
    with sense.load() as session:
        tokens = session.model.chat_prompt(said).first(None)
        rows = int((sense.golden["one.ids"] == PLACEHOLDER).sum())
        assert (tokens >= VOCAB).sum() == rows
        assert (tokens == PLACEHOLDER).sum() == 0
        assert typed in session.model.tokenizer.decode(tokens[tokens < VOCAB].tolist())


@both
def test_path_bytes_and_array_are_the_same(sense: Sense, tmp_path: Path) -> None:
    path, array = tmp_path / "it", sense.thing("second")
    stream = BytesIO()
    if sense is EYES:
        PIL.fromarray(array).save(stream, "PNG")
    else:
        stream.write(wav_of(array))
    path.write_bytes(stream.getvalue())
    name = "images" if sense is EYES else "sounds"
    with sense.load() as session:
        answers = set()
        for each in (path, str(path), path.read_bytes(), array):
            session.reset()
            answers.add(session.generate("What?", max_tokens=12, ignore_eos=True, **{name: [each]}))
    assert len(answers) == 1
    assert answers != {""}


@both
def test_conversation_is_saved_and_goes_on(sense: Sense, tmp_path: Path) -> None:
    def say(talk: edge.Conversation, text: str, name: str) -> str:
        given: dict[str, Any] = {"images" if sense is EYES else "sounds": [sense.thing(name)]}
        return "".join(talk.say(text, max_tokens=4, ignore_eos=True, **given))

    with sense.load() as session:
        talk, other = edge.Conversation(session), edge.Conversation(session)
        say(talk, "What is it?", "first")
        answers = [say(talk, "And this?", "second")]
        talk.save(tmp_path / "talk.json")
        talk.undo()
        answers.append(say(talk, "And this?", "second"))
        answers.append("".join(talk.retry(max_tokens=4, ignore_eos=True)))
        other.load(tmp_path / "talk.json")
        if sense is EYES:
            np.testing.assert_array_equal([each.pixels for each in other.images], [sense.thing("second")])
        else:
            assert [each.digest for each in other.sounds] == [edge.Sound(sense.thing("second")).digest]
        other.undo()
        answers.append(say(other, "And this?", "second"))
    assert len(set(answers)) == 1


@both
def test_encoder_beside_the_model_is_found(sense: Sense, tmp_path: Path) -> None:
    model = Path(shutil.copy(sense.text, tmp_path / "a.gguf"))
    assert find_mmproj(edge.open_model(model), edge.Options()) is None
    shutil.copy(sense.mmproj, tmp_path / "mmproj-a.gguf")
    other = Path(shutil.copy(GOLDEN / "llama-gqa-tied.gguf", tmp_path / "b.gguf"))
    for path, senses in ((model, ["picture" if sense is EYES else "sound"]), (other, [])):  # another model's
        with edge.load(path, backend="reference") as session:
            assert [*session.model.senses] == senses


@both
def test_models_without_encoder_refuse(sense: Sense) -> None:
    said = sense.messages("one")
    with (
        edge.load(sense.text, backend="reference", mmproj="off") as session,
        pytest.raises(edge.InputError, match="mmproj"),
    ):
        session.generate(messages=said)


# Pictures


def test_joined_branch_keeps_its_pictures() -> None:
    """Also where another branch has run in its sequence since."""
    said, other = EYES.messages("one"), EYES.messages("two")[2:]
    options: dict[str, Any] = {"raw": True, "max_tokens": 4, "ignore_eos": True}
    with EYES.load() as session:
        answer(session, said, count=4)
        alone = session.generate("And?", follow_up=True, **options)
        session.reset()
        with session.fork(2) as fork:
            for branch, asked in zip(fork, (said, other), strict=True):
                branch.generate(session.model.chat_prompt(asked), **options)
            fork.join(fork[0])
        assert session.generate("And?", follow_up=True, **options) == alone


def test_evicted_pictures_are_freed() -> None:
    held: list[weakref.ref[edge.Image]] = []

    def picture(step: int) -> edge.Image:
        found = edge.Image(np.roll(EYES.thing("first"), step, axis=1))
        held.append(weakref.ref(found))
        return found

    def alive() -> int:
        gc.collect()
        return sum(each() is not None for each in held)

    with EYES.load() as session:
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


def test_template_without_pictures_gets_placeholders(tmp_path: Path) -> None:
    (file := tmp_path / "chatml.jinja").write_text(CHATML)
    with EYES.load() as session:
        model = session.model.with_template(file).with_senses(session.model.senses)
        tokens = tokens_of(model, EYES.messages("two"))
    assert (tokens == PLACEHOLDER).sum() == (EYES.golden["two.ids"] == PLACEHOLDER).sum()
    text = "".join(map(model.tokenizer.text, tokens.tolist())).replace("Ċ", "\n")
    assert text.startswith("<|im_start|>user\n<fake_token_around_image><row_1_col_1><image>")
    assert text.endswith("<fake_token_around_image>?<|im_end|>\n<|im_start|>assistant")


# In a process of its own: budgets count the peak, which earlier tests have raised in this one.
LEFT_OUT = """
import shutil, sys
import edge
model, mmproj, beside = sys.argv[1:]
options = {"backend": "reference", "max_kv_size": 64}
smallest = []
for chosen in ({}, {"mmproj": mmproj}):
    try:
        edge.load(model, memory="8MiB", **options, **chosen)
    except edge.BudgetError as error:
        smallest.append(error.smallest)
enough = sum(smallest) // 2  # for the text model alone
shutil.copy(mmproj, beside)
with edge.load(model, memory=enough, **options) as session:
    assert not session.model.senses
with edge.load(model, **options) as session:
    assert session.model.senses
print(len(smallest))
"""


def test_encoder_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    model = shutil.copy(EYES.text, tmp_path / "a.gguf")
    command = [sys.executable, "-c", LEFT_OUT, str(model), str(EYES.mmproj), str(tmp_path / "mmproj-a.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_image_tokens_limit_rows_or_are_refused() -> None:
    model, picture = edge.open_model(EYES.text), edge.Image(EYES.thing("first"))
    options = edge.Options(mmproj=EYES.mmproj, backend="reference")

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


def test_damaged_picture_keeps_the_conversation(tmp_path: Path) -> None:
    PIL.fromarray(EYES.thing("first")).save(path := tmp_path / "cut.png")
    path.write_bytes(path.read_bytes()[:-60])
    with EYES.load() as session:
        talk = edge.Conversation(session)
        with pytest.raises(edge.InputError, match="damaged"):
            session.model.senses["picture"].check(edge.Image(path))  # as /image of edge chat does
        with pytest.raises(edge.InputError, match="damaged"):
            list(talk.say("What is it?", [path], max_tokens=4))
        found = "".join(talk.say("Hello there.", max_tokens=4, ignore_eos=True))
        assert [each["content"] for each in talk.messages if each["role"] == "user"] == ["Hello there."]
        session.reset()
        assert found == "".join(edge.Conversation(session).say("Hello there.", max_tokens=4, ignore_eos=True))


# Sounds


def test_run_hears_files_and_stdin(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(wav_of(SOUNDS["first"]))
    flags = (
        "--mmproj", str(EARS.mmproj), "--backend", "reference", "-p", "What is heard?", "-n", "12", "--ignore-eos",
        "--json",
    )  # fmt: skip
    named = edge_json("run", str(EARS.text), "--audio", str(path), *flags)
    assert named["media"]["sounds"] == 1
    command = [sys.executable, "-m", "edge", "run", str(EARS.text), "--audio", "-", *flags]
    piped = subprocess.run(command, input=path.read_bytes(), capture_output=True, timeout=240, check=True)
    assert json.loads(piped.stdout)["text"] == named["text"] != ""
    refused = edge_command("run", str(EARS.text), "--audio", "nofile.wav", *flags)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(("sound", "tokens"), [("0.82s", 20), (None, 21)])
def test_plan_counts_the_rows_of_a_sound(sound: str | None, tokens: int, tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(wav_of(SOUNDS["first"]))
    plan = ("plan", str(EARS.text), "--mmproj", str(EARS.mmproj), "--json", "--device", "raspberry-pi-5", "--audio")
    found = edge_json(*plan, sound or str(path))["audio"]
    assert found["tokens"] == tokens
    assert found["first_token_s"] > found["seconds"] > 0
    assert found["peak"] >= found["encoder"] > found["weights"]


def test_plan_names_rows_and_memory_a_sound_lacks() -> None:
    plan = ("plan", str(EARS.text), "--mmproj", str(EARS.mmproj), "--device", "raspberry-pi-5", "--max-kv-size", "256")
    told = forked(*plan, "--audio", "5m", "--memory", "90MiB").stdout  # counts the process that plans
    assert "does not fit in 256 KV rows: use --max-kv-size 7501" in told
    assert "the limit, 90 MiB, is too low for the sound" in told
    assert "KV rows: use" not in edge_command(*plan, "--audio", "2s").stdout


def test_ambiguous_and_damaged_ears_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = edge.open_model(shutil.copy(EARS.text, tmp_path / "m.gguf"))
    beside = Path(shutil.copy(EARS.mmproj, tmp_path / "mmproj-a.gguf"))
    shutil.copy(EARS.mmproj, tmp_path / "mmproj-b.gguf")
    open_ears_of(model, edge.Options())
    assert "mmproj-a.gguf and mmproj-b.gguf fit m.gguf" in caplog.text
    (tmp_path / "mmproj-b.gguf").unlink()
    beside.write_bytes(beside.read_bytes()[:-300])
    with pytest.raises(edge.InputError, match=r"hears nothing .*mmproj-a.gguf: the file is truncated"):
        open_ears_of(model, edge.Options())
    with pytest.raises(edge.InputError, match="choose its own"):
        edge.load(GOLDEN / "llama-one-layer.gguf", backend="reference", mmproj=EARS.mmproj)
    with pytest.raises(edge.UnsupportedError, match="hears nothing"):
        open_ears_of(model, edge.Options(mmproj=EYES.mmproj))


# Refusals


FIRST = EYES.golden["first"]


@pytest.mark.parametrize(("sense", "given", "why"), [
    (EYES, {"prompt": "hi", "raw": True, "images": [FIRST]}, "leave raw and follow_up out"),
    (EYES, {"messages": EYES.messages("one"), "images": [FIRST]}, "leave images and sounds out"),
    (EYES, {"prompt": "hi", "images": FIRST.tobytes()}, "images must be a list of pictures"),
    (EYES, {"prompt": "hi", "images": ["nowhere.png"]}, "no such file"),
    (EARS, {"prompt": "hi", "sounds": ["nofile.wav"]}, "no such file"),
    (EARS, {"prompt": "hi", "sounds": [np.zeros(0, np.float32)]}, "empty"),
    (EARS, {"prompt": "hi", "sounds": [np.array([np.nan], np.float32)]}, "no numbers"),
    (EARS, {"prompt": "hi", "sounds": [wav_of(np.zeros(9000))[:-9000]]}, "cut off"),
    *((sense, {"messages": [{"role": "user", "content": [part]}]}, why) for sense, part, why in (
        (EYES, {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "not fetched: send"),
        (EYES, {"type": "image_url", "image_url": {"url": ""}}, r"content\[0\]: it has no picture"),
        (EYES, {"type": "image_url", "image_url": {"url": "/a.png"}}, "is no data URL"),  # "image" alone names files
        (EARS, {"type": "audio", "audio": "https://x.org/a.wav"}, "are not fetched"),
        (EARS, {"type": "input_audio", "input_audio": {"data": "!!!", "format": "wav"}}, "not base64"),
        (EARS, {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "no sound that can be read"),
        (EARS, {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "pcm16"}}, "format must be one of"),
        (EARS, {"type": "input_audio", "input_audio": {}}, "it has no sound"),
    )),
])  # fmt: skip
def test_refusals_raise_one_line(sense: Sense, given: dict[str, Any], why: str) -> None:
    with sense.load() as session, pytest.raises(edge.InputError, match=why) as refused:
        session.generate(**given)
    assert "\n" not in str(refused.value)


def test_a_sound_that_does_not_fit_is_refused() -> None:
    with pytest.raises(edge.EdgeError, match="--max-kv-size"), EARS.load(max_kv_size=16) as small:
        small.generate("What?", sounds=[SOUNDS["first"]], max_tokens=2)


# Pictures by llama.cpp's mtmd, for encoders that edge does not run


@pytest.fixture
def qwen3vl(tmp_path: Path) -> Path:
    pytest.importorskip("llama_cpp")
    convert_folder(GOLDEN / "pictures" / "qwen3vl", tmp_path / "m.gguf", type="F32")
    return tmp_path / "m.gguf"


def forget_family(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: each for kind, each in towers._FAMILIES[towers.VISION].items() if kind != "qwen3vl_merger"}
    monkeypatch.setitem(towers._FAMILIES, towers.VISION, known)


@pytest.mark.parametrize(("options", "says"), [
    ({"backend": "cpu"}, "not with the encoder 'qwen3vl_merger': --backend[= ]llamacpp may, by its mtmd"),
    ({"backend": "llamacpp"}, "was built without libmtmd: reinstall it"),
    ({"backend": "llamacpp", "memory": "1GiB"}, "what llama.cpp's mtmd takes is not known before it looks"),
])  # fmt: skip
def test_unknown_encoder_is_refused_by_name(
    qwen3vl: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    forget_family(monkeypatch)
    monkeypatch.setenv("MTMD_CPP_LIB", str(tmp_path))
    with pytest.raises(edge.UnsupportedError, match=says):
        open_eyes(edge.open_model(qwen3vl), edge.Options(mmproj=MERGER).updated(**options))


def test_answers_about_pictures_are_those_of_our_encoder(qwen3vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why_not() is not None:
        pytest.skip("llama-cpp-python was built without libmtmd")
    picture = np.random.default_rng(0).integers(0, 255, (64, 96, 3)).astype(np.uint8)
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": edge.Image(picture)}]
    found = []
    for backend in ("reference", "llamacpp"):
        with edge.load(qwen3vl, mmproj=MERGER, backend=backend, kv_dtype="f32", max_kv_size=128) as session:
            assert isinstance(session.model.senses["picture"], MtmdEyes) == (backend == "llamacpp")
            said = [{"role": "user", "content": parts}]
            found += ["".join(session.stream(messages=said, max_tokens=12, ignore_eos=True))]
        forget_family(monkeypatch)
    assert found[0] == found[1]
