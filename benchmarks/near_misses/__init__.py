"""Near misses and true rewordings: what the guard of the query cache refuses, and what it keeps."""
