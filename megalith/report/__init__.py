"""Pictures and tables: of a run, from the files in its folder, and of results of the planner, dry runs, simulations and checks. Only
`coordcheck` imports torch."""
