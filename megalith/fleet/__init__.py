"""The processes of a run: starting ranks, watching them, naming the first cause when one fails. No torch in the supervisor."""
