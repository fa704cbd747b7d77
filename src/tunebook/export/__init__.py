"""What came out of a run, found again and made ready for others."""
