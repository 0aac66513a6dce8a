"""Pairs for DPO from checked solutions: python pairs.py example_model_solutions.jsonl > pairs.jsonl

Reads GSM8K's file of model solutions (a row has a question and solutions by several models, each with `is_correct`).
Writes a pair for every question that one model solved and another did not.
"""

import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    for line in file:
        row = json.loads(line)
        answers = [answer for answer in row.values() if isinstance(answer, dict)]
        right = [answer["solution"] for answer in answers if answer["is_correct"]]
        wrong = [answer["solution"] for answer in answers if not answer["is_correct"]]
        if right and wrong:
            print(json.dumps({"query": row["question"], "response": right[0], "rejected_response": wrong[0]}))
