"""What a search's results depend on beside the question: the hard part of the key."""
