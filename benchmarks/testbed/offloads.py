"""Let the kernel cut and checksum itself what a device sends.

    python offloads.py DEVICE

Both ends of a veth pair leave this to hardware that is not there, which does no harm as
long as frames stay inside the kernel. A frame that a program reads has to be what would
be on a wire: complete, and no longer than the MTU.
"""

import array
import fcntl
import socket
import struct
import sys

SIOCETHTOOL = 0x8946
# ETHTOOL_S*: number of the command that sets each
OFFLOADS = {"tx checksum": 0x17, "tso": 0x1F, "gso": 0x24}


def switch_off(device: str) -> None:
    """Switch the offloads of a device off, as `ethtool -K DEVICE tx off tso off gso off` does."""
    with socket.socket() as asking:
        for command in OFFLOADS.values():
            value = array.array("I", [command, 0])  # struct ethtool_value
            # struct ifreq
            request = struct.pack("16sP16x", device.encode(), value.buffer_info()[0])
            fcntl.ioctl(asking, SIOCETHTOOL, request)


if __name__ == "__main__":
    switch_off(sys.argv[1])
