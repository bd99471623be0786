#!/usr/bin/env bash
# A Slurm cluster of virtual nodes on this machine, as the user who calls it; no systemd, no cgroups, nothing outside FOLDER.
#   tests/slurm/cluster.sh up FOLDER NODES CPUS PORT    then: export SLURM_CONF=FOLDER/slurm.conf
#   tests/slurm/cluster.sh down FOLDER
# CPUS: of each node; no more than the machine has, or Open MPI fails under srun. PORT: the first of NODES + 1 free ones.
# FOLDER: short, for munge's socket is in it. What Debian calls slurm-wlm and munge has to be installed.
set -eu
command=$1 folder=$2
export SLURM_CONF=$folder/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

write_configuration() {
  local nodes=$1 cpus=$2 port=$3 host user
  host=$(hostname -s) user=$(id -un)
  # TmpFS: the plugin for PMIx makes a folder there whose name two nodes would share. cred_expire: a job that goes back
  # into the queue waits as many seconds, 120 by default. gpu: any devices do, for Slurm only counts and numbers them.
  cat > "$SLURM_CONF" <<CONFIGURATION
ClusterName=virtual
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
TmpFS=$folder/tmp-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=near Nodes=n[1-$((nodes / 2))] MaxTime=INFINITE State=UP
PartitionName=far Nodes=n[$((nodes / 2 + 1))-$nodes] MaxTime=INFINITE State=UP
CONFIGURATION
  printf 'Name=gpu File=/dev/%s\n' null zero > "$folder/gres.conf"
}

up() {
  local nodes=$1 node
  mkdir -p "$folder/state"
  write_configuration "$@"
  (umask 077; head -c 128 /dev/urandom > "$folder/munge.key")
  # --force: the folder need not be root's
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
  slurmctld -c
  for node in $(seq -f n%g "$nodes"); do
    mkdir -p "$folder/spool-$node" "$folder/tmp-$node"
    slurmd -N "$node"
  done
  for _ in $(seq 120); do
    [ "$(sinfo --noheader --states=idle --format=%D)" != "$nodes" ] || return 0
    sleep 0.25
  done
  echo "$0: the nodes are not ready after 30 s:" >&2
  sinfo >&2
  tail -n 20 "$folder"/*.log >&2
  return 1
}

# Send a signal to the daemon of a pid file; false when it is gone. A program that got its number since is left alone.
tell() {
  local pid
  pid=$(cat "$1" 2> /dev/null) || return 1
  case $(cat "/proc/$pid/stat" 2> /dev/null) in
    *") Z "*) return 1 ;;
    *"(slurmd)"* | *"(slurmctld)"* | *"(munged)"*) kill -s "$2" "$pid" ;;
    *) return 1 ;;
  esac
}

down() {
  local file
  timeout 10 scancel --user="$(id -un)" 2> /dev/null || true
  for _ in $(seq 40); do  # a job outlives its slurmd
    [ -n "$(timeout 10 squeue --noheader 2> /dev/null)" ] || break
    sleep 0.5
  done
  for file in "$folder"/*.pid; do tell "$file" TERM || true; done
  for file in "$folder"/*.pid; do
    for _ in $(seq 40); do
      tell "$file" 0 || continue 2
      sleep 0.25
    done
    tell "$file" KILL || true
  done
}

case $command in
  up) shift 2; up "$@" ;;
  down) down ;;
  *) sed -n 2,6p "$0"; exit 2 ;;
esac
