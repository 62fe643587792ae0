"""Pictures and tables of a run, made from the files in its folder alone. No torch."""
