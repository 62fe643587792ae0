"""Pictures and tables of a run, made only from the files in its folder. No torch."""
