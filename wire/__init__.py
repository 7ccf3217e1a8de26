"""The contract between gateway and site: `federation.proto`, the code generated from it, the format of
training files, which both read, and the pace at which both send text.
"""
