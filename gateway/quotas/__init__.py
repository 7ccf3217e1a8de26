"""Quotas of tenants and keys: reserved at admission, topped up while streaming, settled at the end."""
