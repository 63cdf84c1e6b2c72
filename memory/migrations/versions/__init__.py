"""One file per schema revision; never edited once released."""
