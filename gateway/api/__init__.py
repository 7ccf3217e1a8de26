"""The OpenAI-compatible HTTP edge. Formats stop here: inside, a request is a `Query` and an answer is its pieces."""
