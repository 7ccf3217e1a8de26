"""A whole federation on one machine: what it consists of, its folder, its processes, and their life."""
