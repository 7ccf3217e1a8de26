"""The command line and the federation behind `mico up`. The only package that knows all the others."""
