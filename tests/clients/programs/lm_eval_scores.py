"""lm-eval: a task of multiple choice on a server's completions. The server splits texts into tokens, too: lm-eval finds
that out by /tokenizer_info.

What follows the address and the model is the task's file: a JSON object on each line, with a question, choices, and the
number of the right one.
"""

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, model, path = sys.argv[1:]


scorer = LocalCompletionsAPI(base_url=f"{url}/completions", model=model, num_concurrent=1, max_retries=1)
task = {
    "task": "colours", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": path}}, "test_split": "test",
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
found = simple_evaluate(model=scorer, tasks=[task], bootstrap_iters=0)
samples = sorted(found["samples"]["colours"], key=lambda each: each["doc_id"])
print(json.dumps({
    "accuracy": found["results"]["colours"]["acc,none"],
    "scores": [[answer[0][0] for answer in each["resps"]] for each in samples],
}))  # fmt: skip
