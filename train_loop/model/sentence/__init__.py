"""Rules of folders of sentence-transformers."""
