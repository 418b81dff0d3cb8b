"""The documentation site: pages generated from the code when MkDocs builds it."""
