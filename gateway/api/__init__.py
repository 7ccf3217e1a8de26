"""The OpenAI-compatible HTTP edge. Formats stop here: further in are only queries and pieces of answers."""
