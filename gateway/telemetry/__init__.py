"""Logs, metrics, traces and snapshots of the running gateway."""
