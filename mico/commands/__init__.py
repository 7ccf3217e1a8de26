"""The commands, one file per noun. Each turns flags into one call and its result into a table or JSON."""
