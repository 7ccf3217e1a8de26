"""The command line, and the local federation of `mico up`. The only package that imports all others."""
