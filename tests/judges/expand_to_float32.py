"""Write a GGUF file with the same metadata and weights as another, every weight expanded to float32.

Run by hand with a Python that has the gguf package installed:

    python tests/judges/expand_to_float32.py MODEL.gguf FLOAT32.gguf

Nothing of vkit is imported: the gguf package reads, dequantises and writes.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np


def expand(source: str, target: str) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        value = 0 if field.name == "general.file_type" else field.contents()
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: expand_to_float32.py MODEL.gguf FLOAT32.gguf")
    expand(sys.argv[1], sys.argv[2])
