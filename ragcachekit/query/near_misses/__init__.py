"""Questions that look alike and ask for different things, told apart by their text."""
