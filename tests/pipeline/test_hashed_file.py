import hashlib

import numpy as np
import pyarrow as pa

from pipeline.hashed_file import HashedFile


def test_the_hash_is_that_of_the_bytes_on_disk_whatever_they_came_in(tmp_path):
    file = HashedFile(tmp_path / "f")
    pieces = [b"bytes", memoryview(b"view"), np.arange(7, dtype=np.uint16), pa.py_buffer(b"buffer"), b""]
    sizes = [file.write(piece) for piece in pieces]
    assert sizes == [5, 4, 14, 6, 0] and file.num_bytes == 29 and not file.closed
    file.flush()
    assert (tmp_path / "f").stat().st_size == 29
    file.close()
    body = (tmp_path / "f").read_bytes()
    assert body == b"bytesview" + np.arange(7, dtype=np.uint16).tobytes() + b"buffer"
    assert file.closed and file.sha256 == hashlib.sha256(body).hexdigest() and file.hash_seconds > 0
