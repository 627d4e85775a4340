"""The block-diffusion drafter in PyTorch: model, anchors, mask, loss, walk, training, checkpoint."""

import os

# PyTorch reads it at its first large tensor. Huge pages: a step on a CPU writes each of its tensors once, and spent a
# quarter of its time on taking them from the system in small ones.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
