"""The gateway: an OpenAI-compatible server that routes each query to a site and records its outcome."""
