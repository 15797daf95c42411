"""What a rank computes on: lanes, the ops that a sharding issues on them, and the recorder that sees every one."""

from reference.device.device import Call, Device

__all__ = ["Call", "Device"]
