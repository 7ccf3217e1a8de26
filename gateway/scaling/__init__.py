"""How many machines each pool should have, and the clouds' groups that are told so."""
