"""Measure the attention logits of transformers' models, in calls of the attention implementation.

Every attention module of transformers gets its implementation from `AttentionInterface.get_interface`, and calls it
with itself, rotated queries and keys, a mask and a scale. While logits are measured, the module gets a function that
measures before it calls the implementation. The forward pass does not change.

With `eager`, the result is the largest logit of any query with a key that it attends to. Other implementations never
store logits: there, only the `MOST_QUERIES` queries of largest norm per sequence and head count. The result is at most
the true maximum, and equal to it for sequences of up to this length.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_muon.math.logits import Visible, largest_logits
from hf_muon.math.torch_private import disable_dynamo
from hf_muon.rules.heads import Attention, LogitsOf
from hf_muon.storage.tensors import is_dtensor

MOST_QUERIES = 128
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"

_recorders: weakref.WeakKeyDictionary[nn.Module, _Recorder] = weakref.WeakKeyDictionary()


def measure(attentions: Sequence[Attention]) -> LogitsOf | str:
    """Measure the logits of some attentions, in forward passes in training mode that compute gradients.

    Evaluation does not count. Activation checkpointing, which computes activations twice, does not change the result.

    Returns:
        A function that returns the largest logits since its last call; or why they cannot be measured.
    """
    module = sys.modules.get("transformers.modeling_utils")
    interface = getattr(module, "AttentionInterface", None)
    for attention in attentions:
        forward = inspect.unwrap(type(attention.module).forward)
        if interface is None or _INTERFACE not in getattr(getattr(forward, "__code__", None), "co_names", ()):
            return (
                f"{attention.name} ({type(attention.module).__name__}) does not hand its queries and keys to an "
                f"attention function of transformers ({_INTERFACE}), where hf_muon measures logits "
                "[unmeasured-attention]"
            )
    _patch(interface)
    recorders = [_Recorder(attention) for attention in attentions]
    _recorders.update({attention.module: recorder for attention, recorder in zip(attentions, recorders, strict=True)})
    return lambda: [recorder.pop() for recorder in recorders]


def _patch(interface: Any) -> None:
    """Patch `get_interface`: attentions whose logits are measured get a measuring function, others the usual one."""
    get_interface = interface.get_interface
    if get_interface.__globals__ is globals():  # ours: `wraps` has given its `__module__` the upstream one's value
        return

    @functools.wraps(get_interface)  # pickle finds a function by the names that `wraps` copies
    def get_measuring(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = get_interface(self, attn_implementation, default)
        return functools.partial(_measured, function, attn_implementation) if _recorders else function

    interface.get_interface = get_measuring


def _measured(
    function: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if module.training and torch.is_grad_enabled():
        _record(implementation, module, query, key, attention_mask, kwargs)
    return function(module, query, key, value, attention_mask, *args, **kwargs)


@disable_dynamo
@torch.no_grad()
def _record(
    implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
) -> None:
    recorder = _recorders.get(module)
    if recorder is not None:
        recorder.record(implementation, query.detach(), key.detach(), mask, options)


class _Recorder:
    """The largest logits of one attention so far."""

    def __init__(self, attention: Attention) -> None:
        self._heads = attention.heads
        self._size = attention.size
        self._name = attention.name
        self._query = next(name for name, rows in attention.rows.items() if 1 in rows.roles)  # the first query head's
        self._module = weakref.ref(attention.module)
        self._largest: Tensor | None = None

    def pop(self) -> Tensor | None:
        largest, self._largest = self._largest, None
        return largest

    def record(self, implementation: str, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> None:
        """Measure one forward pass.

        Args:
            implementation: name of the function that computes the attention.
            query: ``(B, H, S, D)``.
            key: ``(B, K, T, D)``.
            mask: as that function gets it.
            options: the keyword arguments of that function.

        Raises:
            RuntimeError: the heads do not match the weights, or the mask cannot be read.
        """
        first, count = self._own_heads(query, key)
        if not count:
            return
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        visible = self._visible(implementation, query, key, mask, options)
        limit = None if implementation == "eager" else MOST_QUERIES
        logits = largest_logits(query, key, scale, visible, limit)
        largest = logits.new_full((self._heads.queries,), -torch.inf)
        largest[first : first + count] = logits
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def _own_heads(self, query: Tensor, key: Tensor) -> tuple[int, int]:
        """Return the first of the heads that this rank computes, and their number.

        Raises:
            RuntimeError: the number of heads does not match the weights.
        """
        heads, queries, keys = self._heads, query.shape[1], key.shape[1]
        sizes = {query.shape[-1], key.shape[-1]}
        if queries == heads.queries and keys in (heads.keys, queries) and sizes == {self._size}:
            return 0, queries
        # Tensor parallel: each rank has the heads whose rows of the query projection it stores.
        weight = self._module().get_parameter(self._query.removeprefix(f"{self._name}."))  # type: ignore[union-attr]
        if is_dtensor(weight) and query.shape[-1] == self._size and keys * (heads.queries // heads.keys) == queries:
            from hf_muon.storage.dtensor import own_region

            ranges = own_region(weight, weight.shape).dims[0]  # type: ignore[arg-type]
            if len(ranges) == 1 and ranges[0][1] - ranges[0][0] == queries * self._size:
                return ranges[0][0] // self._size, queries
        raise RuntimeError(
            f"qk_clip: the attention {self._name} has {queries} query and {keys} key heads of {query.shape[-1]}, and "
            f"its weights make {heads.queries} and {heads.keys} of {self._size}. Switch qk_clip off, or report this "
            "model [heads-misfit]"
        )

    def _visible(self, implementation: str, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> Visible:
        """Return which keys a query attends to, as the implementation reads the mask.

        Raises:
            RuntimeError: the mask cannot be read.
        """
        keys = key.shape[2]
        if isinstance(mask, Tensor) and mask.ndim == 4:
            return functools.partial(_of_mask, mask[..., :keys], query.shape[:3])
        # As `sdpa_attention_forward` of transformers decides it.
        causal = options.get("is_causal")
        causal = bool(getattr(self._module(), "is_causal", True) if causal is None else causal) and query.shape[2] > 1
        if mask is None and implementation == "eager":
            return lambda positions: None
        if mask is None and implementation == "sdpa":
            return functools.partial(_of_positions, keys, causal, None, None, None)
        if "flash" in implementation and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
            documents = _documents(options, query.shape[0], query.shape[2], query.device)
            return functools.partial(_of_positions, keys, causal, options.get("sliding_window"), documents, mask)
        raise RuntimeError(
            f"qk_clip: the mask of attn_implementation={implementation!r} in {self._name} cannot be read. Use sdpa, "
            "flash_attention_2, flash_attention_3 or eager [unreadable-mask]"
        )


def _of_mask(mask: Tensor, shape: Sequence[int], positions: Tensor) -> Tensor:
    """Return which keys queries attend to, ``(B, H, n, T)``, from a mask that is bool or added to logits."""
    rows = positions.unsqueeze(-1).expand(*positions.shape, mask.shape[-1])
    mask = mask.expand(*shape, mask.shape[-1]).gather(2, rows)
    # An added mask hides a key with the lowest number or -inf; a bias of positions is far from both.
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _of_positions(
    keys: int, causal: bool, window: int | None, documents: Tensor | None, padding: Tensor | None, positions: Tensor
) -> Tensor | None:
    """Return which keys queries attend to, ``(B, H, n, T)``, from positions; None for all keys.

    Args:
        keys: number of keys, T.
        causal: whether a query attends only to earlier keys and its own.
        window: how many positions a query looks back, its own included.
        documents: ``(B, T)``, the document of each position; a query attends only to its own document.
        padding: ``(B, T)``, 0 for keys of padding.
        positions: the positions of the queries, ``(B, H, n)``.
    """
    masks: list[Tensor] = []
    of_query, of_key = positions.unsqueeze(-1), _positions(keys, positions.device)
    if causal:
        masks.append(of_key <= of_query)
    if window is not None:
        masks.append((of_query - of_key).abs() < window)
    if documents is not None:
        document = documents.unsqueeze(1).expand(-1, positions.shape[1], -1).gather(2, positions)
        masks.append(document.unsqueeze(-1) == documents[:, None, None, :])
    if padding is not None:
        masks.append(padding[:, None, None, :].bool())
    return functools.reduce(torch.logical_and, masks) if masks else None


def _positions(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device)


def _documents(options: dict[str, Any], batch: int, length: int, device: torch.device) -> Tensor | None:
    """Return the number of the document that each position is in, ``(B, S)``, of sequences packed without padding."""
    # Flash attention takes these ends rather than position_ids where no mask is given; rows are one sequence then.
    if (ends := options.get("cu_seq_lens_q")) is not None and batch == 1:
        return torch.bucketize(_positions(length, device), ends.to(device)[1:], right=True).unsqueeze(0)
    positions = options.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[-1] == length:
        starts = positions[:, 1:] != positions[:, :-1] + 1
        return torch.nn.functional.pad(starts.cumsum(-1), (1, 0)).expand(batch, -1)
    return None
