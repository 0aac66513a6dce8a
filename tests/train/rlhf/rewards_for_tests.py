"""A reward of one's own."""


def chance(completions, completion_ids, **columns):
    """Another number for nearly every answer."""
    return [sum(ids) % 7 / 3 + len(ids) for ids in completion_ids]


def by_word(prompts, completions, **columns):
    """Answers to questions that begin with one word are worth the same, all others something else each."""
    asked = [prompt[-1]["content"] for prompt in prompts]
    return [0.5 if text.startswith("idle") else float(place % 2) for place, text in enumerate(asked)]
