"""Everything that depends on vLLM's internals, for the versions listed in ``versions.py``."""
