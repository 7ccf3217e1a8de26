"""The operator's API, used by the dashboard and the command line."""
