"""The tensor file format: the bytes that `torch.save` writes around a tensor, for every shape and dtype."""

import io

import pytest
import torch

from train_loop.checkpoint.files.tensor_file import tensor_file_format


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (0, 4)])
def test_tensor_file_is_readable_by_torch_and_trainshed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    frame = tensor_file_format(torch.Size(shape), dtype)
    content = b"" if not tensor.numel() else bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    blob = frame.head + content + frame.tail
    assert len(blob) == frame.size
    assert torch.equal(torch.load(io.BytesIO(blob), weights_only=True), tensor)
    found = frame.data_in(memoryview(bytearray(blob)))
    assert found is not None
    assert torch.equal(found, tensor)
    assert found.dtype == dtype


def test_foreign_file_format_is_recognised() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(3, 5).t(), file)
    assert tensor_file_format(torch.Size((5, 3)), torch.float32).data_in(memoryview(bytearray(file.getvalue()))) is None
