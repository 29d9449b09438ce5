"""Saves that nobody waits for: the memory that they are staged in, and the thread that writes."""
