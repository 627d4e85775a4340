"""The edges: one file a stage on Ray, the loop, engine actors, the MLflow registry, the command line."""
