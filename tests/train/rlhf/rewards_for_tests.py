"""A reward of one's own."""


def chance(completions, completion_ids, **columns):
    """Another number for nearly every answer."""
    return [sum(ids) % 7 / 3 + len(ids) for ids in completion_ids]
