"""LoRA adapters as names of models."""

from __future__ import annotations

from pathlib import Path

from conftest import open_golden
from lora_files import write_adapter
from serving import MODEL, PLAIN, chat, error_of, hub_of, served

from edge.run.loading import load


def test_adapters_are_models(tmp_path: Path) -> None:
    model = open_golden(MODEL).model
    small = write_adapter(tmp_path / "small.gguf", model, rank=2, seed=1)
    large = write_adapter(tmp_path / "large.gguf", model, rank=8, seed=2)
    with load(model, lora=str(large), **PLAIN) as session:
        answers = {}
        for name, lora in (("", None), (":small", small), (":large", large)):
            session.set_lora(lora)
            answers[name] = session.generate("Hello", max_tokens=8, ignore_eos=True)
    assert len(set(answers.values())) == 3
    with served(adapters=[f"small={small}", f"{MODEL}/large={large}"]) as client:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names == [MODEL, f"{MODEL}:small", f"{MODEL}:large"]
        for name in ("", ":small", ":large", "", ":small"):
            found = chat(client, model=MODEL + name)
            assert found["choices"][0]["message"]["content"] == answers[name]
            assert found["model"] == MODEL + name
        assert hub_of(client).pool.loads == 1
        response = client.post("/v1/chat/completions", json={"messages": [], "model": f"{MODEL}:none"})
        assert error_of(response)["code"] in ("model_not_found", "invalid_value")
