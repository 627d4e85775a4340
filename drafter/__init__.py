"""The block-diffusion drafter in PyTorch: model, anchors, mask, loss, walk, training, checkpoint."""
