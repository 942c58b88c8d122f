"""The messages between roll and a reward.

A frame is b"ROLL", the length of a header (u32, little-endian), the header (JSON), and then the bytes of the tensors that
the header lists, one after the other, row-major and little-endian. Tensors that are listed with `at` are not among them:
they lie at that offset of the file that both sides have mapped.
"""

import json
import struct

MAGIC = b"ROLL"
#: Bytes of an element.
SIZES = {"f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "u8": 1, "bool": 1}
#: As memoryview and struct call them; half floats have no such name.
CODES = {"f32": "f", "i64": "q", "i32": "i", "u8": "B", "bool": "B"}


class FrameError(Exception):
    """Bytes that are no frame."""


class Array:
    """A tensor without NumPy: `values`, a flat memoryview, and `shape`."""

    def __init__(self, data, dtype="f32", shape=None):
        self.dtype = dtype
        self.data = memoryview(data).cast("B")
        count = len(self.data) // SIZES[dtype]
        self.shape = [count] if shape is None else list(shape)

    @property
    def values(self):
        """The elements, row-major."""
        return self.data.cast(CODES[self.dtype])

    def __len__(self):
        return len(self.data) // SIZES[self.dtype]

    def numpy(self):
        """As a NumPy array, which shares the memory. bf16 comes as u16."""
        import numpy

        types = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "i64": "<i8", "i32": "<i4", "u8": "u1", "bool": "?"}
        return numpy.frombuffer(self.data, types[self.dtype]).reshape(self.shape)

    def torch(self):
        """As a PyTorch tensor, which shares the memory."""
        import warnings

        import torch

        types = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "i32": "int32", "u8": "uint8", "bool": "bool"}
        with warnings.catch_warnings():
            # Memory that is read-only: nobody writes into the frames.
            warnings.simplefilter("ignore")
            return torch.frombuffer(self.data, dtype=getattr(torch, types[self.dtype])).reshape(self.shape)


def as_array(value):
    """A number, a list of numbers, an `Array`, a NumPy array or a PyTorch tensor as an `Array`."""
    if isinstance(value, Array):
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu().contiguous()
        names = {"float32": "f32", "int64": "i64", "int32": "i32", "uint8": "u8", "bool": "bool"}
        name = str(value.dtype).split(".")[1]
        if name not in names:
            value, name = value.float(), "float32"
        return Array(value.numpy().reshape(-1), names[name], value.shape)
    if hasattr(value, "__array__"):
        import numpy

        value = numpy.ascontiguousarray(value)
        names = {"f4": "f32", "i8": "i64", "i4": "i32", "u1": "u8", "b1": "bool", "?": "bool"}
        code = value.dtype.str[1:]
        if code not in names:
            value, code = value.astype("<f4"), "f4"
        return Array(value.reshape(-1), names[code], value.shape)
    if isinstance(value, (bytes, str)):
        data = value.encode() if isinstance(value, str) else value
        return Array(data, "u8", [len(data)])
    import array

    numbers = [float(value)] if isinstance(value, (int, float)) else [float(v) for v in value]
    return Array(array.array("f", numbers), "f32", [len(numbers)])


def _listed(header):
    try:
        for item in header.pop("tensors", []):
            count = SIZES[item["dtype"]]
            for axis in item["shape"]:
                if not isinstance(axis, int) or axis < 0:
                    raise FrameError(f"a tensor of shape {item['shape']}")
                count *= axis
            yield item["name"], item["dtype"], item["shape"], count, item.get("at")
    except (KeyError, TypeError, AttributeError) as error:
        raise FrameError(f"a list of tensors that makes no sense: {error!r}") from None


def buffer(count):
    """A writable memoryview of `count` bytes, on large pages where the system has them: small ones cost more to get than
    to fill."""
    if count < 8 << 20:
        return memoryview(bytearray(count))
    import mmap

    pages = mmap.mmap(-1, count)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        pass  # No Linux.
    return memoryview(pages)


def read(take, shared=None):
    """A header and its tensors; `take(n)` gives n bytes or fewer at the end, `shared(header)` the mapped file.

    `None` where the other side is done.
    """
    start = take(8)
    if not start:
        return None
    if len(start) < 8 or start[:4] != MAGIC:
        raise FrameError(f"{bytes(start[:60])!r} where a frame should begin")
    (length,) = struct.unpack("<I", start[4:])
    if length > 1 << 20:
        raise FrameError(f"a header of {length} bytes")
    text = bytes(take(length))
    if len(text) < length:
        raise FrameError(f"a header that was cut off: {len(text)} of {length} bytes")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise FrameError(f"a header that makes no sense: {error}") from None
    if not isinstance(header, dict):
        raise FrameError("a header that is no JSON object")
    tensors, mapped = {}, None
    for name, dtype, shape, count, at in _listed(header):
        if at is None:
            data = take(count)
        else:
            mapped = shared(header) if mapped is None and shared else mapped
            data = b"" if mapped is None else mapped[at : at + count]
        if len(data) != count:
            raise FrameError(f"the tensor `{name}` was cut off: {len(data)} of {count} bytes")
        tensors[name] = Array(data, dtype, shape)
    return header, tensors


def pieces(body, tensors=(), shared=None):
    """The bytes of a frame, in pieces. Tensors go into `shared`, a writable memoryview, where they fit."""
    listed, data, used = [], [], 0
    for name, value in tensors:
        if shared is not None and str(getattr(value, "dtype", "")) == "torch.float32":
            # From wherever it is, in one copy.
            import torch

            size = 4 * value.numel()
            if 0 < size <= len(shared) - used:
                torch.frombuffer(shared, dtype=torch.float32, count=size // 4, offset=used).view(value.shape).copy_(value.detach())
                listed.append({"name": name, "dtype": "f32", "shape": list(value.shape), "at": used})
                used += (size + 63) // 64 * 64
                continue
        array = as_array(value)
        item = {"name": name, "dtype": array.dtype, "shape": list(array.shape)}
        size = len(array.data)
        if shared is not None and size and used + size <= len(shared):
            shared[used : used + size] = array.data
            item["at"] = used
            used += (size + 63) // 64 * 64
        else:
            data.append(array.data)
        listed.append(item)
    header = json.dumps({**body, "tensors": listed}, allow_nan=False).encode()
    return [MAGIC + struct.pack("<I", len(header)) + header, *data]
