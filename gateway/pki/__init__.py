"""The small authority that names sites: certificates that live for a day, asked for with a join secret."""
