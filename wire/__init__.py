"""The contract between gateway and site: `federation.proto` and the code generated from it, nothing else."""
