"""How Hugging Face transformers writes each family down, one table a file."""
