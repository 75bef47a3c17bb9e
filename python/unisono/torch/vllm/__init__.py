"""vLLM on CPUs with tensor parallelism by Unisono. vLLM finds `register` by its entry point."""

from __future__ import annotations

__all__ = ["register"]

COMMUNICATOR = f"{__name__}.communicator.UnisonoCommunicator"


def register() -> None:
    """Names Unisono's communicator as that of vLLM's CPU platform. Idempotent, as vLLM asks of a plug-in.

    VLLM_PLUGINS chooses plug-ins: a list without `unisono` leaves vLLM as it is.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        type(current_platform).get_device_communicator_cls = classmethod(lambda cls: COMMUNICATOR)
