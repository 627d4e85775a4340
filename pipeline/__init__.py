"""What happens to data: artifacts, schemas, config, and each stage as a plain function."""
