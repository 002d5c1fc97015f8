"""openai: a transcript, verbose with words, streamed, as captions; a translation; an error."""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model, path = sys.argv[2:]


def hear(**fields: object):
    with open(path, "rb") as file:
        return client.audio.transcriptions.create(model=model, file=file, **fields)


verbose = hear(response_format="verbose_json", timestamp_granularities=["segment", "word"])
events = list(hear(stream=True))
with open(path, "rb") as file:
    translated = client.audio.translations.create(model=model, file=file)
try:
    hear(language="xx")
    error = None
except openai.BadRequestError as found:
    error = found.body["message"]
print(json.dumps({
    "text": hear().text, "plain": hear(response_format="text"), "captions": hear(response_format="srt"),
    "segments": [[each.start, each.end, each.text] for each in verbose.segments],
    "words": [each.word for each in verbose.words], "duration": verbose.duration,
    "pieces": "".join(each.delta for each in events if each.type == "transcript.text.delta"),
    "done": [each.text for each in events if each.type == "transcript.text.done"],
    "translated": translated.text, "error": error,
}))  # fmt: skip
