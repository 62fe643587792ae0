"""The format of each model family in Hugging Face transformers, with one table per file."""
