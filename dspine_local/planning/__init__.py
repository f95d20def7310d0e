"""What a target and its drafter need of each device's memory, from their headers alone (docs/memory.md).

``fit.py`` is where callers begin: a plan for given options, the largest context that fits, what to change.
"""
