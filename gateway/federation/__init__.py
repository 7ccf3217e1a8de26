"""The gateway's end of the federation link: who has joined, how busy they are, and what runs there."""
