"""The block-diffusion drafter in PyTorch: model, anchors, mask, loss, walk, training, checkpoint."""

import os

# PyTorch reads it at its first large tensor. Huge pages: a step on a CPU writes each of its tensors once, and spent a
# quarter of its time on taking them from the system in small ones.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# oneDNN keeps compiled code for each shape of a product, a thousand of them by itself; packed rows have new shapes in
# every step. The shapes that come again, those of the layers, are far fewer.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
