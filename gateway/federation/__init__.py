"""The gateway's end of the federation link: the joined sites, their load, and their live attempts."""
