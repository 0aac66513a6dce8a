"""Rows as a run deals them out: how long they are, which rank reads which, and what shares one."""
