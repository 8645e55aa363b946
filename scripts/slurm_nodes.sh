#!/bin/bash
# SLURM on one machine, to try examples/cluster/slurm.sh: nodes with a network, a host name, processes, /tmp and
# /dev/shm of their own. As root, on Debian with slurm-wlm, munge and iproute2; the folder must not be in /tmp.
#   scripts/slurm_nodes.sh up FOLDER [NODES]         and then   export SLURM_CONF=FOLDER/slurm.conf
#   scripts/slurm_nodes.sh down FOLDER
set -euo pipefail
folder=$(realpath -m "${2:?say up or down, and a folder}") count=${3:-3}
export SLURM_CONF=$folder/slurm.conf

up() {
    mkdir -p "$folder/state" /run/munge
    chown munge: /run/munge
    munge -n > /dev/null 2>&1 || runuser -u munge -- munged
    version=$([ -e /sys/fs/cgroup/cgroup.controllers ] && echo 2 || echo 1)
    printf 'CgroupPlugin=cgroup/v%s\nIgnoreSystemd=yes\n' "$version" > "$folder/cgroup.conf"
    cat > "$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=ctl(10.77.0.254)
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
ReturnToService=2
StateSaveLocation=$folder/state
SlurmctldLogFile=$folder/ctl.log
SlurmctldPidFile=$folder/ctl.pid
SlurmdSpoolDir=$folder/%n
SlurmdLogFile=$folder/%n.log
SlurmdPidFile=$folder/%n.pid
NodeName=node[1-$count] NodeAddr=10.77.0.[1-$count] CPUs=$(nproc) RealMemory=$(free -m | awk '/^Mem/ {print int($2 / 2)}')
PartitionName=all Nodes=ALL Default=YES
CONF
    echo "127.0.0.1 localhost" > "$folder/hosts"
    for i in $(seq "$count"); do echo "10.77.0.$i node$i" >> "$folder/hosts"; done
    ip link add slurmbr type bridge
    ip address add 10.77.0.254/24 dev slurmbr
    ip link set slurmbr up
    unshare --uts sh -c 'hostname ctl && slurmctld'
    for i in $(seq "$count"); do
        mkdir -p "$folder/node$i"
        ip netns add "slurmnode$i"
        ip link add "slurm$i" type veth peer name eth0 netns "slurmnode$i"
        ip link set "slurm$i" master slurmbr up
        ip -n "slurmnode$i" address add "10.77.0.$i/24" dev eth0
        ip -n "slurmnode$i" link set eth0 up
        ip -n "slurmnode$i" link set lo up
        setsid nsenter --net="/run/netns/slurmnode$i" unshare --uts --mount --ipc --pid --fork --mount-proc bash -c "
            hostname node$i; mount --bind '$folder/hosts' /etc/hosts
            mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm
            exec slurmd -D -N node$i" > "$folder/node$i.out" 2>&1 < /dev/null &
    done
    for _ in $(seq 30); do
        [ "$(sinfo --noheader --states=idle --format=%D 2> /dev/null)" != "$count" ] || exec sinfo
        sleep 1
    done
    echo "Not all nodes are idle after 30 s; $folder/node1.log may say why." >&2
    exit 1
}

down() {
    [ ! -e "$folder/ctl.pid" ] || kill "$(cat "$folder/ctl.pid")" || true
    for i in $(ip netns list | awk '/^slurmnode[0-9]/ {print $1}'); do
        ip netns pids "$i" | xargs -r kill -9
        ip netns del "$i"
    done
    ip link del slurmbr
}

"$1"
