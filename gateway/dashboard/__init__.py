"""The operator's page: static files, written by hand, served as they are."""
