"""A custom reward: --reward-funcs examples/rlhf/rewards.py:steps

A reward function gets the completions, and every column of the rows under its name; it returns a number for each
completion.
"""

import re


def steps(completions, **columns):
    """Half a point for a calculation in GSM8K's brackets that is right, such as <<3*4=12>>; none for a wrong one."""
    return [_steps(turns[0]["content"]) for turns in completions]


def _steps(text):
    found = re.findall(r"<<(\d+)([-+*])(\d+)=(\d+)>>", text)
    results = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    return 0.5 * any(results[sign](int(a), int(b)) == int(c) for a, sign, b, c in found)
