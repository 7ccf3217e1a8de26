"""The contract between gateway and site: `federation.proto` and the code generated from it. Nothing else lives here."""
