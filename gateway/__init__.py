"""HTTP in, the best site chosen, tokens out, nothing lost."""
