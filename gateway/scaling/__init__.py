"""Compute how many machines each pool needs, and resize the clouds' groups of machines."""
