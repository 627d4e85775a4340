"""Many replicas: where they are, what they serve, and how a drafter gets onto all of them."""
