"""A whole federation on one machine: its plan, its folder, its processes, and their lifecycle."""
