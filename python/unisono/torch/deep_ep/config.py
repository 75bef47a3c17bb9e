"""The sizes by which DeepEP V1 is tuned. They are kept, and change nothing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Config"]


@dataclass(frozen=True)
class Config:
    """DeepEP V1's Config: SMs, and tokens of a chunk. The communicator chooses by itself."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns bytes that grow with their arguments, for num_nvl_bytes of a Buffer."""
        return num_ranks * hidden_bytes * self.num_max_nvl_chunked_recv_tokens

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0."""
        return 0
