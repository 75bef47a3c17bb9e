#!/bin/sh
# The launcher of hydra's `-launcher-exec`. `enter_host.sh [OPTION...] ADDRESS COMMAND...` runs a command on the host of hosts.py
# with that address. UNISONO_TEST_HOSTS and the address's last number are the name of the host's network namespace.
# Processes, System V and POSIX shared memory and the host name are separate too: otherwise UCX would bypass the network.
while [ "${1#-}" != "$1" ]; do shift; done
address=$1
shift
exec ip netns exec "${UNISONO_TEST_HOSTS:?}${address##*.}" \
  unshare --uts --ipc --pid --fork --kill-child --mount-proc /bin/sh -c "mount -t tmpfs none /dev/shm && $*"
