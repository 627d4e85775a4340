"""What runs beside or inside vLLM. Imports the standard library, vLLM and what vLLM brings, nothing else."""
