"""The operator's API: what the dashboard and the command line read and do."""
