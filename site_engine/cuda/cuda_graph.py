"""Run a forward pass over static buffers, as a captured CUDA graph or eagerly."""

from __future__ import annotations

from functools import partial

import torch

from site_engine.cuda.adapters import TILE_NUMBERS, AdapterArenas, StepAdapters
from site_engine.cuda.attention import DeviceContext
from site_engine.cuda.attention_launch import DecodeWork, PrefillWork, chunk_tokens
from site_engine.cuda.batch_layout import Shape, views
from site_engine.cuda.borrowed import BorrowedMemory
from site_engine.cuda.kernels import layer_kernels
from site_engine.cuda.rule_graphs import StepAddresses
from site_engine.cuda.sampling_launch import sample
from site_engine.model import attention_context
from site_engine.model.kv_cache import KVCache
from site_engine.model.runner import Forward
from site_engine.model.tensor_group import TensorGroup

PREPARE_BLOCK = 256


class Device:
    """Device memory shared by all steps: page table, newest token of every slot, counters of split rows."""

    def __init__(
        self, kv_cache: KVCache, slots: int, pages_per_row: int, group: TensorGroup | None = None
    ) -> None:
        self.group = group
        where = kv_cache.keys[0].device
        self.kv_cache = kv_cache
        self.where = where
        self.table = torch.zeros(slots + 1, pages_per_row, dtype=torch.int32, device=where)
        self.newest = torch.zeros(slots + 1, dtype=torch.int32, device=where)
        kv_heads = max(keys.shape[2] for keys in kv_cache.keys)
        self.chunk_tokens = partial(chunk_tokens, kv_heads=kv_heads)  # takes the number of rows
        self.side = torch.cuda.Stream() if where.type == "cuda" else None
        self.arrived = torch.zeros((slots + 8) * kv_heads, dtype=torch.int32, device=where)


class Step:
    """The buffers of one shape and the forward pass over them. Call `load`, then `run`."""

    def __init__(
        self,
        device: Device,
        forward: Forward,
        shape: Shape,
        arenas: AdapterArenas | None = None,
    ) -> None:
        """Allocate the buffers. `arenas` hold the adapters of a step with tiles."""
        self._device = device
        self._forward = forward
        self._shape = shape
        self._arenas = arenas
        self._block = torch.zeros(shape.size, dtype=torch.int32, device=device.where)
        self._in = views(self._block, shape)
        self._ids = torch.zeros(1, shape.tokens, dtype=torch.long, device=device.where)
        self._positions = torch.zeros_like(self._ids)
        self._wanted = torch.zeros(shape.samples, dtype=torch.long, device=device.where)
        self.chosen = torch.zeros(shape.samples, dtype=torch.int32, device=device.where)
        self.logits: torch.Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self, block: torch.Tensor) -> None:
        """Copy a step's block of numbers to the device."""
        self._block.copy_(block, non_blocking=True)

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.logits = self._forward_pass()

    @property
    def addresses(self) -> StepAddresses:
        """The addresses of logits, sampled tokens and inputs. Running another step overwrites the logits."""
        assert self.logits is not None
        return StepAddresses(
            self.logits.data_ptr(), self.chosen.data_ptr(), self._ids.data_ptr(), self._wanted.data_ptr()
        )

    def capture(self, stream: torch.cuda.Stream, pool: tuple[int, int], *, compiled: bool) -> None:
        """Capture the forward pass as a graph, after an eager pass unless its kernels are `compiled`.

        The loaded block must be padding. The logits are stored in memory shared by all graphs and valid until
        another graph runs. Raises RuntimeError for operations that cannot be captured; the step stays eager.
        """
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if not compiled:
                self._forward_pass()
            torch.cuda.current_blas_handle()  # per thread and stream; creating it would abort a capture
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                logits = self._forward_pass()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.logits = _unowned(logits)
        self._graph = graph

    def _forward_pass(self) -> torch.Tensor:
        shape, given = self._shape, self._in
        self._prepare()
        decode = prefill = adapters = None
        side = self._device.side if shape.graph else None
        if shape.tiles and self._arenas is not None:
            adapters = StepAdapters(
                self._arenas, given.tiles.view(-1, TILE_NUMBERS), shape.tokens, owned=shape.owned
            )
        if shape.items:
            chunk = self._device.chunk_tokens(shape.samples)
            decode = DecodeWork(given.items.view(-1, 4), self._device.arrived, shape.split, chunk)
        if shape.blocks:
            prefill = PrefillWork(given.slot, given.position, given.blocks.view(-1, 4))
        attention = DeviceContext(
            self._device.kv_cache,
            self._device.table,
            decode,
            prefill,
            side,
            adapters,
        )
        with torch.no_grad(), attention_context.use(attention):
            logits = self._forward(self._ids, self._positions, self._wanted)
        if attention.layer != len(self._device.kv_cache.keys):
            raise RuntimeError(
                f"{attention.layer} attention calls in a model of {len(self._device.kv_cache.keys)}"
            )
        sample(
            logits,
            given.rules,
            given.owner,
            self._device.newest,
            self.chosen,
            pdl=attention.pdl,
        )
        return logits

    def _prepare(self) -> None:
        shape, given = self._shape, self._in
        if self._device.group is not None:  # only the leader samples rows with rules
            self._device.group.share(self._device.newest)
        most = max(shape.tokens, shape.samples, shape.patches)
        layer_kernels.prepare_inputs[(-(-most // PREPARE_BLOCK),)](
            given.source, given.position, given.wanted, given.patch_at, given.patch_page,
            self._device.newest, self._device.table, self._ids, self._positions, self._wanted,
            shape.tokens, shape.samples, shape.patches, BLOCK=PREPARE_BLOCK,
        )  # fmt: skip


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor that does not keep its memory allocated."""
    memory = BorrowedMemory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype).view(tensor.shape)
