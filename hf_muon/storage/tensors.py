"""Facts about one tensor: its whole shape, its local tensor, and whether a step supports its class and dtype."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hf_muon.math.torch_private import is_of_fsdp1, is_strided

STEPPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of parameters and gradients."""

# The classes of most tensors, checked first because that is fast.
_PLAIN = (Tensor, torch.nn.Parameter)


def shape_of(param: Tensor) -> tuple[int, ...]:
    """Return a parameter's whole shape, also after DeepSpeed's zero.Init has emptied the parameter itself."""
    if uninitialized(param):
        return ()
    return tuple(getattr(param, "ds_shape", param.shape))


def uninitialized(param: Tensor) -> bool:
    """Return whether a parameter of a lazy module has no shape yet."""
    return torch.nn.parameter.is_lazy(param)


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing torch.distributed.tensor."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def has_data(tensor: Tensor) -> bool:
    """Return whether values can be read; those of the meta device and of fake tensors cannot."""
    if tensor.device.type == "meta":
        return False
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is None or not isinstance(tensor, module.FakeTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return the tensor that this rank stores."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


# Classes whose `shape` is the whole parameter's, in addition to torch.Tensor and nn.Parameter.
_KNOWN_CLASSES = {
    "DTensor": "torch.distributed.tensor",
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FunctionalTensor": "torch._subclasses.functional_tensor",
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives",
    # Trainable if has_fp16_weights; otherwise of dtype int8.
    "Int8Params": "bitsandbytes.nn",
}


def _is_known(cls: type) -> bool:
    """Return whether `shape` of a tensor of this class is the whole parameter's, or is a shape that torch manages."""
    if cls in _PLAIN:
        return True
    module = sys.modules.get(_KNOWN_CLASSES.get(cls.__name__, ""))
    if getattr(module, cls.__name__, None) is cls:
        return True
    # A subclass that behaves like nn.Parameter, with more attributes. Shards of other frameworks do not get here:
    # nn.Parameter(tensor) keeps the class of the tensor.
    bases = [base for base in cls.__mro__ if base not in torch.nn.Parameter.__mro__]
    behaves = not any({"__torch_function__", "__torch_dispatch__"} & vars(base).keys() for base in bases)
    return torch.nn.Parameter in cls.__mro__ and behaves and not any("DTensor" in base.__name__ for base in bases)


def class_complaint(param: Tensor) -> str | None:
    """Return why a trained parameter cannot be stepped because of its class, or None if it can.

    `shape` of an unknown class may be that of one shard, which would be orthogonalized as if it were the whole matrix.
    """
    if type(param) in _PLAIN:
        return None
    if uninitialized(param):
        return (
            "is not initialized yet, as in a lazy module: run a forward pass before the optimizer is built "
            "[lazy-parameter]"
        )
    if not param.requires_grad:
        return None  # frozen quantized weights have other classes
    # With gradients, the class of a local tensor would be another one.
    with torch.no_grad():
        stored = local_of(param)
    for tensor in (param, stored):
        cls = type(tensor)
        if not _is_known(cls):
            whose = "is" if tensor is param else "is a DTensor of local tensors that are each"
            return (
                f"{whose} a {cls.__module__}.{cls.__qualname__}, a class that hf_muon does not know: its shape may be "
                "that of one shard, which would be orthogonalized as if it were the matrix. Train plain parameters, or "
                "torch's own DTensors (fully_shard, tensor parallel) [unknown-tensor-class]"
            )
    return None


def storage_complaint(param: Tensor) -> str | None:
    """Return why a parameter cannot be stepped as it is stored, and what to do, or None if it can."""
    if complaint := class_complaint(param):
        return complaint
    if is_dtensor(param):
        placements = param.placements  # type: ignore[attr-defined]
        odd = [p for p in placements if not (p.is_replicate() or p.is_shard() or is_strided(p))]
        if odd:
            return (
                f"is a DTensor with placement {odd[0]}; Muon steps Shard and Replicate ones. Redistribute it "
                "first [partial-placement]"
            )
    if is_of_fsdp1(param):
        return (
            "is a flat FSDP1 parameter, in which matrices have lost their shape: Muon needs FSDP2. Use fully_shard, in "
            "TrainingArguments fsdp_config={'version': 2}, in an accelerate config fsdp_version: 2, in verl "
            "strategy=fsdp2 [fsdp1]"
        )
    if param.is_complex():
        return (
            f"has dtype {param.dtype}, and Muon and AdamW here step real numbers: train its real and imaginary parts, "
            "nn.Parameter(torch.view_as_real(weight)), and use torch.view_as_complex(self.weight) in forward "
            "[unsupported-dtype]"
        )
    if param.layout != torch.strided or param.dtype not in STEPPED_DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in STEPPED_DTYPES)
        return (
            f"has dtype {param.dtype} and layout {param.layout}; Muon and AdamW step dense tensors in {dtypes} "
            "[unsupported-dtype]"
        )
    return None


def unattached_complaint(param: Tensor, *, is_matrix: bool) -> str | None:
    """Return why a parameter can only be stepped by the framework that stores it; None otherwise.

    Args:
        param: not a flat partition that the optimizer knows.
        is_matrix: whether the parameter has been a matrix, or a stack of matrices.
    """
    if hasattr(param, "ds_id"):
        return (
            "is partitioned by DeepSpeed ZeRO-3, which was started without Muon. Start it with "
            "hf_muon.integrations.deepspeed.initialize, or with Accelerator.prepare, and step its engine: "
            "engine.step() [step-the-engine]"
        )
    if is_matrix and len(shape_of(param)) < 2:
        return (
            "is no matrix, and its param group says use_muon: True. If you wrote that into the group, write False: "
            "AdamW steps vectors. If DeepSpeed has put a flat tensor in place of a matrix, start it with "
            "hf_muon.integrations.deepspeed.initialize, or with Accelerator.prepare [replaced-by-flat]"
        )
    return None


def quoted(value: Any) -> str:
    """Return the repr of a value for an error, cut at 200 characters; of a tensor with several elements, its shape."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  an integer of more digits than Python prints, or a class with a broken repr
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


def accelerator() -> torch.device:
    """Return the accelerator that this process uses.

    Raises:
        RuntimeError: there is none.
    """
    if not torch.accelerator.is_available():
        raise RuntimeError("a device mesh of an accelerator needs one, and torch sees none [no-accelerator]")
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())  # type: ignore[union-attr]


def model_device(param: Tensor) -> torch.device:
    """Return the device on which the model computes with a parameter; with FSDP2's CPU offload, its mesh's device."""
    local = local_of(param)
    kind = param.device_mesh.device_type if is_dtensor(param) else local.device.type  # type: ignore[attr-defined]
    return local.device if kind == local.device.type else accelerator()
