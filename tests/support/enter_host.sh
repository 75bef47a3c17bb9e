#!/bin/sh
# The launcher of hydra's `-launcher-exec`: `enter_host.sh [OPTION...] ADDRESS COMMAND...` runs a command on the host of hosts.py
# with that address. Its last number is that of the host's network namespace, whose name begins with UNISONO_TEST_HOSTS.
# Processes, System V and POSIX shared memory, and the name, are the host's own too: UCX would find its way past the network otherwise.
while [ "${1#-}" != "$1" ]; do shift; done
address=$1
shift
exec ip netns exec "${UNISONO_TEST_HOSTS:?}${address##*.}" \
  unshare --uts --ipc --pid --fork --kill-child --mount-proc /bin/sh -c "mount -t tmpfs none /dev/shm && $*"
