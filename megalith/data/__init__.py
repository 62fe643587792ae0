"""Text to training samples: sources -> documents -> tokens -> shards -> a stream of samples. Samples are NumPy arrays; torch is
not used.

Read in this order: `sources` (files to documents), `tokenizer`, `prepare` (documents to a folder of shards), `manifest` (contents of such a
folder), `stream` (sample number to sample), with its parts `mixture` and `shuffle`.
"""
