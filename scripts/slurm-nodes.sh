#!/bin/bash
# Starts a test Slurm with 4 nodes on this machine, runs a command in it, and removes everything.
#   scripts/slurm-nodes.sh DIR COMMAND..
# Creates DIR and writes the configuration and logs to it. Needs root and the Debian packages slurm-wlm and munge.
# Everything runs in its own PID, network (with its own loopback) and mount (node names in /etc/hosts) namespaces, so it
# leaves nothing behind and does not touch a Slurm that this machine belongs to.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
    exec unshare --mount --net --pid --fork --kill-child --mount-proc "$0" --inside "$@"
fi
dir=$2
shift 2
mkdir -p "$dir"/{state,log,munge}
dir=$(realpath "$dir")
node=$(hostname -s)
export SLURM_CONF=$dir/slurm.conf

# Every node has an address: Slurm does not start with only a loopback interface.
ip link set lo up
ip link add nodes type veth peer name others
ip link set others up
ip link set nodes up
echo "127.0.0.1 localhost $node" > "$dir/hosts"
for number in 1 2 3 4; do
    ip address add 10.77.0.$number/24 dev nodes
    echo "10.77.0.$number n$number" >> "$dir/hosts"
done
mount --bind "$dir/hosts" /etc/hosts

cat > "$SLURM_CONF" <<END
ClusterName=nodes
SlurmctldHost=$node
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is put back into the queue waits for as long as its credentials are valid: usually 120 s.
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
ReturnToService=2
MpiDefault=none
KillWait=5
RequeueExit=75
NodeName=n[1-4] NodeHostname=$node NodeAddr=10.77.0.[1-4] Port=[17001-17004] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END

dd if=/dev/urandom of="$dir/munge/key" bs=1 count=1024 status=none
chmod 600 "$dir/munge/key"
munged --force --key-file "$dir/munge/key" --socket "$dir/munge/socket" --pid-file "$dir/munge/pid" \
    --log-file "$dir/log/munged.log" --seed-file "$dir/munge/seed" --num-threads 1
slurmctld
for name in n1 n2 n3 n4; do slurmd -N $name; done
for _ in $(seq 6000); do
    [ "$(sinfo --noheader --states idle --format %D 2> /dev/null)" = 4 ] && exec "$@"
    sleep 0.1
done
echo "the nodes of Slurm are not idle after ten minutes: see $dir/log" >&2
exit 1
