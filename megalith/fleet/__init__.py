"""The processes of a run: starting ranks, watching them, and finding the first cause when one fails. The supervisor never imports
torch."""
