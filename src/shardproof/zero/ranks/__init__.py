"""How ranks find together: who wants what next, who waits for whom, and what has to be the same on all of them."""
