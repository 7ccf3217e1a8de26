"""The contract between gateway and site: `federation.proto`, the code generated from it, and the format of
training files, which both read.
"""
