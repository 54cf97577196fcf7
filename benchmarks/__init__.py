"""What proves the library's claims; not in the wheel."""
